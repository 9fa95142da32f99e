"""The training loop: optimizer steps, evaluation, checkpoints, and the summary of the run."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from .. import preemption
from ..columns import counted
from ..comm.axis import Axis
from ..comm.health import flight, watchdog
from ..comm.health.failure import telling_where
from ..comm.profile import trace
from ..comm.profile.nvtx import Ranges
from ..errors import CheckpointError, ConfigError
from ..files import read_json, replacing
from ..nn.copies import Named, compare
from ..nn.gradients import norm_and_votes
from ..nn.layers.dropout import Batch
from ..nn.models.base import Inputs
from ..node_support import load_average, watchdog_seconds
from ..parallel.critical import in_words, replay
from ..parallel.expert_load import ExpertLoads
from ..parallel.replicas import replica_rows
from ..parallel.states import named_parameters
from . import metrics
from .checkpoint import folder as checkpoint
from .checkpoint.writer import Writer
from .config import Config
from .device import on_device, peak_device_memory
from .generate import load, sample
from .lease import Lease
from .loss_plot import draw_load, draw_loss
from .metrics import MetricsWriter, StepMetrics, Stopwatch
from .on_root import on_root
from .optimizer import clip_factor, learning_rate
from .precision import torch_dtype
from .prepare import Run, Votes, prepare
from .progress import Progress
from .utilization import StepWork, model_flops, peak_flops

WRITING = 1 << 26
"""The vote of a rank that writes a checkpoint: more than all the ranks that may be asked to end."""
COPIES_EVERY = 100
"""Steps between two comparisons of the copies of weights, in a run with grid.check."""
ONE_RANK_PARAMETERS = 100_000_000
"""Below this many parameters, one rank alone generates text faster than the grid, which communicates per layer and token."""


@dataclass(frozen=True)
class TraceWindow:
    """The trace of a run: the steps `first` to `last`, both included, are written to `file`."""

    file: Path
    first: int
    last: int

    def check(self, done: int, steps: int) -> None:
        """Raise ConfigError unless the file can be written and the steps are among done + 1 … steps."""
        trace.check_file(self.file)
        if not done < self.first <= self.last <= steps:
            raise ConfigError(
                f"--trace-steps {self.first}:{self.last} are not among the steps {done + 1} to {steps} that this run takes. "
                "Choose two of them, the first not after the last."
            )


def train(
    config: Config,
    comm: MPI.Intracomm,
    folder: Path,
    resume: bool = False,
    overwrite: bool = False,
    traced: TraceWindow | None = None,
    ranges: Ranges | None = None,
) -> dict[str, Any]:
    """Train the model of `config` on the ranks of `comm`; collective. Returns the summary of the run, equal on every rank.

    That of a run which a signal has asked to end (`preemption.listen`) has `run`, `step`, and `preempted`: what asked for it.

    Parameters
    ----------
    folder : the run folder, which receives config.toml, metrics.jsonl, checkpoints/step-N/, loss.png and summary.json,
        and of a mixture load.png
    resume : whether to continue from the newest complete checkpoint in `folder`, which any grid may have written
    overwrite : whether to delete the checkpoints in `folder` and start again
    traced : steps to write as a trace
    ranges : NVTX ranges, which show steps, phases and collectives to a profiler

    Raises the errors of `prepare`, on every rank alike, and Summa3dError where the loss or the gradient diverges.
    """
    hung = watchdog_seconds(config.train.watchdog)
    watchdog.limit(hung)
    with Lease() as lease, Progress(config.train.steps, speak=comm.rank == 0) as progress, preemption.telling(progress.say):
        run = prepare(config, comm, folder, resume, overwrite, lease, progress)
        if traced is not None:
            traced.check(run.done, config.train.steps)
        run.grid.ledger.ranges = ranges
        flight.keep_in(folder)
        recorder = MetricsWriter(
            run.folder / "metrics.jsonl",
            comm,
            run.done,
            _work(run, progress),
            config.train.tensorboard,
            torch.get_num_threads(),
        )
        progress.say(_opening(run))
        progress.start(run.done)
        began = time.perf_counter()
        with (
            Writer(run.checkpoints, run.grid, config, progress.say) as writer,
            telling_where(lambda: run.pipeline.executor.state),
            watchdog.Watchdog(hung, "no training step completed") if hung else nullcontext() as deadline,
            torch.autograd.set_multithreading_enabled(False),
        ):
            asked = run_steps(run, recorder, writer, lease, progress, deadline, traced)
        recorder.close()
        seconds = time.perf_counter() - began
        summary = preempted_at(run, progress, asked) if asked else finish(run, recorder, seconds, progress)
        run.grid.free()
    return summary


def finished(config: Config, comm: MPI.Intracomm, folder: Path) -> dict[str, Any] | None:
    """The summary of the run in `folder`, where it has taken all its steps and ended; else None. Collective."""

    def find() -> dict[str, Any] | None:
        newest, file = checkpoint.newest(folder / "checkpoints"), folder / "summary.json"
        if newest is None or newest.name != f"step-{config.train.steps}" or not file.is_file():
            return None
        summary = read_json(file)
        return {**summary, "steps_taken": 0} if summary["step"] == config.train.steps else None

    return on_root(comm, find, CheckpointError)


def run_steps(
    run: Run,
    recorder: MetricsWriter,
    writer: Writer,
    lease: Lease,
    progress: Progress,
    deadline: watchdog.Watchdog | None = None,
    traced: TraceWindow | None = None,
) -> str:
    """Take the remaining steps; evaluate and save at their periods, and after the last step.

    Returns what asked it to end before the last step, if it saved and ended for that; else "". Ranks agree on that before the
    first step, and in each step by the sum of the gradient norm.
    """
    settings, ledger = run.config.train, run.grid.ledger
    run.writer = writer
    if (asked := asked_to_end(run)) and run.done < settings.steps:
        return asked
    for number in range(run.done + 1, settings.steps + 1):
        lease.check()
        if traced is not None and number == traced.first:
            ledger.start_trace()
        with ledger.run(f"step {number}"):
            step = take_step(run, number)
        if run.grid.job.check and number % COPIES_EVERY == 0:
            compare_copies(run)
        if traced is not None and number == traced.last:
            whole = ledger.stop_trace()
            trace.write(traced.file, whole, run.grid.comm)
            if run.pipeline.axis is not None:
                of_ranks = run.grid.comm.allgather((run.pipeline.rank, whole.arithmetic))
                progress.say(in_words(replay(run.pipeline.schedule(settings.accumulate), of_ranks)))
        if _due(number, settings.evaluate_every, settings.steps):
            step.validation_loss = evaluate(run)
        if settings.sample_every and number % settings.sample_every == 0 and number < settings.steps:
            step.samples = continued_on_grid(run)
            for text in step.samples:
                progress.say(f"step {number}, sample: {text!r}")
        recorder.post(step)
        progress.step(step, recorder.core_time)
        asked = asked_to_end(run) if run.votes.asked and number < settings.steps else ""
        if settings.keep and (asked or _due(number, settings.checkpoint_every, settings.steps)):
            recorder.flush()
            waits = bool(asked) or number == settings.steps or not settings.background
            writer.save(number, run.blocks(), run.loss_scale.state(), waits)
        elif not run.votes.writing:
            writer.settle()
        run.done = number
        if deadline is not None:
            deadline.touch()
        if asked:
            return asked
    return ""


def asked_to_end(run: Run) -> str:
    """Return which rank got which signal that asks the run to end, or ""; collective. Ctrl-C of any rank is shown."""
    signals = run.grid.comm.allgather(preemption.received())
    if signal.SIGINT in signals:
        preemption.tell()
    return next((f"rank {rank} got {result.name}" for rank, result in enumerate(signals) if result is not None), "")


def take_step(run: Run, number: int) -> StepMetrics:
    """Take the optimizer step `number` (from 1): accumulate gradients, clip them by their global norm, update the weights.

    With dynamic loss scaling, a step may skip the update; the step counts nevertheless. The host synchronizes with a device
    twice, at the end of backward: for the loss and for the gradient norm.
    """
    settings, ledger, scale = run.config.train, run.grid.ledger, run.loss_scale.value
    stopwatch = Stopwatch(ledger, torch.get_num_threads())
    for state in run.optimizer.states.values():
        state.clear()
    losses = accumulate(run, number)
    with ledger.phase("optimizer"):
        run.replicas.finish()
        loss = run.replicas.settle(total(losses, run.pipeline.axis))
        votes = (preemption.received() is not None) + WRITING * (run.writer is not None and run.writer.busy)
        norm, votes = norm_and_votes(run.optimizer.counted_gradients(), run.grid, votes)
        run.votes = Votes(*divmod(votes, WRITING))
        norm /= scale
        rate, loads = learning_rate(number, settings), ExpertLoads.of(run.model, run.optimizer.states.values())
        counts = None if loads is None else loads.take()

        def update() -> None:
            run.optimizer.step(rate, clip_factor(norm, settings.clip, scale))
            if loads is not None and counts is not None:
                loads.move(counts)

        if run.loss_scale.accepts(number, loss, norm):
            run.replicas.update(update)
    step = StepMetrics(number, loss, norm, rate, tokens=settings.batch * run.config.model.sequence)
    if counts is not None:
        step.expert_tokens = counts.tolist()
    if run.loss_scale.dynamic:
        step.loss_scale, step.skipped_steps = scale, run.loss_scale.skipped
    stopwatch.stop(step)
    return step


def compare_copies(run: Run) -> None:
    """Raise AgreementError on all ranks unless all copies of weights are equal, of those in 16 bits too; collective."""
    states = run.optimizer.states.values()
    run.replicas.gathers.finish()
    named = [Named(state.name, state.parameter.data, state.shardings.stored) for state in states]
    named += [
        Named(f"{state.name} (working copy)", state.used, state.shardings.used) for state in states if state.copy is not None
    ]
    with run.grid.ledger.phase("other"):
        compare(named, run.grid, "check_copies")


def accumulate(run: Run, number: int) -> list[Tensor]:
    """Forward and backward of all micro-batches of a step, in the order of the pipeline's schedule.

    Returns their parts of the step's loss on the last stage of a pipeline, and none on the others. Random numbers count steps
    from 0.

    Of a micro-batch's rows each replica takes its own.
    """
    settings, counts = run.config.train, run.objective.counts(run.config.train.batch)

    def feed(micro: int) -> tuple[Inputs, Batch]:
        first_row = micro * settings.micro_batch + replica_rows(run.grid, settings.micro_batch).start
        rows = run.objective.training(settings.seed, number - 1, first_row, run.config.rows)
        inputs = on_device(rows, run.device)
        return inputs, run.model.batch_of(inputs, number - 1, first_row, **counts, step_rows=settings.batch)

    with ExitStack() as copies:  # made once a step; they end with the last forward, and its backward frees each that it has used
        copies.enter_context(run.working_weights())
        return run.pipeline.run(settings.accumulate, feed, scale=run.loss_scale.value, forwarded=copies.close)


def total(losses: Sequence[Tensor], axis: Axis | None = None) -> float:
    """The sum of `losses` in float64, in order; then over the members of `axis`, the ranks of a pipeline.

    >>> total([torch.tensor(0.5), torch.tensor(1.25)])
    1.75
    """
    loss = float(sum(loss.double() for loss in losses))
    return loss if axis is None else float(axis.all_reduce(np.array([loss]))[0])


def evaluate(run: Run) -> float:
    """The mean loss on the held-out rows, which are the same in every evaluation; collective."""
    settings, own = run.config.train, run.config.rows
    rows, micro = settings.evaluate_batches * settings.batch, settings.micro_batch
    first = replica_rows(run.grid, micro).start
    held_out, counts = on_device(run.objective.held_out(rows), run.device), run.objective.counts(micro)

    def feed(index: int) -> tuple[Inputs, Batch]:
        row = first + index * micro
        inputs = {name: whole[row : row + own] for name, whole in held_out.items()}
        return inputs, run.model.batch_of(inputs, **counts)

    run.model.eval()
    with torch.no_grad(), run.grid.ledger.phase("other"), run.working_weights():
        loss = run.replicas.total(total(run.pipeline.run(rows // micro, feed), run.pipeline.axis))
    run.model.train()
    return loss / (rows // micro)


def finish(run: Run, recorder: MetricsWriter, seconds: float, progress: Progress) -> dict[str, Any]:
    """Continue the sample prompts, draw loss.png and write summary.json; collective. Returns the summary on every rank."""
    comm = run.grid.comm
    if run.config.prompts:
        progress.doing(f"sampling {run.config.train.sample_tokens} tokens")
    texts = continued(run)
    entries = metrics.read(run.folder / "metrics.jsonl") if comm.rank == 0 else []
    plot = _draw(run, progress) if comm.rank == 0 else None
    peak, device_peak = comm.allreduce(metrics.peak_memory()), comm.allreduce(peak_device_memory(run.device))
    account, dtype = recorder.account, torch_dtype(run.config.dtype)
    account.work = account.work.measured_again(run.config.train, run.grid, run.device, dtype)
    summary = _account(run, account, entries, seconds)
    blocked, cpu = (0.0, 0.0) if run.writer is None else (run.writer.blocked, run.writer.cpu)
    summary |= {"checkpoint_blocked_seconds": comm.allreduce(blocked, MPI.MAX), "checkpoint_cpu_seconds": comm.allreduce(cpu)}
    summary |= {"peak_memory_bytes": peak, "peak_device_bytes": device_peak, "plot": plot}
    summary |= {"sample": texts[0] if texts else None, "samples": texts}
    if comm.rank == 0:
        with replacing(run.folder / "summary.json") as new:
            new.write_text(json.dumps(summary, indent=1) + "\n")
    return comm.bcast(summary)


def preempted_at(run: Run, progress: Progress, asked: str) -> dict[str, Any]:
    """Say that the run ends before its last step, and what asked for it. Returns its summary, equal on every rank."""
    saved = checkpoint.newest(run.checkpoints) == run.checkpoints / f"step-{run.done}" if run.config.train.keep else False
    kept = f"saved after step {run.done}" if saved else "nothing to save"
    progress.say(f"{asked}: {kept} of {run.config.train.steps}; exit status {preemption.STATUS}, --resume continues")
    return {"run": os.fspath(run.folder), "step": run.done, "preempted": asked}


def continued(run: Run) -> list[str]:
    """The samples at the end of a run, if it has some: a small model is run by rank 0 alone, a large one on the grid."""
    prompts, settings = run.config.prompts, run.config.train
    if not (prompts and settings.keep and _parameters(run) < ONE_RANK_PARAMETERS):
        return continued_on_grid(run)

    def on_one_rank() -> list[str]:
        model, context, config, tokenizer = load(run.folder, MPI.COMM_SELF, run.device)
        of = model, context, config.model, tokenizer
        return [sample(*of, prompt, settings.sample_tokens) for prompt in prompts]

    return on_root(run.grid.comm, on_one_rank, CheckpointError)


def continued_on_grid(run: Run) -> list[str]:
    """The continued prompts, by the weights as they are, on every rank; none where the run has no samples."""
    prompts, tokens = run.config.prompts, run.config.train.sample_tokens
    if not prompts:
        return []
    of = run.model, run.model.context, run.config.model, run.tokens.tokenizer
    with run.working_weights(), run.grid.ledger.phase("other"):
        return [sample(*of, prompt, tokens, pipeline=run.pipeline) for prompt in prompts]


def _account(run: Run, account: metrics.Account, entries: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    validated = [entry["validation_loss"] for entry in entries if "validation_loss" in entry]
    return {
        "run": os.fspath(run.folder),
        "ranks": run.grid.size,
        "scheme": run.config.scheme,
        "grid": run.config.grid.axes,
        "device": run.device.type,
        "products_by": run.grid.job.blas.name if run.device.type == "cpu" else None,
        "step": run.done,
        "steps_taken": account.steps,
        "loss": entries[-1]["loss"] if entries else None,
        "validation_loss": validated[-1] if validated else None,
        "training_seconds": seconds,
        "step_seconds": account.seconds,
        "tokens_per_second": account.tokens / account.seconds if account.seconds else None,
        "model_flops": account.work.flops,
        "peak_flops_per_second": account.work.peak,
        "peak_load": account.work.load,
        "words_per_rank": account.words,
        "bytes_by_dtype": _bytes_by_dtype(run),
        "skipped_steps": run.loss_scale.skipped,
        "cores": account.core_time.cores,
        "communication_share": None,
        "waited_seconds": None,
        "exposed_communication": None,
        "model_flops_per_second": None,
        "mfu": None,
        **account.core_time.entries(),
    }


def _bytes_by_dtype(run: Run) -> dict[str, int]:
    """Bytes that rank 0 received since the start, by dtype of the collectives."""
    rows = run.grid.ledger.rows()
    return {dtype: sum(row.amounts.bytes for row in rows if row.dtype == dtype) for dtype in sorted({row.dtype for row in rows})}


def _draw(run: Run, progress: Progress) -> str | None:
    path = run.folder / "loss.png"
    try:
        with replacing(path) as new:
            draw_loss([run.folder], [new])
        if run.config.model.num_experts:
            with replacing(run.folder / "load.png") as new:
                draw_load(run.folder, [new])
    except ImportError as error:
        numbers = run.folder / "metrics.jsonl"
        progress.say(f"{path.name} was not drawn: {error}. Install summa3d[plot]; {numbers} holds the numbers.")
        return None
    return os.fspath(path)


def _opening(run: Run) -> str:
    imported = checkpoint.newest(run.checkpoints) is not None  # training writes no checkpoint before its first step
    start = f"resumed after step {run.done}" if run.done else f"from the {'imported weights' if imported else 'start'}"
    where = f"{counted(run.grid.size, 'rank')}, grid {run.config.grid}, {run.config.dtype} on {run.device.type}"
    return (
        f"{_parameters(run):,} parameters on {where}; "
        f"{len(run.tokens.train):,} training and {len(run.tokens.validation):,} validation tokens; {start}"
    )


def _work(run: Run, progress: Progress) -> StepWork:
    """Rates that the steps' use is measured against; collective."""
    settings, dtype = run.config.train, torch_dtype(run.config.dtype)
    if not settings.peak_tflops:
        progress.doing("measuring a product")
    peak = peak_flops(settings, run.grid, run.device, dtype)
    flops = model_flops(run.model, run.config.model, settings.batch)
    return StepWork(flops, peak, run.device.type == "cpu", None if settings.peak_tflops else load_average())


def _parameters(run: Run) -> int:
    return sum(prod(p.sharding.shape) for _, p in named_parameters(run.model))


def _due(number: int, period: int, last: int) -> bool:
    return number == last or (period > 0 and number % period == 0)
