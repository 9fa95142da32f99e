"""A Transformers folder as the model of a run: its training is torch's on one process, and it is written as it was read."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import adopted
import pytest
import torch
from mpi4py import MPI
from safetensors.torch import load_file
from small_runs import shared_corpus
from torch import Tensor, nn

from summa3d.dry.step import run as run_dry
from summa3d.errors import CheckpointError, ConfigError, LayoutError
from summa3d.train import config as configuration
from summa3d.train.checkpoint import folder as checkpoint
from summa3d.train.checkpoint import writer
from summa3d.train.checkpoint.huggingface import export_folder
from summa3d.train.dry_run import setting_of, training_of
from summa3d.train.generate import load, sample
from summa3d.train.loop import take_step
from summa3d.train.prepare import prepare

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers needs Python 3.11")

SETTINGS = {"dtype": "float64", "model.sequence": 11, "train.batch": 8, "train.warmup": 0, "train.schedule": "constant"}
SETTINGS |= {"train.learning_rate": 0.01, "train.accumulate": 2, "train.steps": 7}
SIZES = {"vocab_size": 263, "intermediate_size": 36, "num_hidden_layers": 3, "num_key_value_heads": 4}
Y_DP = {"scheme": "oned", "grid.y": 2, "grid.dp": 2, "replicas.zero": 1}
X_DP = {"scheme": "cuboid", "grid.x": 2, "grid.dp": 2, "replicas.zero": 3}
Y_PP = {"scheme": "oned", "grid.y": 2, "grid.pp": 2, "recompute": "full"}
Z_DP = {"scheme": "cuboid", "grid.z": 2, "grid.dp": 2, "replicas.zero": 2}
WIDE = [("gemma2", X_DP, Y_DP), ("phi3", Z_DP, Y_DP), ("llama", Y_PP, Z_DP), ("starcoder2", X_DP, Z_DP), ("qwen3", Z_DP, Y_PP)]
WIDE += [("vaultgemma", Z_DP, X_DP)]
PIPED = {"grid.pp": 2, "grid.dp": 2, "replicas.zero": 1, "grid.y": 2, "grid.z": 2}
"""With six layers, on sixteen ranks."""
ONE_HEAD = ("llama", "qwen3", "phi3")
"""Kinds that get one head of k and v, which the ranks of an axis share."""


def folder_of(comm: Any, folder: Path, kind: str, **changed: Any) -> Path:
    """The folder of a small model, written by Transformers on rank 0."""
    if comm.rank == 0:
        adopted.small(kind, **{**SIZES, **changed}).save_pretrained(folder / "hf")
    comm.Barrier()
    return folder / "hf"


def config_of(folder: Path, corpus: Path, settings: dict[str, Any]) -> Any:
    keys = {**SETTINGS, "data.path": corpus, **settings}
    return configuration.load(str(folder), [f"{key}={value}" for key, value in keys.items()])


@contextmanager
def prepared(comm: Any, folder: Path, name: str, settings: dict[str, Any], resume: bool = False) -> Iterator[Any]:
    corpus = shared_corpus(comm, folder)
    with adopted.Wide():
        run = prepare(config_of(folder / "hf", corpus, settings), comm, folder / name, resume=resume)
        yield run
    run.grid.free()


class Torch:
    """The same training by Transformers and torch.optim.AdamW on one process."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        self.model, self.clip = model, config.train.clip
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": config.train.weight_decay},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.train.learning_rate, betas=config.train.betas, eps=1e-8)

    def step(self, inputs: dict[str, Tensor]) -> float:
        logits = self.model(input_ids=inputs["tokens"].contiguous()).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        for gradient in gradients if norm > self.clip else ():
            gradient *= self.clip / norm
        self.optimizer.step()
        return loss.item()


def check_steps(run: Any, alone: Torch, numbers: range) -> None:
    for number in numbers:
        inputs = run.objective.training(run.config.train.seed, number - 1, 0, run.config.train.batch)
        assert take_step(run, number).loss == pytest.approx(alone.step(inputs), rel=1e-9), number


def check_training(comm: Any, folder: Path, kind: str, first: dict[str, Any], second: dict[str, Any], **sizes: Any) -> None:
    """Five steps on one grid, and two on another that goes on; the folder that is written; the text that is continued."""
    folder_of(comm, folder, kind, **sizes)
    with prepared(comm, folder, "run", first) as run:
        alone = Torch(adopted.small(kind, **{**SIZES, **sizes}), run.config)
        check_steps(run, alone, range(1, 5))
        with run.grid.ledger.watch() as moved:
            check_steps(run, alone, range(5, 6))
        counted: Counter[tuple[str, str]] = Counter()
        for row in moved.rows:
            counted[row.phase, row.axis] += row.amounts.words
        dry = run_dry(setting_of(run.config, comm.rank), training_of(run.config)).words()
        assert {(phase, axis): words for phase, axes in dry.items() for axis, words in axes.items() if words} == {
            line: words for line, words in counted.items() if words
        }
        saved = writer.save(run.checkpoints, 5, run.blocks(), run.grid, run.config)
    if comm.rank == 0:
        check_folder(saved, folder, alone.model)
    with prepared(comm, folder, "run", second, resume=True) as run:
        assert run.done == 5
        check_steps(run, alone, range(6, 8))
        writer.save(run.checkpoints, 7, run.blocks(), run.grid, run.config)
        configuration.write(configuration.to_table(run.config), run.folder / "config.toml")
    check_generation(comm, folder, alone.model)


def check_folder(saved: Path, folder: Path, model: nn.Module) -> None:
    """The written folder has the names and values of the model, and Transformers reads it."""
    import transformers

    export_folder(checkpoint.read(saved, MPI.COMM_SELF), folder / "out")
    names = load_file(folder / "hf" / "model.safetensors").keys()
    found = load_file(folder / "out" / "model.safetensors")
    assert found.keys() == names
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.float64).state_dict()
    for name, want in model.state_dict().items():
        assert (theirs[name] - want).abs().max() <= 1e-9 * want.abs().max().clamp(min=1e-3), name
        assert name not in found or torch.equal(found[name], theirs[name]), name


def check_generation(comm: Any, folder: Path, model: nn.Module) -> None:
    with adopted.Wide(), torch.no_grad():
        on_grid, context, config, tokenizer = load(folder / "run", comm)
        text = sample(on_grid, context, config.model, tokenizer, "bad ", 9, temperature=0)
        ids = list(b"bad ")
        for _ in range(9):
            logits = model(input_ids=torch.tensor([ids[-11:]])).logits[0, -1]
            ids.append(int(logits[: tokenizer.vocabulary].argmax()))
    assert text == tokenizer.decode(ids)


@pytest.mark.mpi(sizes=(2,))
def test_training_is_that_of_torch_on_any_grid_that_goes_on(comm: Any, shared_tmp_path: Path) -> None:
    """Qwen3 has norms of heads, which stay as copies; the head is the embedding's."""
    replicas = {"scheme": "serial", "grid.dp": 2, "replicas.zero": 3}
    check_training(comm, shared_tmp_path, "qwen3", replicas, {"scheme": "cuboid", "grid.z": 2}, tie_word_embeddings=True)


@pytest.mark.wide
@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize(("kind", "first", "second"), WIDE, ids=[f"{kind}-{number}" for number, (kind, *_) in enumerate(WIDE)])
def test_so_it_is_of_every_kind(
    comm: Any, shared_tmp_path: Path, kind: str, first: dict[str, Any], second: dict[str, Any]
) -> None:
    check_training(comm, shared_tmp_path, kind, first, second, num_key_value_heads=1 if kind in ONE_HEAD else 4)


@pytest.mark.wide
@pytest.mark.mpi(sizes=(16,))
@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "phi3"])
def test_so_it_is_in_stages_and_replicas_of_a_cuboid(comm: Any, shared_tmp_path: Path, kind: str) -> None:
    sizes = {"num_hidden_layers": 6, "num_key_value_heads": 1 if kind in ONE_HEAD else 4}
    check_training(comm, shared_tmp_path, kind, PIPED, {**PIPED, "pipeline.schedule": "zb-h1"}, **sizes)


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("kind", ["gemma2", "qwen3"])
def test_weights_gathered_behind_the_next_forward_change_no_bit(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Of replicas on several nodes. The embedding is used first, and its gradient, complete last, is in the last bucket."""
    monkeypatch.setenv("SUMMA3D_NODE_MEMORY", "no")
    folder_of(comm, shared_tmp_path, kind, tie_word_embeddings=False)
    found = []
    for overlap in (True, False):
        settings = {"scheme": "oned", "grid.dp": 2, "replicas.bucket": 1, "replicas.overlap": str(overlap).lower()}
        with prepared(comm, shared_tmp_path, f"run {overlap}", settings) as run:
            names = [bucket.names[0] for bucket in run.replicas.buckets]
            embedding = next(name for name in names if "embed_tokens" in name)
            assert "lm_head" in names[0] and not any(name.startswith("blocks.") for name in names[names.index(embedding) :])
            losses = [take_step(run, number).loss for number in (1, 2, 3)]
            assert (run.replicas.gathers.left[0] > 0) is overlap
            run.replicas.gathers.finish()
            found.append([losses, *(state.parameter.data.clone() for state in run.optimizer.states.values())])
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1:], found[1][1:], strict=True))


@pytest.mark.mpi(sizes=(2,))
def test_what_a_folder_cannot_be_trained_with_is_refused_by_name(comm: Any, shared_tmp_path: Path) -> None:
    folder, corpus = folder_of(comm, shared_tmp_path, "llama"), shared_corpus(comm, shared_tmp_path)
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ConfigError, "model.hidden is 64, but config.json makes it 60", {"model.hidden": 64}),
        (ConfigError, "Values for a folder's model: none, full", {"recompute": "selective"}),
        (ConfigError, "config.json has its own", {"model.dropout": 0.1}),
        (LayoutError, "oned-sp scheme adopts no module: it splits sequences", {"scheme": "oned-sp", "model.sequence": 12}),
        (CheckpointError, "missing is no folder", {"model.folder": folder / "missing"}),
    ]
    for error, words, settings in refused:
        with pytest.raises(error, match=words):
            prepare(config_of(folder, corpus, {"scheme": "oned", "grid.y": 2, **settings}), comm, shared_tmp_path / "run")
    with pytest.raises(ConfigError, match="hf is that of a Transformers folder: summa3d train FOLDER"):
        configuration.load("demo", ["model.family=hf"])


@pytest.mark.mpi(sizes=(2,))
def test_without_weights_in_its_folder_a_model_begins_with_the_same_on_every_grid(comm: Any, shared_tmp_path: Path) -> None:
    """In 16 bits, in which layers of replicas compute with copies; norms begin with the values that the model gives them."""
    folder = folder_of(comm, shared_tmp_path, "qwen3", num_key_value_heads=1)
    if comm.rank == 0:
        (folder / "model.safetensors").unlink()
    comm.Barrier()
    losses = []
    for settings in ({"scheme": "oned", "grid.y": 2}, {"scheme": "serial", "grid.dp": 2, "replicas.zero": 1}):
        with prepared(comm, shared_tmp_path, f"run-{len(losses)}", {**settings, "dtype": "bfloat16"}) as run:
            losses.append([take_step(run, number).loss for number in range(1, 4)])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0][0] == pytest.approx(torch.tensor(263.0).log().item(), rel=0.1)
    assert losses[0][2] < losses[0][0]
