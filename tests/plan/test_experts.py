"""Models with experts by other programs: what a block multiplies and sends, whose weights a rank holds, who sums them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from math import prod
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from summa3d.cluster import Cluster, Number, load
from summa3d.dry.record import Op
from summa3d.errors import ConfigError
from summa3d.nn.config import MixtureConfig, ModelConfig
from summa3d.plan.cells import BLOCK
from summa3d.plan.programs import rows, search
from summa3d.plan.programs.bands import band_of, bands
from summa3d.plan.programs.devices import cluster_of
from summa3d.plan.programs.experts import layout_of, travelling
from summa3d.plan.programs.memory import FRAGMENTS, RESERVE, bytes_of
from summa3d.plan.programs.sizes import block_parameters
from summa3d.plan.programs.step import OPTIMIZER_BYTES, rank_parameters, replicas_of, step

MODEL = {"family": "qwen3_moe", "layers": 6, "hidden": 96, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 80}
MODEL |= {"experts": 12, "top_k": 3, "vocabulary": 1000}
H, Q, KV, F, E, K = 96, 128, 128, 80, 12, 3
ROW: dict[str, Any] = {
    **{"program": "megatron-core", "gpu": "H100", "model": MODEL, "gpus": 24, "grid": {"tp": 1, "pp": 1, "ep": 4, "dp": 24}},
    **{"micro_batch": 2, "batch": 48, "sequence": 64, "dtype": "bfloat16", "recompute": "none", "seconds": 1.0},
}
TOKENS = 2 * 64


def read(folder: Path, **changes: Any) -> rows.MeasuredStep:
    file = folder / "rows.json"
    file.write_text(json.dumps([{**ROW, **changes}]))
    (row,) = rows.read(file)
    return row


def block(given: Mapping[str, Any], backward: bool) -> list[Op]:
    return list(step(given).cells[BLOCK][backward])


def of_products(ops: list[Op]) -> int:
    return sum(op.flops for op in ops if op.name != "attention")


@pytest.mark.parametrize("ep", [1, 2, 4, 12])
def test_a_block_multiplies_a_tokens_experts_and_sends_it_to_them(tmp_path: Path, ep: int) -> None:
    """Also where a rank has fewer experts than a token goes to, and is traced with more."""
    given = read(tmp_path, grid={"tp": 1, "pp": 1, "ep": ep, "dp": 24}).given
    forward, backward = block(given, False), block(given, True)
    each = 2 * TOKENS * (H * (Q + KV) + Q * H + K * 3 * H * F)
    router = 2 * TOKENS * H * E
    assert of_products(forward) == each + router and of_products(backward) == 2 * (each + router)
    grouped = [op for op in forward if ".experts." in op.layer and op.kind == "product"]
    assert [(op.m, op.n, op.k, op.batch) for op in grouped] == [
        (TOKENS * K * ep // E, 2 * F, H, E // ep),
        (TOKENS * K * ep // E, H, F, E // ep),
    ]
    rows_of = TOKENS * K * ep // E
    inputs = [op for op in backward if ".experts." in op.layer and op.kind == "product" and op.name == "nt"]
    assert [(op.m, op.n, op.k, op.batch) for op in inputs] == [(rows_of, F, H, E // ep), (rows_of, H, 2 * F, E // ep)]
    weights = [op for op in backward if ".experts." in op.layer and op.kind == "product" and op.name == "tn"]
    assert [(op.m, op.n, op.k, op.batch) for op in weights] == [(F, H, rows_of, E // ep), (H, 2 * F, rows_of, E // ep)]
    (activation,) = (op for op in forward if ".experts." in op.layer and op.kind == "elements")
    assert (activation.read, activation.written) == (2 * TOKENS * K * 2 * F, 2 * TOKENS * K * F)
    assert sum(op.read for op in grouped) == 2 * (TOKENS * K * (H + F) + E // ep * 3 * H * F)
    sent = [op for op in forward + backward if op.name == "all_to_all"]
    assert [op.words for op in sent] == [TOKENS * K * H * (ep - 1) // ep] * 4 * (ep > 1)
    assert [op.phase for op in sent] == (["forward"] * 2 + ["backward"] * 2) * (ep > 1)


def test_what_is_computed_again_is_sent_again(tmp_path: Path) -> None:
    given = read(tmp_path, recompute="full").given
    assert [op.phase for op in block(given, True) if op.name == "all_to_all"] == ["recompute"] * 2 + ["backward"] * 2


@pytest.mark.parametrize(("etp", "ep"), [(4, 3), (2, 6), (1, 12)])
def test_tensor_ranks_may_split_an_expert_or_share_out_whole_ones(tmp_path: Path, etp: int, ep: int) -> None:
    """As many multiply-adds, weights and words to experts of a rank, each way."""
    grid = {"tp": 4, "sp": True, "pp": 1, "ep": ep, "etp": etp, "dp": 6}
    given = read(tmp_path, grid=grid, sequence=128, batch=24).given
    ops, tokens = block(given, False), 2 * 128
    of_experts = [op for op in ops if ".experts." in op.layer and op.kind == "product"]
    assert of_products(of_experts) == 2 * tokens * K * 3 * H * F // 4
    assert rank_parameters(given)[1] == 3 * E * H * F // 12
    sent = {op.axis: op.words for op in ops if op.name == "all_to_all"}
    assert sent == {"ep" if etp == 4 else "y·ep": round(tokens * K * H * (ep - 1) / ep / 4)}
    (summed,) = (op.words for op in step(given).late if op.axis == "zero·dp")  # of two replicas
    assert summed == 6 * 3 * E * H * F // 12 // 2
    moves = [op for op in ops if op.name in ("all_gather", "reduce_scatter") and ".moe" in op.layer]
    assert bool(moves) == (etp > 1)


def test_replicas_of_experts_are_those_that_ep_leaves(tmp_path: Path) -> None:
    """Sums of all other weights go over 24 replicas, those of experts over 6; masters and moments are cut alike."""
    given = read(tmp_path, switches={"overlap_gradients": False, "overlap_parameters": False}).given
    dense, own = rank_parameters(given, 6)
    assert dense == 6 * (H * (Q + KV) + Q * H + E * H) and own == 6 * 3 * E * H * F // 4
    held = dense + 1000 * H
    found = [(op.name, op.axis, op.words) for op in step(given).after if op.kind == "move"]
    assert found == [
        ("reduce_scatter", "ep·zero·dp", held * 23 // 24),
        ("all_gather", "ep·zero", held * 23 // 24),
        ("reduce_scatter", "zero·dp", own * 5 // 6),
        ("all_gather", "zero", own * 5 // 6),
    ]
    assert dict(step(given).topology.shape) == {"y": 1, "cp": 1, "shards": 1, "ep": 4, "zero": 6, "dp": 1, "pp": 1}
    whole = read(tmp_path, grid={"tp": 1, "pp": 1, "ep": 1, "dp": 24}).given
    tables = 2 * 1000 * H
    states = [(dense + tables) * (4 + 12 / 24) + many * (4 + 12 / copies) for many, copies in ((own, 6), (4 * own, 24))]
    assert bytes_of(whole) - bytes_of(given) == pytest.approx(FRAGMENTS * (states[1] - states[0]), rel=1e-9)
    assert bytes_of(given) > RESERVE + states[0]


def test_a_step_counts_the_parameters_that_a_token_meets(tmp_path: Path) -> None:
    row = read(tmp_path)
    assert block_parameters(row.given) == H * (Q + KV) + Q * H + E * H + 3 * E * H * F
    met = 6 * (H * (Q + KV) + Q * H + E * H + 3 * K * H * F) + 1000 * H
    assert row.flops == (6 * met + 6 * 6 * Q * 64) * 48 * 64


@pytest.mark.parametrize("width", [80, 112])
def test_an_expert_of_all_tokens_is_multiplied_where_they_are(tmp_path: Path, width: int) -> None:
    without, given = (read(tmp_path, model=model).given for model in (MODEL, {**MODEL, "shared": width}))
    for backward, times in ((False, 1), (True, 2)):
        more = of_products(block(given, backward)) - of_products(block(without, backward))
        assert more == times * 2 * TOKENS * 3 * H * width
        sent = [[op for op in block(one, backward) if op.name == "all_to_all"] for one in (without, given)]
        assert sent[0] == sent[1]
    (activation,) = (op for op in block(given, False) if op.layer.endswith(".shared") and op.kind == "elements")
    assert (activation.read, activation.written) == (2 * TOKENS * 2 * width, 2 * TOKENS * width)
    (dense, own), before = rank_parameters(given), rank_parameters(without)
    assert (dense - before[0], own) == (3 * H * width, before[1])


def test_ranks_of_a_step_are_its_gpus_and_planes_have_enough_of_them(tmp_path: Path) -> None:
    """Every way to share out experts, beside contexts, shards, masters that few replicas cut, and tensor ranks."""
    cases = product((1, 2, 4), (1, 2), (1, 2), (1, 2, 3, 4, 6, 12), (1, 2, 4), (0, 1, 3), (1, 2, 3, 6))
    seen = 0
    for tp, pp, cp, ep, etp, zero, size in cases:
        if tp % etp or (6 * tp * cp) % (ep * etp) or (zero == 3 and size > 1):
            continue
        grid = {"tp": tp, "sp": tp > 1, "pp": pp, "cp": cp, "ep": ep, "etp": etp, "dp": 6}
        switches = {"zero": zero, "zero_size": size}
        row = read(tmp_path, gpus=6 * tp * pp * cp, grid=grid, switches=switches, sequence=128, batch=12)
        shape = step(row.given).topology.shape
        layout = layout_of(row.given)
        assert prod(shape.values()) == row.given["gpus"], (grid, switches)
        assert layout.copies * layout.shards * ep * etp == 6 * tp * cp
        for plane, ranks in ((layout.exchange, ep), (layout.sums, layout.copies)):
            assert prod(shape[name] for name in plane.split("·")) >= ranks, (grid, switches, plane)
        seen += 1
    assert seen > 200


def test_weights_that_are_cut_are_whole_once_over_the_ranks_of_shards_and_experts(tmp_path: Path) -> None:
    """FSDP over 24 ranks, of which 4 have other experts: those of a rank are cut over 6, and no weight goes missing."""
    held, bytes_held = {}, {}
    for ep in (1, 4):
        given = read(tmp_path, program="fsdp2", grid={"fsdp": 24, "ep": ep}, recompute="full").given
        layout = layout_of(given)
        assert (layout.shards, layout.copies) == (24 // ep, 1)
        own = rank_parameters(given, 6)[1]
        held[ep], bytes_held[ep] = own / layout.shards, bytes_of(given) - FRAGMENTS * 8 * own / 6  # with two gathered blocks
        updates = [op.read for op in step(given).after if op.name == "adam"]
        assert updates[-1] == OPTIMIZER_BYTES * (own // layout.shards)
    assert held[1] == held[4] == 6 * 3 * E * H * F / 24
    assert bytes_held[1] == pytest.approx(bytes_held[4], rel=1e-9)
    hybrid = read(tmp_path, program="fsdp2", grid={"fsdp": 12, "ep": 12, "dp": 2}).given
    assert layout_of(hybrid)[3:5] == (1, 2)  # each rank has an expert, and its copy is in the other replica


def test_planes_are_the_innermost_ranks_that_are_enough(tmp_path: Path) -> None:
    grid = {"tp": 4, "sp": True, "cp": 3, "ep": 4, "etp": 1, "dp": 2}
    layout = layout_of(read(tmp_path, grid=grid, sequence=192, batch=4).given)
    assert (layout.among, layout.exchange, layout.copies, layout.sums) == (1, "y", 6, "cp·zero·dp")
    layout = layout_of(read(tmp_path, grid={**grid, "ep": 12}, sequence=192, batch=4).given)
    assert (layout.among, layout.exchange, layout.copies, layout.sums) == (1, "y·cp", 2, "zero·dp")
    layout = layout_of(read(tmp_path, grid={"tp": 2, "cp": 1, "ep": 12, "etp": 2, "dp": 12}, batch=24).given)
    assert (layout.among, layout.exchange, layout.copies) == (12, "ep", 1)


def test_a_token_travels_once_to_each_node_of_its_experts(tmp_path: Path) -> None:
    for many, chosen in ((2, 3), (4, 2), (3, 4)):
        given = {"tp": 1, "ep": 8 * many, "expert_nodes": many, "top_k": chosen, "switches": {"tokens_once": True}}
        expected = mean(len(set(nodes)) for nodes in product(range(many), repeat=chosen)) / chosen
        assert travelling(given) == pytest.approx(expected)
        assert travelling({**given, "ep": many, "expert_nodes": 1}) == pytest.approx(expected)  # ranks of one node
        assert travelling({**given, "switches": {}}) == 1.0
    once = read(tmp_path, switches={"tokens_once": True}, grid={"tp": 1, "pp": 1, "ep": 12, "dp": 24}).given
    assert once["expert_nodes"] == 2
    words = {op.words for op in block(once, False) if op.name == "all_to_all"}
    assert words == {round(TOKENS * K * H * 11 / 12 * 2 * (1 - 0.5**3) / 3)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"grid": {"ep": 5, "dp": 24}}, r"grid.ep = 5 does not divide model.experts = 12.*ep: 1, 2, 3, 4, 6, 12"),
        ({"grid": {"tp": 4, "ep": 3, "etp": 3, "dp": 6}}, r"grid.etp = 3 tp = 4.*etp: 1, 2, 4"),
        ({"model": {**MODEL, "top_k": 13}}, r"model.experts is 12, and model.top_k 13.*1 to 12"),
        ({"model": {key: value for key, value in MODEL.items() if key != "top_k"}}, r"model.top_k None"),
        ({"gpus": 8, "grid": {"ep": 12, "dp": 8}, "batch": 16}, r"ep·etp = 12 ranks do not divide the 8 of a stage"),
    ],
)
def test_experts_that_do_not_divide_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, **changes)


def test_what_is_assumed_of_experts_is_said(tmp_path: Path) -> None:
    without = {key: value for key, value in MODEL.items() if key != "experts"}
    row = read(tmp_path, model=without)
    assert row.remarks == (
        "experts are priced as a feed-forward of 3 times the width, without model.experts",
        "model.head_dim is not priced without experts",
    )
    assert row.given["ffn"] == K * F and row.kind == "megatron-core"
    assert read(tmp_path).remarks == () and read(tmp_path).kind == "megatron-core, experts"


def test_a_rack_is_filled_by_as_many_as_divide_the_job_and_has_the_ports_of_its_trays() -> None:
    rack = cluster_of("GB200", 4, "4x400Gb/s")
    assert rack["network.ports"] == cluster_of("GB200", 4, "1.6Tb/s")["network.ports"] == 72
    assert rack["network.bandwidth"] == cluster_of("GB200", 4, "1.6Tb/s")["network.bandwidth"]
    sizes = {gpus: rack.filled(gpus).levels[1].size for gpus in (64, 72, 128, 144, 256, 360, 96, 74, 76, 152, 200, 2048)}
    assert sizes == {64: 72, 72: 72, 128: 64, 144: 72, 256: 64, 360: 72, 96: 48, 74: 72, 76: 72, 152: 72, 200: 72, 2048: 64}
    assert rack.filled(128)["network.ports"] == 64 and rack.filled(96)["network.ports"] == 48
    assert all(rack.filled(gpus).filled(gpus) == rack.filled(gpus) for gpus in range(1, 800))
    leaves = load("selene").numbers | {f"leaf.{key}": number for key, number in _level(load("selene"), "network").items()}
    tree = Cluster("tree", ("node", "leaf", "network"), leaves | {"leaf.size": Number(256, "assumed")})
    assert tree.filled(320) == tree
    pods = Cluster("pods", (*rack.level_names[:-1], "pod", "network"), rack.numbers | _level(rack, "network", "pod", 576))
    assert [level.size for level in pods.filled(128).levels] == [4, 64, 576, 0] and pods.filled(128)["pod.ports"] == 64
    threes = pods.replaced({"pod.size": 216.0})
    assert threes.filled(128) == threes  # a pod has no whole number of parts of 64
    assert cluster_of("H100").filled(12) == cluster_of("H100") and load("frontier").filled(12) == load("frontier")


def _level(cluster: Cluster, name: str, as_name: str = "", size: int = 0) -> dict[str, Number]:
    """The numbers of a level, under another name with a size."""
    own = {key.partition(".")[2]: number for key, number in cluster.numbers.items() if key.startswith(f"{name}.")}
    return {f"{as_name}.{key}": number for key, number in (own | {"size": Number(size, "assumed")}).items()} if as_name else own


def test_owners_of_experts_hold_as_many_bytes_as_their_program_says(tmp_path: Path) -> None:
    """InternEvo's hold ten more a parameter than the twelve of masters and moments, of experts as of other weights."""
    row = read(tmp_path, program="internevo", gpu="A800", recompute="full")
    dense, of_experts = rank_parameters(row.given, MODEL["layers"])
    other = dense + MODEL["vocabulary"] * H * 2
    twelve = bytes_of({**row.given, "profile": "deepspeed-zero"}) - RESERVE
    eager = bytes_of(row.given) - RESERVE
    owners, copies = (replicas.owners for replicas in replicas_of(row.given))
    assert eager - twelve == pytest.approx(FRAGMENTS * 10 * (other / owners + of_experts / copies), rel=0.02)


def test_plans_of_a_program_share_out_experts() -> None:
    sizes = {"layers": 6, "hidden": 96, "heads": 4, "head_dim": 32, "sequence": 64, "vocabulary": 1000, "ffn": 80}
    model = ModelConfig(family="mixtral", experts=12, experts_per_token=3, **sizes)
    found = search.search("megatron-core", model, load("dgx-h100"), 24, 48, ["tp=1", "pp=1", "b=2"], 1e12, 100)
    assert {plan.given["ep"] for plan in found.best} == {1, 2, 3, 4, 6, 12}
    kept = {plan.given["ep"]: plan.memory for plan in found.best if plan.given["recompute"] == "none"}
    assert list(kept.values()) != sorted(kept.values()) and kept[12] < kept[4] < kept[1]
    assert found.band == band_of("megatron-core", "H100-SXM", True)[0]
    assert band_of("maxtext", "H100-SXM", True) == (bands()["experts"], False)
    dense = ModelConfig(family="llama", **{**sizes, "head_dim": None, "hidden": 128})
    for one, program, ep in ((dense, "megatron-core", 2), (model, "fsdp2", 2), (model, "megatron-core", 5)):
        with pytest.raises(ConfigError, match=f"with ep={ep}: no sizes divide evenly"):
            search.search(program, one, load("dgx-h100"), 24, 48, [f"ep={ep}"], 1e12, 3)
    with pytest.raises(ConfigError, match=r"model.moe.dense is '0': .*all layers are alike"):
        mixed = ModelConfig(family="mixtral", experts=12, moe=MixtureConfig(dense="0"), **sizes)
        search.search("megatron-core", mixed, load("dgx-h100"), 24, 48, [], 1e12, 3)
    shared = ModelConfig(family="qwen2_moe", experts=12, experts_per_token=3, **{**sizes, "hidden": 128, "head_dim": None})
    (plan,) = search.search("megatron-core", shared, load("dgx-h100"), 24, 48, ["tp=1", "pp=1", "b=2", "ep=4"], 1e12, 1).best
    assert plan.given["shared"] == 80


def test_plans_of_a_program_take_contexts_where_sequences_are_long_and_name_stages_that_differ() -> None:
    sizes = {"layers": 6, "hidden": 256, "heads": 8, "vocabulary": 1024}

    def best(sequence: int, program: str = "nemo", *fixes: str) -> list[search.ProgramPlan]:
        model = ModelConfig(family="llama", sequence=sequence, **sizes)
        return list(search.search(program, model, load("dgx-h100"), 16, 16, ["tp=1", "b=1", *fixes], 1e12, 400).best)

    assert {plan.given["cp"] for plan in best(4096)} == {1}
    assert {plan.given["cp"] for plan in best(16384)} == {1, 2, 4} and {plan.given["cp"] for plan in best(65536)} == {1, 2, 4, 8}
    assert (
        {plan.given["cp"] for plan in best(65536, "fsdp2")} == {1} == {plan.given["cp"] for plan in best(65536, "megatron-2021")}
    )
    assert "pp 4 dp 4 of 2 or 1 layers" in str(best(4096, "nemo", "pp=4")[0])
    assert "layers" not in str(best(4096, "nemo", "pp=2")[0])
    for name in ("megatronn", "fsdp3", "megatron-core-2"):
        with pytest.raises(ConfigError, match=f"unknown program '{name}'; the nearest is .* Known: summa3d"):
            best(4096, name)


def test_plans_of_a_program_take_its_switches_and_fill_racks() -> None:
    """16 ranks of experts lie on two nodes; tokens that go to a node once are fewer, and a fused kernel keeps no scores."""
    sizes = {"layers": 6, "hidden": 96, "heads": 4, "head_dim": 32, "sequence": 64, "vocabulary": 1000, "ffn": 80}
    model = ModelConfig(family="mixtral", experts=16, experts_per_token=6, **sizes)
    fixes = ["tp=1", "pp=1", "b=2", "ep=16", "recompute=none"]

    def best(*more: str, cluster: str = "dgx-h100", ranks: int = 16) -> search.ProgramPlan:
        return search.search("megatron-core", model, load(cluster), ranks, 4 * ranks, [*fixes, *more], 1e12, 1).best[0]

    assert best("tokens_once=true").seconds < best().seconds == best("tokens_once=false").seconds
    assert best().given["expert_nodes"] == 2 and best(cluster="gb200-nvl72").given["expert_nodes"] == 1
    assert best("fused_attention=false").memory > best().memory
    whole, filled = load("gb200-nvl72"), load("gb200-nvl72").filled(128)
    assert best(cluster="gb200-nvl72", ranks=128).seconds == step(best(ranks=128).given | {"expert_nodes": 1}).seconds(filled)
    assert step(best(ranks=128).given | {"expert_nodes": 1}).seconds(whole) != step(best(ranks=128).given).seconds(filled)
    with pytest.raises(ConfigError, match="tokens_once takes true or false: a token travels once"):
        best("tokens_once=2")
    dense = ModelConfig(family="llama", **{**sizes, "head_dim": None, "hidden": 128})
    with pytest.raises(ConfigError, match="--fix tokens_once is of models with experts"):
        search.search("megatron-core", dense, load("dgx-h100"), 16, 64, ["tokens_once=true"], 1e12, 1)
    with pytest.raises(ConfigError, match="nearest key is tokens_once"):
        best("token_once=true")
    with pytest.raises(ConfigError, match="--fix tokens_once is not of the form KEY=VALUE, as in --fix tokens_once=true"):
        best("tokens_once")
    assert "tokens_once" in str(best("tokens_once=true")) and "no tokens_once" in str(best("tokens_once=false"))
    bloom = ModelConfig(layers=24, hidden=1024, heads=16, sequence=512, vocabulary=4096)
    one = ("tp=2", "pp=2", "b=2")
    (older,), (whole,) = (
        search.search(name, bloom, load("selene"), 16, 64, one, 1e12, 1).best for name in ("bloom", "megatron-2021")
    )
    assert (older.given["zero"], whole.given["zero"]) == (1, 0) and older.memory < whole.memory
    assert older.given["attention_dropout"] > older.given["dropout"] == 0
