"""`summa3d checkpoint` as a user starts it: from a Transformers folder to a run, through the ranks, and back.

Starts real processes; what is in the files is tested in tests/train/test_hf.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import jobs
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from summa3d.train.checkpoint.index import digest
from summa3d.train.lease import Lease

H, V = 8, 257


def summa3d(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [jobs.python(), "-m", "summa3d", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=dict(os.environ))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of one layer as Transformers stores it, written without Transformers."""
    folder = tmp_path_factory.mktemp("theirs")
    layer = {
        "ln_1": (H,),
        "ln_2": (H,),
        "attn.c_attn": (H, 3 * H),
        "attn.c_proj": (H, H),
        "mlp.c_fc": (H, 4 * H),
        "mlp.c_proj": (4 * H, H),
    }
    shapes = {"wte.weight": (V, H), "wpe.weight": (5, H), "ln_f.weight": (H,), "ln_f.bias": (H,)}
    for name, shape in layer.items():
        shapes |= {f"h.0.{name}.weight": shape, f"h.0.{name}.bias": shape[-1:]}
    generator = torch.Generator().manual_seed(2)
    save_file(
        {f"transformer.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    said = {"model_type": "gpt2", "n_layer": 1, "n_embd": H, "n_head": 2, "n_positions": 5, "vocab_size": V, "eos_token_id": 3}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def test_a_folder_is_imported_by_two_ranks_inspected_continued_and_exported(theirs: Path, tmp_path: Path) -> None:
    run, back = tmp_path / "run", tmp_path / "back"
    said = summa3d("checkpoint", "import", theirs, run).stdout.splitlines()
    assert said[1:] == [
        "The run has no tokenizer and reads bytes. Name one with --set data.tokenizer=FOLDER.",
        f"Train it with: summa3d train --run {run} --resume --set data.path=FILE --set train.learning_rate=RATE",
    ]
    done = summa3d("launch", "-n", 2, "checkpoint", "import", theirs, run, "--overwrite", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"checkpoint": f"{run}/checkpoints/step-0", "run": str(run)}
    seen = json.loads(summa3d("checkpoint", "inspect", run, "--json").stdout)
    assert (seen["step"], seen["files"], seen["optimizer"], seen["model"]["hidden"]) == (0, 2, False, H)
    assert seen["parameters"] == sum(tensor.numel() for tensor in load_file(theirs / "model.safetensors").values())
    assert seen["tensors"]["model.blocks.0.attention.qkv.weight"] == {"shape": [H, 3 * H], "dtype": "float32", "pieces": 2}
    checked = summa3d("checkpoint", "verify", run).stdout
    assert checked.startswith(f"{run}/checkpoints/step-0: step 0, complete and as its index says: {len(seen['tensors'])} tensors")
    text = summa3d("checkpoint", "inspect", run / "checkpoints" / "step-0").stdout
    assert "step 0" in text and "family gpt2" in text and "model.embedding.weight" in text
    assert re.search(r", written on \w+(,\w+=\d+)*\n", text), text

    assert summa3d("generate", run, "--prompt", "ab", "--tokens", 3).stdout.startswith("ab")
    done = summa3d("checkpoint", "export", run, back, "--json")
    assert json.loads(done.stdout) == {"folder": str(back), "files": ["model.safetensors"], "tokenizer": None}
    there, again = load_file(theirs / "model.safetensors"), load_file(back / "model.safetensors")
    assert there.keys() == again.keys() and all(torch.equal(there[name], again[name]) for name in there)
    said = json.loads((back / "config.json").read_text())
    assert (said["n_head"], said["eos_token_id"], said["architectures"]) == (2, 3, ["GPT2LMHeadModel"])

    with Lease() as lease:
        lease.take(run)
        done = summa3d("launch", "-n", 2, "checkpoint", "import", theirs, run, "--overwrite")
    assert done.returncode != 0 and done.stderr.count("is in use by process") == 1 and "Traceback" not in done.stderr
    assert (run / "checkpoints" / "step-0").is_dir()

    half = summa3d("checkpoint", "export", run / "checkpoints" / "step-0", tmp_path / "half", "--dtype", "bfloat16")
    assert half.returncode == 0, half.stderr
    said = "half/model.safetensors\nthe checkpoint's float32 tensors, as bfloat16\n"
    assert half.stdout.endswith(f'{said}no tokenizer written: the run\'s data.tokenizer is "bytes"\n')
    halves = load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(halves[name], there[name].bfloat16()) for name in there)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json of V tokens."""
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    letters = {letter: number for number, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    made = tokenizers.Tokenizer(models.BPE({**letters, "ab": len(letters)}, [("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(file))
    return file


@pytest.fixture
def run(theirs: Path, tmp_path: Path) -> Path:
    """A run folder with the imported model."""
    jobs.commands([["checkpoint", "import", theirs, tmp_path / "run"]], 1)
    return tmp_path / "run"


def name_tokenizer(run: Path, named: str) -> None:
    """Have the checkpoint of a run name this tokenizer."""
    file = run / "checkpoints" / "step-0" / "index.json"
    index = json.loads(file.read_text())
    del index["sha256"]
    index["config"]["data"]["tokenizer"] = named
    file.write_text(json.dumps({**index, "sha256": digest(index)}))


def test_an_export_publishes_no_file_outside_of_the_run_that_a_checkpoint_names(
    run: Path, tmp_path: Path, tokenizer: Path
) -> None:
    (tmp_path / "id_rsa").write_text("-----BEGIN PRIVATE KEY-----")
    (run / "link.json").symlink_to(tokenizer)
    places = [tmp_path / "id_rsa", tokenizer, f"{run}/../id_rsa", run / "link.json", "/proc/kmsg", "/dev/tty", "\ud800", "\0"]
    for number, place in enumerate([*map(str, places), "\x1b[2Jx"]):
        name_tokenizer(run, f"bpe:{V}:{place}")
        out = tmp_path / f"out-{number}"
        (done,) = jobs.commands([["checkpoint", "export", run, out]], 1)
        assert done.status == 0, done.stderr
        assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]
        assert done.stdout.splitlines()[-1].startswith("no tokenizer written: the run's data.tokenizer is \"bpe:257:")
        assert (
            done.stdout.endswith(", not in its folder: --tokenizer FILE\n")
            and done.stdout.isascii()
            and "\x1b" not in done.stdout
        )


def test_an_export_publishes_the_tokenizer_of_its_run_or_the_one_it_is_given_and_names_it(
    run: Path, tmp_path: Path, tokenizer: Path
) -> None:
    shutil.copy(tokenizer, run / "tokenizer.json")
    (run / "tokenizer_config.json").write_text('{"a": 1}')
    name_tokenizer(run, f"bpe:{V}:{run}/tokenizer.json")
    given = ["checkpoint", "export", run, tmp_path / "given", "--tokenizer", tokenizer.parent]
    first, second = jobs.commands([["checkpoint", "export", run, tmp_path / "own"], given], 1)
    own = tmp_path / "own"
    assert first.stdout.splitlines()[-2:] == [str(own / "tokenizer.json"), str(own / "tokenizer_config.json")]
    assert second.stdout.splitlines()[-1] == str(tmp_path / "given" / "tokenizer.json")
    assert (own / "tokenizer.json").read_bytes() == (tmp_path / "given" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()


def test_an_export_refuses_what_is_no_tokenizer_before_it_writes(run: Path, tmp_path: Path, tokenizer: Path) -> None:
    key, lines = tmp_path / "id_rsa", []
    key.write_text("-----BEGIN PRIVATE KEY-----")
    for given in (key, "/proc/kmsg", "/dev/tty", tmp_path / "nowhere"):
        lines.append(["checkpoint", "export", run, tmp_path / "out", "--tokenizer", given])
    for done in jobs.commands(lines, 1):
        assert done.status != 0 and "is not a tokenizer.json of the tokenizers library" in done.stderr
    for name, text in (("tokenizer.json", "-----BEGIN PRIVATE KEY-----"), ("tokenizer_config.json", "[1]")):
        shutil.copy(tokenizer, run / "tokenizer.json")
        (run / name).write_text(text)
        name_tokenizer(run, f"bpe:{V}:{run}/tokenizer.json")
        (done,) = jobs.commands([["checkpoint", "export", run, tmp_path / "out"]], 1)
        assert done.status != 0 and f"{run / name} " in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_import_takes_no_file_for_a_tokenizer_that_is_none(theirs: Path, tmp_path: Path) -> None:
    (tmp_path / "id_rsa").write_text("-----BEGIN PRIVATE KEY-----")
    for number, target in enumerate([tmp_path / "id_rsa", Path("/proc/kmsg"), Path("/etc/passwd")]):
        source, made = tmp_path / f"theirs-{number}", tmp_path / f"run-{number}"
        shutil.copytree(theirs, source)
        (source / "tokenizer.json").symlink_to(target)
        (done,) = jobs.commands([["checkpoint", "import", source, made]], 1)
        assert done.status != 0 and "tokenizer.json is not a tokenizer.json of the tokenizers library" in done.stderr
        assert not made.exists()


def test_a_snapshot_of_a_hub_which_consists_of_links_is_imported(theirs: Path, tmp_path: Path, tokenizer: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1a2b"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    files = [*theirs.iterdir(), tokenizer]
    for number, file in enumerate(files):
        shutil.copy(file, blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    (snapshot / "model.safetensors").rename(snapshot / "model-00001-of-00001.safetensors")
    names = load_file(theirs / "model.safetensors")
    weights = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    made = tmp_path / "run"
    imported, said = jobs.commands(
        [["checkpoint", "import", snapshot, made], ["generate", made, "--prompt", "ab", "--tokens", 3]], 1
    )
    assert imported.status == said.status == 0, (imported, said)
    assert said.stdout.startswith("ab")
    assert not (made / "tokenizer.json").is_symlink() and (made / "tokenizer.json").read_bytes() == tokenizer.read_bytes()


def test_an_index_of_weights_that_names_no_file_below_its_folder_is_refused(theirs: Path, tmp_path: Path) -> None:
    source = tmp_path / "below" / "theirs"
    shutil.copytree(theirs, source)
    shutil.copy(theirs / "model.safetensors", tmp_path / "outside.safetensors")
    names = ["../../outside.safetensors", str(tmp_path / "outside.safetensors"), "a/../../../outside.safetensors", 1, None, True]
    names += [["x"], {"x": "y"}, "", "\0", "\ud800", "\x1b[2Jgone", "\x1b[2J/../x"]
    lines = []
    for number, name in enumerate(names):
        shutil.copytree(source, tmp_path / "below" / str(number))
        index = {"weight_map": {"transformer.wte.weight": "model.safetensors", "transformer.wpe.weight": name}}
        (tmp_path / "below" / str(number) / "model.safetensors.index.json").write_text(json.dumps(index))
        lines.append(["checkpoint", "import", tmp_path / "below" / str(number), tmp_path / f"run-{number}"])
    for name, done in zip(names, jobs.commands(lines, 1), strict=True):
        assert done.status != 0 and done.stderr.startswith("CheckpointError: ") and "\x1b" not in done.stderr, (name, done)
        assert ("which is no file below its folder" in done.stderr) == (name not in ("", "\ud800", "\x1b[2Jgone")), (name, done)


def test_what_cannot_be_done_is_said_in_a_line(theirs: Path, tmp_path: Path) -> None:
    cases = [
        (["inspect", tmp_path], "neither a checkpoint"),
        (["verify", tmp_path], "neither a checkpoint"),
        (["import", tmp_path / "nowhere", tmp_path / "run"], "is not a Transformers folder"),
        (["export", tmp_path, tmp_path / "back"], "neither a checkpoint"),
        (["export", tmp_path, tmp_path / "back", "--file-size", "0"], "--file-size is 0"),
        (["transplant", tmp_path], "invalid choice"),
    ]
    for done, (_, words) in zip(jobs.commands([["checkpoint", *line] for line, _ in cases], 1), cases, strict=True):
        assert done.status != 0 and done.stdout == "" and words in done.stderr and len(done.stderr.splitlines()) <= 3, done
    alone = summa3d("checkpoint", *cases[0][0])
    assert alone.returncode != 0 and alone.stdout == "" and cases[0][1] in alone.stderr
    assert "Traceback" not in alone.stderr and len(alone.stderr.splitlines()) <= 3
