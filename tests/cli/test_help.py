"""What the command line says of itself: help, defaults, examples, environment variables, and what is missing."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import jobs
import pages
import pytest

from summa3d.cli import main as entry

INTERNAL = {"SUMMA3D_TERMINAL", "SUMMA3D_CORES", "SUMMA3D_THREADS", "SUMMA3D_TESTED_DEVICE"}
"""Variables that processes of summa3d and of its tests set for each other."""


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from parsers(one)


@pytest.mark.parametrize("name", entry.COMMANDS)
def test_every_option_is_explained_with_its_default_and_every_command_shown_by_examples(name: str) -> None:
    for parser in parsers(entry.parser_of(name)):
        assert parser.description and parser.description[0].isupper() and parser.description.endswith(".")
        text = " ".join(parser.format_help().split())
        for action in parser._actions:
            assert action.help or isinstance(action, argparse._SubParsersAction), f"{parser.prog} {action.dest}"
            if action.option_strings and action.default not in (None, False, argparse.SUPPRESS, []):
                assert "default is" in action.help or f"The default is {action.default}." in text, f"{parser.prog} {action.dest}"
    examples = entry.EXAMPLES[name]
    assert examples and all(f"\n  {line}\n" in entry.parser_of(name).format_help() for line in examples)
    for line in examples:
        words = shlex.split(line)
        assert words[0] == "summa3d"
        pages.check_summa3d(words[1:])


@pytest.mark.parametrize("words", [["help", "train"], ["train", "--help"]])
def test_help_has_two_spellings(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main(["config" if word == "train" else word for word in words])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("usage: summa3d config")


@pytest.mark.parametrize("name", entry.COMMANDS)
def test_a_usage_error_is_one_line_that_names_the_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.parser_of(name).parse_args(["--no-such-option"])
    said = capsys.readouterr().err
    assert ended.value.code == entry.USAGE_STATUS and said.count("\n") == 1
    assert said.startswith(f"summa3d {name}: ") and said.endswith(f"; see summa3d help {name}\n")


@pytest.mark.parametrize("line", ["plan schedule", "plan formulas", "bench block", "checkpoint import", "sweep collect"])
def test_help_reaches_the_commands_of_commands_and_errors_name_it(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main(["help", *line.split()])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith(f"usage: summa3d {line} ")
    with pytest.raises(SystemExit):
        entry.parser_of(line.split()[0]).parse_args([*line.split()[1:], "--none-such"])
    assert capsys.readouterr().err.split("see ")[-1].startswith("summa3d help ")
    with pytest.raises(SystemExit) as ended:
        entry.parser_of("plan").parse_args(["schedule"])
    assert capsys.readouterr().err.endswith("see summa3d help plan schedule\n")


@pytest.mark.parametrize("words", ["gemm --m 8", "plan schedule --pp 2", "train demo --none-such", "sweep run"])
def test_a_usage_error_under_launch_is_one_line_before_any_rank_starts(words: str) -> None:
    done = jobs.run_serial(["-m", "summa3d", "launch", "-n", "2", *words.split()], {"SUMMA3D_MPIEXEC": "false"})
    assert done.status == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"summa3d {words.split()[0]}")


def test_an_error_of_the_ranks_is_the_last_line_of_their_job() -> None:
    for words in (["gemm", "--m", "8"], ["gemm", "--m", "8", "--n", "8", "--k", "8", "--grid", "x=5"]):
        done = jobs.run(["-m", "summa3d", *words], 2)
        said = done.stderr.splitlines()
        assert done.status not in (0, 139) and said[0].startswith(("summa3d gemm: ", "GridError: ")), done.stderr
        assert all(line.startswith(("summa3d gemm: ", "GridError: ", "  ")) for line in said), done.stderr


def test_the_version_has_two_spellings_and_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["-V"]) == entry.main(["--version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second and first.startswith("summa3d ")
    assert entry.main(["help"]) == 0
    listing = capsys.readouterr().out
    assert "-V, --version" in listing and all(f"\n  {command} " in listing for command in (*entry.COMMANDS, "help"))
    assert all(f"\n  {variable} " in listing for variable in entry.VARIABLES)


def test_every_variable_that_is_read_is_in_the_help_and_on_the_page() -> None:
    files = [*(pages.ROOT / "summa3d").rglob("*.py"), *(pages.ROOT / "kernels").rglob("*.py")]
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    read = set(re.findall(r'^(?! *>>>).*"(SUMMA3D_[A-Z_]+)"', code, re.MULTILINE))
    listed = {name for name in entry.VARIABLES if name.startswith("SUMMA3D_")}
    assert read - INTERNAL == listed
    page = (pages.ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^  ([A-Z0-9_]{5,})  ", page, re.MULTILINE)) == set(entry.VARIABLES)


WITHOUT = """
import sys
sys.modules["torch"] = sys.modules["matplotlib"] = None
from summa3d.cli.main import main
from summa3d.errors import Summa3dError
for words in (["train", "demo"], ["generate", "x", "--prompt", "a"], ["checkpoint", "inspect", "x"], ["bench", "block"]):
    try:
        main(words)
    except Summa3dError as error:
        print(error)
print(main(["gemm", "--m", "4", "--n", "4", "--k", "4", "--json"]), main(["config", "train.steps"]))
"""


def test_without_torch_a_command_says_in_one_line_what_installs_it_and_others_work() -> None:
    ended = jobs.run_serial(["-c", WITHOUT], fresh=True)
    assert ended.status == 0, ended.stderr
    lines = ended.stdout.splitlines()
    for name, line in zip(("train", "generate", "checkpoint", "bench"), lines, strict=False):
        assert line.startswith(f"summa3d {name} needs torch, which is not installed: pip install 'summa3d[train]'"), lines
    assert lines[-1] == "0 0" and any(line.startswith("train.steps = 300") for line in lines)


@pytest.mark.parametrize("words", ["gemm --m 4 --n 4 --k 4", "plan --rows papers/rows/nemo.json", "help sweep"])
def test_without_an_mpi_library_a_command_says_what_installs_it(words: str) -> None:
    words = words.replace("papers/", f"{pages.ROOT}/papers/")
    ended = jobs.run_serial(["-m", "summa3d", *words.split()], {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}, fresh=True)
    assert ended.status == 1 and ended.stderr.startswith("LaunchError: mpi4py cannot load an MPI library: ")
    assert "pip install 'summa3d[mpi]'" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize(("line", "words"), [("summa3d tr", {"train "}), ("summa3d train --dry", {"--dry-run "})])
def test_a_shell_can_ask_how_a_line_goes_on(line: str, words: set[str]) -> None:
    pytest.importorskip("argcomplete")
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_SHELL": "bash"}
    answer = f"{sys.executable} -m summa3d 8>&1 9>/dev/null"
    done = subprocess.run(["bash", "-c", answer], capture_output=True, text=True, env=jobs.environment(asked), timeout=200)
    assert set(done.stdout.split("\v")) == words, done.stderr
