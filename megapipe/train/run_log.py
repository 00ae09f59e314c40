"""run.jsonl: what a run is and how it went, one JSON object a line, for `megapipe report`; a resumed run appends. Keys are stable.

Every record has `kind` and `time` (Unix seconds), and:

start    time, host, pid, command, versions, machine, grid, config (YAML), plan (text), resumed_from, remarks,
         kernels (which library computes what)
note     what was said at the console beside the steps: checkpoints, profiles, what was passed over
warning  what did not go as asked and did not stop the run
stragglers  step, told (sentences), slowest (times of ranks): with --log-straggler, where somebody was slow
rollback number, from_step, to_step, first_sample, past_sample, reason, account: back to a checkpoint from before a spike
failure  rank, error, text: what ended it
end      step, reason, early
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch

from megapipe import __version__
from megapipe.checkpoint.rollbacks import Rollback
from megapipe.comm.bootstrap import World
from megapipe.errors import CommunicationError, NoProgressError
from megapipe.plan.report import plan_text
from megapipe.plan.run_plan import RunPlan

FILE_NAME = "run.jsonl"


class RunLog:
    """Appends to run.jsonl in `folder` (None: nowhere). A disk that refuses costs the record, never the run.

    rank 0 records everything; another rank only its own failure, and not that it lost a peer.
    """

    def __init__(self, folder: Path | None, global_rank: int = 0) -> None:
        self._path = None if folder is None else folder / FILE_NAME
        self._rank = global_rank

    def start(
        self, plan: RunPlan, world: World, config_text: str, remarks: Sequence[str], kernels: Sequence[str] = ()
    ) -> None:
        """The ranks have met."""
        if self._rank == 0:
            self._write(
                "start",
                host=platform.node(),
                pid=os.getpid(),
                command=sys.argv,
                versions=_versions(),
                machine=_machine(world),
                grid=_grid(plan),
                config=config_text,
                plan=plan_text(plan),
                remarks=list(remarks),
                kernels=list(kernels),
            )

    def resumed(self, path: Path) -> None:
        """A checkpoint was loaded."""
        if self._rank == 0:
            self._write("resumed", path=str(path))

    def note(self, text: str) -> None:
        if self._rank == 0:
            self._write("note", text=text)

    def rolled_back(self, rollback: Rollback) -> None:
        self._write("rollback", **{key: value for key, value in asdict(rollback).items() if key != "time"})

    def warning(self, text: str) -> None:
        if self._rank == 0:
            self._write("warning", text=text)

    def stragglers(self, step: int, told: Sequence[str], slowest: Sequence[Mapping[str, Any]]) -> None:
        """Who was slow in the steps before this one. slowest: times of the ranks that computed longest, in seconds."""
        if self._rank == 0:
            self._write("stragglers", step=step, told=list(told), slowest=list(slowest))

    def end(self, step: int, reason: str, early: bool) -> None:
        if self._rank == 0:
            self._write("end", step=step, reason=reason, early=early)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Records what is raised inside, which goes on its way."""
        try:
            yield
        except BaseException as error:
            if self._rank == 0 or not isinstance(error, CommunicationError):
                self.failed(error)
            raise

    def failed(self, error: BaseException) -> None:
        """What ends the run, from whatever rank."""
        if self._path is not None and self._path.parent.is_dir():  # a run that never began leaves no folder
            self._write("failure", rank=self._rank, error=type(error).__name__, text=str(error))

    def _write(self, kind: str, **record: Any) -> None:
        if self._path is None:
            return
        line = json.dumps({"kind": kind, "time": time.time(), **record}) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)  # one write: lines of several ranks do not mix
        except OSError as error:
            print(f"{self._path} cannot be written to: {error.strerror}; the run goes on without it", file=sys.stderr)
            self._path = None


def last_failure(folder: Path, since: float) -> str | None:
    """What ended the newest run recorded in a folder that failed after `since` (Unix seconds), in one line; None where nothing tells.

    A start that was refused for want of progress is no run.
    """
    try:
        lines = (folder / FILE_NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:  # torn by a crash
            continue
        if record.get("kind") == "failure" and record["time"] >= since and record["error"] != NoProgressError.__name__:
            return f"{record['error']}: {record['text']}".splitlines()[0]
    return None


def _versions() -> dict[str, str]:
    return {
        "megapipe": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def _machine(world: World) -> dict[str, Any]:
    is_gpu = world.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(world.device) if is_gpu else "CPU",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "backend": world.backend,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _grid(plan: RunPlan) -> dict[str, Any]:
    t = plan.topology
    return {
        "world_size": t.world_size,
        "tp": t.tp,
        "cp": t.cp,
        "pp": t.pp,
        "dp": t.dp,
        "chunks": plan.num_chunks,
        "order": t.order,
        "ranks_per_node": t.ranks_per_node,
        "schedule": plan.schedule_name,
    }
