"""Closed formulas of Narayanan et al. 2021 (arXiv 2104.04473): parameters, operations, days, and the bubble of a pipeline."""

from __future__ import annotations

from typing import NamedTuple

DAY = 86400.0


def parameters(layers: int, hidden: int, vocabulary: int, sequence: int) -> float:
    """Parameters of a GPT, equation 2.

    >>> round(parameters(96, 12288, 51200, 2048) / 1e9, 1)
    174.6
    """
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocabulary + sequence) / (12 * layers * hidden))


def hardware_flops(layers: int, hidden: int, vocabulary: int, sequence: int, batch: int) -> float:
    """Operations of a step that computes all activations again, equation 3: four forwards a block, three of the logits.

    >>> f"{hardware_flops(128, 25600, 51200, 2048, 3072):.3e}"
    '5.139e+19'
    """
    logits = vocabulary / (16 * layers * hidden)
    return 96 * batch * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden) + logits)


def model_flops(layers: int, hidden: int, vocabulary: int, sequence: int, batch: int) -> float:
    """Operations of a step that computes nothing again."""
    logits = vocabulary / (12 * layers * hidden)
    return 72 * batch * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden) + logits)


def days(layers: int, hidden: int, vocabulary: int, sequence: int, tokens: float, ranks: int, rate: float) -> float:
    """Days to train on `tokens` at `rate` operations per second of each rank, by equation 3.

    >>> round(days(128, 25600, 51200, 2048, 450e9, 3072, 163e12), 1)
    85.0
    """
    return hardware_flops(layers, hidden, vocabulary, sequence, 1) / sequence * tokens / (ranks * rate) / DAY


def days_by_parameters(count: float, tokens: float, ranks: int, rate: float) -> float:
    """Days by equation 4, 8·T·P/(n·X), which leaves out attention's scores.

    >>> round(days_by_parameters(1008e9, 450e9, 3072, 163e12), 1)
    83.9
    """
    return 8 * tokens * count / (ranks * rate) / DAY


def bubble(ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """The bubble of a pipeline as a part of its ideal time, (p − 1)/(v·m).

    >>> bubble(4, 8, 2)
    0.1875
    """
    return (ranks - 1) / (chunks * micro_batches)


class Formula(NamedTuple):
    """A value of a closed formula: its key in JSON, what it is, and where the formula stands."""

    name: str
    what: str
    value: float
    source: str


def of_gpt(layers: int, hidden: int, vocabulary: int, sequence: int, batch: int) -> list[Formula]:
    """Parameters and operations of a GPT."""
    sizes = (layers, hidden, vocabulary, sequence)
    return [
        Formula("parameters", "parameters", parameters(*sizes), "equation 2"),
        Formula("hardware_flops", "flops of a step, recomputed", hardware_flops(*sizes, batch), "equation 3"),
        Formula("model_flops", "flops of a step", model_flops(*sizes, batch), "equation 3 with three passes in place of four"),
    ]


def of_pipeline(ranks: int, micro_batches: int, chunks: int) -> list[Formula]:
    """The bubble of a pipeline."""
    return [Formula("bubble", "bubble ÷ ideal time", bubble(ranks, micro_batches, chunks), "section 2.2, (p − 1)/(v·m)")]


def of_training(
    layers: int, hidden: int, vocabulary: int, sequence: int, tokens: float, ranks: int, rate: float
) -> list[Formula]:
    """Days on so many tokens, both ways: equation 4 leaves out attention's scores and logits, and says 1 to 3 % less."""
    sizes = (layers, hidden, vocabulary, sequence)
    return [
        Formula("days", "days of training", days(*sizes, tokens, ranks, rate), "equation 3, as the paper's tables"),
        Formula(
            "days_by_parameters", "days, approximated", days_by_parameters(parameters(*sizes), tokens, ranks, rate), "equation 4"
        ),
    ]
