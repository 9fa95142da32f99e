"""Contexts: every kind, folded or not, has the loss and raw gradients of whole sequences, and moves the words of its formula."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from nn_parity import global_weights
from plain_llama import PlainLlama
from scheme_table import FAMILIES, rows_for
from torch import Tensor

from summa3d.bench.memory import peak_bytes, saved_bytes
from summa3d.errors import ConfigError, GridError, LayoutError
from summa3d.nn import ModelConfig, build, scheme
from summa3d.nn.context_parallel import parts, tiles
from summa3d.nn.context_parallel.moves import RingMoves
from summa3d.nn.context_parallel.options import ContextOptions
from summa3d.nn.layers.attention import AttentionCore
from summa3d.nn.layers.attention_mask import Visible
from summa3d.nn.layers.dropout import Batch
from summa3d.parallel.replicas import Replicas, replica_rows
from summa3d.parallel.states import states_of

Case = tuple[str, dict[str, int], str, dict[str, Any], dict[str, Any]]
"""Scheme, axes of the grid, family, context options, changes of the model's configuration."""
FUSED = {"attention_dropout": 0.0}
GATHER, FLAT = {"kind": "gather"}, {"kind": "gather", "fold": False}
RING, FLAT_RING, HEADS = {"kind": "ring"}, {"kind": "ring", "fold": False}, {"kind": "heads"}
MESH = {"kind": "mesh", "heads": 2}
CASES: dict[int, list[Case]] = {
    2: [
        ("serial", {"cp": 2}, "gpt2", GATHER, {}),
        ("serial", {"cp": 2}, "llama", FLAT, FUSED),
        ("serial", {"cp": 2}, "llama", RING, {"kv_heads": 3}),
        ("serial", {"cp": 2}, "gpt2", FLAT_RING, {}),
        ("serial", {"cp": 2}, "llama", RING, {"hidden": 24}),  # of heads of two elements kernels get other strides
        ("serial", {"cp": 2}, "llama", HEADS, {"kv_heads": 1}),
    ],
    3: [
        ("serial", {"cp": 3}, "llama", GATHER, FUSED),
        ("serial", {"cp": 3}, "gpt2", FLAT, {"sequence": 15}),
        ("serial", {"cp": 3}, "llama", RING, {"kv_heads": 2}),
        ("serial", {"cp": 3}, "gpt2", FLAT_RING, {"sequence": 15}),
        ("serial", {"cp": 3}, "llama", HEADS, {"kv_heads": 4}),
        ("serial", {"cp": 3}, "llama", HEADS, {"kv_heads": 2}),  # of which the second member takes both, the others one
        ("serial", {"cp": 3}, "gpt2", HEADS, {}),
    ],
    4: [
        ("oned", {"cp": 2, "y": 2}, "llama", GATHER, FUSED),
        ("oned-sp", {"cp": 2, "y": 2}, "gpt2", GATHER, {}),
        ("serial", {"cp": 2, "dp": 2}, "gpt2", RING, {}),
        ("serial", {"cp": 4}, "llama", RING, {"sequence": 24}),
        ("serial", {"cp": 4}, "gpt2", MESH, {}),
        ("serial", {"cp": 4}, "llama", {**MESH, "fold": False}, {"kv_heads": 1}),
        ("oned", {"cp": 2, "y": 2}, "llama", HEADS, {"kv_heads": 1}),
        ("cuboid", {"cp": 2, "z": 2}, "gpt2", RING, {}),
    ],
}
WIDE: dict[int, list[Case]] = {
    4: [
        ("oned-sp", {"cp": 2, "y": 2}, "llama", MESH, {}),
        ("summa", {"cp": 2, "y": 2}, "gpt2", RING, {}),
        ("serial", {"cp": 4}, "llama", HEADS, {"kv_heads": 3}),
        ("tesseract", {"cp": 2, "d": 2}, "llama", RING, {"kv_heads": 3}),
    ],
    6: [
        ("serial", {"cp": 6}, "gpt2", {"kind": "mesh", "heads": 3}, {}),
        ("cuboid-sequence", {"cp": 2, "y": 3}, "llama", RING, {"kv_heads": 1}),
        ("summa", {"cp": 2, "x": 3, "order": "cp,x"}, "gpt2", HEADS, {}),
    ],
    8: [
        ("summa", {"cp": 2, "x": 2, "y": 2}, "llama", RING, {"kv_heads": 1}),
        ("cuboid", {"cp": 2, "y": 2, "z": 2}, "gpt2", HEADS, {}),
        ("cuboid-sequence", {"cp": 2, "x": 2, "z": 2}, "llama", GATHER, {}),
        ("cuboid", {"cp": 2, "y": 4}, "gpt2", RING, {}),
        ("tesseract", {"cp": 2, "x": 2, "y": 2}, "llama", RING, {}),
        ("serial", {"cp": 4, "dp": 2}, "llama", MESH, {"kv_heads": 2}),
        ("oned", {"cp": 4, "y": 2}, "llama", {"kind": "mesh", "heads": 2, "fold": False}, {"kv_heads": 1}),
    ],
    12: [
        ("cuboid", {"cp": 2, "y": 3, "z": 2}, "llama", RING, {"kv_heads": 6}),
        ("serial", {"cp": 12}, "gpt2", {"kind": "mesh", "heads": 6}, {"sequence": 24}),
        ("oned-sp", {"cp": 3, "y": 4}, "llama", HEADS, {}),
    ],
}
"""Further grids, which `make test-all` takes."""


def config_of(family: str, options: dict[str, Any], changes: dict[str, Any], on_grid: Any) -> ModelConfig:
    """The family's model; without dropout of probabilities, where the kind cannot drop them."""
    config = replace(FAMILIES[family].config(on_grid), **changes)
    return config if options["kind"] in ("gather", "heads") else replace(config, attention_dropout=0.0)


def check_raw_gradients(make_grid: Any, case: Case, no_labels_of: int | None = None) -> None:
    """Loss and gradients in float64, dropout on; `no_labels_of`, without the labels of that context's positions."""
    kind, axes, family, given, changes = case
    grid = make_grid(**axes) if callable(make_grid) else make_grid
    axes = grid.shape
    on_grid = scheme(kind, grid, contexts=ContextOptions(**given))
    config = config_of(family, given, changes, on_grid)
    model = build(config, on_grid, torch.float64, seed=3)
    plain = FAMILIES[family].plain(config, global_weights(model), seed=3)
    rows = rows_for(on_grid) * axes.get("dp", 1) * 2
    batch = FAMILIES[family].batch(config, rows, config.sequence)
    if no_labels_of is not None:
        for run in replace(on_grid.contexts, index=no_labels_of).runs(config.sequence):
            batch["labels"][:, run.start : run.stop] = -100
    count = int((batch["labels"] >= 0).sum())
    replicas = Replicas.of(states_of(model, grid, 1), grid, 1, 500)
    own = replica_rows(grid, rows)
    mine = {key: tensor[own] for key, tensor in batch.items()}
    loss = model(**mine, step=4, first_row=5 + own.start, count=count)
    loss.backward()
    want = plain.loss(**batch, step=4, first_row=5)
    want.backward()
    assert replicas.total(loss.item()) == pytest.approx(want.item(), rel=1e-12), case
    replicas.reduce()
    for state in replicas.states.values():
        expected = plain.weights[state.name].grad[state.shardings.partition.slices(grid)]
        assert state.own_gradient is not None
        error = (state.own_gradient - expected).norm() / plain.weights[state.name].grad.norm()
        assert error <= 1e-10, (case, state.name, error)


@pytest.mark.wide
@pytest.mark.mpi(sizes=tuple(WIDE))
def test_so_are_those_of_further_grids(make_grid: Any, world_size: int) -> None:
    for number, case in enumerate(WIDE[world_size]):
        check_raw_gradients(make_grid, case, number if number < case[1]["cp"] and number else None)


@pytest.mark.mpi(sizes=tuple(CASES))
def test_raw_gradients_are_those_of_whole_sequences(make_grid: Any, world_size: int) -> None:
    for number, case in enumerate(CASES[world_size]):
        check_raw_gradients(make_grid, case, number if number < case[1]["cp"] and number else None)


@pytest.mark.mpi(sizes=(2,))
def test_so_they_are_where_a_tile_has_many_pieces(make_grid: Any, monkeypatch: Any) -> None:
    """Pieces of one kv head, and of one row of it."""
    for most in (6, 1000):
        monkeypatch.setattr(tiles, "PIECE", 1)
        monkeypatch.setattr(tiles, "MOST_PIECES", most)
        monkeypatch.setattr(tiles, "LONG_PIECE", 1)
        monkeypatch.setattr(tiles, "FEWEST_QUERIES", 4)
        check_raw_gradients(make_grid, ("serial", {"cp": 2}, "llama", RING, {"kv_heads": 2}))
    check_masked_rows(make_grid(cp=2), [RING])


@pytest.mark.mpi(sizes=(3,))
def test_so_they_are_where_a_block_travels_in_parts_and_words_are_the_same(make_grid: Any, monkeypatch: Any) -> None:
    """Parts of rows, of heads, and of positions, in which messages are as many as parts, and memory is none more."""
    monkeypatch.setattr(parts, "LEAST_BYTES", 1)
    for most, (rows, heads), many in ((2, (5, 3), 2), (7, (3, 4), 9), (9, (1, 2), 10)):
        monkeypatch.setattr(parts, "MOST_PARTS", most)
        grid = make_grid(cp=3)
        kv = torch.randn(rows, heads, 26, 2, 8, generator=torch.Generator().manual_seed(8))
        found = parts.parts_of(kv)
        met = torch.zeros(kv.shape[:3], dtype=torch.int64)
        for part in found:
            met[part] += 1
            assert part.of(kv).is_contiguous()
        assert (met == 1).all() and len(found) == many
        with grid.ledger.watch() as moved:
            add = partial(add_multiple, grid["cp"].index + 1)
            total = RingMoves(grid["cp"]).add_gradients(kv, add)
        assert (total - 6 * kv).norm() <= 1e-6 * kv.norm()
        assert (moved.words, moved.messages) == (2 * 2 * kv.numel(), 2 * 2 * many)
    for case in (RING, FLAT_RING):
        check_raw_gradients(grid, ("serial", {"cp": 3}, "llama", case, {"kv_heads": 2, "sequence": 30}))
    check_masked_rows(grid, [RING])


def add_multiple(by: int, source: int, part: parts.BlockPart, block: Tensor, of_block: Tensor) -> None:
    """Gradients of a block that are a multiple of it."""
    of_block.add_(block, alpha=by)


class MaskedLlama(PlainLlama):
    """A plain Llama whose queries attend to `beside` [b, 1, s, s] alone, beside causality."""

    beside: Tensor

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, name: str) -> Tensor:
        causal = allowed
        allowed = allowed & self.beside
        return super().attend(q, k, v, allowed | causal & ~allowed.any(-1, keepdim=True), name)


MASKED: dict[int, list[dict[str, Any]]] = {2: [GATHER, RING, HEADS], 3: [FLAT_RING, RING], 4: [MESH]}


@pytest.mark.mpi(sizes=tuple(MASKED))
def test_packed_and_padded_rows_are_those_of_whole_sequences(make_grid: Any, world_size: int) -> None:
    check_masked_rows(make_grid(cp=world_size), MASKED[world_size])


def check_masked_rows(grid: Any, kinds: list[dict[str, Any]]) -> None:
    """Documents of uneven lengths, one id twice in a row; padding before and behind, and a row of it alone."""
    s, rows = 24, 4
    generator = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(0, 37, (2, rows, s), generator=generator)
    documents = (torch.rand(rows, s, generator=generator) < 0.2).cumsum(1) % 3
    padding = torch.ones(rows, s, dtype=torch.int64)
    padding[0, :7], padding[1, 15:], padding[2], padding[3, 9:12] = 0, 0, 0, 0
    labels[padding == 0] = -100
    starts = torch.cat((torch.ones(rows, 1, dtype=torch.bool), documents[:, 1:] != documents[:, :-1]), 1).cumsum(1)
    same = starts[:, None, :, None] == starts[:, None, None, :]
    seen = (padding != 0)[:, None, None, :]
    for given in kinds:
        for masks, beside in (
            ({"documents": documents}, same),
            ({"attention_mask": padding}, seen),
            ({"documents": documents, "attention_mask": padding}, same & seen),
        ):
            on_grid = scheme("serial", grid, contexts=ContextOptions(**given))
            config = replace(config_of("llama", given, {"sequence": s}, on_grid), dropout=0.0)
            model = build(config, on_grid, torch.float64, seed=3)
            plain = MaskedLlama(config, global_weights(model), seed=3)
            plain.beside = beside
            loss = model(tokens, labels, count=int((labels >= 0).sum()), **masks)
            loss.backward()
            want = plain.loss(tokens, labels)
            want.backward()
            replicas = Replicas.of(states_of(model, grid, 1), grid, 1, 500)
            assert replicas.total(loss.item()) == pytest.approx(want.item(), rel=1e-12), (given, [*masks])
            replicas.reduce()
            for state in replicas.states.values():
                expected = plain.weights[state.name].grad
                error = (state.own_gradient - expected[state.shardings.partition.slices(grid)]).norm()
                assert error <= 1e-10 * expected.norm(), (given, [*masks], state.name)


@pytest.mark.mpi(sizes=(2,))
def test_learned_positions_of_packed_documents_restart_on_every_context(make_grid: Any) -> None:
    tokens, labels = torch.randint(0, 37, (2, 2, 12), generator=torch.Generator().manual_seed(6))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2], [3, 3, 3, 3, 3, 3, 3, 4, 4, 4, 4, 3]])
    on_grid = scheme("serial", make_grid(cp=2), contexts=ContextOptions("ring"))
    config = config_of("gpt2", RING, {}, on_grid)
    models = [build(config, where, torch.float64, seed=3) for where in (on_grid, scheme("serial"))]
    losses = [model(tokens, labels, documents=documents, count=24) for model in models]
    for loss in losses:
        loss.backward()
    got, want = (model.get_parameter("positions.weight").grad for model in models)
    summed = on_grid.whole["cp"].all_reduce(got)
    assert (summed - want).norm() <= 1e-10 * want.norm()
    assert on_grid.whole["cp"].all_reduce(losses[0].detach()).item() == pytest.approx(losses[1].item(), rel=1e-12)


@pytest.mark.mpi(sizes=(2, 3))
def test_logits_of_every_position_and_of_any_prompts_next_token_are_those_of_one_rank(make_grid: Any, world_size: int) -> None:
    grid = make_grid(cp=world_size)
    for given in (GATHER, RING, HEADS):
        on_grid = scheme("serial", grid, contexts=ContextOptions(**given))
        config = config_of("llama", given, {"kv_heads": 2}, on_grid)
        model, alone = (build(config, where, torch.float64, seed=3).eval() for where in (on_grid, scheme("serial")))
        tokens = torch.randint(0, 37, (2, 12), generator=torch.Generator().manual_seed(7))
        assert (model.logits(tokens) - alone.logits(tokens)).norm() <= 1e-12 * alone.logits(tokens).norm()
        for length in (1, 5, 7, 12):
            got, want = (one.next_logits(tokens[:, :length]) for one in (model, alone))
            assert (got - want).norm() <= 1e-12 * want.norm(), (given, length)


LONG = 16384
"""Positions, of four heads of 8 elements."""


def held_by_attention(on_grid: Any) -> tuple[int, int, int]:
    """Bytes kept for backward, beyond q, k and v held by forward, and by backward, of attention alone in float32."""
    heads, size, own = 4, 8, on_grid.contexts.local(LONG)
    core = AttentionCore(heads, True, 0.0, "long", on_grid, on_grid.residual)
    qkv = torch.randn(1, own, heads, 3, size, requires_grad=True)
    outs: list[Tensor] = []

    def forward() -> None:
        q, k, v = (part.transpose(1, 2) for part in qkv.clone().unbind(3))
        outs.append(core(q, k, v, Batch(1, own), Visible()))

    with saved_bytes([qkv]) as saved:
        forward()
    kept = saved.bytes
    del saved
    outs.clear()
    in_forward = peak_bytes(forward) - qkv.nbytes
    with torch.autograd.set_multithreading_enabled(False):
        in_backward = peak_bytes(lambda: outs.pop().sum().backward())
    return kept, in_forward, in_backward


@pytest.mark.wide
@pytest.mark.mpi(sizes=(4,))
def test_attention_to_16384_positions_holds_a_quarter_on_each_of_four_contexts(make_grid: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    alone, scratch = held_by_attention(scheme("serial")), 5 << 18  # a tile of scores and its gradients
    block = 2 * 4 * 4 * 8 * LONG // 4  # of keys and values
    for given in (RING, FLAT_RING, HEADS, MESH, GATHER):
        kept, forward, backward = held_by_attention(scheme("serial", make_grid(cp=4), contexts=ContextOptions(**given)))
        assert kept - (3 * block if given is GATHER else 0) <= 1.001 * alone[0] / 4, given  # beside those of others
        if given["kind"] == "ring":
            assert forward <= 2 * block + block + block + scratch, given  # of two others, the own one; queries and the output
        if given is not GATHER:  # nor do the rest grow with the number of contexts
            assert forward <= 6 * block and backward <= 9 * block, given


@pytest.mark.mpi(sizes=(2,))
def test_what_contexts_cannot_split_is_an_error_on_every_rank(make_grid: Any) -> None:
    grid = make_grid(cp=2)
    on_grid = scheme("serial", grid, contexts=ContextOptions("ring"))
    config = config_of("gpt2", RING, {}, on_grid)
    model = build(config, on_grid, torch.float64)
    tokens = torch.zeros(2, 10, dtype=torch.int64)
    with grid.ledger.watch() as moved:
        with pytest.raises(LayoutError, match=r"sequence 10 .* cp = 2(.|\n)*fit: 4, 8, 12, 16(.|\n)*context.fold = false"):
            model(tokens, tokens, count=20)
        with pytest.raises(LayoutError, match=r"sequence 13 .* cp = 2"):
            build(replace(config, sequence=13), on_grid)
        for family, words in (("bert", "A bert model"), ("vit", "A vit model")):
            changes = {"vocabulary": 256, "sequence": 128} if family == "vit" else {}
            with pytest.raises(ConfigError, match=words):
                build(replace(config, family=family, **changes), on_grid)
        with pytest.raises(ConfigError, match=r"attention_dropout is 0.2.*gather, heads"):
            build(replace(config, attention_dropout=0.2), on_grid)
    assert moved.words == 0
    with pytest.raises(ConfigError, match="needs `count`"):  # of the whole step, which no context knows
        model(tokens[:, :8], tokens[:, :8])
    with pytest.raises(GridError, match=r"context.heads 3 does not divide cp = 2"):
        scheme("serial", grid, contexts=ContextOptions("mesh", heads=3))
