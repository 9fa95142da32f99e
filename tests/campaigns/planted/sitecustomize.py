"""Plants a fault in a rank of a job. Python imports this file when it starts, where faults.py puts its folder on PYTHONPATH.

CHAOS is JSON: `ranks` to strike (none: all), `kind`, `stage`, `count`: at which call of the stage's functions, `delay`: how many
seconds later, in another thread, `variant`, and `at`: the file that receives the time. With `counts`, a file, the rank strikes
nobody: it writes how often it came to each stage, and when it came to the set-up. The library knows nothing of all this.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import functools
import importlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

STAGES = {
    "set-up": (
        *(f"summa3d.train.prepare:{name}" for name in ("open_grid", "build_model", "open_pipeline")),
        "summa3d.train.data.tokens:prepare",
    ),
    "forward": ("summa3d.parallel.executor:PipelineExecutor._forward",),
    "backward": ("summa3d.parallel.executor:PipelineExecutor._backward",),
    "optimizer": ("summa3d.train.loop:norm_and_votes", "summa3d.train.optimizer:AdamW.step"),
    "evaluation": ("summa3d.parallel.executor:PipelineExecutor._forward",),
    "copy": ("summa3d.train.checkpoint.writer:Writer._copy",),
    "write": ("summa3d.train.checkpoint.safetensors:_on_host",),  # a tensor of a rank's file, in its thread
    "publish": (
        "summa3d.train.checkpoint.shards:sync",
    ),  # of the index, of the folder, and of the folder above once it is renamed
    "clean": ("summa3d.train.checkpoint.folder:_delete", "shutil:rmtree"),
    "read": ("summa3d.train.checkpoint.shards:checksum", "summa3d.train.checkpoint.open_files:OpenFiles.file"),
}
FOREVER = 10**6


class Planted(Exception):
    """The exception that is planted."""


class Fault:
    """The fault of this process: it strikes once, at the `count`-th call of its stage."""

    def __init__(self, plan: dict[str, Any], rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.calls: Counter[str] = Counter()
        self.began = time.perf_counter()
        self.start = 0.0
        self.evaluates = self.desynchronised = False

    def came(self, stage: str, arguments: tuple[Any, ...]) -> None:
        """This rank has come to a stage."""
        if stage in ("forward", "evaluation") and self.evaluates != (stage == "evaluation"):
            return
        if stage == "clean" and ("step-" not in str(arguments[0]) or ".tmp-" in str(arguments[0])):
            return
        self.start = self.start or time.perf_counter() - self.began
        self.calls[stage] += 1
        if stage == self.plan.get("stage") and self.calls[stage] == self.plan["count"]:
            self.arm()

    def arm(self) -> None:
        """Strike now, later in another thread, or at this rank's next collective."""
        if self.plan["kind"] == "desynchronised call":
            self.desynchronised = True
        elif self.plan["delay"]:
            timer = threading.Timer(self.plan["delay"], self.strike)
            timer.daemon = True
            timer.start()
        else:
            self.strike()

    def strike(self) -> None:
        """Do what the kind of the fault is."""
        file = os.open(self.plan["at"], os.O_CREAT | os.O_WRONLY)
        os.write(file, repr(time.time()).encode())
        os.close(file)
        kind, seconds = self.plan["kind"], self.plan["seconds"]
        if kind.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[kind])
        elif kind == "abort":
            os.abort()
        elif kind == "exception":
            raise Planted(f"in {self.plan['stage']}")
        elif kind == "thread exception":
            thread = threading.Thread(target=raise_planted)
            thread.start()
            thread.join()
        elif kind == "lock held":
            hold(self.plan["variant"])
        elif kind == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        elif kind in ("failing write", "failing read"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        elif kind == "slow rank":
            time.sleep(seconds)

    def desynchronise(self, name: str, function: Callable[..., Any], axis: Any, *arguments: Any, **options: Any) -> Any:
        """A collective of an axis: with the fault, one more before it, or none."""
        from summa3d.comm.collective import alone

        extra = self.plan.get("variant") == "extra"
        if self.desynchronised and axis.size > 1 and (extra or name == "all_reduce"):
            self.desynchronised = False
            self.strike()
            if not extra:
                return alone(arguments[0], options.get("into"))
            import numpy as np

            axis.all_reduce(np.ones(3))
        return function(axis, *arguments, **options)

    def plant(self) -> None:
        """Wrap the functions of all stages; the library is imported, and MPI has been initialized."""
        for stage, places in STAGES.items():
            for place in places:
                wrap(place, functools.partial(self.before, stage))
        wrap("summa3d.train.loop:evaluate", self.evaluate)
        for name in ("all_gather", "reduce_scatter", "all_reduce") if self.plan.get("kind") == "desynchronised call" else ():
            wrap(f"summa3d.comm.axis:Axis.{name}", functools.partial(self.desynchronise, name))

    def before(self, stage: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.came(stage, arguments)
        return function(*arguments, **options)

    def evaluate(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.evaluates = True
        try:
            return function(*arguments)
        finally:
            self.evaluates = False

    def write_counts(self) -> None:
        """Write how often this rank came to each stage."""
        with open(f"{self.plan['counts']}.{self.rank}", "w") as file:
            json.dump({"start": self.start, **self.calls}, file)


def raise_planted() -> None:
    raise Planted("in a thread")


def hold(variant: str) -> None:
    """Hold the interpreter's lock, or wait for a lock that nobody gives back."""
    if variant == "interpreter":
        ctypes.PyDLL(None).sleep(FOREVER)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def wrap(place: str, around: Callable[..., Any]) -> None:
    """Have `around` called in place of a function of a module or a class, with that function before the arguments."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    function = getattr(owner, name)

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        return around(function, *arguments, **options)

    setattr(owner, name, called)


def main() -> None:
    """Read the plan; strike at a time from the start of this process, or plant the fault once the command is imported."""
    rank = next((os.environ[name] for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ), None)
    plan = json.loads(os.environ.get("CHAOS", "null"))
    if rank is None or plan is None:
        return
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # which takes a second at the end of every run
    if plan["ranks"] is not None and int(rank) not in plan["ranks"]:
        return
    fault = Fault(plan, int(rank))
    if "counts" in plan:
        atexit.register(fault.write_counts)
    elif plan["stage"] == "start":
        fault.arm()
    import_module = importlib.import_module

    def imported(name: str, package: str | None = None) -> Any:
        """`importlib.import_module`, by which the command line imports a command once MPI runs."""
        if (name, package) == (".train", "summa3d.cli"):
            importlib.import_module = import_module
            fault.plant()
        return import_module(name, package)

    importlib.import_module = imported


main()
