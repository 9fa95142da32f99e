"""The choice of a scheme and a grid for a model on a number of ranks: that whose products move the fewest words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch

from ..columns import counted
from ..comm.grid import Place
from ..comm.topology import describe
from ..errors import GridError, LayoutError
from ..gemm.cost.volume import gradients, of_plan
from .config import ModelConfig
from .context import scheme
from .models.registry import build
from .schemes.registry import SCHEME_SPECS
from .schemes.scheme import Scheme

FOR_MODELS = ("cuboid", *(name for name, spec in SCHEME_SPECS.items() if name != "cuboid" and not spec.limits))
"""The schemes that run whole models, the cuboid first, which shards weights and moments over all ranks."""

EQUAL = 1.01  # words up to so many times the fewest count as equal: the first such grid is taken
NEAR = 4  # numbers of ranks that an error names


@dataclass(frozen=True)
class SchemeChoice:
    """A scheme and its grid; the words that a rank receives in the products of a micro-batch; how many grids were compared."""

    scheme: str
    grid: dict[str, int]
    words: int
    compared: int = 1

    def __str__(self) -> str:
        fewest = f", the fewest words of {self.compared} that fit" if self.compared > 1 else ""
        return f"scheme {self.scheme}, grid {describe(self.grid)}: {self.words:,} words per rank in the products{fewest}"


def choose(
    config: ModelConfig,
    batch: int,
    ranks: int,
    schemes: Sequence[str] = tuple(SCHEME_SPECS),
    regather: bool = True,
    vectors: str = "copied",
) -> SchemeChoice:
    """Choose the scheme and grid of exactly `ranks` ranks on which the products of the model's layers move the fewest words.

    Parameters
    ----------
    batch : sequences of one micro-batch on the whole grid
    schemes : the schemes to choose from; those that run single layers only are left out
    regather, vectors : as of `scheme`

    Counts, by closed forms, what the first rank receives in the products of all blocks and of the language-model head, forward
    and backward; the small messages of norms, losses and the optimizer are left out. Moves nothing, and returns the same on
    every rank. Raises GridError, naming numbers of ranks that would do, where no grid fits.

    >>> choose(ModelConfig(hidden=64), batch=8, ranks=4, regather=False).grid
    {'x': 4, 'y': 1, 'z': 1}
    """
    choices = ranked(config, batch, ranks, schemes, regather, vectors)
    fewest = min(item.words for item in choices)
    return replace(next(item for item in choices if item.words <= EQUAL * fewest), compared=len(choices))


def ranked(
    config: ModelConfig,
    batch: int,
    ranks: int,
    schemes: Sequence[str],
    regather: bool = True,
    vectors: str = "copied",
    alike: bool | None = None,
) -> list[SchemeChoice]:
    """Every scheme on every grid of `ranks` ranks that can hold the model, as `choose` takes them and raises, cuboids first.

    alike : whether the ranks hold parts alike; None, where any grid has such parts
    """
    among = [name for name in FOR_MODELS if name in schemes]

    def fitting(count: int, even: bool = True) -> Iterator[SchemeChoice]:
        for name in among:
            for shape in SCHEME_SPECS[name].grids(count):
                try:
                    layouts = Scheme.of(name, shape, vectors)
                    layouts.check(config, batch)
                    if even:
                        layouts.check_even(config, batch)
                    with torch.device("meta"):  # kv heads and the MLP's width are checked here
                        build(replace(config, layers=1), scheme(name, Place(shape), regather, vectors))
                except (GridError, LayoutError):
                    continue
                yield SchemeChoice(name, dict(shape), _words(layouts, config, batch, regather))

    result = [] if alike is False else list(fitting(ranks))
    if not result and not alike:
        result = list(fitting(ranks, even=False))
    if result:
        return result
    near = sorted(range(1, 2 * ranks + NEAR), key=lambda count: abs(count - ranks))
    counts = sorted(islice((count for count in near if next(fitting(count, even=alike is not False), None)), NEAR))
    names = f" with scheme {', '.join(among)}" if len(among) < len(FOR_MODELS) else ""
    sizes = f"batch {batch}, sequence {config.sequence}, heads {config.heads}, hidden {config.hidden}"
    raise GridError(
        f"No grid of {counted(ranks, 'rank')} fits {sizes}{names}. Ranks that fit: {', '.join(map(str, counts)) or 'none'}."
    )


def _words(layouts: Scheme, config: ModelConfig, batch: int, regather: bool) -> int:
    """The words that the first rank receives in the products of a micro-batch, forward and backward."""
    rows, stream = batch * config.sequence, layouts.residual
    block = layouts.block(config, rows)
    head = [] if config.family == "vit" else [layouts.plan(stream, "nt", rows, config.vocabulary, config.hidden)]
    shape, first = layouts.shape, dict.fromkeys(layouts.shape, 0)
    return sum(
        times * volume.words_of(first)
        for products, times in ((block, config.layers), (head, 1))
        for product in products
        for volume in (of_plan(product, shape), gradients(product, shape, regather))
    )
