"""Corpora and windows: what is read, what is held out, and that a window depends on seed, step and row alone."""

from __future__ import annotations

import json
import os
import re
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from small_runs import write_corpus

from summa3d.errors import ConfigError, DataError
from summa3d.train.config import DataConfig
from summa3d.train.data import corpus, tokens


def prepare(path: Path | str, folder: Path, sequence: int = 16, **keys: object) -> tokens.Tokens:
    return tokens.prepare(DataConfig(path=str(path), **keys), sequence, folder / "data", MPI.COMM_SELF)  # type: ignore[arg-type]


def test_a_window_depends_on_seed_step_and_row_alone(tmp_path: Path) -> None:
    found = prepare(write_corpus(tmp_path / "text"), tmp_path)
    whole = found.batch(seed=3, step=11, first_row=0, rows=12)
    assert whole.shape == (12, 17) and whole.dtype == np.int64
    for first, rows in [(0, 4), (4, 8), (7, 1), (11, 1)]:
        np.testing.assert_array_equal(found.batch(3, 11, first, rows), whole[first : first + rows])
    for other in [(4, 11), (3, 12)]:
        assert (found.batch(*other, 0, 12) != whole).any(axis=1).sum() >= 11


def test_windows_are_pieces_of_the_training_text_and_reach_its_ends() -> None:
    assert {begin for step in range(40) for begin in tokens.starts(1, step, 0, 16, places=5)} == set(range(5))
    text = np.arange(100, dtype=np.uint8)
    np.testing.assert_array_equal(tokens.windows(text, 3, [0, 96]), [[0, 1, 2, 3], [96, 97, 98, 99]])


def test_windows_begin_at_every_place_of_the_text_and_no_number_is_drawn_twice() -> None:
    text = np.arange(20, dtype=np.uint8)
    found = tokens.Tokens(text, text, 16, corpus.ByteTokenizer())
    assert {int(row[0]) for step in range(20) for row in found.batch(1, step, 0, 4)} == {0, 1, 2, 3}
    drawn = [begin for seed in (1, 2) for step in range(20) for begin in tokens.starts(seed, step, 0, 16, 1 << 62)]
    assert len(set(drawn)) == len(drawn)


def test_held_out_windows_are_fixed_and_span_the_held_out_part(tmp_path: Path) -> None:
    found = prepare(write_corpus(tmp_path / "text"), tmp_path)
    windows = found.held_out(5)
    np.testing.assert_array_equal(windows, found.held_out(5))
    np.testing.assert_array_equal(windows[0], found.validation[:17])
    np.testing.assert_array_equal(windows[-1], found.validation[-17:])


def test_one_file_holds_out_its_tail(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "text")
    found = prepare(path, tmp_path, held_out=0.1)
    assert bytes(found.train) + bytes(found.validation) == path.read_bytes()
    assert len(found.validation) == path.stat().st_size // 10


def test_a_folder_holds_out_whole_files_by_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    for number in range(40):
        (folder / "sub" / f"{number:02}.txt").write_bytes(bytes([number + 1]) * 30)
    (folder / ".hidden").write_bytes(b"\xff" * 30)
    found = prepare(folder, tmp_path, held_out=0.2)
    parts = [set(np.asarray(part).tolist()) for part in (found.train, found.validation)]
    assert parts[0] | parts[1] == set(range(1, 41)) and not parts[0] & parts[1]
    assert parts[1] == {number + 1 for number in range(40) if corpus.held_out(f"sub/{number:02}.txt", 0.2)}


def test_the_standard_library_is_read_without_installed_packages() -> None:
    names = [document.name for document in corpus.documents("stdlib")]
    assert "json/decoder.py" in names and names == sorted(names)
    assert not any("site-packages" in name or "dist-packages" in name for name in names)
    assert (Path(sysconfig.get_path("stdlib")) / "json/decoder.py").stat().st_size > 0


def test_prepared_files_are_used_again_until_the_corpus_changes(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "text")
    prepare(path, tmp_path)
    made = (tmp_path / "data" / "train.bin").stat().st_ino
    prepare(path, tmp_path)
    assert (tmp_path / "data" / "train.bin").stat().st_ino == made
    path.write_text(path.read_text() + " more")
    os.utime(path, (1, 1))
    assert bytes(prepare(path, tmp_path).validation).endswith(b" more")


def test_a_trained_byte_pair_encoding_gives_the_text_back(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = write_corpus(tmp_path / "text")
    found = prepare(path, tmp_path, tokenizer="bpe:300")
    assert found.tokenizer.decode([*found.train, *found.validation]) == path.read_text()
    assert 256 < found.tokenizer.vocabulary <= 300
    assert len(found.train) + len(found.validation) < path.stat().st_size
    again = tokens.open_tokens(DataConfig(path=str(path), tokenizer="bpe:300"), 16, tmp_path / "data")
    assert list(again.tokenizer.encode(b"abc def")) == list(found.tokenizer.encode(b"abc def"))


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, ["does not exist", "stdlib"]), (b"", ["is empty"]), (b"too short", ["train part", "9 tokens", "17"])],
)
def test_a_missing_empty_or_short_corpus_is_refused(tmp_path: Path, content: bytes | None, words: list[str]) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as raised:
        prepare(path, tmp_path)
    assert all(word in str(raised.value) for word in [*words, str(path)])


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    with pytest.raises(DataError, match="holds no files"):
        prepare(tmp_path / "texts", tmp_path)


def test_a_truncated_token_file_is_refused(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "text")
    prepare(path, tmp_path)
    os.truncate(tmp_path / "data" / "train.bin", 100)
    with pytest.raises(DataError, match=r"train\.bin holds 100 tokens"):
        prepare(path, tmp_path)
    (tmp_path / "data" / "tokens.json").write_text(json.dumps({}))
    assert len(prepare(path, tmp_path).train) > 100


def whole(found: tokens.Tokens) -> list[int]:
    return [*map(int, found.train), *map(int, found.validation)]


def test_json_lines_are_read_by_their_key_and_separated(tmp_path: Path) -> None:
    path, texts = tmp_path / "corpus.jsonl", ["one ä text", "another\n", "the last one, longer than the others"]
    path.write_text("\n\n".join(json.dumps({"meta": 1, "body": text}) for text in texts) + "\n")
    found = prepare(path, tmp_path, sequence=4, key="body", separator="|", held_out=0.3)
    assert bytes(whole(found)).decode() == "|".join(texts) + "|"
    assert bytes(whole(prepare(path, tmp_path, sequence=4, key="body", held_out=0.3))).decode() == "\n".join(texts) + "\n"


def test_a_folder_may_mix_text_and_json_lines_and_validation_may_be_a_file_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("plain text. " * 4)
    (folder / "b.jsonl").write_text(json.dumps({"text": "json text. " * 4}))
    (tmp_path / "held.jsonl").write_text(json.dumps({"text": "held out. " * 4}))
    found = prepare(folder, tmp_path, sequence=4, validation=str(tmp_path / "held.jsonl"))
    assert bytes(found.train).decode() == "plain text. " * 4 + "json text. " * 4 + "\n"
    assert bytes(found.validation).decode() == "held out. " * 4 + "\n"


@pytest.mark.parametrize("dtype", ["uint16", "int64"])
def test_token_numbers_are_mapped_where_they_lie_and_compared_with_the_vocabulary(tmp_path: Path, dtype: str) -> None:
    numbers = np.arange(100, dtype=dtype) * 7
    numbers.tofile(tmp_path / "train.bin")
    (numbers[:30]).tofile(tmp_path / "val.bin")
    keys = {"token_dtype": dtype, "tokenizer": "numbers:694"}
    found = prepare(tmp_path / "train.bin", tmp_path, held_out=0.2, **keys)
    assert whole(found) == numbers.tolist() and len(found.validation) == 20
    assert found.tokenizer.decode(found.tokenizer.encode(b"7 693")) == "7 693"
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["tokens.json"]
    found = prepare(tmp_path / "train.bin", tmp_path, validation=str(tmp_path / "val.bin"), **keys)
    assert (found.train.tolist(), found.validation.tolist()) == (numbers.tolist(), numbers[:30].tolist())
    with pytest.raises(DataError, match=r"tokens 0 to 693, but data.tokenizer = 'numbers:693' has 693"):
        prepare(tmp_path / "train.bin", tmp_path, token_dtype=dtype, tokenizer="numbers:693")


def test_a_transformers_folder_brings_its_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    text, folder = write_corpus(tmp_path / "text"), tmp_path / "their_model"
    folder.mkdir()
    trained = corpus.train_tokenizer(corpus.documents(str(text)), DataConfig(str(text), "bpe:300"), folder)
    for name in (folder, folder / "tokenizer.json"):
        settings = DataConfig(str(text), str(name))
        assert settings.vocabulary == trained.vocabulary <= 300
        found = prepare(text, tmp_path, tokenizer=str(name))
        assert found.tokenizer.decode(whole(found)) == text.read_text() and len(found.train) < 12_000
    numbered = tmp_path / "tokens.bin"
    np.array(whole(found), np.uint32).tofile(numbered)
    found = prepare(numbered, tmp_path, tokenizer=str(folder), token_dtype="uint32")
    assert found.tokenizer.decode(whole(found)) == text.read_text()


REFUSED = {
    "tokens.bin": (b"\1\0\2\0", {}, "say of which dtype, as data.token_dtype=uint16"),
    "odd.bin": (b"\1\0\2", {"token_dtype": "uint16"}, "has 3 bytes, not a whole number of uint16 tokens"),
    "signed.bin": (b"\xff\xff\xff\xff", {"token_dtype": "int32"}, "tokens -1 to -1"),
    "untrained.bin": (b"\1\0\2\0", {"token_dtype": "uint16", "tokenizer": "bpe:300"}, "is trained on text"),
    "latin.txt": (
        "ä".encode("latin-1") * 40,
        {},
        "is not UTF-8 text: unexpected end of data at byte 39|is not UTF-8 text: invalid",
    ),
    "words.txt": (np.arange(40, dtype=np.uint16).tobytes(), {}, "is not text: byte 0 is 0"),
    "array.json": (b'[{"text": "a"}]', {}, "is JSON, not JSON lines"),
    "other.jsonl": (b'{"text": "a"}\n{"body": "b"}\n', {}, "line 2 has no key 'text'; its keys are body. data.key"),
    "broken.jsonl": (b'{"text": "a"}\n{"text": ', {}, "line 2 is not JSON: Expecting value"),
    "list.jsonl": (b'["a"]\n', {}, "line 1 is not a JSON object, but '"),
    "prose.txt": (b"three words here", {"tokenizer": "numbers:9"}, "reads numbers below 9; 'three words here' is not such text"),
    "number.jsonl": (b'{"text": 7}\n', {}, "line 1 has 7 under 'text', not a text"),
    "half.jsonl": (b'{"text": "a\\ud800"}\n', {}, r"line 1 has '\\ud800' under 'text', half of a surrogate pair"),
    "folder/tokens.bin": (b"\1\0\2\0", {"token_dtype": "uint16"}, "which cannot be part of a folder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_text_is_refused_in_a_line(tmp_path: Path, name: str) -> None:
    content, keys, words = REFUSED[name]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    if name.startswith("folder/"):
        path = path.parent
    with pytest.raises(DataError, match=words) as raised:
        prepare(path, tmp_path, **keys)
    assert "\n" not in str(raised.value)


def test_a_short_validation_is_named(tmp_path: Path) -> None:
    text, short = write_corpus(tmp_path / "text"), tmp_path / "short"
    short.write_text("too short")
    with pytest.raises(DataError, match=r"data\.validation '.*short' has 9 tokens; one window needs") as raised:
        prepare(text, tmp_path, validation=str(short))
    assert "held_out" not in str(raised.value)


@pytest.mark.parametrize("tokenizer", ["nowhere", "bpe:12", "bpe:many", "numbers:0", "numbers:-1", "byte"])
def test_an_unknown_tokenizer_is_refused(tokenizer: str) -> None:
    with pytest.raises(ConfigError, match="is not known"):
        DataConfig(tokenizer=tokenizer)


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ConfigError, match=r"is not a tokenizer.json of the tokenizers library \(KeyError: 'vocab'\)"):
        DataConfig(tokenizer=str(tmp_path))
    (tmp_path / "noise.json").write_bytes(bytes(range(200, 256)) * 100)
    with pytest.raises(ConfigError, match="UnicodeDecodeError: 'utf-8' codec can't decode byte 0xc8") as raised:
        DataConfig(tokenizer=str(tmp_path / "noise.json"))
    assert len(str(raised.value)) < 400
    with pytest.raises(ConfigError, match=r"data\.token_dtype = 'float32' is not known"):
        DataConfig(token_dtype="float32")


def test_a_corpus_of_the_tests_is_seen_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that each run alone write it at once, and read it."""
    file, seen, write = tmp_path / "corpus.txt", [], Path.write_text

    def in_two_parts(path: Path, text: str) -> None:
        write(path, text[:100])
        seen.append(file.exists() and len(file.read_text()))
        write(path, text)

    monkeypatch.setattr(Path, "write_text", in_two_parts)
    write_corpus(file)
    size = file.stat().st_size
    write_corpus(file)
    assert seen == [False, size] and size > 1000


def flipped(path: Path, bit: int) -> None:
    """Flip a bit of a file, and leave its times as they are."""
    data, times = bytearray(path.read_bytes()), path.stat()
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "tokenizer.json"])
def test_a_flipped_bit_of_a_token_file_is_named_before_anything_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(tokens, "PIECE", 1000)
    (tmp_path / "held").write_text("other words, which are held out " * 100)
    keys = {"validation": str(tmp_path / "held"), "tokenizer": "bpe:300"}
    prepare(write_corpus(tmp_path / "text"), tmp_path, **keys)
    prepare(tmp_path / "text", tmp_path, **keys)
    path = tmp_path / "data" / name
    number = re.search(rb'": ([1-9]),', path.read_bytes())  # of a token of the tokenizer: its file stays one
    flipped(path, 8 * (number.start(1) if number else 1500))
    with pytest.raises(DataError, match=rf"bytes [0-9]+ to [0-9]+ of {path} are not those of its checksum"):
        prepare(tmp_path / "text", tmp_path, **keys)


def test_a_flipped_bit_of_the_users_own_tokens_is_named(tmp_path: Path) -> None:
    np.arange(4000, dtype=np.uint16).tofile(tmp_path / "own.bin")
    keys = {"token_dtype": "uint16", "tokenizer": "numbers:5000"}
    prepare(tmp_path / "own.bin", tmp_path, **keys)
    flipped(tmp_path / "own.bin", 77)
    with pytest.raises(DataError, match=rf"bytes 0 to 8000 of {tmp_path / 'own.bin'} are not those"):
        prepare(tmp_path / "own.bin", tmp_path, **keys)


def test_tokens_of_an_earlier_version_are_read_without_checksums(tmp_path: Path) -> None:
    prepare(write_corpus(tmp_path / "text"), tmp_path)
    file = tmp_path / "data/tokens.json"
    table = json.loads(file.read_text())
    assert table.pop("sha256")
    file.write_text(json.dumps(table))
    prepare(tmp_path / "text", tmp_path)
    assert json.loads(file.read_text()) == table


@pytest.mark.mpi(sizes=(3,))
def test_a_damaged_piece_of_the_tokens_is_refused_on_every_rank(
    comm: MPI.Intracomm, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank compares some pieces."""
    monkeypatch.setattr(tokens, "PIECE", 1000)
    path, config = shared_tmp_path / "text", DataConfig(path=str(shared_tmp_path / "text"))
    if comm.rank == 0:
        write_corpus(path)
    comm.Barrier()
    tokens.prepare(config, 16, shared_tmp_path / "data", comm)
    comm.Barrier()
    if comm.rank == 0:
        flipped(shared_tmp_path / "data/train.bin", 8 * 1500)
    comm.Barrier()
    with pytest.raises(DataError, match=r"bytes 1000 to 2000 of .*train.bin .*(?s:.*)On rank 1 of 3 only"):
        tokens.prepare(config, 16, shared_tmp_path / "data", comm)
