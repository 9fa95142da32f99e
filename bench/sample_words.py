"""Says which of a sample's words occur in the corpus that a run was trained on, and its longest copy: `make demo` ends so.

    python bench/sample_words.py runs/demo-words

A word is a run of letters; white space in a copy counts as one character. The text that a sample continues counts for neither.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from common import conclude

from summa3d.train.config import load
from summa3d.train.data.corpus import read, sources

WORD = re.compile(r"[^\W\d_]+")
SHARE, COPY = 0.8, 50


def corpus_of(run: Path) -> str:
    """The text of all files that a run trains and validates on, with a byte 0 between two files."""
    data = load(str(run / "config.toml")).data
    texts = (b"".join(read(document, data)) for files in sources(data).values() for document in files)
    return "\0".join(text.decode("utf-8", errors="replace") for text in texts)


def known_words(sample: str, corpus: str) -> tuple[int, int]:
    """Return how many words of a sample occur in a corpus as words, and how many it has.

    >>> known_words("def parse(tree, zorn)", "def visit(tree): parse(tree)")
    (3, 4)
    """
    words, known = WORD.findall(sample), set(WORD.findall(corpus))
    return sum(word in known for word in words), len(words)


def longest_copy(sample: str, corpus: str) -> str:
    """The longest part of a sample that occurs in a corpus.

    >>> longest_copy("return self._tree + 1", "    return self._root")
    'return self._'
    """
    longest, start = "", 0
    for end in range(1, len(sample) + 1):
        while end - start > len(longest) and sample[start:end] not in corpus:
            start += 1
        if end - start > len(longest):
            longest = sample[start:end]
    return longest


def main() -> None:
    """Print the share and the longest copy, and whether they are as claimed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of a run that has ended with a sample")
    run = parser.parse_args().run
    prompt, text = load(str(run / "config.toml")).train.sample_prompt, json.loads((run / "summary.json").read_text())["sample"]
    sample, corpus = (re.sub(r"\s+", " ", one) for one in (text.removeprefix(prompt), corpus_of(run)))
    (known, words), copied = known_words(sample, corpus), longest_copy(sample, corpus)
    print(f"sample: {known} of {words} words occur in the corpus; its longest copy, of {len(copied)} characters: {copied!r}")
    conclude(
        [
            (f"at least {SHARE:.0%} of the sample's words occur in the corpus", known >= SHARE * words),
            (f"no {COPY} characters are copied", len(copied) < COPY),
        ]
    )


if __name__ == "__main__":
    main()
