"""`summa3d checkpoint` as a user starts it: from a Transformers folder to a run, through the ranks, and back.

Starts real processes; what is in the files is tested in tests/train/test_hf.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import jobs
import pytest
import torch
from safetensors.torch import load_file, save_file

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
