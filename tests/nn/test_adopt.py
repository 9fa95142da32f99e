"""A Transformers model on a grid is the same function as the unsplit model, by the plan that it ships with."""

from __future__ import annotations

import copy

import adopted
import pytest
import torch
from plain_muon import without_bfloat16
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from summa3d.errors import CheckpointError, ConfigError, LayoutError
from summa3d.layout import Layout, collect
from summa3d.nn import Muon, from_folder, full_state_dict, parallelise, scheme
from summa3d.nn.adopt.stand_in import StandIn

GRIDS = {
    2: [("oned", {"y": 2}, 3), ("cuboid", {"x": 2}, 4)],
    3: [("oned", {"y": 3}, 2)],
    4: [
        ("oned", {"y": 4}, 3),
        ("summa", {"x": 2, "y": 2}, 6),
        ("cuboid", {"y": 2, "z": 2}, 4),
        ("tesseract", {"d": 4}, 4),
    ],
    6: [("cuboid", {"x": 6}, 6), ("summa", {"x": 2, "y": 3}, 2)],
    8: [("cuboid", {"x": 2, "y": 2, "z": 2}, 8), ("tesseract", {"x": 2, "y": 2, "d": 2}, 4)],
}
CHANGED = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"tie_word_embeddings": True},
    "phi3": {"intermediate_size": 36},  # gate and up are one layer, of which each part splits evenly
}
KINDS = ("llama", "qwen2", "mistral", "qwen3", "gemma2", "phi3")
SHARED = {
    2: [("oned", {"y": 2}, 3, 1), ("tesseract", {"d": 2}, 2, 1)],
    3: [("oned", {"y": 3}, 2, 1)],
    4: [
        ("oned", {"y": 4}, 3, 2),
        ("summa", {"x": 2, "y": 2}, 2, 1),
        ("cuboid", {"y": 2, "z": 2}, 4, 1),
        ("tesseract", {"d": 4}, 4, 2),
    ],
    6: [("cuboid", {"x": 2, "y": 3}, 6, 1), ("oned", {"y": 6}, 1, 2), ("oned", {"y": 6}, 1, 3)],
    8: [("cuboid", {"x": 2, "y": 2, "z": 2}, 8, 1), ("cuboid", {"y": 4, "z": 2}, 4, 2), ("summa", {"x": 2, "y": 4}, 2, 1)],
}
"""Grids of so many rows, and heads of k and v of which there are fewer than of ranks that split them."""


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("kind", [pytest.param("qwen3", marks=pytest.mark.wide), "phi3"])
def test_logits_loss_and_every_gradient_are_those_of_one_process(make_grid, kind):
    for name, axes, rows in GRIDS[4]:
        check(scheme(name, make_grid(**axes)), kind, rows)


@pytest.mark.wide
@pytest.mark.mpi(sizes=tuple(GRIDS))
def test_so_they_are_of_every_kind_on_every_grid(make_grid, world_size):
    for name, axes, rows in GRIDS[world_size]:
        on_grid = scheme(name, make_grid(**axes))
        for kind in KINDS:
            check(on_grid, kind, rows)


@pytest.mark.mpi(sizes=(4,))
def test_rows_of_heads_are_others_than_those_of_the_residual_stream(make_grid):
    """Attention counts its rows by the shape of what it is given."""
    check(scheme("cuboid", make_grid(x=2, z=2)), "gemma2", 4)
    check(scheme("cuboid", make_grid(y=4)), "qwen3", 4)


@pytest.mark.mpi(sizes=(4,))
def test_ranks_share_a_head_of_k_and_v(make_grid):
    """Made by layers of their own, side by side with queries, or normed before they are heads; in a module of one's own, too."""
    check(scheme("cuboid", make_grid(y=4)), "llama", 4, num_key_value_heads=2)
    check(scheme("oned", make_grid(y=4)), "olmo2", 3, num_key_value_heads=2)
    grid = make_grid(y=4)
    phi = check(scheme("oned", grid), "phi3", 2, num_key_value_heads=2)
    qkv = next(item for item in phi.adoption.layers if "qkv" in item.name)
    with grid.ledger.watch() as moved:
        qkv.layer(torch.zeros(2, 11, 60, dtype=torch.float64))
    assert moved.words == qkv.words(22) == 22 * 2 * 5
    torch.manual_seed(4)
    assert not any(item.whole for item in parallelise(Halved().double(), scheme("oned", grid), HALVED).adoption.layers)
    grid = make_grid(x=2, y=2)
    model = parallelise(Grouped().double(), scheme("summa", grid), dict.fromkeys("qkv", "first") | {"out": "second"})
    q, k, v, _ = model.adoption.layers
    assert [item.whole is not None for item in (q, k, v)] == [False, True, True]
    assert "in the product of q, heads gathered from 2 ranks" in k.now
    x = torch.zeros(2, 5, 6, dtype=torch.float64)
    with grid.ledger.watch() as moved:
        k.layer(x)
    with grid.ledger.watch() as unhooked:
        k.layer.forward(x)
    assert moved.words - unhooked.words == k.words(20) == 20 // 2 * 3


HALVED = {"up": "first", "down": "second"}


class Halved(nn.Module):
    """Two halves of what is between two linear layers, which are no heads; with `whole` it is taken for the whole width."""

    def __init__(self, whole=False):
        super().__init__()
        n = 10 if whole else 16
        self.up, self.down, self.whole = nn.Linear(12, n), nn.Linear(n, 12), whole

    def forward(self, x):
        between = self.up(x)
        if self.whole:
            return self.down(between.reshape(len(x), -1, 10).tanh())
        return self.down(between.unflatten(-1, (2, -1)).tanh().flatten(-2))


class Grouped(nn.Module):
    """Attention of 8 heads of 6 elements, which share one of k and one of v, of 4 elements."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(*sizes) for sizes in ((12, 48), (12, 6), (12, 4), (32, 12)))

    def forward(self, x):
        heads = ((self.q, 6), (self.k, 6), (self.v, 4))
        q, k, v = (layer(x).unflatten(-1, (-1, size)).transpose(1, 2) for layer, size in heads)
        return self.out(functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))


@pytest.mark.wide
@pytest.mark.mpi(sizes=tuple(SHARED))
def test_so_they_do_in_every_kind_and_scheme(make_grid, world_size):
    for name, axes, rows, kv_heads in SHARED[world_size]:
        on_grid = scheme(name, make_grid(**axes))
        for kind in (*KINDS, "olmo2", "olmo3", "gemma3_text", "glm"):
            sizes = {"intermediate_size": 36} if kind in ("phi3", "glm") else {}
            check(on_grid, kind, rows, num_key_value_heads=kv_heads, head_dim=12, **sizes)


def test_what_else_is_done_with_the_stream_than_read_its_shape_is_refused():
    stream = torch.randn(2, 3, 5, requires_grad=True)
    one = StandIn.of(stream, 4)
    assert (one.shape, one.dtype, len(one), one.size(-1)) == ((4, 3, 5), torch.float32, 4, 5)
    for use in (lambda: one + 1, lambda: one.mean(), lambda: torch.cat([one, one]), lambda: one[0], lambda: one.view(-1)):
        with pytest.raises(ConfigError, match=r"of the residual stream by itself.*y = z"):
            use()


DENSE = (
    *("apertus", "arcee", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4"),
    *("gpt_neox", "granite", "hyperclovax", "internlm3", "iquestcoder", "jais2", "llama", "ministral", "ministral3", "mistral"),
    *(
        "nanochat",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen3",
        "seed_oss",
        "smollm3",
        "starcoder2",
        "vaultgemma",
    ),
)


@pytest.mark.wide
@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("kind", DENSE)
def test_so_they_are_of_every_dense_architecture_that_has_a_plan(make_grid, kind):
    for axes in ({"y": 2, "z": 2}, {"x": 2, "z": 2}, {"z": 4}):
        check(scheme("cuboid", make_grid(**axes)), kind, 4, intermediate_size=36)


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("tied", [False, True])
def test_padded_and_packed_sequences_are_those_of_one_process(make_grid, tied):
    """On this grid a rank's rows of heads are others than its rows of the stream, though as many."""
    on_grid = scheme("cuboid", make_grid(y=2, z=2))
    padding = torch.ones(4, 11, dtype=torch.int64)
    for row, (first, last) in enumerate(((0, 11), (3, 11), (0, 7), (5, 10))):
        padding[row, :first] = padding[row, last:] = 0
    packed = torch.tensor([[*range(cut), *range(11 - cut)] for cut in (1, 4, 6, 9)])
    kind = "qwen3" if tied else "gemma2"
    for inputs in ({"attention_mask": padding}, {"position_ids": packed}):
        check(on_grid, kind, 4, inputs, tie_word_embeddings=tied)


def check(on_grid, kind, rows, inputs=None, **sizes):
    inputs = inputs or {}
    changed = {"num_key_value_heads": 4 if on_grid.grid.size == 4 else 6, **CHANGED.get(kind, {}), **sizes}
    ids, labels = adopted.batch(rows)
    if "attention_mask" in inputs:
        labels[inputs["attention_mask"] == 0] = -100
    logits, loss, gradients = adopted.alone(adopted.small(kind, **changed), ids, labels, **inputs)
    model = parallelise(adopted.small(kind, **changed), on_grid)
    with adopted.Wide():
        found = model(input_ids=ids, labels=labels, **inputs)
        found.loss.backward()
    whole = collect(found.logits.detach(), on_grid.grid, model.get_output_embeddings().logits_layout, tuple(logits.shape))
    assert (whole - logits).abs().max() <= 1e-10 * logits.abs().max()
    assert abs(found.loss - loss) <= 1e-10 * loss
    for name, error in adopted.differences(model, gradients).items():
        assert error <= 1e-9, (name, error)
    return model


def refused(error, words, module, on_grid=None, **options):
    with pytest.raises(error, match=words):
        parallelise(module, on_grid or scheme("serial"), **options)


def test_a_plan_is_refused_by_the_name_of_what_is_wrong_in_it():
    model = adopted.small("llama", num_hidden_layers=1)
    whole = {f"self_attn.{one}_proj": "first" for one in "qkv"} | {"o_proj": "second"}
    mlp = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
    refused(ConfigError, "layers.0.mlp.gate_proj has no role in the plan", model, plan=whole)
    refused(ConfigError, "'fc1' matches no module", model, plan={**whole, **mlp, "fc1": "first"})
    refused(ConfigError, "'columns' of 'q_proj'.*not known", model, plan={"q_proj": "columns"})
    refused(ConfigError, "both first and second of model.layers.0.self_attn.q_proj", model, plan={**whole, "q_proj": "second"})
    refused(
        ConfigError, "gate_proj is a second linear layer.*given the residual", model, plan={**whole, **mlp, "gate_proj": "second"}
    )
    refused(ConfigError, "roles are those of torch.nn.Linear", model, plan={**whole, "rotary_emb": "first"})
    refused(ConfigError, "experts are not adopted", adopted.small("mixtral", num_local_experts=2, num_hidden_layers=1))
    refused(ConfigError, "config has no base_model_tp_plan", adopted.small("gpt2", n_embd=8, n_head=2, n_layer=1))
    assert parallelise(model, scheme("serial"), {**whole, **mlp}) is model


def test_what_a_rank_cannot_compute_alone_is_refused_by_name():
    dropped = adopted.small("phi3", intermediate_size=36)
    dropped.model.layers[1].resid_mlp_dropout.p = 0.1
    refused(ConfigError, "model.layers.1.resid_mlp_dropout: dropout with p > 0", dropped)
    attended = adopted.small("llama")
    attended.model.layers[0].self_attn.attention_dropout = 0.1
    refused(ConfigError, "layers.0.self_attn: dropout with p > 0", attended)
    shared = adopted.small("llama")
    shared.model.layers[1].mlp = shared.model.layers[0].mlp
    refused(ConfigError, "layers.0.mlp.gate_proj and model.layers.1.mlp.gate_proj share", shared)
    flex = adopted.small("llama")
    flex.config._attn_implementation = "flex_attention"
    refused(ConfigError, "attention 'flex_attention' is not known", flex)
    for name in ("prod", "cumprod", "median"):  # of small values, a probe sees little of them
        net = Forked()
        net.use = lambda net, x, name=name: net.k(x) + net.v(getattr(x, name)(-1))
        plan = dict.fromkeys("qkv", "first") | {"down": "second"}
        refused(
            ConfigError, f"{name} reduces the residual stream over its last dim", net, plan=plan, probe=(torch.ones(2, 3, 12),)
        )


@pytest.mark.mpi(sizes=(4,))
def test_sizes_and_schemes_that_do_not_fit_are_refused_on_every_rank(make_grid):
    refused(
        LayoutError,
        "num_attention_heads 3 .*y = 4",
        adopted.small("gemma2", num_attention_heads=3, num_key_value_heads=1),
        scheme("oned", make_grid(y=4)),
    )
    refused(
        LayoutError,
        "(?s)num_key_value_heads 3 .*x=4,y=1,z=1",
        adopted.small("llama", num_key_value_heads=3),
        scheme("cuboid", make_grid(y=4)),
    )
    refused(
        LayoutError,
        r"(?s)num_key_value_heads 1 .*that fit: 2\..* x=2,y=2,z=1 · x=4,y=1,z=1",
        adopted.small("llama", num_key_value_heads=1),
        scheme("cuboid", make_grid(y=4)),
    )
    refused(
        LayoutError,
        "oned-sp scheme adopts no module: it splits sequences",
        adopted.small("llama", num_key_value_heads=4),
        scheme("oned-sp", make_grid(y=4)),
    )
    model = parallelise(adopted.small("llama", num_key_value_heads=4), scheme("cuboid", make_grid(y=4)))
    padded = torch.ones(4, 11, dtype=torch.int64)
    assert model(input_ids=adopted.batch(4)[0], attention_mask=padded).logits.shape[0] == 4
    padded[1, :3] = 0
    with pytest.raises(ConfigError, match=r"attention_mask differs between rows, of which attention has 1/1 .* 1/4"):
        model(input_ids=adopted.batch(4)[0], attention_mask=padded)
    model = parallelise(adopted.small("llama", num_key_value_heads=4), scheme("cuboid", make_grid(x=4)))
    with pytest.raises(LayoutError, match="batch 3 cannot be split over x·y = 4"):
        model(input_ids=adopted.batch(3)[0])


@pytest.mark.mpi(sizes=(4,))
def test_the_table_says_what_became_of_each_layer_and_the_words_that_are_moved(make_grid):
    grid = make_grid(y=2, z=2)
    model = parallelise(adopted.small("qwen3", num_hidden_layers=3, intermediate_size=36), scheme("cuboid", grid))
    rows = 4 * 11
    table = {line.split()[0]: line for line in model.adoption.table(rows).splitlines()}
    q, product = "model.layers.*.self_attn.q_proj", "one product with k_proj and v_proj"
    assert f"Linear(60 → 120, b:(x,y) s h:z → b:(x,z) s n:y, bias=False), {product}" in table[q]
    assert "in the product of gate_proj" in table["model.layers.*.mlp.up_proj"]
    assert "a copy on all ranks, its gradient summed over x·z·y" in table["model.layers.*.self_attn.q_norm.weight"]
    products = [one for one in model.adoption.layers if one.words(rows)]
    assert len(products) == 3 * 4 + 1
    for one in products:
        k, layout = one.layer.weight.sharding.shape[one.name == "lm_head"], getattr(one.layer, "input_layout", "b:(x,y) s h:z")
        x = torch.zeros(Layout.of(layout).local_shape((4, 11, k), grid.shape, grid.coordinates), dtype=torch.float64)
        with grid.ledger.watch() as moved:
            (one.together or one.layer)(x)
        assert max(grid.comm.allgather(moved.words)) == one.words(rows), one.name
        assert f"{one.words(rows):,}" in table[one.name.replace("0", "*").replace("1", "*").replace("2", "*")]
    with grid.ledger.watch() as moved:
        model.model.layers[1].mlp(torch.zeros(2, 11, 30, dtype=torch.float64))
    assert moved.words == sum(one.words(rows) for one in products if "layers.1.mlp" in one.name)


class Forked(nn.Module):
    """A branch of a residual stream: three linear layers of one input, used by the code of a case."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(12, n, bias=False) for n in (8, 4, 4))
        self.down, self.use = nn.Linear(4, 12), None

    def forward(self, x):
        return x + self.down((self.use or together)(self, x * 1.5))


def together(net, x):
    return net.q(x)[..., ::2] * net.k(x) + net.v(x)


def apart(net, x):
    return net.q(x)[..., ::2] * net.k(x + 0) + net.v(x)


def without_k(net, x):
    return net.q(x)[..., ::2] + net.v(x)


def for_nothing(net, x):
    net.v(x)
    return net.q(x)[..., ::2] * net.k(x)


def twice(net, x):
    return net.q(x)[..., ::2] * net.k(x) * net.k(x) + net.v(x)


def changed_in_between(net, x):
    q = net.q(x)
    x.mul_(2)
    return q[..., ::2] * net.k(x) + net.v(x)


def changed_weight(net, x):
    q = net.q(x)
    with torch.no_grad():
        net.k.weight.mul_(2)
    return q[..., ::2] * net.k(x) + net.v(x)


def outputs_changed(net, x):
    q, k, v = net.q(x), net.k(x), net.v(x)
    kept = k.exp()
    return q.mul_(2).view(-1).view_as(q)[..., ::2] * kept + v.sin_()


def part_recomputed(net, x):
    return checkpoint(net.q, x, use_reentrant=False)[..., ::2] * net.k(x) + net.v(x)


def half_without_graph(net, x):
    with torch.no_grad():
        q = net.q(x)
    return q[..., ::2] * net.k(x) + net.v(x)


FORKS = {
    together: ("qkv",), apart: ("qkv", "k"), without_k: ("qkv",), for_nothing: ("qkv",), twice: ("qkv", "k"),
    changed_weight: ("qkv", "k", "v"), outputs_changed: ("qkv",), part_recomputed: ("q", "qkv"), half_without_graph: ("q", "qkv"),
}  # fmt: skip
"""What code does with its linear layers → the products that it takes, where those of one input are found in `together`."""


def forked(on_grid=None):
    torch.manual_seed(2)
    module = Forked().double()
    return parallelise(module, on_grid, dict.fromkeys("qkv", "first") | {"down": "second"}) if on_grid else module


@pytest.mark.mpi(sizes=(4,))
def test_layers_of_one_input_are_one_product_where_code_gives_them_one(make_grid):
    """Else each is by itself; a gradient is None where that of the unsplit module is."""
    grid = make_grid(y=2, z=2)
    on_grid = scheme("cuboid", grid)
    x, upstream = torch.randn(2, 4, 3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    mine = on_grid.residual.slices(x.shape, grid.shape, grid.coordinates)
    for use, products in FORKS.items():
        plain, net = forked(), forked(on_grid)
        together_now = {one.name: one.together for one in net.adoption.layers}["q"]
        layers = {"qkv": together_now, "q": net.q, "k": net.k, "v": net.v}
        with grid.ledger.watch() as wanted:
            net.down(torch.zeros(2, 3, 2, dtype=torch.float64))
            for one in products:
                layers[one](x[mine])
        plain.use = net.use = use
        out = plain(x)
        (out * upstream).sum().backward()
        with grid.ledger.watch() as moved:
            found = net(x)
        assert moved.words == wanted.words, use
        (found * upstream[mine]).sum().backward()
        assert torch.allclose(found, out[mine], rtol=1e-12, atol=1e-12), use
        for name, error in adopted.differences(net, {name: p.grad for name, p in plain.named_parameters()}).items():
            assert error <= 1e-10, (use, name)
        gradients = adopted.whole_gradients(net)
        assert [gradients[name] is None for name, _ in plain.named_parameters()] == [p.grad is None for p in plain.parameters()]
        assert net.q.siblings is None


@pytest.mark.mpi(sizes=(4,))
def test_so_they_are_without_a_graph_recomputed_copied_and_behind_an_error(make_grid):
    on_grid = scheme("cuboid", grid := make_grid(y=2, z=2))
    x, upstream = torch.randn(2, 4, 3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    mine = on_grid.residual.slices(x.shape, grid.shape, grid.coordinates)
    plain, net = forked(), forked(on_grid)
    (plain(x) * upstream).sum().backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    net.use = lambda net, x: net.q(x) + undefined  # noqa: F821
    with pytest.raises(NameError, match="undefined"):
        net(x)
    assert net.q.siblings is None
    net.use = None
    for reentrant in (False, True):
        for one in (net, copy.deepcopy(net)):
            one.zero_grad()
            given = x.clone().requires_grad_()
            (checkpoint(one, given, use_reentrant=reentrant) * upstream[mine]).sum().backward()
            assert max(adopted.differences(one, wanted).values()) <= 1e-10
    plain.use = net.use = changed_in_between
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.allclose(net(x), plain(x)[mine], rtol=1e-12, atol=1e-12)


@pytest.mark.mpi(sizes=(4,))
def test_muon_updates_an_adopted_model_as_torchs_does_the_unsplit_one(make_grid):
    on_grid = scheme("cuboid", make_grid(y=2, z=2))
    sizes = {"num_hidden_layers": 1, "num_key_value_heads": 4}
    plain, model = adopted.small("qwen3", **sizes), parallelise(adopted.small("qwen3", **sizes), on_grid)
    steps = []
    for one, kind in ((plain, torch.optim.Muon), (model, Muon)):
        named = dict(one.named_parameters())
        hidden = [p for name, p in named.items() if p.dim() == 2 and "layers" in name]
        rest = [p for name, p in named.items() if p.dim() == 1 or "layers" not in name]
        steps.append((kind(hidden, lr=0.1), torch.optim.AdamW(rest, lr=0.1)))
    ids, labels = adopted.batch(4)
    for _ in range(2):
        with adopted.Wide():
            logits = plain(input_ids=ids).logits
            functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100).backward()
            model(input_ids=ids, labels=labels).loss.backward()
        with without_bfloat16():
            for one in (*steps[0], *steps[1]):
                one.step()
                one.zero_grad()
    found = full_state_dict(model)
    for name, p in plain.named_parameters():
        assert (found[name] - p).abs().max() <= 1e-8 * p.abs().max(), name


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("kind", ["gemma2", "phi3"])
def test_a_folder_is_read_in_blocks_and_written_as_it_was(make_grid, tmp_path_factory, kind):
    import transformers

    on_grid = scheme("cuboid", grid := make_grid(y=2, z=2))
    folder = grid.comm.bcast(tmp_path_factory.mktemp(kind) if grid.rank == 0 else None)
    changed = {"tie_word_embeddings": kind == "gemma2", **CHANGED.get(kind, {})}
    plain = adopted.small(kind, **changed)
    if grid.rank == 0:
        plain.save_pretrained(folder, max_shard_size="20KB")
    grid.comm.barrier()
    model, reference = from_folder(folder, on_grid, torch.float64), adopted.small(kind, **changed)
    wanted = dict(parallelise(plain, on_grid).named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    for name, p in found.items():
        assert torch.equal(p, wanted[name]), name
    ids = adopted.batch(4)[0]
    logits = collect(model(ids).logits.detach(), grid, model.lm_head.logits_layout, (4, 11, 101))
    assert torch.allclose(logits, reference(ids).logits, rtol=1e-4, atol=1e-4)  # rotary angles are float32 here
    for p in model.parameters():
        p.data += 1
    model.save_pretrained(folder / "again")
    if grid.rank == 0:
        again = transformers.AutoModelForCausalLM.from_pretrained(folder / "again", dtype=torch.float64)
        for name, p in adopted.small(kind, **changed).named_parameters():
            assert torch.equal(again.get_parameter(name), p + 1), name
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    grid.comm.barrier()
    with pytest.raises(CheckpointError, match="Cannot read the weights"):
        from_folder(folder, on_grid, torch.float64)


class Blocks(nn.Module):
    """A language model of torch's own layers: learned positions, layer norms, a residual stream, a head."""

    def __init__(self, scaled=False):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(31, 12), nn.Embedding(9, 12)
        self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in range(2))
        self.up, self.down = (
            nn.ModuleList(nn.Linear(12, 17) for _ in range(2)),
            nn.ModuleList(nn.Linear(17, 12) for _ in range(2)),
        )
        self.gain, self.out, self.scaled = nn.Parameter(torch.tensor(1.5)), nn.Linear(12, 31), scaled

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            inner = self.gain * up(norm(x)).tanh()
            x = x + down(inner / inner.shape[-1] if self.scaled else inner)
        return self.out(x)


PLAN = {"up.*": "first", "down.*": "second", "out": "first"}


@pytest.mark.mpi(sizes=(4,))
def test_a_module_of_ones_own_is_compared_with_itself_unsplit(make_grid):
    for name, axes in (
        ("summa", {"x": 2, "y": 2}),
        ("cuboid", {"y": 2, "z": 2}),
        ("cuboid", {"x": 2, "z": 2}),
        ("oned", {"y": 4}),
    ):
        on_grid = scheme(name, make_grid(**axes))
        torch.manual_seed(3)
        module = parallelise(Blocks().double(), on_grid, PLAN)
        assert (
            module(torch.zeros(4, 5, dtype=torch.int64)).shape[-1]
            == on_grid.scheme.after_linear(on_grid.residual).local_shape(
                (4, 5, 31), on_grid.grid.shape, on_grid.grid.coordinates
            )[-1]
        )
    reads_a_size = Blocks(scaled=True).double()
    refused(ConfigError, "first in the output of down.0, a Linear", reads_a_size, scheme("oned", make_grid(y=4)), plan=PLAN)
    ends = "the probe ends on a rank's block behind up"  # where its code raises, and where a product refuses what it gives it
    refused(ConfigError, ends, Halved(whole=True).double(), scheme("oned", make_grid(y=4)), plan=HALVED)
