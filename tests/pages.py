"""The code blocks of README.md and docs/: reading them, running Python, and checking command lines without running them.

A comment before a block says what the test does with it: ``<!-- ranks: 8 -->`` runs Python on 8 ranks (else on one),
``<!-- ranks: 8, wide -->`` where wide tests run;
``<!-- run -->`` runs a block of commands, which is else only parsed; those blocks of a page, of both kinds, that have
``<!-- then: NAME -->`` are run one after the other in one folder. A block of text after ``<!-- prints -->`` is the whole
output of the block before it, one after ``<!-- shows -->`` has the beginnings of some of its lines.
"""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from summa3d.cli.main import COMMANDS, Parser
from summa3d.jobs import script as jobs

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?:<!-- (?P<note>[^>]*) -->\n)?^```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
SNIPPET = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
PATH = re.compile(r"[\w*.-]+(?:/[\w*.-]+)*/?")
SUFFIXES = (".py", ".md", ".c", ".cu", ".cuh", ".sh", ".def", ".svg")
EXAMPLES = {"product.py", "script.py"}
"""Files that a reader is to write."""
MADE = ("bench/build/", "checkpoints/", "jobs/", "runs/", "site/")
"""Folders that commands make."""
NAME = re.compile(r"(?:summa3d|comm|layout|gemm|autograd|nn|dry|parallel)(?:\.\w+)+")
OTHERS = ("module", "git", "cp", "cd", "df", "ls", "rm", "apptainer", "spack", "conda", "pip", "pre-commit")
BUILTINS = (".", "source", "export")
"""Programs whose options are theirs to check."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    note: str
    body: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page in order, snippets filled in."""
    text, found = page.read_text(encoding="utf-8"), []
    for match in FENCE.finditer(text):
        body = SNIPPET.sub(lambda snippet: (ROOT / snippet[1]).read_text(encoding="utf-8"), match["body"])
        line = text.count("\n", 0, match.start("language")) + 1
        found.append(Block(str(page.relative_to(ROOT)), line, match["language"], match["note"] or "", body))
    return found


def with_outputs() -> Iterator[tuple[Block, Block | None]]:
    """Every block that is no output, with the output that follows it."""
    for page in PAGES:
        found = blocks(page)
        for block, after in zip(found, [*found[1:], None], strict=False):
            if block.note not in ("prints", "shows"):
                yield block, after if after is not None and after.note in ("prints", "shows") else None


def missing_paths(text: str, folder: Path) -> list[str]:
    """The paths in code marks and links that are not there; `*` stands for any name.

    Taken for a path: links, what ends like a source file, and what begins with a folder of the repository. It may begin in the
    page's folder, the repository, the package, or a folder that the same line names.
    """
    tops = {entry.name for entry in ROOT.iterdir() if entry.is_dir()}
    found = set()
    for line in text.splitlines():
        words = [word for code in CODE.findall(line) for word in code.split() if PATH.fullmatch(word)]
        paths = [word for word in words if word.endswith(SUFFIXES) or ("/" in word and word.partition("/")[0] in tops)]
        places = (folder, ROOT, ROOT / "summa3d", *(ROOT / path for path in paths if path.endswith("/")))
        for path in {*paths, *LINK.findall(line)} - EXAMPLES:
            if not path.startswith((*MADE, ".venv")) and not any(_is_there(place, path) for place in places):
                found.add(path)
    return sorted(found)


def _is_there(place: Path, path: str) -> bool:
    return any(place.glob(path)) if "*" in path else (place / path).exists()


def missing_names(text: str) -> list[str]:
    """The dotted names in code marks that begin with a package of summa3d and cannot be imported."""
    found = {name for words in CODE.findall(text) for name in NAME.findall(words) if words.startswith(name)}
    return sorted(name for name in found if not _imports(name.removeprefix("summa3d.")))


def _imports(name: str) -> bool:
    value: object = importlib.import_module("summa3d")
    for part in name.split("."):
        try:
            value = importlib.import_module(f"{value.__name__}.{part}") if isinstance(value, ModuleType) else getattr(value, part)
        except (ImportError, AttributeError):
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
    return True


def check_output(expected: Block | None, printed: str) -> None:
    """Assert that what was printed is what the page shows."""
    if expected is None:
        return
    lines = printed.splitlines()
    if expected.note == "prints":
        assert lines == expected.body.splitlines(), f"{expected} shows another output"
        return
    for wanted in expected.body.splitlines():
        assert any(line.startswith(wanted) for line in lines), f"{expected}: no line begins with {wanted!r} in\n{printed}"


def commands(block: Block) -> Iterator[list[str]]:
    """The command lines of a block of shell, as words: continued lines joined, comments and files of output gone, `&&` apart."""
    for line in block.body.replace("\\\n", " ").splitlines():
        line = re.sub(r">>? *\S+", "", re.sub(r"\$\([^)]*\)", "…", line))
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&;")
        lexer.whitespace_split, lexer.commenters, words = True, "#", []
        for word in [*lexer, ";"]:
            if set(word) <= {"&", ";"}:
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def check_command(words: list[str], where: Block) -> None:
    """Assert that a command can be given: its options exist, the files and targets that it names are there."""
    while re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
        words = words[1:]
    program, arguments = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "summa3d":
        check_summa3d(arguments)
    elif program in ("mpiexec", "srun"):
        rest = arguments[2:] if arguments[0] == "-n" else arguments
        check_command(rest, where)
    elif program == "make":
        targets = [word for word in arguments if "=" not in word]
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets), f"{where}: make {targets}"
    elif program in ("python", "bash", "sbatch"):
        if "pytest" not in arguments and "pip" not in arguments and "venv" not in arguments:
            files = [word for word in arguments if re.search(r"/\w+\.(py|sh)$", word)]
            written = {f"jobs/{name}" for of in jobs.names() for name in jobs.write_all(jobs.site(of))}
            assert all(file in written or (ROOT / file).exists() for file in files), f"{where}: {arguments}"
    else:
        assert program in (*OTHERS, *BUILTINS), f"{where}: no rule for {program}"


def check_summa3d(arguments: list[str]) -> None:
    """Parse the arguments of `summa3d`; those of what `launch` starts too. SystemExit where an option does not exist."""
    arguments = arguments[: arguments.index(">")] if ">" in arguments else arguments
    name, rest = arguments[0], arguments[1:]
    if name == "help":
        assert rest == [] or rest[0] in COMMANDS, rest
        return
    assert name in COMMANDS, name
    parser = Parser(prog=f"summa3d {name}")
    importlib.import_module(f"summa3d.cli.{name}").add_arguments(parser)
    parsed = parser.parse_args(rest)
    if name == "launch" and parsed.arguments[:1] and not parsed.arguments[0].endswith(".py"):
        check_summa3d(parsed.arguments)
    elif name == "launch":
        assert parsed.module or parsed.arguments[0] in EXAMPLES or (ROOT / parsed.arguments[0]).exists(), arguments
    if name == "train":
        from summa3d.train.config import load

        folder = parsed.config in (None, "FOLDER") or parsed.config.endswith(".toml")
        load("demo" if folder else parsed.config, parsed.assignments)
