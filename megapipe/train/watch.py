"""Heartbeats and the watchdog of a run: share this rank's record, know the others', report once when the run hangs."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megapipe.comm.bootstrap import leave
from megapipe.comm.collectives import broadcast_object, gather_objects
from megapipe.comm.groups import Group
from megapipe.comm.store_exchange import StoreExchange
from megapipe.environment import Environment
from megapipe.errors import CommunicationError, ConfigError
from megapipe.monitor.diagnosis import silent_hosts
from megapipe.monitor.heartbeat import Heartbeat
from megapipe.monitor.process import host, process_space, start_ticks
from megapipe.monitor.roster import (
    NAME,
    Member,
    Roster,
    base_folder,
    live_folder,
    record_path,
    records_of,
    sight,
    speaks,
    sweep,
    write_copies,
    write_roster,
)
from megapipe.monitor.watchdog import Watchdog
from megapipe.plan.run_plan import RunPlan
from megapipe.topology import GROUP_NAMES, Topology
from megapipe.train.journal import Journal, recorded_folder

COPY_SECONDS = 1.0  # between copies of the records for `megapipe status`
LEAVE_SECONDS = 2.0  # to wait for the other ranks of this host to end too
DYING_SECONDS = 0.3  # between a broken connection and the end of the process that held it


@contextmanager
def watched(plan: RunPlan, environment: Environment, world: Group, journal: Journal) -> Iterator[None]:
    """Share this rank's heartbeat inside the block; end the process with a report if the run hangs. A collective.

    world: all ranks. Other groups are created inside the block: creating one waits for ranks that may be dead.
    """
    heartbeat = world.heartbeat
    if heartbeat is None:
        yield
        return
    watch = _Watch(plan, environment, world, heartbeat, journal)
    watch.start()
    try:
        yield
    except BaseException as error:
        watch.stop("failed")
        if isinstance(error, CommunicationError) and watch.watchdog.is_reported:
            leave(1)  # a report explains why the peer is lost; this error would only repeat it
        if isinstance(error, CommunicationError) and (others := watch.lost()):
            raise CommunicationError(f"{error}. {others}") from error
        raise
    watch.stop("ended")


class _Watch:
    """The watchdog, the copies and the exchange with other hosts of one rank's heartbeat."""

    def __init__(
        self, plan: RunPlan, environment: Environment, world: Group, heartbeat: Heartbeat, journal: Journal
    ) -> None:
        self._heartbeat, self._journal = heartbeat, journal
        self._run = recorded_folder(plan.config)
        self._folder = None if self._run is None else self._run / NAME  # of copies for `megapipe status`
        self._rank, topology, pid, space = world.global_rank, plan.topology, os.getpid(), process_space()
        token = broadcast_object(secrets.token_hex(6), world)
        try:
            self._live = live_folder(token)
            heartbeat.share(record_path(self._live, self._rank))
        except OSError as error:
            raise ConfigError(
                f"heartbeats cannot be written to {base_folder()}: {error.strerror}; free some space, or give "
                "--hang-timeout-seconds 0 to do without"
            ) from error
        stages = tuple(plan.placement.stages_of(topology.coordinates(self._rank).pp_rank))
        own = Member(self._rank, host(), pid, start_ticks(pid), space, _place(topology, self._rank), stages)
        several = {name: tuple(ranks for ranks in topology.groups(name) if len(ranks) > 1) for name in GROUP_NAMES}
        self._roster = Roster(tuple(gather_objects(own, world)), several)
        self._here = [member for member in self._roster.members if member.space == space]
        self._writes = self._rank == min(member.rank for member in self._here)
        self._exchange = None
        if len(self._here) < len(self._roster.members):
            hosts: dict[str, list[int]] = {}
            for member in self._roster.members:
                hosts.setdefault(member.space, []).append(member.rank)
            self._exchange = StoreExchange(
                self._rank,
                token,
                list(hosts.values()),
                partial(records_of, self._here, self._live),
                partial(speaks, self._here, self._rank, self._live),
            )
        self.watchdog = Watchdog(
            heartbeat,
            self._roster,
            self._rank,
            self._live,
            plan.config.parallel.hang_timeout_seconds,
            self._say,
            lambda: leave(1),
            exchange=self._exchange,
            kills=environment.launcher != "torchrun",  # its agent kills ranks itself
        )
        self._stopped = threading.Event()

    def start(self) -> None:
        if self._writes:
            sweep()
            self._write(partial(write_roster, run=self._run), self._live)
        if self._rank == 0 and self._folder is not None:
            self._write(write_roster, self._folder)
        if self._exchange is not None:
            self._exchange.start()
        self.watchdog.start()
        if self._writes and self._folder is not None:
            threading.Thread(target=self._copy_on, name="heartbeat-copies", daemon=True).start()

    def stop(self, last_phase: str) -> None:
        """End the watchdog and write a last copy. After a successful run the live records are removed."""
        self.watchdog.stop()
        self._heartbeat.leave(last_phase)
        self._stopped.set()
        if not self._writes:
            if self._exchange is not None:
                self._exchange.stop()
            return
        until = time.monotonic() + LEAVE_SECONDS if last_phase == "ended" else 0.0
        while time.monotonic() < until:
            if all((seen := sight(member, self._live)).has_left or seen.is_gone for member in self._here):
                break
            time.sleep(0.01)
        if self._exchange is not None:
            self._exchange.stop()
        self._copy()
        if last_phase == "ended":
            shutil.rmtree(self._live, ignore_errors=True)

    def lost(self) -> str:
        """Describe ranks of this host whose processes died without an error message, and hosts that do not answer."""
        time.sleep(DYING_SECONDS)
        members = [member for member in self._roster.members if sight(member, self._live).is_gone]
        names = "; ".join(f"{member} on {member.host}, process {member.pid}" for member in members)
        hosts = silent_hosts(self.watchdog.unreachable())
        parts = (f"Died without an error message: {names}" if names else "", hosts[:1].upper() + hosts[1:])
        return ". ".join(part for part in parts if part)

    def _say(self, report: str) -> None:
        error = CommunicationError(report)
        print(f"communication error (rank {self._rank}): {error}", file=sys.stderr, flush=True)
        self._journal.failed(error)
        if self._writes or self._folder is not None:
            self._copy()

    def _copy_on(self) -> None:
        while not self._stopped.wait(COPY_SECONDS):
            self._copy()

    def _copy(self) -> None:
        if self._folder is not None:
            self._write(write_copies, self._folder)

    def _write(self, write: Callable[[Path, Roster, Path], None], folder: Path) -> None:
        """Write for `megapipe status`. A disk that refuses costs its output, never the run."""
        try:
            write(folder, self._roster, self._live)
        except OSError as error:
            if not self._stopped.is_set():
                text = f"the heartbeats of this run could not be copied to its folder: {error.strerror}"
                self._journal.record("note", text=text)
            self._folder = None


def rank_text(topology: Topology, rank: int) -> str:
    """Return a rank with its place in the grid: 'rank 5 (pp 1, tp 1)'; axes of size 1 are left out."""
    place = _place(topology, rank)
    return f"rank {rank} ({place})" if place else f"rank {rank}"


def _place(topology: Topology, rank: int) -> str:
    coordinates = topology.coordinates(rank)._asdict()
    return ", ".join(
        f"{axis} {coordinates[axis + '_rank']}" for axis in ("pp", "dp", "cp", "tp") if topology.size(axis) > 1
    )
