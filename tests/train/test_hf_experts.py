"""Transformers folders of mixtures of experts: each tensor bit for bit, logits and gradients of `transformers` itself."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from safetensors.torch import load_file

from summa3d.errors import CheckpointError
from summa3d.nn import build, full_state_dict, load_full_state_dict, scheme
from summa3d.train.checkpoint import folder as checkpoint
from summa3d.train.checkpoint.huggingface import export_folder, import_folder, rules_of, to_ours
from summa3d.train.generate import load

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers needs Python 3.11")

BASE = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 12,
    "max_position_embeddings": 12,
    "vocab_size": 263,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "router_aux_loss_coef": 0.0,
}
QWEN = {**BASE, "num_experts": 5, "moe_intermediate_size": 4, "norm_topk_prob": True}
SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {**BASE, "num_local_experts": 5, "head_dim": 6},
    "qwen2_moe": {**QWEN, "shared_expert_intermediate_size": 8, "norm_topk_prob": False, "mlp_only_layers": [1]},
    "qwen3_moe": {**QWEN, "head_dim": 4},
    "olmoe": {**BASE, "num_experts": 5, "clip_qkv": 0.5},
}
CLASSES = {"mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe", "olmoe": "Olmoe"}


class Wide:
    """torch, whose float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def islands_of_float64(family: str) -> Iterator[None]:
    """Within the block, what Transformers' models compute in float32 always, they compute in float64."""
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    narrow, plain = torch.Tensor.float, modeling.torch
    modeling.torch, torch.Tensor.float = Wide(), torch.Tensor.double  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        modeling.torch, torch.Tensor.float = plain, narrow  # type: ignore[method-assign]


def their_model(family: str, dtype: torch.dtype) -> Any:
    """A Transformers model with random weights."""
    import transformers

    kind = getattr(transformers, f"{CLASSES[family]}ForCausalLM")
    model = kind(kind.config_class(**SIZES[family])).to(dtype)
    model.set_experts_implementation("eager")  # the other has no float64
    generator = torch.Generator().manual_seed(5)
    for name, p in model.named_parameters():
        std = 0.6 if "gate.weight" in name else 0.1
        p.data.copy_(("norm" in name) + std * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype))
    return model.eval()


def batch() -> torch.Tensor:
    return torch.randint(263, (4, 8), generator=torch.Generator().manual_seed(1))


def their_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def imported(run: Path, comm: MPI.Intracomm) -> checkpoint.Checkpoint:
    path = checkpoint.newest(run / "checkpoints")
    assert path is not None
    return checkpoint.read(path, comm)


@pytest.mark.parametrize("family", SIZES)
def test_tensors_logits_and_gradients_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    tokens = batch()
    with islands_of_float64(family):
        theirs = their_model(family, torch.float64)
        theirs.save_pretrained(tmp_path / "theirs")
        want = theirs(tokens).logits
        torch.nn.functional.cross_entropy(want.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
        theirs.save_pretrained(tmp_path / "gradients", state_dict={name: p.grad for name, p in theirs.named_parameters()})
    import_folder(tmp_path / "theirs", tmp_path / "run", MPI.COMM_SELF)
    export_folder(imported(tmp_path / "run", MPI.COMM_SELF), tmp_path / "ours")
    first, second = their_tensors(tmp_path / "theirs"), their_tensors(tmp_path / "ours")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    said, ours = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "ours"))
    assert {key: ours.get(key) for key in said if key != "layer_types"} == {
        key: said[key] for key in said if key != "layer_types"
    }

    model = load(tmp_path / "run", MPI.COMM_SELF)[0]
    got = model.logits(tokens)
    assert (got - want.detach()).norm() <= 1e-9 * want.norm()
    model(tokens, tokens.roll(-1, 1)).backward()
    of_theirs = their_tensors(tmp_path / "gradients")
    for rule in rules_of(model.config):
        gradient = to_ours(rule, [of_theirs[name] for name in rule.theirs], model.config)
        assert (model.get_parameter(rule.ours).grad - gradient).norm() <= 1e-9 * max(gradient.norm(), 1e-6), rule.ours
    unpatched = their_model(family, torch.float64)(tokens).logits.detach()
    assert (got - unpatched).norm() <= 1e-6 * unpatched.norm()


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("family", [pytest.param(one, marks=[pytest.mark.wide] * (one != "qwen2_moe")) for one in SIZES])
def test_on_every_scheme_a_family_has_the_loss_and_gradients_that_it_has_alone(make_grid: Any, family: str) -> None:
    from summa3d.train.checkpoint.huggingface import model_of

    config, tokens = model_of({**SIZES[family], "model_type": family}, Path("here")), batch()
    alone = build(config, scheme("serial"), torch.float64)
    loss = alone(tokens, tokens.roll(-1, 1))
    loss.backward()
    weights, want = full_state_dict(alone), {name: p.grad for name, p in alone.named_parameters()}
    for name, axes in (("oned", {"y": 4}), ("cuboid", {"y": 2, "z": 2}), ("cuboid-sequence", {"y": 2, "z": 2})):
        grid = make_grid(**axes)
        model = build(config, scheme(name, grid), torch.float64)
        load_full_state_dict(model, weights)
        found = model(tokens, tokens.roll(-1, 1))
        found.backward()
        assert abs(found.item() - loss.item()) <= 1e-11 * loss.item()
        for key, p in model.named_parameters():
            block = want[key][p.sharding.slices(grid)]
            assert (p.grad - block).norm() <= 1e-10 * max(want[key].norm().item(), 1e-9), (name, key)


@pytest.mark.parametrize("table", [{"scores": "sigmoid"}, {"groups": 5}, {"bias_rate": 0.0}])
def test_routers_that_no_family_of_transformers_has_are_not_exported(tmp_path: Path, table: dict[str, Any]) -> None:
    saved = checkpoint.Checkpoint(tmp_path, {"model": {"family": "mixtral", "experts": 5, "moe": table}})
    with pytest.raises(CheckpointError, match="cannot be exported"):
        export_folder(saved, tmp_path / "ours")


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("mixtral", {"sliding_window": 4}, "sliding_window = 4"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ("qwen2_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("olmoe", {"attention_bias": True}, "attention_bias = True"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path, family: str, change: dict[str, Any], says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES[family], "model_type": family, **change}))
    with pytest.raises(CheckpointError, match=says):
        import_folder(tmp_path, tmp_path / "run", MPI.COMM_SELF)
