"""Adopted models beside the unsplit ones: small Transformers models with random weights, and whole gradients of the blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from summa3d.layout import collect
from summa3d.nn.adopt.folder import empty_model
from summa3d.nn.adopt.layers import FusedParts

SIZES = {
    "hidden_size": 60,
    "intermediate_size": 53,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 10,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "pad_token_id": 3,
    "sliding_window": 4,
}
"""Heads divide by 1, 2, 3, 4 and 6; hidden is not heads · head_dim; the feed-forward width and the vocabulary are primes."""

DROPOUT = re.compile("dropout|_pdrop|drop_prob|layerdrop")


class Wide(TorchFunctionMode):
    """Within it, what a model computes in float32 whatever its weights have is computed in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if one is torch.float32 else one for one in args)
        kwargs = {name: torch.float64 if one is torch.float32 else one for name, one in (kwargs or {}).items()}
        return func(*args, **kwargs)


def config_of(kind: str, sizes: Mapping[str, Any]) -> Any:
    """The configuration of a kind, without dropout."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(kind, **sizes)
    config._attn_implementation = sizes.get("attn_implementation", "eager")
    for name, value in vars(config).items():
        if DROPOUT.search(name) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def without_data(kind: str, **sizes: Any) -> nn.Module:
    """A causal language model of a kind, whose weights have no memory."""
    return empty_model(config_of(kind, {**SIZES, **sizes} if sizes else {}), torch.float64)


def small(kind: str, **changed: Any) -> nn.Module:
    """A small causal language model of a kind, in float64, with random weights and biases that are the same on every rank."""
    import transformers

    config = config_of(kind, {**SIZES, **changed})
    torch.set_default_dtype(torch.float64)
    try:
        with Wide():
            model = transformers.AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(5)
    for _, p in sorted(model.named_parameters()):
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.25
    return model


def batch(rows: int, length: int = 11) -> tuple[Tensor, Tensor]:
    """Ids and labels; some labels are not counted."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, SIZES["vocab_size"], (rows, length), generator=generator)
    labels = ids.clone()
    labels[0, :4] = -100
    return ids, labels


def alone(model: nn.Module, ids: Tensor, labels: Tensor, **inputs: Any) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
    """Logits, loss and gradients of the unsplit model."""
    with Wide():
        logits = model(input_ids=ids, **inputs).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
    return logits.detach(), loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def whole_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """The gradients of an adopted model as the unsplit one has them: whole, in torch's layout, fused parts joined."""
    found: dict[str, Tensor | None] = {}
    for name, p in model.named_parameters():
        if p.grad is None:
            found[name] = None
            continue
        whole = collect(p.grad.contiguous(), p.grid, p.sharding.layout, p.sharding.shape)
        owner = model.get_submodule(name.rpartition(".")[0])
        found[name] = whole.t() if name.rpartition(".")[2] in getattr(owner, "transposed_in_torch", ()) else whole
    for name, one in model.named_modules():
        if isinstance(one, FusedParts):
            for leaf in ("weight", "bias"):
                parts = [found.pop(f"{name}.parts.{place}.{leaf}", None) for place in range(len(one.parts))]
                if parts[0] is not None:
                    found[f"{name}.{leaf}"] = torch.cat(parts)
    return found


def differences(model: nn.Module, want: dict[str, Tensor | None], floor: float = 1e-30) -> dict[str, float]:
    """Of each gradient, the largest difference, of its largest element, or of `floor`."""
    found = whole_gradients(model)
    assert found.keys() == want.keys(), found.keys() ^ want.keys()
    result = {}
    for name, gradient in want.items():
        mine = found[name]
        if gradient is None or mine is None:
            assert gradient is None or not gradient.any(), name
            assert mine is None or not mine.any(), name
            continue
        result[name] = ((mine - gradient).abs().max() / gradient.abs().max().clamp(min=floor)).item()
    return result


def largest_difference(
    model: Any, on_grid: Any, wanted: tuple[Tensor, Tensor, dict[str, Tensor | None]], ids: Tensor, labels: Tensor, **inputs: Any
) -> float:
    """The largest relative difference of an adopted model's logits, loss and gradients from what `alone` gave; collective."""
    logits, loss, gradients = wanted
    with Wide():
        found = model(input_ids=ids, labels=labels, **inputs)
        found.loss.backward()
    whole = collect(found.logits.detach(), on_grid.grid, model.get_output_embeddings().logits_layout, tuple(logits.shape))
    of_logits = ((whole - logits).abs().max() / logits.abs().max()).item()
    return max(of_logits, abs(found.loss - loss).item() / loss.item(), *differences(model, gradients).values())
