"""What foreign files, folders and variables hold ends in a line of ours, without a traceback and without obeyed escapes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import jobs
import pytest
from small_runs import assignments, write_corpus

from summa3d import Layout, cluster
from summa3d.cli.main import main as cli
from summa3d.cli.main import parser_of
from summa3d.errors import CheckpointError, ClusterError, ConfigError, DataError, LayoutError, Summa3dError, printable
from summa3d.files import from_json, from_toml
from summa3d.node_support import watchdog_seconds
from summa3d.train.checkpoint import index as contents
from summa3d.train.config import DataConfig
from summa3d.train.data import corpus

DEEP = ".".join(["a"] * 5000)
SWEEP = 'name = "own"\nwhat = "gemm"\nranks = [1]\n[base]\nm = 8\nn = 8\nk = 8\n'


@pytest.mark.parametrize("read", [from_toml, from_json])
def test_tables_nest_no_deeper_than_code_can_follow(read: object) -> None:
    def text(levels: int) -> str:
        return "a." * (levels - 1) + "a = 1" if read is from_toml else '{"a": ' * levels + "1" + "}" * levels

    assert read(text(50)) != {}  # type: ignore[operator]
    for levels in (65, 400, 5000):
        with pytest.raises(ValueError, match="nested too deeply"):
            read(text(levels))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (f"{DEEP} = 1\n", "nested too deeply"),
        (f"[vary]\n{DEEP} = [1]\n", "nested too deeply"),
        ("[vary]\nbeta = [1, 1979-05-27]\n", "beta = 1979-05-27 of a sweep is a date"),
        ("form = 07:32:00\n", "form = 07:32:00 of a sweep is a date or a time"),
        ("[[series]]\nname = 'a'\nbase = {alpha = 1979-05-27T07:32:00}\n", "alpha = 1979-05-27 07:32:00 of a sweep is a date"),
    ],
)
@pytest.mark.parametrize("act", ["plan", "submit"])
def test_a_sweep_s_file(more: str, said: str, act: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.toml").write_text(SWEEP + more)
    assert cli(["sweep", act, str(tmp_path / "own.toml"), "--dir", str(tmp_path / "out")]) == 1
    found = capsys.readouterr()
    assert said in found.err and found.err.count("\n") == 1 and found.out == "" and not (tmp_path / "out").exists()


def test_a_cluster_s_file() -> None:
    with pytest.raises(ClusterError, match="nested too deeply"):
        cluster.read_text(f"{DEEP} = 1", "own")


def test_a_corpus_whose_folder_cannot_be_walked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")

    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path / "cwd"))

    monkeypatch.setattr(Path, "is_file", refused)
    monkeypatch.setattr(Path, "rglob", lambda path, pattern: refused(path))
    with pytest.raises(DataError, match=r"data\.path .* cannot be read: Permission denied: .*cwd"):
        corpus.documents(str(tmp_path))


def test_the_first_json_line_is_read_before_anything_is_chosen(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"text": "abc"}\n')
    (done,) = jobs.commands(
        [["train", "demo", "--run", tmp_path / "run", *_set(tmp_path / "a.jsonl"), "--set", "data.key=body"]], 2
    )
    assert done.status == 1 and done.stderr.startswith("DataError: ") and "line 2 has no key 'body'" in done.stderr
    assert not (tmp_path / "run").exists()
    corpus.check(DataConfig(path=str(tmp_path / "a.jsonl")))


def _set(path: Path) -> list[str]:
    return [word for one in assignments(path) for word in ("--set", one)]


def test_a_prompt_that_is_no_text() -> None:
    args = parser_of("generate").parse_args([".", "--prompt", os.fsdecode(b"a\xff")])
    from summa3d.cli import generate

    with pytest.raises(ConfigError, match="no Unicode text"):
        generate.run(args)


def test_a_run_folder_whose_name_is_not_utf_8_is_trained_and_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = tmp_path / os.fsdecode(b"r\xff\x1b")
    words = ["train", "demo", "--run", str(run), *_set(write_corpus(tmp_path / "corpus.txt"))]
    done = jobs.run_serial(["-m", "summa3d", *words, "--set", "train.sample_tokens=0"])
    assert done.status == 0 and "Traceback" not in done.stderr and "\x1b[" not in done.stdout, done.stderr
    assert (run / "loss.png").is_file()


def test_text_that_the_output_s_encoding_lacks_is_escaped() -> None:
    done = jobs.run_serial(["-m", "summa3d", "--help"], {"PYTHONIOENCODING": "ascii"}, fresh=True)
    assert (done.status, done.stderr) == (0, "") and "usage: summa3d COMMAND \\u2026" in done.stdout


def test_a_checkpoint_whose_index_is_of_another_step(tmp_path: Path) -> None:
    words = ["train", "demo", "--run", str(tmp_path / "run"), *_set(write_corpus(tmp_path / "corpus.txt"))]
    (done,) = jobs.commands([[*words, "--set", "train.steps=2", "--set", "train.sample_tokens=0"]], 1)
    saved = tmp_path / "run/checkpoints/step-2"
    assert done.status == 0 and contents.read(saved / contents.NAME)["step"] == 2
    shutil.copytree(saved, saved.with_name("step-3"))
    with pytest.raises(CheckpointError, match="it is that of step 2, and its folder is step-3"):
        contents.read(saved.with_name("step-3") / contents.NAME)
    saved.rename(saved.with_name("best"))
    assert contents.read(saved.with_name("best") / contents.NAME)["step"] == 2


@pytest.mark.parametrize("text", ["٣", "1_0", " 5 s", "nan", "-1", "1e9"])
def test_a_watchdog_takes_seconds_in_plain_digits(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUMMA3D_WATCHDOG", text)
    with pytest.raises(ConfigError, match="SUMMA3D_WATCHDOG is"):
        watchdog_seconds()


@pytest.mark.parametrize("text", ["1_0", "٣"])
def test_options_take_numbers_in_plain_digits(text: str) -> None:
    with pytest.raises(SystemExit):
        parser_of("train").parse_args(["demo", "--ranks", text])


@pytest.mark.parametrize("dims", [[()] * 65, [("x",)] + [()] * 100_000])
def test_a_layout_of_more_dims_than_arrays_have(dims: list[tuple[str, ...]]) -> None:
    with pytest.raises(LayoutError, match="they have at most 64"):
        Layout(*dims)
    with pytest.raises(LayoutError, match="at most"):
        Layout(" ".join(f"d{place}" for place in range(len(dims))))


def test_messages_are_bounded_and_hold_nothing_that_a_terminal_obeys() -> None:
    for text in ("@x=0 " * 10_000, "a" * 100_000, "ab " * 100_000, "m:" + "(" * 9_000):
        with pytest.raises(LayoutError) as raised:
            Layout(text)
        assert len(str(raised.value)) < 4200
    assert 4000 < len(str(Summa3dError("a b " * 10_000))) < 4200
    hostile = "a\x1b[2J\x07\r\x9b\u202e\udcffb\nc\td"
    assert str(Summa3dError(hostile)) == printable(hostile) == "a\\x1b[2J\\x07\\r\\x9b\\u202e\\udcffb\nc\td"


@pytest.mark.parametrize("said", ["std::bad_alloc", "[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes", None])
def test_what_libraries_say_of_memory_that_ended_is_a_line(
    said: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise MemoryError if said is None else RuntimeError(said)

    monkeypatch.setattr("summa3d.cli.config.run", fail)
    assert cli(["config", "demo"]) == 1
    assert "CapacityError: rank 0 ran out of memory" in capsys.readouterr().err
