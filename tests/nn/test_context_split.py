"""Which positions contexts hold, and which blocks of queries and keys meet: every pair once, and as many on each rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from summa3d.dry.rank_classes import classes
from summa3d.dry.step import Setting
from summa3d.errors import ConfigError, GridError, LayoutError
from summa3d.nn import ModelConfig
from summa3d.nn.context_parallel import tiles
from summa3d.nn.context_parallel.heads import wanted_kv_heads
from summa3d.nn.context_parallel.options import ContextOptions
from summa3d.nn.context_parallel.split import ContextSplit

OPTIONS = [
    *(ContextOptions(kind, fold) for kind in ("gather", "ring", "heads") for fold in (True, False)),
    *(ContextOptions("mesh", fold, heads) for fold in (True, False) for heads in (2, 3)),
]


def splits() -> list[ContextSplit]:
    return [ContextSplit(size, 0, one) for size, one in product((1, 2, 3, 4, 6), OPTIONS) if size % one.heads == 0]


@pytest.mark.parametrize("split", splits(), ids=str)
def test_every_position_is_on_one_context_where_owner_says(split: ContextSplit) -> None:
    s, found = 2 * split.multiple, {}
    for index in range(split.size):
        one = replace(split, index=index)
        positions = [position for run in one.runs(s) for position in run]
        assert positions == sorted(positions) and len(positions) == one.local(s)
        found |= {position: (index, place) for place, position in enumerate(positions)}
        for low, high in ((0, 1), (1, len(positions)), (len(positions) // 2, len(positions))):
            assert [at for run in one.runs_of(slice(low, high), s) for at in run] == positions[low:high]
    assert found == {position: split.owner(position, s) for position in range(s)}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("split", splits(), ids=str)
def test_tiles_meet_every_visible_pair_once_and_folded_ones_are_as_much_work_on_each(split: ContextSplit, causal: bool) -> None:
    s = 2 * split.multiple
    length, work = s // split.rings, []
    groups = [replace(split.group, index=turn) for turn in range(split.rings)]
    pairs = np.zeros((s, s), int)
    for mine in groups:
        work.append(0)
        queries = np.array([position for run in mine.runs(s) for position in run])
        for other in groups:
            keys = np.array([position for run in other.runs(s) for position in run])
            for tile in mine.tiles(other.index, length, causal):
                of_q, of_k = queries[tile.queries], keys[tile.keys]
                met = np.ones((len(of_q), len(of_k)), int)
                if tile.diagonal:
                    met = np.tril(met)
                    assert (of_q == of_k).all()
                pairs[np.ix_(of_q, of_k)] += met
                work[-1] += met.sum()
    assert (pairs == (np.tril(np.ones((s, s), int)) if causal else 1)).all()
    assert len(set(work)) == 1 or (causal and not split.folded)


@pytest.mark.parametrize(("heads", "kv_heads", "members"), [(6, 2, 3), (12, 4, 2), (4, 1, 4), (6, 6, 3), (8, 2, 4), (6, 3, 2)])
def test_each_member_has_the_kv_heads_of_its_query_heads(heads: int, kv_heads: int, members: int) -> None:
    own, shared = heads // members, heads // kv_heads
    for member, wanted in enumerate(wanted_kv_heads(heads, kv_heads, members)):
        assert {head // shared for head in range(member * own, (member + 1) * own)} == set(wanted)


@pytest.mark.parametrize(
    ("split", "sizes", "words"),
    [
        (ContextSplit(3), (20, 12, 1), "sequence 20 .* cp = 3.*2·3 equal parts.*\n.*fit: 12, 18, 24, 30"),
        (ContextSplit(3), (15, 12, 1), "context.fold = false"),
        (ContextSplit(4, 0, ContextOptions("ring", False)), (18, 12, 1), "4 equal parts.*\n.*fit: 12, 16, 20, 24"),
        (ContextSplit(4, 0, ContextOptions("heads")), (16, 6, 1), "heads 6 .* 4 contexts(.|\n)*fit: 4, 8.*gather.*heads of 2"),
        (ContextSplit(2, 0, ContextOptions("heads")), (16, 6, 2), "2 shards of heads(.|\n)*fit: 4, 8"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be_split_are_named_with_those_that_can(
    split: ContextSplit, sizes: tuple[int, int, int], words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        split.check(*sizes)
    split.check(24, 24, 1)


def test_options_and_families_that_contradict_each_other_are_named() -> None:
    with pytest.raises(ConfigError, match=r"kind is 'zigzag'.*gather, ring, heads, mesh"):
        ContextOptions("zigzag")
    with pytest.raises(ConfigError, match=r'context.heads is 2.*kind = "ring".*"mesh"'):
        ContextOptions("ring", heads=2)
    with pytest.raises(GridError, match=r"context.heads 4 does not divide cp = 6. Values that do: 1, 2, 3, 6"):
        ContextSplit(6, 0, ContextOptions("mesh", heads=4))
    for family in ("bert", "vit"):
        with pytest.raises(ConfigError, match=rf"A {family} model .* cp = 2 contexts.*gpt2, llama"):
            ContextSplit(2).check_family(family, 0.0)
    for kind in ("ring", "mesh"):
        with pytest.raises(ConfigError, match=r"attention_dropout is 0.1.*Kinds that can: gather, heads"):
            ContextSplit(2, 0, ContextOptions(kind)).check_family("gpt2", 0.1)
    ContextSplit(2, 0, ContextOptions("heads")).check_family("gpt2", 0.1)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (ContextOptions("ring"), {0: 1, 1: 3, 4: 1}),
        (ContextOptions("heads"), {0: 5}),
    ],
)
def test_a_dry_run_traces_the_ends_of_a_ring_and_one_context_between(options: ContextOptions, wanted: dict[int, int]) -> None:
    model = ModelConfig(layers=1, hidden=20, heads=5, sequence=20, vocabulary=20)  # the five share all evenly
    assert classes(Setting(model, 5, "serial", {"x": 1, "cp": 5}, context=options)) == wanted


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "length"), [(3, 6, 2, 64), (5, 4, 4, 512), (1, 8, 1, 2048), (2, 24, 8, 640)]
)
def test_pieces_of_a_tile_have_each_pair_of_a_row_and_head_once_and_are_few(
    rows: int, heads: int, kv_heads: int, length: int
) -> None:
    shared = heads // kv_heads
    for diagonal, keys in ((False, length // 2), (True, length)):
        q, k = torch.empty(rows, heads, length, 8), torch.empty(rows, kv_heads, keys, 8)
        pairs, long = torch.zeros(rows, heads, length, keys, dtype=torch.int8), 4 * length * keys * 8 * shared
        for piece in tiles.pieces_of(q, k, diagonal):
            met = pairs[piece.rows, piece.heads, piece.queries, piece.keys]
            met += torch.ones(met.shape[2:], dtype=torch.int8).tril_() if piece.diagonal else 1
            assert (piece.kv_heads.start * shared, piece.kv_heads.stop * shared) == (piece.heads.start, piece.heads.stop)
        whole = torch.ones(length, keys, dtype=torch.int8)
        assert (pairs == (whole.tril_() if diagonal else whole)).all()
        pieces = tiles.pieces_of(q, k, diagonal)
        cuts = -(-length // max(tiles.FEWEST_QUERIES, -(-length * tiles.LONG_PIECE // long)))
        assert len(pieces) <= 2 * tiles.MOST_PIECES * (2 * cuts - 1 if diagonal else cuts)
        assert (len(pieces) > 1) == ((long * kv_heads * rows > tiles.PIECE and rows * kv_heads > 1) or cuts > 1)
        (one,) = tiles.pieces_of(q.to("meta"), k.to("meta"), diagonal)[:1]
        assert one.queries == slice(0, length)  # a dry run need not know in how many calls queries attend


@pytest.mark.parametrize("diagonal", [False, True])
def test_plain_torch_attends_to_a_block_as_the_hosts_kernel(diagonal: bool) -> None:
    """Output, log-sums, and the gradients by those of all blocks: what a device computes."""
    generator = torch.Generator().manual_seed(3)
    q, out, grad = (torch.randn(2, 6, 5, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    k, v = (torch.randn(2, 3, 5 if diagonal else 7, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    allowed = None if diagonal else torch.rand(2, 1, 5, 7, generator=generator) < 0.7
    mask = None if allowed is None else tiles._additive(allowed, q.dtype)
    for got, want in zip(tiles._plain(q, k, v, diagonal, mask), tiles.attended(q, k, v, diagonal, allowed), strict=True):
        assert (got - want).norm() <= 1e-13 * want.norm()
    sums = torch.randn(2, 6, 5, generator=generator, dtype=torch.float64) + 3
    host = tiles.gradients(grad, q, k, v, out, sums, diagonal, allowed)
    for got, want in zip(tiles._plain_gradients(grad, q, k, v, out, sums, diagonal, mask), host, strict=True):
        assert (got - want).norm() <= 1e-13 * want.norm()
