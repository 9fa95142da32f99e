"""Hostile files and settings: a seeded generator of cases, each a command on what it has spoilt, run in a fork with limits.

`python tests/campaigns hostile --cases 1000 --seed 1` prints a table of what they end with. A case is held where the command
refuses in a few lines, or ends well and says what it says of the unspoilt; a traceback, a hang, a crash, or a wrong acceptance is
a finding.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from campaigns import core

BYTES, LINES = 6 << 30, 8
"""Limits of a case: address space, lines of a refusal."""
OUTSIDE, VICTIM = "outside-of-the-folder", "somebody-else"
NUMBERS = (
    "-1",
    "0",
    "1",
    "nan",
    "inf",
    "-inf",
    "1e300",
    "1e-320",
    "2.5",
    str(2**31),
    str(2**63),
    str(2**64),
    "9" * 400,
    "9" * 10_000,
)
LONG_NUMBERS = ("9" * 400, "9" * 10_000)
OTHERS = (
    *LONG_NUMBERS,
    *("true", "''", "'x'", "[]", "[1]", "{}", "{a=1}", "[[[]]]", "None", "0x", "1\n2", "x" * 3_000_000, "[" * 100_000),
    *("'../../etc'", "'\\ud800'", "\udce9", "'\u0000'", "$(id)", "1979-05-27", "'; import os'"),
)
JSON_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 10**9, 2**63, 2**64, 10**400, 0.5, float("nan"), float("inf"), "", "x", "0", [], {}, [1], [None]),
    *({"a": 1}, "../../" + OUTSIDE, "/etc/passwd", "\udce9", "x" * 100_000, [[[]]], [-1, 3], [0, 10**9]),
)
LONG = ("train.steps", "train.sample_tokens", "train.evaluate_batches", "train.batch", "model.layers", "model.hidden")
"""Keys whose large values are only a long run, or a large one."""
REFUSED, EITHER, RIGHT = "refused", "either", "right"


@dataclass(frozen=True)
class Case:
    """A command whose files `spoil` has spoilt, in a folder of its own.

    words : of the command line, in the folder. must : "refused", "right" or "either". same : an accepted case prints what the
    command prints of the unspoilt files.
    """

    kind: str
    name: str
    words: list[str]
    spoil: Callable[[Path], None] = lambda folder: None
    must: str = EITHER
    same: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a command ended ("refused", "right" or the finding), and what it said."""

    verdict: str
    status: int | None
    stdout: str
    stderr: str


def run(words: list[str], folder: Path, seconds: float) -> Outcome:
    """Run `summa3d WORDS…` in a fork of this process, in the folder, under the limits."""
    out, err = folder / ".stdout", folder / ".stderr"
    child = os.fork()
    if child == 0:
        _become(words, folder, out, err)
    status, end = None, time.monotonic() + seconds
    while status is None and time.monotonic() < end:
        done, code = os.waitpid(child, os.WNOHANG)
        status = code if done else None
        time.sleep(0 if done else 0.01)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    said = [file.read_text(errors="surrogateescape") if file.exists() else "" for file in (out, err)]
    if status is None:
        return Outcome("hang", None, *said)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return Outcome(f"crash: {signal.Signals(-code).name}", code, *said)
    traced = "Traceback (most recent call last)" in said[1]
    return Outcome("traceback" if traced else "refused" if code else "right", code, *said)


def _become(words: list[str], folder: Path, out: Path, err: Path) -> None:
    """The fork: the command line, at the end of which the process ends."""
    code = 1
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(folder)
        for number, file in ((0, os.devnull), (1, out), (2, err)):
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT, 0o600), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", errors="backslashreplace", closefd=False)
        from summa3d.cli.main import main

        code = main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def judge(case: Case, found: Outcome, unspoilt: str) -> str:
    """ "refused", "right", or what is wrong."""
    if found.verdict not in core.HELD:
        return found.verdict
    if "root:" in found.stdout + found.stderr:
        return "read outside of the folder"
    if case.must not in (EITHER, found.verdict) or (found.verdict == "right" and case.same and found.stdout != unspoilt):
        return "wrongly " + ("refused" if found.verdict == "refused" else "accepted")
    said = [line for line in found.stderr.splitlines() if line.strip()]
    if found.verdict == "refused" and not said:
        return "refused without a word"
    said = said[max((place for place, line in enumerate(said) if re.match(r"\w+Error: ", line)), default=0) :]
    return "a long refusal" if found.verdict == "refused" and (len(said) > LINES or len(found.stderr) > 4000) else found.verdict


# ---------------------------------------------------------------------------------------------------------------- the material


def make_base(folder: Path) -> None:
    """A run, its export as a Transformers folder, a corpus, a tokenizer, a configuration, a benchmark's lines, a cluster."""
    from small_runs import assignments, write_corpus

    write_corpus(folder / "corpus.txt")
    settings = assignments("corpus.txt", **SMALLER, scheme="serial")
    words = ["train", "demo", "--run", "run", *[part for one in settings for part in ("--set", one)]]
    for command in (words, ["checkpoint", "export", "run", "exported"]):
        ended = run(command, folder, 120)
        if ended.verdict != "right":
            raise RuntimeError(f"{command}: {ended}")
    shutil.copy(folder / "run" / "config.toml", folder / "mine.toml")
    lines = [{"m": 64, "n": 64, "k": 64, "form": "nn", "dtype": "float64", "ranks": 1, "seconds": {"median": 1.0}}]
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train([str(folder / "corpus.txt")], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    import summa3d

    shutil.copy(Path(summa3d.__file__).parent / "clusters" / "selene.toml", folder / "cluster.toml")
    for file in folder.glob(".std*"):
        file.unlink()


SMALLER: dict[str, Any] = {
    **{"model__hidden": 12, "model__heads": 2, "model__sequence": 8, "model__dropout": 0.0, "train__steps": 2, "train__batch": 2},
    **{"train__warmup": 1, "train__evaluate_every": 0, "train__evaluate_batches": 1, "train__checkpoint_every": 2},
}
TRAIN = ["train", "mine.toml", "--run", "new"]
BRIEF = ["--set", "train.steps=2", "--set", "train.evaluate_batches=1", "--set", "train.sample_tokens=0"]
"""For a file that may have lost the keys that make a run short: an empty one is the default run."""
RESUME = ["train", "mine.toml", "--run", "run", "--resume", "--set", "train.steps=3"]
GENERATE = ["generate", "run", "--prompt", "ab", "--tokens", "4"]
INSPECT, EXPORT = ["checkpoint", "inspect", "run"], ["checkpoint", "export", "run", "out"]
IMPORT = ["checkpoint", "import", "exported", "imported"]


# ------------------------------------------------------------------------------------------------------------------- the cases


def settings_cases(chooser: random.Random) -> Iterator[Case]:
    """Keys with values of another type, sign, size or kind; by --set, and in a file."""
    from summa3d.train import toml
    from summa3d.train.config import Config

    keys = [*toml.leaves(Config)]
    while True:
        key, value = chooser.choice(keys), chooser.choice(NUMBERS if chooser.random() < 0.6 else OTHERS)
        only_long = key in LONG and value.isdigit() and len(value) < 20
        name = f"{key} = {value[:40]!r}"
        must = REFUSED if refused_of(key, value) else EITHER
        if chooser.random() < 0.5 and "\udce9" not in value:
            text = f"{key} = {value}\n"
            yield Case("file", name, ["train", "bad.toml", "--dry-run"], lambda at, text=text: _write(at / "bad.toml", text))
        elif only_long or chooser.random() < 0.5:
            yield Case("set", name, ["train", "demo", "--dry-run", "--set", f"{key}={value}"], must=must)
        else:
            yield Case("run", name, [*TRAIN, "--set", f"{key}={value}"], must=must)


def refused_of(key: str, value: str) -> bool:
    """Return whether no value of the key can be this one: a count that is no positive whole number, a number that is none."""
    from summa3d.train import toml
    from summa3d.train.config import Config

    kind = toml.type_of(Config, key)
    if kind in (int, int | None):
        return value in ("-1", "nan", "inf", "-inf", "1e300", "2.5", "'x'", "[]", "{}", "true")
    if kind in (float, float | None):
        return value in ("nan", "'x'", "[]", "{}", "true", "-inf")
    return kind in (bool, bool | None) and value in ("1", "'x'", "[]", "nan")


def json_cases(chooser: random.Random) -> Iterator[Case]:
    """A value of a JSON file replaced, removed or repeated."""
    index, tokens = "run/checkpoints/step-2/index.json", "run/tokens.json"
    readers: dict[str, list[tuple[list[str], bool]]] = {
        index: [(RESUME, False), (GENERATE, True), (INSPECT, False), (EXPORT, False)],
        tokens: [(RESUME, False), (GENERATE, True)],
        "exported/config.json": [(IMPORT, False)],
        "tokenizer.json": [([*TRAIN, "--set", "data.tokenizer=tokenizer.json", "--set", "model.vocabulary=300"], False)],
        "lines.jsonl": [(["report", "lines.jsonl"], False)],
        "run/metrics.jsonl": [(RESUME, False), (["plot", "run", "--out", "losses.png"], False)],
        "run/summary.json": [(RESUME, False)],
    }
    while True:
        file = chooser.choice([*readers, index, index, "exported/config.json"])
        words, same = chooser.choice(readers[file])
        seed = chooser.random()
        yield Case("json", f"{file} {seed}", words, lambda at, file=file, seed=seed: _spoil_json(at / file, seed), same=same)


def _spoil_json(path: Path, seed: float) -> None:
    """Change one place of a JSON file, or of a line of it."""
    chooser = random.Random(seed)
    if not path.exists():
        return
    text = path.read_text()
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    number = chooser.randrange(len(lines))
    found = json.loads(lines[number])
    holder, key = chooser.choice([*_places(found)])
    what = chooser.random()
    if what < 0.2:
        del holder[key]
    elif what < 0.3 and isinstance(holder, list):
        holder.append(holder[key])
    elif what < 0.35 and isinstance(holder, dict):
        holder["../" + str(key)] = holder.pop(key)
    else:
        holder[key] = chooser.choice(JSON_VALUES)
    if path.name == "index.json" and chooser.random() < 0.8 and isinstance(found, dict):
        found = _signed(found)
    lines[number] = json.dumps(found)
    path.write_text("\n".join(lines) + "\n")


def _places(found: Any) -> Iterator[tuple[Any, Any]]:
    pairs = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    for key, value in list(pairs):
        yield found, key
        yield from _places(value)


BODIES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "empty": lambda body, chooser: b"",
    "cut short": lambda body, chooser: body[: chooser.randrange(1, max(2, len(body)))],
    "a byte changed": lambda body, chooser: _changed(body, chooser),
    "deep": lambda body, chooser: b"[" * 200_000 + b"]" * 200_000,
    "deep tables": lambda body, chooser: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a long number": lambda body, chooser: b'{"a": ' + b"9" * 10_000 + b"}",
    "not UTF-8": lambda body, chooser: b"\xff\xfe\x80" * 100,
    "zeros": lambda body, chooser: bytes(4096),
    "noise": lambda body, chooser: chooser.randbytes(4096),
    "a pickle": lambda body, chooser: b"\x80\x04cposix\nsystem\n(S'touch ran-code'\ntR.",
    "one value": lambda body, chooser: b"null",
    "a list": lambda body, chooser: b"[1, 2, 3]",
    "twice": lambda body, chooser: body + body,
}


def _changed(body: bytes, chooser: random.Random) -> bytes:
    place = chooser.randrange(max(1, len(body)))
    return body[:place] + bytes([chooser.randrange(256)]) + body[place + 1 :]


def body_cases(chooser: random.Random) -> Iterator[Case]:
    """Whole files replaced, by other bytes, by a folder, a FIFO, a link or nothing."""
    saved = "run/checkpoints/step-2"
    readers = {
        f"{saved}/index.json": [RESUME, GENERATE, INSPECT, EXPORT],
        f"{saved}/*.safetensors": [RESUME, GENERATE, EXPORT],
        "run/tokens.json": [RESUME, GENERATE],
        "run/config.toml": [RESUME, GENERATE, ["plot", "run", "--out", "losses.png"]],
        "run/metrics.jsonl": [RESUME, ["plot", "run", "--out", "losses.png"]],
        "run/*.bin": [RESUME],
        "mine.toml": [[*TRAIN, *BRIEF], ["train", "mine.toml", "--dry-run"]],
        "corpus.txt": [TRAIN],
        "tokenizer.json": [[*TRAIN, "--set", "data.tokenizer=tokenizer.json", "--set", "model.vocabulary=300"]],
        "exported/config.json": [IMPORT],
        "exported/*.safetensors": [IMPORT],
        "lines.jsonl": [["report", "lines.jsonl"], ["report", "--merge", "lines.jsonl"]],
    }
    kinds = [*BODIES, "a folder", "a FIFO", "a link to itself", "removed", "not readable"]
    while True:
        file, kind, seed = chooser.choice([*readers]), chooser.choice(kinds), chooser.random()
        words = chooser.choice(readers[file])
        yield Case("body", f"{file}: {kind}", words, lambda at, args=(file, kind, seed): _spoil_body(at, *args))


def _spoil_body(folder: Path, pattern: str, kind: str, seed: float) -> None:
    chooser = random.Random(seed)
    for path in sorted(folder.glob(pattern))[:1]:
        body = path.read_bytes()
        path.unlink()
        if kind == "a folder":
            path.mkdir()
        elif kind == "a FIFO":
            os.mkfifo(path)
        elif kind == "a link to itself":
            path.symlink_to(path.name)
        elif kind == "not readable":
            path.symlink_to("/proc/self/mem")
        elif kind != "removed":
            path.write_bytes(BODIES[kind](body, chooser))


def piece_cases(chooser: random.Random) -> Iterator[Case]:
    """An index, well-formed and with checksums that hold, that says what is not so: it must be refused."""
    changes: dict[str, Callable[[dict[str, Any], Path, random.Random], None]] = {
        "a piece twice": lambda index, at, chooser: _pieces(index, chooser).append(dict(_pieces(index, chooser)[0])),
        "no pieces": lambda index, at, chooser: _pieces(index, chooser).clear(),
        "a file that is not listed": lambda index, at, chooser: index["files"].pop(chooser.choice([*index["files"]])),
        "no files": lambda index, at, chooser: index["files"].clear(),
        "a file outside": _outside,
        "a slice beyond": lambda index, at, chooser: _slice(index, chooser, lambda low, high: [low, 100 * high + 7]),
        "a slice before": lambda index, at, chooser: _slice(index, chooser, lambda low, high: [low - 3, high]),
        "a slice reversed": lambda index, at, chooser: _slice(index, chooser, lambda low, high: [high, low]),
        "another dtype": lambda index, at, chooser: _tensor(index, chooser).update(dtype="int32"),
        "another shape": lambda index, at, chooser: _tensor(index, chooser).update(shape=[10**6, 10**6]),
        "a negative shape": lambda index, at, chooser: _tensor(index, chooser).update(shape=[-12]),
    }
    while True:
        name, words, seed = chooser.choice([*changes]), chooser.choice([RESUME, GENERATE, EXPORT]), chooser.random()
        yield Case(
            *("piece", name, words),
            lambda at, name=name, seed=seed: _spoil_index(at, changes[name], random.Random(seed)),
            must=REFUSED,
        )


def _spoil_index(folder: Path, change: Callable[[dict[str, Any], Path, random.Random], None], chooser: random.Random) -> None:
    path = folder / "run/checkpoints/step-2/index.json"
    index = json.loads(path.read_text())
    change(index, path.parent, chooser)
    path.write_text(json.dumps(_signed(index)))


def _signed(index: dict[str, Any]) -> dict[str, Any]:
    """An index with the checksum of what it says now."""
    from summa3d.train.checkpoint import index as contents

    said = {key: value for key, value in index.items() if key != "sha256"}
    return {**said, "sha256": contents.digest(said)}


def _tensor(index: dict[str, Any], chooser: random.Random) -> dict[str, Any]:
    names = [name for name in index["tensors"] if name.startswith("model.")]
    found: dict[str, Any] = index["tensors"][random.Random(len(names)).choice(names)]
    return found


def _pieces(index: dict[str, Any], chooser: random.Random) -> list[Any]:
    pieces: list[Any] = _tensor(index, chooser)["pieces"]
    return pieces


def _slice(index: dict[str, Any], chooser: random.Random, change: Callable[[int, int], list[int]]) -> None:
    for piece in _pieces(index, chooser):
        where = next(value for value in piece.values() if isinstance(value, list))
        if isinstance(where[0], list):
            where[0] = change(*where[0])
        else:
            where[:2] = change(*where[:2])


def _outside(index: dict[str, Any], at: Path, chooser: random.Random) -> None:
    name = chooser.choice([*index["files"]])
    other = f"../../../{OUTSIDE}.safetensors"
    shutil.copy(at / name, at / other)
    if chooser.random() < 0.5:
        other = str((at / other).resolve())
    index["files"][other] = index["files"].pop(name)
    for tensor in index["tensors"].values():
        for piece in tensor["pieces"]:
            piece.update({key: other for key, value in piece.items() if value == name})


def link_cases(chooser: random.Random) -> Iterator[Case]:
    """Files of run and model folders that are links to files or folders of somebody else: none of those may change or vanish."""
    saved = "run/checkpoints/step-2"
    writers: dict[str, list[list[str]]] = {
        **{f"run/{name}": [RESUME] for name in ("lease", "metrics.jsonl", "summary.json", "config.toml", "tokens.json")},
        **{
            f"run/checkpoints/{name}": [RESUME]
            for name in ("step-3", ".tmp-step-3", "step-3/index.json", ".tmp-step-3/index.json")
        },
        **{f"{saved}{name}": [RESUME, GENERATE, EXPORT] for name in ("", "/index.json")},
        **{
            f"new/{name}": [TRAIN, [*TRAIN, "--overwrite"]]
            for name in ("lease", "metrics.jsonl", "config.toml", "checkpoints", "x")
        },
        **{f"out/{name}": [EXPORT] for name in ("config.json", "model.safetensors", "tokenizer.json", ".tmp", "x")},
        **{f"imported/{name}": [IMPORT] for name in ("lease", "config.toml", "checkpoints", "checkpoints/step-0", "tokens.json")},
        **{
            f"exported/{name}": [IMPORT]
            for name in ("config.json", "tokenizer.json", "model.safetensors", "generation_config.json")
        },
        "losses.png": [["plot", "run", "--out", "losses.png"]],
        "flight": [[*TRAIN, "--set", "data.path=nowhere"]],
    }
    while True:
        at, target = chooser.choice([*writers]), chooser.choice(("file", "folder", "nothing", "own"))
        words = chooser.choice(writers[at])
        yield Case("link", f"{at}: {target}", words, lambda here, args=(at, target): _link(here, *args))


def _link(folder: Path, name: str, target: str) -> None:
    """Put a link in the place of a file; the link's target keeps what the file was, where it is a file that was there."""
    at, victim = folder / name, folder.parent / VICTIM
    at.parent.mkdir(parents=True, exist_ok=True)
    if target == "own" and at.exists():
        shutil.move(at, victim / "own")
    elif at.is_dir():
        shutil.rmtree(at)
    else:
        at.unlink(missing_ok=True)
    at.symlink_to(victim / target)


def make_victim(folder: Path) -> None:
    """Files of somebody else, an old one among them."""
    (folder / "folder" / "lower").mkdir(parents=True)
    for name in ("file", "folder/thesis.tex", "folder/lower/data.csv", "folder/index.json", "folder/lease"):
        _write(folder / name, "precious\n" * 100)
        os.utime(folder / name, (1e9, 1e9))


def contents(folder: Path) -> dict[str, bytes]:
    """The files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def option_cases(chooser: random.Random) -> Iterator[Case]:
    """Options with values that they cannot have."""
    options = {
        "generate": ["--tokens", "--temperature", "--seed", "--prompt", "--top-k"],
        "gemm": ["--m", "--n", "--k", "--grid", "--panel", "--repeats", "--dtype", "--alpha"],
        "plan": ["--rows", "--plots"],
        "train": ["--ranks", "--run", "--trace", "--ranks-per-node"],
    }
    start = {
        "generate": ["run", "--tokens", "2"],
        "gemm": ["--m", "8", "--n", "8", "--k", "8"],
        "plan": [],
        "train": ["mine.toml", "--dry-run"],
    }
    while True:
        command = chooser.choice([*options])
        option = chooser.choice(options[command])
        value = chooser.choice([*NUMBERS, *OTHERS]).replace("\u0000", "")
        value = value[:100_000]
        yield Case("option", f"{command} {option} {value[:40]!r}", [command, *start[command], f"{option}={value}"])


def corpus_cases(chooser: random.Random) -> Iterator[Case]:
    """Corpora that are none, or are almost."""
    makers: dict[str, tuple[str, Callable[[Path], object]]] = {
        "no text": ("c", lambda path: _write(path, "")),
        "one letter": ("c", lambda path: _write(path, "a")),
        "a line of 2 MB": ("c", lambda path: _write(path, "ab " * 700_000)),
        "one word of 2 MB": ("c", lambda path: _write(path, "a" * 2_000_000)),
        "a folder of nothing": ("c", lambda path: path.mkdir()),
        "a FIFO": ("c", lambda path: os.mkfifo(path)),
        "a name that is not UTF-8": ("c\udcff.txt", lambda path: _write(path, "some words " * 2000)),
        "a link that ends nowhere": ("c", lambda path: path.symlink_to("nowhere")),
        "a folder that holds itself": ("c", _loop),
        "a device": ("c", lambda path: path.symlink_to("/dev/zero")),
        "nothing at all": ("c", lambda path: None),
        "lines that are no JSON": ("c.jsonl", lambda path: _write(path, "{]\n" * 100)),
        "numbers in JSON": ("c.jsonl", lambda path: _write(path, '{"text": 1}\n' * 100)),
        "deep JSON": ("c.jsonl", lambda path: _write(path, '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n")),
        "a surrogate": ("c.jsonl", lambda path: _write(path, '{"text": "\\ud800 abc"}\n' * 2000)),
        "an empty array of numbers": ("c.npy", lambda path: _write(path, "")),
        "an array of objects": ("c.npy", _objects),
    }
    for name, (file, make) in makers.items():
        for tokenizer in ("bytes", "bpe:300", "numbers:256"):
            words = [*TRAIN, "--set", f"data.path={file}", "--set", f"data.tokenizer={tokenizer}"]
            yield Case("corpus", f"{name}, {tokenizer}", words, lambda at, make=make, file=file: make(at / file))


def _objects(path: Path) -> None:
    import numpy as np

    np.save(path, np.array([{"a": 1}, None], dtype=object), allow_pickle=True)


def _loop(folder: Path) -> None:
    folder.mkdir()
    (folder / "again").symlink_to("..")
    (folder / "zeros.txt").symlink_to("/dev/zero")


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))


KINDS: dict[str, tuple[Callable[[random.Random], Iterator[Case]], float]] = {
    "settings": (settings_cases, 0.35),
    "json": (json_cases, 0.25),
    "body": (body_cases, 0.2),
    "piece": (piece_cases, 0.1),
    "option": (option_cases, 0.1),
    "link": (link_cases, 0.1),
    "corpus": (corpus_cases, 0.1),
}


def cases(number: int, seed: int) -> list[Case]:
    """So many cases, of every kind its share, the same ones for a seed."""
    found = []
    for kind, (make, share) in KINDS.items():
        source = make(random.Random(f"{seed} {kind}"))
        found += [case for _, case in zip(range(round(number * share)), source, strict=False)]
    return found


def prepare() -> None:
    """Import what commands take long to import, once for all forks."""
    import mpi4py

    mpi4py.rc.initialize = False
    import safetensors.torch  # noqa: F401
    import torch

    import summa3d.cli.main
    import summa3d.train.loop  # noqa: F401

    torch.set_num_threads(1)


def in_copy(base: Path, case: Case, seconds: float) -> Outcome:
    """Run a case in a copy of the material, beside the files of somebody else."""
    with tempfile.TemporaryDirectory(dir=base.parent) as name:
        folder, victim = Path(name) / "here", Path(name) / VICTIM
        shutil.copytree(base, folder, symlinks=True)
        make_victim(victim)
        case.spoil(folder)
        before = contents(victim)
        ended = run(case.words, folder, seconds)
        after = contents(victim)
        if {path.name for path in Path(name).iterdir()} - {folder.name, victim.name}:
            return replace(ended, verdict="wrote outside of the folder")
        if "nothing" in after:
            return replace(ended, verdict="wrote through a link that ends nowhere")
        if changed := [file for file, body in before.items() if after.get(file) != body]:
            return replace(ended, verdict=f"changed {', '.join(changed)} through a link")
        return replace(ended, verdict="ran code") if [*folder.rglob("ran-code")] else ended


def main() -> int:
    """Run the campaign of the command line."""
    settings = core.options(__doc__, cases=1000).parse_args()
    prepare()
    lines, unspoilt = list[core.Line](), dict[str, str]()
    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "base"
        base.mkdir()
        make_base(base)
        for number, case in enumerate(cases(settings.cases, settings.seed)):
            if settings.only and number not in settings.only:
                continue
            key = " ".join(case.words)
            if case.same and key not in unspoilt:
                unspoilt[key] = in_copy(base, Case(case.kind, "", case.words), settings.limit).stdout
            found = in_copy(base, case, settings.limit)
            verdict = judge(case, found, unspoilt.get(key, ""))
            words = " ".join(case.words)
            lines.append(core.Line(number, case.kind, f"{case.name[:100]!r}, {words[:160]!r}", verdict, found.stderr[-1500:]))
            lines[-1].tell()
    return core.report(lines, "hostile files and settings")
