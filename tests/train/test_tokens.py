"""Corpora and windows: what is read, what is held out, and that a window depends on seed, step and row alone."""

from __future__ import annotations

import json
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from small_runs import write_corpus

from summa3d.errors import DataError
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
