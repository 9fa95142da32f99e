"""Activations computed again in backward: the same gradients to the bit, one more forward of words, less that is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import devices
import pytest
import torch
from small_runs import micro_batch, shared_corpus, small_config, train_small

from summa3d.autograd.recompute import recompute
from summa3d.dry.step import run as run_dry
from summa3d.errors import ConfigError
from summa3d.nn.layers.dropout import Batch
from summa3d.train import config
from summa3d.train.dry_run import setting_of, training_of
from summa3d.train.loop import take_step
from summa3d.train.prepare import Run, prepare

GRIDS = {1: (1, 1, 1), 2: (1, 2, 1), 4: (1, 2, 2), 8: (2, 2, 2)}
KINDS = [("selective", 1), ("full", 1), ("full", 2)]
MODELS = [
    {"model__layers": 3, "model__attention_dropout": 0.2, "regather": False},
    {"model__layers": 3, "model__family": "llama", "model__kv_heads": 2, "dtype": "bfloat16"},
]


def gradients(run: Run) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and accumulated gradients of two micro-batches."""
    run.model.zero_grad()
    losses = [micro_batch(run, 1, row).item() for row in (0, 12)]
    return losses, {name: p.grad.clone() for name, p in run.model.named_parameters()}


def prepared(comm: Any, folder: Path, shape: tuple[int, ...], **changes: object) -> Run:
    axes = {f"grid__{name}": length for name, length in zip("xyzd", shape, strict=False)}
    settings = small_config(shared_corpus(comm, folder), train__batch=24, train__accumulate=2, **axes, **changes)
    return prepare(settings, comm, folder / "run")


@pytest.mark.mpi(sizes=(1, 2, 4, 8))
@pytest.mark.parametrize("model", MODELS, ids=["gpt2", "llama"])
@pytest.mark.turns
def test_gradients_are_the_same_bits_with_and_without(comm: Any, shared_tmp_path: Path, model: dict[str, object]) -> None:
    run = prepared(comm, shared_tmp_path, GRIDS[comm.size], **model)
    want = gradients(run)
    assert all(grad.any() for name, grad in want[1].items() if "blocks" in name)
    for kind, layers in KINDS:
        run.model.recompute(kind, layers)
        losses, found = gradients(run)
        assert losses == want[0], (kind, layers)
        assert [name for name, grad in found.items() if not torch.equal(grad, want[1][name])] == [], (kind, layers)


@pytest.mark.mpi(sizes=(4,))
def test_gradients_are_the_same_bits_in_every_scheme(comm: Any, shared_tmp_path: Path) -> None:
    schemes = {
        "oned": (1, 4, 1),
        "oned-sp": (1, 4, 1),
        "summa": (2, 2, 1),
        "tesseract": (1, 1, 1, 4),
        "cuboid-sequence": (1, 2, 2),
    }
    for name, shape in schemes.items():
        model = {"model__family": "bert", "model__vocabulary": 263, "model__heads": 12, "model__layers": 3}
        run = prepared(comm, shared_tmp_path, shape, scheme=name, **model)
        losses, want = gradients(run)
        for kind, layers in KINDS[1:]:
            run.model.recompute(kind, layers)
            again, found = gradients(run)
            assert again == losses and not [one for one in want if not torch.equal(found[one], want[one])], (name, layers)
        run.grid.free()


@pytest.mark.mpi(sizes=(8,))
def test_full_recomputation_moves_the_blocks_forward_once_more_and_selective_nothing(comm: Any, shared_tmp_path: Path) -> None:
    run = prepared(comm, shared_tmp_path, GRIDS[comm.size], model__layers=3)
    ledger = run.grid.ledger
    moved: dict[str, Any] = {}
    for kind in ("none", "selective", "full"):
        run.model.recompute(kind)
        with ledger.watch() as moved[kind]:
            micro_batch(run, 1, 0)
    before = phases(moved["none"])
    assert phases(moved["selective"]) == before
    x = torch.randn(12, 16, 24, dtype=torch.float64)[
        run.model.context.residual.slices((12, 16, 24), run.grid.shape, run.grid.coordinates)
    ]
    with ledger.watch() as forward, torch.no_grad():
        run.model.through(x.contiguous().to(run.device), 0, len(run.model.blocks), Batch(12, 16), run.model.visible({}))
    after = phases(moved["full"])
    assert after["forward"] == before["forward"] and after["optimizer"] == before["optimizer"]
    assert after["backward"] == tuple(a + b for a, b in zip(before["backward"], (forward.words, forward.messages), strict=True))
    assert forward.words > 0


def phases(moved: Any) -> dict[str, tuple[int, int]]:
    """Words and messages of each phase."""
    return {
        phase: tuple(
            sum(getattr(row.amounts, what) for row in moved.rows if row.phase == phase) for what in ("words", "messages")
        )
        for phase in ("forward", "backward", "optimizer")
    }


def saved_bytes(run: Run) -> int:
    """Bytes that torch keeps for the backward of one micro-batch, each storage once, parameters excluded."""
    weights = {p.untyped_storage().data_ptr() for p in run.model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        windows = torch.from_numpy(run.tokens.batch(1, 0, 0, 12))
        loss = run.model(windows[:, :-1], windows[:, 1:])
    sizes = sum(storage.nbytes() for address, storage in kept.items() if address not in weights)
    del loss
    return sizes


@pytest.mark.skipif(devices.NAME != "cpu", reason="a device keeps no masks")
@pytest.mark.mpi(sizes=(1, 4))
def test_less_is_kept_the_more_is_computed_again(comm: Any, shared_tmp_path: Path) -> None:
    run = prepared(comm, shared_tmp_path, GRIDS[comm.size], model__layers=4, model__attention_dropout=0.1)
    kept = {}
    for kind, layers in [("none", 1), ("selective", 1), ("full", 1), ("full", 2), ("full", 4)]:
        run.model.recompute(kind, layers)
        kept[kind, layers] = saved_bytes(run)
    stream = 12 * 16 * 24 // comm.size * 8  # one rank's block of the stream, float64
    assert kept["none", 1] > kept["selective", 1] > kept["full", 1]
    assert kept["full", 1] - kept["full", 2] == 2 * stream
    assert kept["full", 2] - kept["full", 4] == stream


@pytest.mark.skipif(devices.NAME != "cpu", reason="a device keeps no masks")
@pytest.mark.mpi(sizes=(4,))
def test_ranks_that_hold_copies_keep_a_part_of_a_recomputed_input_each(comm: Any, shared_tmp_path: Path) -> None:
    """The whole is gathered before it is computed again: the same bits, the words of the gathers, as the dry run says."""
    model = {"scheme": "oned", "model__layers": 3, "model__heads": 12, "recompute": "full", "recompute_layers": 2}
    results, kept, moved = [], [], []
    for distributed in (False, True):
        run = prepared(comm, shared_tmp_path, (1, 4, 1), distribute_saved_activations=distributed, **model)
        results.append(gradients(run))
        kept.append(saved_bytes(run))
        before = words_of(run)
        take_step(run, 1)
        moved.append({key: words - before.get(key, 0) for key, words in words_of(run).items()})
        dry = run_dry(setting_of(run.config, comm.rank), training_of(run.config)).words()
        assert {key: words for key, words in moved[-1].items() if words} == {
            (phase, axis): words for phase, axes in dry.items() for axis, words in axes.items() if words
        }
        run.grid.free()
    assert results[0][0] == results[1][0] and all(torch.equal(results[0][1][name], grad) for name, grad in results[1][1].items())
    stream = 12 * 16 * 24  # of each rank; two stretches keep one
    assert kept[0] - kept[1] == 2 * (stream - stream // 4) * 8
    extra = {key: words - moved[0][key] for key, words in moved[1].items() if words != moved[0][key]}
    assert extra == {("backward", "y"): 2 * 2 * (stream - stream // 4)}  # of two micro-batches


def words_of(run: Run) -> dict[tuple[str, str], int]:
    """Words by phase and axis since the start."""
    found: dict[tuple[str, str], int] = {}
    for row in run.grid.ledger.rows():
        found[row.phase, row.axis] = found.get((row.phase, row.axis), 0) + row.amounts.words
    return found


def test_a_recomputed_function_keeps_its_inputs_alone_and_needs_no_gradient_to_run() -> None:
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    scale = torch.nn.Linear(3, 3).double()
    calls = []

    def run(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return scale(x.tanh()).exp()

    y = recompute(run, [x], [scale])
    y.sum().backward()
    found = [x.grad, scale.weight.grad, scale.bias.grad]
    want = torch.autograd.grad(run(x).sum(), [x, scale.weight, scale.bias])
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert calls == [False, True, True]
    with torch.no_grad():
        assert torch.equal(recompute(run, [x], [scale]), y) and len(calls) == 4


@pytest.mark.mpi(sizes=(2,))
def test_a_run_recomputes_as_its_configuration_says(comm: Any, shared_tmp_path: Path) -> None:
    losses, words = [], []
    for changes in ({}, {"recompute": "full", "recompute_layers": 2}, {"recompute": "selective"}):
        folder = shared_tmp_path / str(len(losses))
        if comm.rank == 0:
            folder.mkdir()
        comm.Barrier()
        summary = train_small(comm, folder, grid__y=2, train__steps=3, train__keep=0, **changes)
        losses.append(summary["loss"])
        words.append(summary["words_per_rank"])
    assert losses == [losses[0]] * 3 and words[1] > words[0] == words[2]


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["recompute=ful"], ["'ful'", "'full'", "selective"]),
        (["recompute_layers=0"], ["recompute_layers is 0"]),
        (["recompute_layers=2"], ["recompute_layers = 2", '"none"', '"full"']),
        (["distribute_saved_activations=true"], ["distribute_saved_activations", '"none"', '"full"']),
    ],
)
def test_a_recomputation_that_no_run_can_have_is_refused(assignments: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        config.load("demo", assignments)
    assert all(word in str(raised.value) for word in words)
