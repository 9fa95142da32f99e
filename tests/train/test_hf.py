"""Transformers folders: imported and exported bit for bit, with the logits of `transformers` itself on every scheme.

Only rank 0 imports transformers; its logits travel as a file.
"""

from __future__ import annotations

import json
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import devices
import pytest
import torch
from mpi4py import MPI
from safetensors.torch import load_file, save_file
from small_runs import assignments, metrics_of, train_small, write_corpus

from summa3d.errors import CheckpointError, DataError
from summa3d.nn.context import scheme
from summa3d.parallel.states import states_of
from summa3d.train import config
from summa3d.train.checkpoint import compare, huggingface_files
from summa3d.train.checkpoint import folder as checkpoint
from summa3d.train.checkpoint.huggingface import export_folder, import_folder, tokenizer_of
from summa3d.train.data import corpus, tokens
from summa3d.train.generate import load, sample
from summa3d.train.loop import train
from summa3d.train.prepare import build_model

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers needs Python 3.11")

# 12 heads and h = 24 are divided by every axis used here; v, f and s are divided by none.
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 24, "n_head": 12, "n_positions": 12, "n_inner": 29, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
    "llama": {
        "num_hidden_layers": 2,
        "hidden_size": 24,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 36,
        "max_position_embeddings": 12,
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
    },
    "bert": {
        "num_hidden_layers": 2,
        "hidden_size": 24,
        "num_attention_heads": 12,
        "intermediate_size": 29,
        "max_position_embeddings": 12,
    },
}
SIZES["gpt2-relu2"] = {**SIZES["gpt2"], "activation_function": "relu2"}
SIZES["llama-linear"] = {**SIZES["llama"], "rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.5}}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 0.5, "high_freq_factor": 2.5}
LLAMA3 |= {"original_max_position_embeddings": 10, "rope_theta": 50.0}
SIZES["llama3-tied"] = {**SIZES["llama"], "rope_parameters": LLAMA3, "hidden_size": 96, "tie_word_embeddings": True}
VOCABULARY = 263
CLASSES = {"gpt2": "GPT2LMHeadModel", "gpt2-relu2": "GPT2LMHeadModel", "bert": "BertForPreTraining"}
CLASSES |= dict.fromkeys(("llama", "llama-linear", "llama3-tied"), "LlamaForCausalLM")
DECODERS = ("gpt2", "llama")
GRIDS: dict[int, list[tuple[str, dict[str, int]]]] = {
    1: [("serial", {"x": 1})],
    4: [("oned", {"y": 4}), ("summa", {"x": 2, "y": 2}), ("cuboid", {"x": 1, "y": 2, "z": 2})],
    8: [
        ("cuboid", {"x": 2, "y": 2, "z": 2}),
        ("cuboid-sequence", {"x": 2, "y": 2, "z": 2}),
        ("tesseract", {"x": 2, "y": 2, "d": 2}),
    ],
}


def their_model(family: str, **changes: Any) -> Any:
    """A Transformers model with random weights, γ, β and biases among them."""
    import transformers

    kind = getattr(transformers, CLASSES[family])
    settings = kind.config_class(**{**SIZES[family], "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, **changes})
    model = kind(settings)
    generator = torch.Generator().manual_seed(5)
    for p in model.parameters():
        p.data.add_(0.1 * torch.randn(p.shape, generator=generator))
    return model.eval()


def their_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def opened(run: Path, comm: MPI.Intracomm = MPI.COMM_SELF) -> checkpoint.Checkpoint:
    path = checkpoint.newest(run / "checkpoints")
    assert path is not None
    return checkpoint.read(path, comm)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", SIZES)
def test_what_was_imported_is_exported_bit_for_bit(tmp_path: Path, family: str, dtype: str) -> None:
    model = their_model(family).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 1
    import_folder(tmp_path / "theirs", tmp_path / "run", MPI.COMM_SELF)
    for name, size in (("one", 1 << 30), ("several", 8000)):
        export_folder(opened(tmp_path / "run"), tmp_path / name, file_bytes=size)
        assert same_bits(their_tensors(tmp_path / "theirs"), their_tensors(tmp_path / name))
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 2
    read = (type(model).from_pretrained(tmp_path / name, dtype=getattr(torch, dtype)).eval() for name in ("theirs", "several"))
    tokens = torch.arange(18).view(2, 9) * 13 % VOCABULARY
    with torch.no_grad():
        assert torch.equal(*(model(tokens)[0] for model in read))
    theirs, ours = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "one"))
    assert {key: ours[key] for key in theirs} == theirs


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, token types and a padding mask."""
    tokens = torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(1))
    types = (torch.arange(8) > 3).long().expand(4, -1).contiguous()
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[1, 6:] = mask[2, 3:] = 0
    return tokens, types, mask


def their_logits(model: Any, family: str) -> list[torch.Tensor]:
    tokens, types, mask = batch()
    with torch.no_grad():
        if family == "bert":
            return [*model(tokens, token_type_ids=types, attention_mask=mask)[:2]]
        return [model(tokens).logits]


def our_logits(model: Any, family: str) -> list[torch.Tensor]:
    """On every rank, of every token."""
    tokens, types, mask = batch()
    return [*model.eval().logits(tokens, types, mask)] if family == "bert" else [model.eval().logits(tokens)]


@pytest.mark.mpi(sizes=tuple(GRIDS))
@pytest.mark.parametrize("family", SIZES)
@pytest.mark.turns
def test_an_imported_model_has_the_logits_of_transformers_on_every_scheme(
    comm: Any, make_grid: Any, shared_tmp_path: Path, family: str
) -> None:
    source, run = shared_tmp_path / "theirs", shared_tmp_path / "run"
    if comm.rank == 0:
        model = their_model(family)
        model.save_pretrained(source)
        torch.save(their_logits(model, family), shared_tmp_path / "logits")
    comm.Barrier()
    import_folder(source, run, comm)
    want = torch.load(shared_tmp_path / "logits")
    settings = config.load(str(run / "config.toml"))
    for name, axes in GRIDS[comm.size]:
        plan = scheme(name, make_grid(**axes))
        ours = build_model(settings, plan)
        opened(run, comm).load(checkpoint.weight_blocks(states_of(ours, plan.grid)), plan.grid)
        for found, expected in zip(our_logits(ours, family), want, strict=True):
            assert (found - expected).abs().max() < 1e-5, name


@pytest.mark.skipif(devices.NAME == "pretended", reason="Transformers reads its folders under modes of its own")
@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("family", DECODERS)
def test_a_model_trained_here_is_exported_to_the_logits_it_has(comm: Any, shared_tmp_path: Path, family: str) -> None:
    changes = {"model__family": family, "model__vocabulary": VOCABULARY, "dtype": "float32", "train__steps": 3}
    train_small(comm, shared_tmp_path, grid__y=2, **changes)
    if comm.rank == 0:
        import transformers

        export_folder(opened(shared_tmp_path / "run"), shared_tmp_path / "theirs")
        model = getattr(transformers, CLASSES[family]).from_pretrained(shared_tmp_path / "theirs").eval()
        ours, *_ = load(shared_tmp_path / "run", MPI.COMM_SELF, torch.device("cpu"))
        tokens = torch.arange(9).view(1, 9) * 17
        with torch.no_grad():
            assert (model(tokens).logits[:, -1] - ours.eval().next_logits(tokens)).abs().max() < 1e-5
    comm.Barrier()


@pytest.mark.mpi(sizes=(2,))
def test_training_goes_on_from_an_imported_model(comm: Any, shared_tmp_path: Path) -> None:
    source, run = shared_tmp_path / "theirs", shared_tmp_path / "run"
    corpus = shared_tmp_path / "corpus.txt"
    if comm.rank == 0:
        their_model("llama").save_pretrained(source)
        write_corpus(corpus)
    comm.Barrier()
    import_folder(source, run, comm)
    wanted = [one for one in assignments(corpus, scheme="oned", grid__y=2, dtype="float32") if not one.startswith("model.")]
    train(config.load(str(run / "config.toml"), wanted), comm, run, resume=True)
    losses = [line["loss"] for line in metrics_of(shared_tmp_path)]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.2
    assert opened(run, comm).has_moments


@pytest.mark.mpi(sizes=(2,))
def test_an_imported_model_trains_over_contexts_as_on_one_rank_and_is_exported_alike(comm: Any, shared_tmp_path: Path) -> None:
    source, text = shared_tmp_path / "theirs", shared_tmp_path / "corpus.txt"
    if comm.rank == 0:
        their_model("llama").double().save_pretrained(source)
        write_corpus(text)
    comm.Barrier()
    losses, exported = {}, {}
    for kind, ranks in (("alone", MPI.COMM_SELF), ("ring", comm), ("heads", comm)):
        folder = shared_tmp_path / (f"{kind}{comm.rank}" if kind == "alone" else kind)
        import_folder(source, folder / "run", ranks)
        keys = {"scheme": "serial", "grid__cp": ranks.size, "dtype": "float64", "train__steps": 3}
        keys |= {"context__kind": kind} if kind != "alone" else {}
        wanted = [one for one in assignments(text, **keys) if not one.startswith("model.")]
        train(config.load(str(folder / "run" / "config.toml"), wanted), ranks, folder / "run", resume=True)
        losses[kind] = [line["loss"] for line in metrics_of(folder)]
        if ranks.rank == 0:
            export_folder(opened(folder / "run"), folder / "theirs")
        ranks.Barrier()
        exported[kind] = their_tensors(folder / "theirs")
        assert len(losses[kind]) == 3 and losses[kind] == pytest.approx(losses["alone"], rel=1e-9), kind
        for name, tensor in exported[kind].items():
            torch.testing.assert_close(tensor, exported["alone"][name], rtol=1e-6, atol=1e-9)
    assert [*exported["ring"]] == [*exported["alone"]]


@pytest.mark.mpi(sizes=(2,))
def test_a_rank_holds_its_share_and_the_tensors_of_one_rule(comm: Any, shared_tmp_path: Path, monkeypatch: Any) -> None:
    if comm.rank == 0:
        their_model("bert").save_pretrained(shared_tmp_path / "theirs")
    comm.Barrier()
    alive: set[int] = set()
    most = 0
    read = huggingface_files.HuggingFaceReader.read

    def counted(reader: huggingface_files.HuggingFaceReader, name: str) -> torch.Tensor:
        nonlocal most
        tensor = read(reader, name)
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        alive.add(address)
        weakref.finalize(storage, alive.discard, address)
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(huggingface_files.HuggingFaceReader, "read", counted)
    import_folder(shared_tmp_path / "theirs", shared_tmp_path / "run", comm)
    assert most == 3 and not alive  # q, k and v make one of our tensors
    files = opened(shared_tmp_path / "run", comm).index["files"]
    sizes = [entry["bytes"] for entry in files.values()]
    assert len(sizes) == 2 and max(sizes) < 1.1 * min(sizes)


def test_names_without_the_models_prefix_and_old_buffers_are_understood(tmp_path: Path) -> None:
    their_model("gpt2").save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    bare |= {"h.0.attn.bias": torch.ones(1, 1, 11, 11), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    save_file({**bare, "lm_head.weight": bare["wte.weight"].clone()}, file)
    import_folder(tmp_path / "theirs", tmp_path / "run", MPI.COMM_SELF)
    export_folder(opened(tmp_path / "run"), tmp_path / "again")
    assert same_bits(their_tensors(tmp_path / "again"), tensors)
    with pytest.raises(CheckpointError, match="again is not empty"):
        export_folder(opened(tmp_path / "run"), tmp_path / "again")


@pytest.mark.mpi(sizes=(2,))
def test_an_imported_model_brings_its_tokenizer(comm: Any, shared_tmp_path: Path) -> None:
    source, run, size = shared_tmp_path / "theirs", shared_tmp_path / "run", 300
    text = write_corpus(shared_tmp_path / "text") if comm.rank == 0 else shared_tmp_path / "text"
    if comm.rank == 0:
        their_model("gpt2", vocab_size=size).save_pretrained(source)
        data = config.DataConfig(path=str(text), tokenizer="bpe:280")
        corpus.train_tokenizer(corpus.documents(str(text)), data, source)
        (source / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    comm.Barrier()
    import_folder(source, run, comm)
    settings = config.load(str(run / "config.toml"))
    assert settings.data.tokenizer == f"bpe:{size}:{run.resolve()}/tokenizer.json"
    if comm.rank == 0:
        model, plan, settings, tokenizer = load(run, MPI.COMM_SELF)
        assert 256 < tokenizer.vocabulary <= 280
        assert sample(model, plan, settings.model, tokenizer, "abc ", 3).startswith("abc ")
        parts = tokens.prepare(replace(settings.data, path=str(text)), 12, run / "data", MPI.COMM_SELF)
        assert tokenizer.decode([*parts.train, *parts.validation]) == text.read_text()
        export_folder(opened(run), shared_tmp_path / "back")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (shared_tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
        with pytest.raises(DataError, match=r"has \d+ tokens; data\.tokenizer says at most 256"):
            corpus.load_tokenizer(replace(settings.data, tokenizer=f"bpe:256:{run}/tokenizer.json"), run)
        with pytest.raises(DataError, match=r"data\.tokenizer names it"):
            corpus.load_tokenizer(replace(settings.data, tokenizer="bpe:256:nowhere"), run)
    comm.Barrier()


def test_an_imported_run_opens_with_its_weights_and_exports_the_tokenizer_it_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    their_model("gpt2", vocab_size=300).save_pretrained(tmp_path / "theirs")
    text, run = write_corpus(tmp_path / "text"), tmp_path / "run"
    import_folder(tmp_path / "theirs", run, MPI.COMM_SELF)
    assert tokenizer_of(opened(run)) is None  # bytes
    few = ["train.steps=1", "train.batch=2", "train.evaluate_batches=1", "train.peak_tflops=1", f"data.path={text}"]
    words = [*few, "data.tokenizer=bpe:280", "scheme=serial", "device=cpu"]
    train(config.load(str(run / "config.toml"), words), MPI.COMM_SELF, run, resume=True)
    assert capsys.readouterr().err.count("from the imported weights") == 1
    export_folder(opened(run), tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (run / "data" / "tokenizer.json").read_bytes()
    assert not (tmp_path / "back" / "tokenizer_config.json").exists()


def test_older_files_say_rope_scaling_and_rope_theta(tmp_path: Path) -> None:
    their_model("llama3-tied").save_pretrained(tmp_path / "theirs")
    settings = tmp_path / "theirs" / "config.json"
    said = json.loads(settings.read_text())
    rope = said.pop("rope_parameters")
    said |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    settings.write_text(json.dumps(said))
    import_folder(tmp_path / "theirs", tmp_path / "run", MPI.COMM_SELF)
    model = config.load(str(tmp_path / "run" / "config.toml")).model
    assert (model.rotary_scaling, model.rotary_base, model.rotary_context) == ("llama3", 50.0, 10) and model.tied
    export_folder(opened(tmp_path / "run"), tmp_path / "again")
    ours = json.loads((tmp_path / "again" / "config.json").read_text())
    assert ours["rope_parameters"] == LLAMA3 and ours["rope_scaling"] is None
    said["rope_scaling"] = {"type": "yarn", "factor": 2.0}
    settings.write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="rope_type = 'yarn'; our llama supports 'default' or 'linear' or 'llama3' only"):
        import_folder(tmp_path / "theirs", tmp_path / "other", MPI.COMM_SELF)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Cannot write .*none/model\.safetensors: .*No such file"):
        huggingface_files.write(tmp_path / "none", [("a", (2,))], "float32", iter([torch.zeros(2)]), 1 << 30)


def spoil(folder: Path, kind: str) -> None:
    """Make an imported folder wrong in one way."""
    file, settings = folder / "model.safetensors", folder / "config.json"
    tensors, said = load_file(file), json.loads(settings.read_text())
    if kind == "missing":
        del tensors["transformer.h.1.ln_2.bias"]
    elif kind == "unknown":
        tensors["transformer.h.1.extra"] = torch.ones(2)
    elif kind == "shape":
        said["n_inner"] = 31
    elif kind == "untied":
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1
    elif kind == "activation":
        said["activation_function"] = "relu"
    elif kind == "family":
        said["model_type"] = "mamba"
    elif kind == "dropouts":
        said["embd_pdrop"] = 0.3
    elif kind == "dtype":
        tensors["transformer.wte.weight"] = tensors["transformer.wte.weight"].to(torch.int8)
    settings.write_text(json.dumps(said))
    save_file(tensors, file)
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif kind == "no config":
        settings.unlink()


@pytest.mark.mpi(sizes=(2,))
def test_a_folder_that_cannot_be_imported_is_refused_by_every_rank(comm: Any, shared_tmp_path: Path) -> None:
    cases = {
        "missing": ["lacks transformer.h.1.ln_2.bias", "GPT2LMHeadModel"],
        "unknown": ["holds unknown tensors: transformer.h.1.extra"],
        "shape": ["transformer.h.0.mlp.c_fc.weight", "(24, 29)", "(24, 31)"],
        "untied": ["lm_head.weight differs from transformer.wte.weight"],
        "activation": ["activation_function = 'relu'", "'gelu_new'"],
        "family": ["'mamba'", "gpt2, llama, bert"],
        "dropouts": ["embd_pdrop", "model.dropout"],
        "dtype": ["dtype I8", "bfloat16"],
        "truncated": ["model.safetensors"],
        "no config": ["is not a Transformers folder"],
    }
    if comm.rank == 0:
        model = their_model("gpt2")
        for kind in cases:
            model.save_pretrained(shared_tmp_path / kind)
            spoil(shared_tmp_path / kind, kind)
    comm.Barrier()
    for kind, words in cases.items():
        with pytest.raises(CheckpointError) as raised:
            import_folder(shared_tmp_path / kind, shared_tmp_path / "run", comm)
        message = str(raised.value)
        assert comm.allgather(message) == [message] * 2
        assert all(word in message for word in [*words, str(shared_tmp_path)]), message
        assert not (shared_tmp_path / "run").exists()
        comm.Barrier()


@pytest.mark.skipif(devices.NAME == "pretended", reason="Transformers reads its folders under modes of its own")
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_an_import_is_compared_with_transformers_own_model(tmp_path: Path, family: str) -> None:
    source, run = tmp_path / "theirs", tmp_path / "run"
    model = their_model(family)
    model.save_pretrained(source)
    import_folder(source, run, MPI.COMM_SELF)
    assert compare.logits(source, run) < compare.LIMIT
    for p in list(model.parameters())[-3:]:
        p.data.mul_(1.01)
    model.save_pretrained(source)
    with pytest.raises(CheckpointError, match="differ from those of"):
        compare.logits(source, run)
