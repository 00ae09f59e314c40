"""Heartbeats and the watchdog of a run: this rank's record shared, the others known, one report when the run hangs."""

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
from megapipe.monitor.folder import (
    base_folder,
    live_folder,
    record_path,
    sight,
    sweep,
    write_copies,
    write_live_roster,
    write_roster,
)
from megapipe.monitor.heartbeat import Heartbeat
from megapipe.monitor.process import host, process_space, start_ticks
from megapipe.monitor.roster import Member, Roster
from megapipe.monitor.watchdog import Watchdog
from megapipe.monitor.words import silent_hosts
from megapipe.plan.run_plan import RunPlan
from megapipe.topology import GROUP_NAMES, Topology
from megapipe.train.run_log import RunLog

COPY_SECONDS = 1.0
LAST_WORDS_SECONDS = 2.0  # for the other ranks of this host to end too
DYING_SECONDS = 0.3  # between a broken connection and the end of the process that held it


def heartbeat_of(config: Config) -> Heartbeat | None:
    """This rank's heartbeat; None where nobody shall watch it."""
    return Heartbeat(GROUP_NAMES) if config.parallel.hang_timeout_seconds else None


@contextmanager
def watched(
    plan: RunPlan, environment: Environment, groups: ProcessGroups, folder: Path | None, log: RunLog
) -> Iterator[None]:
    """Inside the block this rank's heartbeat is seen, and a hang ends the process with a report. Entered by all ranks together.

    folder: of the run, for `megapipe status`; None for a run that writes none.
    """
    heartbeat = groups.world.heartbeat
    if heartbeat is None:
        yield
        return
    watch = _Watch(plan, environment, groups, heartbeat, folder, log)
    watch.start()
    try:
        yield
    except BaseException as error:
        watch.stop("failed")
        if isinstance(error, CommunicationError) and watch.is_told:
            leave(1)  # the peer was ended after a report, which says more than that it is lost
        if isinstance(error, CommunicationError) and (others := watch.lost()):
            raise CommunicationError(f"{error}. {others}") from error
        raise
    watch.stop("ended")


class _Watch:
    """What belongs to the heartbeat of one rank."""

    def __init__(
        self,
        plan: RunPlan,
        environment: Environment,
        groups: ProcessGroups,
        heartbeat: Heartbeat,
        folder: Path | None,
        log: RunLog,
    ) -> None:
        self._heartbeat, self._folder, self._log = heartbeat, folder, log
        self._rank = groups.world.global_rank
        token = broadcast_object(secrets.token_hex(6), groups.world)
        try:
            self._live = live_folder(token)
            heartbeat.share(record_path(self._live, self._rank))
        except OSError as error:
            raise ConfigError(
                f"heartbeats cannot be kept in {base_folder()}: {error.strerror}; free it, or give --hang-timeout-seconds 0 to go without"
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
        kills = environment.launcher != "torchrun"  # whose agent does
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
        """The last copy is that of the whole host; after a run that went well the live records go."""
        self._watchdog.stop()
        self._heartbeat.leave(last_phase)
        self._stopped.set()
        if self._exchange is not None:
            self._exchange.stop()
        if not self._writes:
            return
        if last_phase == "ended":
            self._wait_for_last_words()
        self._copy()
        if last_phase == "ended":
            shutil.rmtree(self._live, ignore_errors=True)

    @property
    def is_told(self) -> bool:
        """Some rank has reported a hang."""
        return self._watchdog.is_told

    def lost(self) -> str:
        """Ranks of this host whose processes have ended without a word, and hosts from which nothing comes, for a person."""
        time.sleep(DYING_SECONDS)
        members = [member for member in self.roster.members if sight(member, self._live).is_gone]
        names = "; ".join(f"{member} on {member.host}, process {member.pid}" for member in members)
        hosts = silent_hosts(self._watchdog.unreachable())
        told = (f"Gone without a word: {names}" if names else "", hosts[:1].upper() + hosts[1:])
        return ". ".join(part for part in told if part)

    def _say(self, report: str) -> None:
        error = CommunicationError(report)
        print(f"communication error (rank {self._rank}): {error}", file=sys.stderr, flush=True)
        self._log.failed(error)
        if self._writes or self._folder is not None:
            self._copy()

    def _wait_for_last_words(self) -> None:
        until = time.monotonic() + LAST_WORDS_SECONDS
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
        """A disk that refuses costs what `megapipe status` shows, never the run."""
        try:
            write()
        except OSError as error:
            if not self._stopped.is_set():
                self._log.note(f"the heartbeats of this run cannot be copied to its folder: {error.strerror}")
            self._folder = None


def _member(topology: Topology, rank: int, stages: tuple[int, ...]) -> Member:
    coordinates, pid = topology.coordinates(rank), os.getpid()
    sizes = {"pp": topology.pp, "dp": topology.dp, "cp": topology.cp, "tp": topology.tp}
    place = ", ".join(f"{axis} {getattr(coordinates, axis + '_rank')}" for axis, size in sizes.items() if size > 1)
    return Member(rank, host(), pid, start_ticks(pid), process_space(), place, stages)


def _groups(topology: Topology) -> dict[str, tuple[tuple[int, ...], ...]]:
    """All groups of more than one rank, by kind."""
    return {name: tuple(ranks for ranks in topology.groups(name) if len(ranks) > 1) for name in GROUP_NAMES}
