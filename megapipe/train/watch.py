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
from pathlib import Path

from megapipe.comm.bootstrap import leave
from megapipe.comm.collectives import broadcast_object, gather_objects
from megapipe.comm.groups import ProcessGroups
from megapipe.comm.store_exchange import StoreExchange
from megapipe.config.config import Config
from megapipe.environment import Environment
from megapipe.errors import CommunicationError, ConfigError
from megapipe.monitor.diagnosis import silent_hosts
from megapipe.monitor.heartbeat import Heartbeat
from megapipe.monitor.process import host, process_space, start_ticks
from megapipe.monitor.roster import (
    Member,
    Roster,
    base_folder,
    live_folder,
    record_path,
    sight,
    sweep,
    write_copies,
    write_live_roster,
    write_roster,
)
from megapipe.monitor.watchdog import Watchdog
from megapipe.plan.run_plan import RunPlan
from megapipe.topology import GROUP_NAMES, Topology
from megapipe.train.journal import Journal

COPY_SECONDS = 1.0  # between copies of the records for `megapipe status`
LEAVE_SECONDS = 2.0  # to wait for the other ranks of this host to end too
DYING_SECONDS = 0.3  # between a broken connection and the end of the process that held it


def heartbeat_of(config: Config) -> Heartbeat | None:
    """Return this rank's heartbeat, or None with --hang-timeout-seconds 0."""
    return Heartbeat(GROUP_NAMES) if config.parallel.hang_timeout_seconds else None


@contextmanager
def watched(
    plan: RunPlan, environment: Environment, groups: ProcessGroups, folder: Path | None, journal: Journal
) -> Iterator[None]:
    """Share this rank's heartbeat inside the block, and end the process with a report if the run hangs. Entered by all
    ranks together.

    folder: of the run, for `megapipe status`; None for a run that writes none.
    """
    heartbeat = groups.world.heartbeat
    if heartbeat is None:
        yield
        return
    watch = _Watch(plan, environment, groups, heartbeat, folder, journal)
    watch.start()
    try:
        yield
    except BaseException as error:
        watch.stop("failed")
        if isinstance(error, CommunicationError) and watch.is_reported:
            leave(1)  # a report explains why the peer is lost; this error would only repeat it
        if isinstance(error, CommunicationError) and (others := watch.lost()):
            raise CommunicationError(f"{error}. {others}") from error
        raise
    watch.stop("ended")


class _Watch:
    """The watchdog, the copies and the exchange with other hosts of one rank's heartbeat."""

    def __init__(
        self,
        plan: RunPlan,
        environment: Environment,
        groups: ProcessGroups,
        heartbeat: Heartbeat,
        folder: Path | None,
        journal: Journal,
    ) -> None:
        self._heartbeat, self._folder, self._journal = heartbeat, folder, journal
        self._rank = groups.world.global_rank
        token = broadcast_object(secrets.token_hex(6), groups.world)
        try:
            self._live = live_folder(token)
            heartbeat.share(record_path(self._live, self._rank))
        except OSError as error:
            raise ConfigError(
                f"heartbeats cannot be written to {base_folder()}: {error.strerror}; free some space, or give "
                "--hang-timeout-seconds 0 to do without"
            ) from error
        held = plan.placement.stages_of(plan.topology.coordinates(self._rank).pp_rank)
        self.roster = Roster(
            tuple(gather_objects(_member(plan.topology, self._rank, tuple(held)), groups.world)), _groups(plan.topology)
        )
        here = [member.rank for member in self.roster.members if member.space == process_space()]
        self._writes = self._rank == min(here)
        self._exchange = None
        if len(here) < len(self.roster.members):
            self._exchange = StoreExchange(self._rank, token, heartbeat.as_bytes)
        limit = plan.config.parallel.hang_timeout_seconds
        kills = environment.launcher != "torchrun"  # its agent kills ranks itself
        self._watchdog = Watchdog(
            heartbeat,
            self.roster,
            self._rank,
            self._live,
            limit,
            self._say,
            lambda: leave(1),
            exchange=self._exchange,
            kills=kills,
        )
        self._stopped = threading.Event()
        self._copier = threading.Thread(target=self._copy_on, name="heartbeat-copies", daemon=True)

    def start(self) -> None:
        if self._writes:
            sweep(base_folder())
            self._write(lambda: write_live_roster(self._live, self.roster, self._live))
        if self._rank == 0 and self._folder is not None:
            folder = self._folder
            self._write(lambda: write_roster(folder, self.roster, self._live))
        if self._exchange is not None:
            self._exchange.start()
        self._watchdog.start()
        if self._writes and self._folder is not None:
            self._copier.start()

    def stop(self, last_phase: str) -> None:
        """End the watchdog and write a last copy. After a successful run the live records are removed."""
        self._watchdog.stop()
        self._heartbeat.leave(last_phase)
        self._stopped.set()
        if self._exchange is not None:
            self._exchange.stop()
        if not self._writes:
            return
        if last_phase == "ended":
            self._wait_for_local_ranks()
        self._copy()
        if last_phase == "ended":
            shutil.rmtree(self._live, ignore_errors=True)

    @property
    def is_reported(self) -> bool:
        """True if some rank has reported a hang."""
        return self._watchdog.is_reported

    def lost(self) -> str:
        """Describe ranks of this host whose processes died without an error message, and hosts that do not answer."""
        time.sleep(DYING_SECONDS)
        members = [member for member in self.roster.members if sight(member, self._live).is_gone]
        names = "; ".join(f"{member} on {member.host}, process {member.pid}" for member in members)
        hosts = silent_hosts(self._watchdog.unreachable())
        parts = (f"Died without an error message: {names}" if names else "", hosts[:1].upper() + hosts[1:])
        return ". ".join(part for part in parts if part)

    def _say(self, report: str) -> None:
        error = CommunicationError(report)
        print(f"communication error (rank {self._rank}): {error}", file=sys.stderr, flush=True)
        self._journal.failed(error)
        if self._writes or self._folder is not None:
            self._copy()

    def _wait_for_local_ranks(self) -> None:
        until = time.monotonic() + LEAVE_SECONDS
        here = [member for member in self.roster.members if member.space == process_space()]
        while (
            not all((seen := sight(m, self._live)).has_left or seen.is_gone for m in here) and time.monotonic() < until
        ):
            time.sleep(0.01)

    def _copy_on(self) -> None:
        while not self._stopped.wait(COPY_SECONDS):
            self._copy()

    def _copy(self) -> None:
        if self._folder is not None:
            folder = self._folder
            self._write(lambda: write_copies(folder, self.roster, self._live))

    def _write(self, write: Callable[[], None]) -> None:
        """Write for `megapipe status`. A disk that refuses costs its output, never the run."""
        try:
            write()
        except OSError as error:
            if not self._stopped.is_set():
                self._journal.note(f"the heartbeats of this run could not be copied to its folder: {error.strerror}")
            self._folder = None


def rank_text(topology: Topology, rank: int) -> str:
    """Return a rank with its place in the grid: 'rank 5 (pp 1, tp 1)'; axes of size 1 are left out."""
    place = _place(topology, rank)
    return f"rank {rank} ({place})" if place else f"rank {rank}"


def _place(topology: Topology, rank: int) -> str:
    coordinates = topology.coordinates(rank)
    sizes = {"pp": topology.pp, "dp": topology.dp, "cp": topology.cp, "tp": topology.tp}
    return ", ".join(f"{axis} {getattr(coordinates, axis + '_rank')}" for axis, size in sizes.items() if size > 1)


def _member(topology: Topology, rank: int, stages: tuple[int, ...]) -> Member:
    pid = os.getpid()
    return Member(rank, host(), pid, start_ticks(pid), process_space(), _place(topology, rank), stages)


def _groups(topology: Topology) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return all groups of more than one rank, by kind."""
    return {name: tuple(ranks for ranks in topology.groups(name) if len(ranks) > 1) for name in GROUP_NAMES}
