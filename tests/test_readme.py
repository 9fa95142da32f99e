# The README's examples run as they stand, and mean what they say.
# May import jobs. Next: ../README.md.
from __future__ import annotations

import re
from pathlib import Path

import jobs
import numpy as np
import pytest

README = Path(__file__).parent.parent / "README.md"


def examples() -> list[str]:
    return re.findall(r"```python\n(.+?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def run(code: str, folder: Path) -> list[str]:
    script = folder / "example.py"
    script.write_text(code, encoding="utf-8")
    ended = jobs.run([str(script)], 8)
    assert ended.status == 0, ended.stderr
    return ended.stdout.splitlines()


def test_the_product_is_made_by_eight_ranks_that_count_their_words(tmp_path: Path) -> None:
    [line] = run(examples()[0], tmp_path)
    *shape, words, norm = line.split()
    assert " ".join(shape) == "(67, 41)"
    assert int(words) == 67 * 101 + 101 * 41 + 67 * 41
    i, j = np.arange(101)[:, None], np.arange(101)[None, :]
    want = np.linalg.norm(np.sin(i[:67] + 2 * j) @ np.cos(3 * i - j[:, :41]))
    assert float(norm) == pytest.approx(want, rel=1e-12)


def test_the_users_own_module_learns_on_eight_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    [line] = run(examples()[1], tmp_path)
    assert line.startswith("loss ")
    assert 0 < float(line.split()[1]) < 0.95  # a target of unit variance: what an untrained, near-zero module gives is 1
