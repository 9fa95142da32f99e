"""Every layer through the fused kernels: a whole model's loss and gradients are the plain ones, and both sides have one face."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from kernel_checks import DEVICE
from summa3d.kernels import dispatch, reference
from summa3d.kernels.rows import Fused

from summa3d.nn import ModelConfig, build, initialise, scheme

ROOT = Path(__file__).parents[2] / "summa3d"
CALL = re.compile(r"kernels_for\(\w+(?:\[0\])?\)\.(\w+)\(")
ENTRIES = sorted({name for file in ROOT.rglob("*.py") for name in CALL.findall(file.read_text(encoding="utf-8"))})
"""Every function that the layers and the optimizer call, read off their sources."""
SIZES = {"layers": 2, "hidden": 24, "heads": 4, "sequence": 7, "vocabulary": 61}  # f = 96 or Llama's; 7 tokens, 61 words
FAMILIES = {
    "gpt2": {"dropout": 0.2, "attention_dropout": 0.1},
    "bert": {"dropout": 0.2},
    "llama": {"kv_heads": 2, "ffn": 35},
}


@pytest.mark.parametrize("name", ENTRIES)
def test_plain_and_fused_take_the_same_arguments_in_the_same_order(name):
    plain = inspect.signature(getattr(reference, name)).parameters
    fused = [*inspect.signature(getattr(Fused, name)).parameters.values()][1:]  # without self
    assert len(plain) <= len(fused)  # a fused kernel may take more, of its own
    for one, other in zip(plain.values(), fused, strict=False):
        assert one.default == other.default


def test_every_call_of_a_kernel_is_found_and_the_host_takes_plain_torch():
    assert len(ENTRIES) == 19 and dispatch.kernels_for(torch.ones(1)) is reference
    calls = "".join(file.read_text(encoding="utf-8") for file in ROOT.rglob("*.py")).count("kernels_for(")
    comparisons = 4  # of the choice itself with `reference`, in Linear, the norms, the activation and the loss
    assert calls == comparisons + sum(len(CALL.findall(file.read_text(encoding="utf-8"))) for file in ROOT.rglob("*.py"))


def trained(family, dtype, device):
    """The loss and every gradient of a model's first step, labels partly missing."""
    config = ModelConfig(family=family, **SIZES, **FAMILIES[family])
    model = build(config, scheme("serial"), dtype)
    initialise(model, model.context, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # γ, β and biases away from 1 and 0
                parameter += torch.linspace(-0.5, 0.5, len(parameter), dtype=dtype)
    tokens = torch.randint(0, 61, (3, 7), generator=torch.Generator().manual_seed(4))
    labels = tokens.roll(1, 1).masked_fill(tokens % 5 == 0, -1)
    model.to(device)
    loss = model(tokens.to(device), labels.to(device), step=2)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return loss.detach().cpu(), {name: gradient.cpu() for name, gradient in gradients.items()}


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_model_on_fused_kernels_has_the_loss_and_the_gradients_of_the_plain_one(fused, family, dtype, monkeypatch):
    want, plain = trained(family, dtype, "cpu")
    used = set()

    class Recorded:
        def __getattr__(self, name):
            used.add(name)
            return getattr(fused, name)

    monkeypatch.setattr(dispatch, "kernels_for", lambda _: Recorded())
    loss, gradients = trained(family, dtype, DEVICE)
    close = {torch.float64: 1e-10, torch.float32: 1e-5}[dtype]
    of_family = {"swiglu_gradient", "rotate"} if family == "llama" else {"dropout_gradient"}
    assert used >= of_family | {"norm_gradient", "cross_entropy_gradient"}
    assert (loss - want).abs() <= close * want.abs()
    assert gradients.keys() == plain.keys()
    for name, grad in gradients.items():
        assert (grad - plain[name]).norm() <= close * (plain[name].norm() + 1e-6), name
