"""A run folder among a user's files: nothing is written through a link in it, and what the user keeps there is not deleted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from mpi4py import MPI
from small_runs import small_config, write_corpus

from summa3d.errors import ConfigError
from summa3d.train.loop import train

PRECIOUS = "# precious"
FEW = {
    "scheme": "serial",
    "train__steps": 2,
    "train__evaluate_batches": 1,
    "data__tokenizer": "bpe:256",
    "model__vocabulary": 256,
}
REPLACED = ["metrics.jsonl", "config.toml", "summary.json", "loss.png", "lease.claim", "hf_config.json"]
REPLACED += ["data/tokens.json", "data/train.bin", "data/tokenizer.json", ".tmp-data/train.bin", ".tmp-data/tokens.json"]
REPLACED += ["checkpoints/.tmp-step-2/rank-0.safetensors", "checkpoints/.tmp-step-2/index.json"]
FOLDERS = ["data", ".tmp-data", "checkpoints/.tmp-step-2", "checkpoints/.old-step-2", "checkpoints/step-2"]
REFUSED = ["lease", "checkpoints", "tensorboard"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt", words=600)


def run(corpus: Path, folder: Path, resume: bool = False, overwrite: bool = False) -> None:
    train(small_config(corpus, **FEW), MPI.COMM_SELF, folder, resume=resume, overwrite=overwrite)


def contents(folder: Path) -> dict[str, str]:
    """Path → text of the files below a folder."""
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def linked(folder: Path, names: list[str], folders: list[str]) -> Path:
    """The targets of links that a run folder has in place of these files and folders; older than any heartbeat."""
    victim = folder / "victim"
    for name in (*names, *folders):
        target, link = victim / name.replace("/", "_"), folder / "run" / name
        target.parent.mkdir(exist_ok=True)
        if name in folders:
            target.mkdir()
            for own in ("index.json", "rank-0.safetensors", "tokens.json", "train.bin", "thesis.tex"):
                (target / own).write_text(PRECIOUS)
        else:
            target.write_text(PRECIOUS)
            os.utime(target, (1, 1))
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    return victim


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_writes_through_no_link_in_its_folder(tmp_path: Path, corpus: Path, overwrite: bool) -> None:
    folders = FOLDERS if overwrite else FOLDERS[:-1]
    names = [name for name in REPLACED if not any(name.startswith(f"{one}/") for one in folders)]
    victim = linked(tmp_path, names, folders)
    before = contents(victim)
    run(corpus, tmp_path / "run", overwrite=overwrite)
    assert contents(victim) == before
    made = tmp_path / "run" / "checkpoints" / "step-2"
    assert made.is_dir() and not made.is_symlink()


def test_files_of_a_run_that_are_links_are_not_written_through(tmp_path: Path, corpus: Path) -> None:
    victim = linked(tmp_path, REPLACED, [])
    before = contents(victim)
    run(corpus, tmp_path / "run")
    assert contents(victim) == before


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("target", ["file", "folder", "nothing"])
def test_a_run_refuses_a_link_where_it_keeps_its_lease_or_a_folder(tmp_path: Path, corpus: Path, name: str, target: str) -> None:
    victim, link = tmp_path / "victim", tmp_path / "run" / name
    link.parent.mkdir()
    link.symlink_to(victim)
    if target == "file":
        victim.write_text(PRECIOUS)
        os.utime(victim, (1, 1))
    elif target == "folder":
        victim.mkdir()
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(ConfigError, match="run"):
            run(corpus, tmp_path / "run", **options)
    assert link.is_symlink()
    if target == "file":
        assert victim.read_text() == PRECIOUS
    elif target == "folder":
        assert not any(victim.iterdir())
    else:
        assert not victim.exists()


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_a_lease_that_is_no_file_is_refused(tmp_path: Path, corpus: Path, kind: str) -> None:
    (tmp_path / "run").mkdir()
    (os.mkfifo if kind == "fifo" else os.mkdir)(tmp_path / "run" / "lease")
    with pytest.raises(ConfigError, match="lease is a link or no file; the lease of a run folder is a regular file"):
        run(corpus, tmp_path / "run")


def test_overwriting_a_run_leaves_what_the_user_keeps_in_it(tmp_path: Path, corpus: Path) -> None:
    folder = tmp_path / "run"
    run(corpus, folder)
    mine = ["checkpoints/notes.txt", "checkpoints/step-2/results.csv", "checkpoints/step-2/mine/a", "checkpoints/step-best/a"]
    mine += ["data/words.txt", "config-large.toml", ".tmp-data/a", "checkpoints/.tmp-step-2/a", "checkpoints/.old-step-9/a"]
    for name in mine:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(PRECIOUS)
    (folder / "config-2.toml").write_text("the library's")
    (folder / "data" / "tokens.json").unlink()
    run(corpus, folder, overwrite=True)
    kept = {name.replace(".tmp-step-2", "step-2").replace(".old-step-9", "step-9").replace(".tmp-data", "data") for name in mine}
    assert {name: (folder / name).read_text() for name in kept} == dict.fromkeys(kept, PRECIOUS)
    assert not (folder / "config-2.toml").exists()
    run(corpus, folder, resume=True)  # the checkpoint is whole


def test_a_metrics_file_that_becomes_a_link_is_not_appended_to(tmp_path: Path) -> None:
    from summa3d.sweep import lines
    from summa3d.train import metrics

    (tmp_path / "victim").write_text(PRECIOUS)
    (tmp_path / lines.NAME).symlink_to(tmp_path / "victim")
    for act in (lambda: lines.append(tmp_path, [{}]), lambda: lines.mend(tmp_path, print)):
        with pytest.raises(OSError, match=lines.NAME):
            act()
    metrics.open_at(tmp_path / lines.NAME, 0).close()
    assert (tmp_path / "victim").read_text() == PRECIOUS
    assert not (tmp_path / lines.NAME).is_symlink()


def test_deleting_an_old_checkpoint_that_is_a_link_deletes_the_link(tmp_path: Path, corpus: Path) -> None:
    folder = tmp_path / "run"
    run(corpus, folder)
    archive = tmp_path / "archive"
    (folder / "checkpoints" / "step-2").rename(archive)
    (folder / "checkpoints" / "step-2").symlink_to(archive)
    before = sorted(file.name for file in archive.iterdir())
    run(corpus, folder, overwrite=True)
    assert sorted(file.name for file in archive.iterdir()) == before
