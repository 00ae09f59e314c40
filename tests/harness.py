"""Run tests on several ranks: real processes over gloo, 0.1 to 0.4 s for a test of four ranks, with a time limit.

    run_ranks(function, 4, *args)          four fresh ranks, one job
    with RankPool(4) as pool:              four live ranks, a few milliseconds per job
        pool.run(function, *args)

`function(rank, world_size, *args)` must be a module-level function; its arguments and results must be picklable
(tensors are). Both calls return the results by rank. Every rank has torch.distributed initialized over gloo (if
world_size > 1) and computes with one thread.

Workers are forked from a server that has imported torch and megapipe (tests/preload.py) and never computes. They use a
FileStore for the rendezvous (no ports), redirect their output to a file that is shown if they fail, and end with
os._exit. The first rank that raises ends the job with its traceback; the others stay alive until then, so that its
error is not hidden by their errors about a lost peer. At the time limit the stacks of all ranks are dumped and shown.
Only the workers import torch, not this file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megapipe.extras.cli.frame import wait_for_end

REPOSITORY = Path(__file__).resolve().parent.parent
PRELOADED = "tests.preload"
STACKS_SIGNAL = signal.SIGUSR2  # SIGUSR1 and SIGTERM belong to the training loop
LOG_TAIL_CHARACTERS = 4000
SECONDS = 250.0  # for one job, on a busy machine too; pytest ends a test after 300
CLEAN_UP = b""  # sent to all ranks once all have answered


class RankFailure(AssertionError):
    """An error of a rank that raised, died or hung.

    Attributes: `rank`, `error_type` (the exception's class name; None if the rank died or hung), `error_text`,
    `report`.
    """

    def __init__(self, rank: int, error_type: str | None, error_text: str, report: str) -> None:
        super().__init__(report)
        self.rank = rank
        self.error_type = error_type
        self.error_text = error_text
        self.report = report


@dataclass(frozen=True)
class _Answer:
    """The answer of a rank: its pickled value, or its exception."""

    value: bytes | None
    error_type: str = ""
    error_text: str = ""
    traceback_text: str = ""
    num_groups: int = 0  # that torch has counted: it names a group by their number


@dataclass
class _Worker:
    rank: int
    process: Any
    connection: Connection
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / f"rank{self.rank}.log"

    @property
    def stacks(self) -> Path:
        return self.folder / f"rank{self.rank}.stacks"

    def shown_log(self) -> str:
        text = self.log.read_text(errors="replace").strip() if self.log.exists() else ""
        return f"\n--- output of rank {self.rank} ---\n{text[-LOG_TAIL_CHARACTERS:]}" if text else ""


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = SECONDS, may_die: Collection[int] = ()
) -> list[Any]:
    """Run function(rank, world_size, *args) on fresh ranks and return the results by rank.

    timeout: seconds for the whole job. may_die: ranks that may end their own process, for tests of a lost peer; the
    result of such a rank is then None. Raises RankFailure with the traceback of the first rank that raised, or with the
    stacks of all ranks after a timeout.
    """
    with RankPool(world_size, timeout=timeout) as pool:
        return pool.run(function, *args, may_die=may_die)


class RankPool:
    """Live ranks for many jobs.

    If a job fails, its ranks are killed and the next job gets fresh ones. Between jobs the process groups of a job are
    destroyed and the default seed and dtype are restored.
    """

    def __init__(self, world_size: int, timeout: float = SECONDS) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self._workers: list[_Worker] = []
        self._folder: Path | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float | None = None, may_die: Collection[int] = ()
    ) -> list[Any]:
        """Run function(rank, world_size, *args) on every rank; see run_ranks."""
        job = pickle.dumps((function, args))
        if not self._workers:
            self._start()
        try:
            for worker in self._workers:
                with contextlib.suppress(BrokenPipeError):  # _collect reports a rank that died at start
                    worker.connection.send_bytes(job)
            answers = self._collect(self.timeout if timeout is None else timeout, frozenset(may_die))
            self._check_groups(answers)
            for worker in self._workers:  # only now: a rank that closes its connections would disturb its peers
                with contextlib.suppress(BrokenPipeError):
                    worker.connection.send_bytes(CLEAN_UP)
        except BaseException:
            self.close()
            raise
        if any(answer is None for answer in answers):
            self.close()
        return [None if answer is None or answer.value is None else pickle.loads(answer.value) for answer in answers]

    def close(self) -> None:
        """Kill the ranks and remove their files."""
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.process.pid, signal.SIGKILL)
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.connection.close()
        self._workers = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self) -> None:
        context = _fork_server()
        self._folder = Path(tempfile.mkdtemp(prefix="megapipe-ranks-"))
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.world_size, theirs, str(self._folder), self.timeout, os.getpid()),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._workers.append(_Worker(rank, process, ours, self._folder))

    def _collect(self, timeout: float, may_die: frozenset[int]) -> list[_Answer | None]:
        deadline = time.monotonic() + timeout
        answers: dict[int, _Answer | None] = {}
        waiting = {worker.connection: worker for worker in self._workers}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._hung(timeout, set(answers))
            for connection in ready:
                worker = waiting.pop(connection)  # type: ignore[call-overload, index]
                try:
                    answer: _Answer | None = pickle.loads(worker.connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    if worker.rank not in may_die:
                        raise self._died(worker) from None
                    answer = None
                if answer is not None and answer.value is None:
                    raise self._raised(worker, answer)
                answers[worker.rank] = answer
        return [answers[rank] for rank in range(self.world_size)]

    def _check_groups(self, answers: list[_Answer | None]) -> None:
        """Raise RankFailure if the ranks have not created the same groups: the next one would wait for ever."""
        found = {rank: answer.num_groups for rank, answer in enumerate(answers) if answer is not None}
        if len(set(found.values())) > 1:
            head = f"the ranks have created different numbers of process groups, so that the next would hang: {found}"
            raise RankFailure(0, None, head, head)

    def _raised(self, worker: _Worker, answer: _Answer) -> RankFailure:
        head = f"rank {worker.rank} of {self.world_size} raised {answer.error_type}: {answer.error_text}"
        return RankFailure(
            worker.rank,
            answer.error_type,
            answer.error_text,
            f"{head}\n\n{answer.traceback_text.rstrip()}{worker.shown_log()}",
        )

    def _died(self, worker: _Worker) -> RankFailure:
        worker.process.join(5)
        code = worker.process.exitcode
        head = f"rank {worker.rank} of {self.world_size} died with exit code {code} and without an answer"
        stacks = worker.stacks.read_text() if worker.stacks.exists() else ""  # written by a crash handler
        return RankFailure(worker.rank, None, head, f"{head}\n{stacks}{worker.shown_log()}")

    def _hung(self, timeout: float, answered: set[int]) -> RankFailure:
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.process.pid, STACKS_SIGNAL)
        missing = [worker for worker in self._workers if worker.rank not in answered]
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline and not all(
            worker.stacks.exists() and worker.stacks.stat().st_size for worker in self._workers
        ):
            time.sleep(0.02)
        time.sleep(0.1)  # a dump is written line by line
        head = f"no answer from ranks {[worker.rank for worker in missing]} of {self.world_size} within {timeout:g} s"
        parts = [head]
        for worker in self._workers:
            state = "answered" if worker.rank in answered else "HANGS"
            stacks = worker.stacks.read_text() if worker.stacks.exists() else "(no stacks written)"
            parts.append(f"=== rank {worker.rank}: {state} ===\n{stacks}{worker.shown_log()}")
        return RankFailure(missing[0].rank, None, head, "\n\n".join(parts))


def _fork_server() -> Any:
    """Return the multiprocessing context of the fork server, which has imported torch.

    Its first process starts the server.
    """
    if str(REPOSITORY) not in sys.path:
        sys.path.insert(0, str(REPOSITORY))
    # the server imports PRELOADED before it gets our sys.path
    paths = [str(REPOSITORY), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    return context


def _serve(rank: int, world_size: int, connection: Connection, folder: str, timeout: float, parent: int) -> None:
    """Run a rank: redirect output, join the process group, and run jobs until the parent closes the pipe.

    It ends with os._exit.
    """
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        with _rank_output(Path(folder) / f"rank{rank}.log"), (Path(folder) / f"rank{rank}.stacks").open("w") as stacks:
            faulthandler.enable(stacks, all_threads=True)
            faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True)
            started = False
            while True:
                job = connection.recv_bytes()
                if job == CLEAN_UP:
                    _clean_up()
                    continue
                connection.send_bytes(pickle.dumps(_answer(job, rank, world_size, folder, timeout, started)))
                started = True
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        os._exit(0)


def _answer(job: bytes, rank: int, world_size: int, folder: str, timeout: float, started: bool) -> _Answer:
    try:
        _prepare(rank, world_size, folder, timeout, started)
        function, args = pickle.loads(job)
        value = pickle.dumps(function(rank, world_size, *args))
        return _Answer(value, num_groups=_num_groups())
    except BaseException as error:
        return _Answer(None, type(error).__name__, str(error), traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _num_groups() -> int:
    import torch.distributed as dist

    return dist.distributed_c10d._world.group_count


def _prepare(rank: int, world_size: int, folder: str, timeout: float, started: bool) -> None:
    """Reset the rank to one thread, default dtype and seed, and only the world's process group."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    if world_size == 1:
        return
    if not started:
        from datetime import timedelta

        if Path("/sys/class/net/lo").exists():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no name lookup, no firewall
        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=2 * timeout)
        )


def _clean_up() -> None:
    """Destroy all process groups but the world.

    Each has threads of gloo that wake up 100 times a second, for as long as the rank lives.
    """
    import torch.distributed as dist

    gc.collect()
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        gc.collect()


def _end_with(parent: int) -> None:
    """End this process when the test run ends, so that a hung rank does not outlive a killed run.

    Runs in a separate thread.
    """
    wait_for_end(parent)
    os._exit(1)


@contextlib.contextmanager
def _rank_output(path: Path) -> Iterator[None]:
    """Redirect file descriptors 1 and 2 to `path`, including output of C++ code."""
    with path.open("w", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log
        yield
