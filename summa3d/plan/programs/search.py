"""The fastest plans of another program, each priced by its step: `summa3d plan --program NAME --model …`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from ...cluster import Cluster
from ...columns import counted
from ...comm.topology import divisors
from ...errors import ConfigError, Summa3dError, nearest
from ...files import toml_value
from ...nn.config import ModelConfig
from .bands import band_of
from .devices import devices
from .experts import nodes_of_experts
from .memory import bytes_of
from .programs import SWITCHES, PricedProgram, on_cluster, program_of
from .sizes import FULLY, stages_of
from .step import step

SHORT = {"y": "tp", "t": "tp", "grid.y": "tp", "p": "pp", "grid.pp": "pp", "d": "dp", "grid.dp": "dp", "fsdp": "shards"}
SHORT |= {"b": "micro_batch", "v": "chunks", "pipeline.chunks": "chunks", "replicas.zero": "zero", "grid.cp": "cp"}
SHORT |= {"grid.ep": "ep"}
AXES = ("tp", "pp", "cp", "shards", "dp", "ep")
NUMBERS = ("tp", "pp", "cp", "dp", "ep", "shards", "chunks", "micro_batch", "zero")
TEXTS = {"recompute": ("none", "selective", "full"), "scheme": ("oned", "oned-sp")}
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
MOST_CHUNKS = 8
SIMULATED = 24
"""Plans beyond those that are shown whose pipelines are simulated: the closed form, by which all are ranked, is up to 3 % off."""
MOST_TENSOR_RANKS = 16
CONTEXTS, FEWEST_POSITIONS = (1, 2, 4, 8), 4096
"""Contexts that are tried, and positions that each has at least."""


@dataclass(frozen=True)
class ProgramPlan:
    """A plan of a program: what `step.step` takes, its seconds, and the bytes of its fullest rank."""

    given: Mapping[str, Any]
    seconds: float
    memory: float

    def __str__(self) -> str:
        axes = " ".join(f"{key} {self.given[key]}" for key in AXES if self.given[key] > 1)
        chunks = f" · chunks {self.given['chunks']}" if self.given["chunks"] > 1 else ""
        sp = " · sp" if self.given["scheme"] == "oned-sp" else ""
        layers = stages_of(self.given)
        chunks += f" of {max(layers)} or {min(layers)} layers" if max(layers) > min(layers) else ""
        zero = f" · zero {self.given['zero']}" if self.given["zero"] and self.given["shards"] == 1 else ""
        switches = "".join(f" · {'' if on else 'no '}{name}" for name, on in self.given["switches"].items())
        return f"{axes or 'one rank'}{chunks}{sp} · b {self.given['micro_batch']} · {self.given['recompute']}{zero}{switches}"


@dataclass(frozen=True)
class ProgramPlans:
    """The fastest plans, ascending by seconds, and how many there were.

    fits : those whose bytes are within the limit. refused : of each plan that cannot be priced, why.
    """

    program: str
    cluster: Cluster
    best: Sequence[ProgramPlan]
    considered: int
    fits: int
    band: float
    validated: bool
    refused: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        """Report that `summa3d plan --program … --json` prints."""
        keys = (*NUMBERS, "recompute", "scheme")
        switches = {"switches": dict(self.best[0].given["switches"])} if self.best else {}
        plans = [
            {
                **{"plan": str(plan), "grid": {key: plan.given[key] for key in keys}, **switches},
                **{"seconds": plan.seconds, "memory": plan.memory},
            }
            for plan in self.best
        ]
        counts = {"considered": self.considered, "fits": self.fits, "refused": len(self.refused)}
        return (
            {"program": self.program, "cluster": self.cluster.name, "band": self.band, "validated": self.validated}
            | counts
            | {"plans": plans}
        )


def search(
    name: str, model: ModelConfig, cluster: Cluster, ranks: int, batch: int, fix: Sequence[str], limit: float, top: int
) -> ProgramPlans:
    """The fastest plans of a program on `ranks` ranks.

    fix : KEY=VALUE that plans must have, of sizes and of the program's switches. limit : bytes of a rank. Raises ConfigError for
    an unknown program, key or value, and where no plan is left.
    """
    own, program = program_of(name, whole=True)
    fixed = dict(_fixed(text) for text in fix)
    if "tokens_once" in fixed and not model.num_experts:
        raise ConfigError("--fix tokens_once is of models with experts, and this one has none.")
    cluster = on_cluster(program, cluster.filled(ranks))
    result: list[tuple[float, int, dict[str, Any], float]] = []
    refused: list[str] = []
    considered = 0
    for given in _plans(own, program, model, ranks, batch, fixed):
        considered += 1
        given |= nodes_of_experts(given, cluster)
        try:
            held = bytes_of(given)
            if held <= limit:
                result.append((step(given).nearly(cluster), len(result), given, held))
        except Summa3dError as error:
            refused.append(str(error))
    if not result:
        wanted = ", ".join(f"{key}={value}" for key, value in fixed.items()) or "nothing fixed"
        why = f"{considered} are possible, and none fits {limit / 2**30:.1f} GiB" if considered else "no sizes divide evenly"
        raise ConfigError(f"no plan of {own} on {ranks} ranks with {wanted}: {why}{'; ' + refused[0] if refused else ''}.")
    device = next((device for device, about in devices().items() if about["cluster"] == cluster.name), cluster.name)
    nearest_ones = sorted(result)[: top + SIMULATED]
    best = [ProgramPlan(given, step(given).seconds(cluster), held) for _, _, given, held in nearest_ones]
    best = sorted(best, key=lambda plan: (plan.seconds, str(plan)))[:top]
    return ProgramPlans(own, cluster, best, considered, len(result), *band_of(own, device, model.num_experts), refused)


def _fixed(text: str) -> tuple[str, Any]:
    """The key and the value of KEY=VALUE. Raises ConfigError for others."""
    short, equals, value = (part.strip() for part in text.partition("="))
    key = SHORT.get(short, short)
    if not equals and key in (*NUMBERS, *TEXTS, *SWITCHES):
        raise ConfigError(f"--fix {text} is not of the form KEY=VALUE, as in --fix {text}={'true' if key in SWITCHES else '1'}.")
    if key not in (*NUMBERS, *TEXTS, *SWITCHES):
        known = [*NUMBERS, *TEXTS, *SHORT, *SWITCHES]
        raise ConfigError(
            f"--fix {text}: the nearest key is {nearest(short, known)}. With --program it takes {', '.join(known)}."
        )
    number = toml_value(value, value)
    if key in TEXTS and value not in TEXTS[key]:
        raise ConfigError(f"--fix {text}: {short} takes {', '.join(TEXTS[key])}.")
    if key in NUMBERS and not (type(number) is int and number >= (key != "zero")):
        raise ConfigError(f"--fix {text}: {short} takes a whole number of at least {int(key != 'zero')}.")
    if key in SWITCHES and type(number) is not bool:
        raise ConfigError(f"--fix {text}: {short} takes true or false: {SWITCHES[key]}.")
    return key, value if key in TEXTS else number


def _plans(
    name: str, program: PricedProgram, model: ModelConfig, ranks: int, batch: int, fixed: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Arguments of `step.step` for every plan whose sizes divide evenly."""
    sizes: dict[str, Any] = {"layers": model.layers, "hidden": model.hidden, "heads": model.heads, "sequence": model.sequence}
    sizes |= {"vocabulary": model.vocabulary, "gpus": ranks, "batch": batch, "ffn": model.ffn_dim, "profile": name}
    switches = {key: value for key, value in fixed.items() if key in SWITCHES}
    fused = {**program.switches, **switches}.get("fused_attention", name == "summa3d")
    sizes |= {"switches": switches, "dropout": 0.0, "attention_dropout": 0.0 if fused else 0.1, "tied": model.tied}
    sizes["family"] = "llama" if model.family == "llama" else "gpt2"
    if model.grouped:
        sizes["kv_heads"] = model.num_kv_heads
    if model.num_experts:
        sizes |= {"experts": model.num_experts, "top_k": model.num_chosen, "ffn": model.expert_width, "family": "llama"}
        sizes |= {"head_dim": model.head_size, "shared": model.shared_width}
        if model.dense_layers:
            raise ConfigError(f"model.moe.dense is {model.moe.dense!r}: with --program all layers are alike, and have experts.")

    def of(key: str, values: Sequence[Any]) -> Sequence[Any]:
        return (fixed[key],) if key in fixed else values

    sharded = "prefetch" in program.switches
    shares_out = program.newer and not sharded
    contexts = [c for c in CONTEXTS if c == 1 or (shares_out and model.sequence // c >= FEWEST_POSITIONS)]
    for tp in of("tp", [1] if sharded else [t for t in divisors(ranks) if t <= MOST_TENSOR_RANKS and model.heads % t == 0]):
        for pp in of("pp", [1] if sharded else [p for p in divisors(ranks // tp) if p <= model.layers]):
            for cp in of("cp", contexts):
                outer, left = divmod(ranks, tp * pp * cp)
                for shards in of("shards", [outer] if sharded else [1]) if not left and outer else ():
                    if outer % shards == 0 and outer // shards == fixed.get("dp", outer // shards):
                        grid = {"tp": tp, "pp": pp, "cp": cp, "shards": shards, "dp": outer // shards}
                        ranks_of_experts = gcd(model.num_experts, cp * shards * grid["dp"])
                        among = divisors(ranks_of_experts) if shares_out and model.num_experts else [1]
                        for ep in of("ep", among):
                            if ep in among:
                                yield from _with_grid(sizes, {**grid, "ep": ep}, program, of)


def _with_grid(sizes: Mapping[str, Any], grid: Mapping[str, int], program: PricedProgram, of: Any) -> Iterator[dict[str, Any]]:
    """The plans of one grid: rows of a micro-batch, chunks, recomputation, sequence parallelism, ZeRO."""
    if of("zero", (1,))[0] == FULLY:
        grid = {**grid, "shards": grid["shards"] * grid["dp"], "dp": 1}
    rows, left = divmod(sizes["batch"], grid["dp"] * grid["shards"])
    per_stage = sizes["layers"] // grid["pp"]
    most = MOST_CHUNKS if grid["pp"] > 1 and not program.balanced else 1
    chunks = [v for v in range(1, most + 1) if per_stage % v == 0]
    modern = program.newer or program.sequences
    for micro in of("micro_batch", [b for b in MICRO_BATCHES if rows % b == 0]) if rows and not left else ():
        for v in of("chunks", chunks):
            if rows % micro or (v > 1 and rows // micro % grid["pp"]):
                continue
            for recompute in of("recompute", ("none", "selective", "full") if modern else ("full",)):
                for scheme in of("scheme", ("oned-sp",) if modern and grid["tp"] > 1 else ("oned",)):
                    for zero in of("zero", (int(program.newer or program.zero),)):
                        kind = {"micro_batch": micro, "chunks": v, "recompute": recompute, "scheme": scheme, "zero": zero}
                        yield {**sizes, **grid, **kind}


def as_text(plans: ProgramPlans, name: str, ranks: int, batch: int) -> Iterator[str]:
    """The lines that a search of a program prints."""
    from ...columns import aligned

    validated = "" if plans.validated else ", not validated: no rows of this program on this machine"
    ranked = counted(ranks, "rank")
    yield f"{name} on {ranked} of {plans.cluster.name} by {plans.program}, batch {batch}: ±{plans.band:.0%}{validated}"
    rows = [(str(n), str(p), f"{p.seconds:.4g}", f"{p.memory / 2**30:.1f}") for n, p in enumerate(plans.best, start=1)]
    yield from aligned([("", "plan", "seconds", "GiB"), *rows], left=(1,))
    yield f"{plans.considered} plans, {plans.fits} of which fit; GiB are with what the runtime and fragments take"
