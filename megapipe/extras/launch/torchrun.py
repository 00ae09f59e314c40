"""torchrun's agent without its output: it forwards signals and returns the exit code of the first failed rank.

torchrun itself prints a traceback after every failure, turns exit code 2 into 1, and answers a signal by killing the
ranks 30 seconds later, even if they are still saving. Here the ranks decide when to exit and with what code.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, determine_local_world_size, get_args_parser

from megapipe.comm.bootstrap import create_store, first_line, open_files_needed
from megapipe.comm.network import await_listener, check_name
from megapipe.environment import announce_launcher, set_for_libraries
from megapipe.errors import CommunicationError, ConfigError
from megapipe.extras.launch.flags import TORCHRUN_PORT, parse_refusing, ranks_per_gpu
from megapipe.extras.launch.forwarder import Forwarder
from megapipe.monitor.process import allow_open_files

LAST_LINES = 30  # of a log file, shown if nothing was printed
# for the remaining ranks when one has failed: they cannot save, and their messages would add nothing (cli.frame)
GRACE_SECONDS = 2
SAVING_SECONDS = 60  # for healthy ranks that are restarted because a node joined
TOLD_BY_RANK = (1, 2, 3, 130)  # exit codes of a program that has printed its error
FINAL = (2, 3, 130)  # of these, where a restart would not help: refused, no progress, interrupted twice
HINTS = {
    signal.SIGKILL: "; the system may have run out of memory",
    signal.SIGBUS: "; a file that it had mapped was cut, such as an index of --data-cache-path, or /dev/shm is full",
}
LOOPBACK = "127.0.0.1"
RENDEZVOUS_SECONDS = 600.0  # for the node that hosts the rendezvous to start; --rdzv-conf timeout=SECONDS


@dataclass(frozen=True)
class Outcome:
    """The end of the ranks of this node."""

    exit_code: int
    message: str = ""  # an error that no rank could print itself
    rank: int | None = None  # the first that failed


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse torchrun's arguments. Raises ConfigError where torchrun would print its usage; `--help` exits."""
    parser = get_args_parser()
    parser.prog = "megapipe launch"
    parser.add_argument("--ranks-per-gpu", "--ranks_per_gpu", help="ranks that share each GPU, to check a grid on one")
    return parse_refusing(parser, arguments)


def ranks_here(arguments: argparse.Namespace) -> int:
    """Return the number of ranks on this node. Raises ConfigError."""
    try:
        count = determine_local_world_size(arguments.nproc_per_node)
    except ValueError:
        raise ConfigError(
            f"--nproc-per-node {arguments.nproc_per_node}: expected a number of ranks, gpu or cpu"
        ) from None
    if count < 1:
        raise ConfigError(f"--nproc-per-node {count}: expected at least 1 rank")
    return count


def run(arguments: argparse.Namespace, num_threads: int, forwarder: Forwarder) -> Outcome:
    """Run the script on all ranks of this node and wait for their end. Raises ConfigError, CommunicationError.

    num_threads: OMP_NUM_THREADS of a rank, if it is not set. forwarder: entered.
    On one node, without flags about the rendezvous, the ranks connect through a free port of the loopback device.
    """
    set_for_libraries(OMP_NUM_THREADS=num_threads)
    announce_launcher(ranks_per_gpu(arguments.ranks_per_gpu, ranks_here(arguments)))
    alone = str(arguments.nnodes) in ("1", "1:1")
    if arguments.master_port is None:
        is_static = arguments.rdzv_backend == "static" and not arguments.rdzv_endpoint and not arguments.standalone
        arguments.master_port = free_port() if alone and is_static else TORCHRUN_PORT
    if arguments.standalone:
        arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.rdzv_id = "c10d", f"{LOOPBACK}:0", "standalone"
    with _silence():
        try:
            config, command, command_arguments = config_from_args(arguments)
            _find_nodes(config)
            num_files = open_files_needed(config.max_nodes * config.nproc_per_node, config.max_nodes, "", True)
            if remark := allow_open_files(num_files):
                print(f"megapipe launch: {remark}", file=sys.stderr)
            agent = _Agent(forwarder, config, command, command_arguments)
            result = agent.run()
        except (AssertionError, ValueError) as error:
            raise ConfigError(str(error)) from None
        except RendezvousTimeoutError:
            raise CommunicationError(
                "not enough nodes came in time: start this command on the others too, or wait longer with "
                "--rdzv-conf join_timeout=SECONDS"
            ) from None
        except (RuntimeError, OSError, RendezvousError) as error:
            text = first_line(error.__cause__ or error)
            raise CommunicationError(f"the nodes could not connect: {text}") from error
    if not result.is_failed():
        return Outcome(0)
    outcome = outcome_of({rank: failure.exitcode for rank, failure in result.failures.items()}, forwarder.received)
    words = "" if outcome.rank is None else agent.last_words(outcome.rank, result.failures[outcome.rank].local_rank)
    return replace(outcome, message="\n".join(filter(None, [outcome.message, words])))


def outcome_of(exit_codes: Mapping[int, int], received: signal.Signals | None = None) -> Outcome:
    """Return the outcome from the exit codes of the ranks that failed or were terminated here.

    exit_codes: by global rank, first failure first. received: the signal that was forwarded to the ranks.
    """
    own = {rank: code for rank, code in exit_codes.items() if code != -signal.SIGTERM}
    rank, code = next(iter((own or exit_codes).items()))
    intact = "saved checkpoints are intact"
    if received is not None and code in (-received, -signal.SIGTERM, -signal.SIGKILL):
        return Outcome(128 + received, f"ended by {received.name} before the ranks could save; {intact}", rank)
    if code < 0:
        killed = f"rank {rank} was killed by {signal.Signals(-code).name}{HINTS.get(signal.Signals(-code), '')}"
        return Outcome(128 - code, f"{killed}. All ranks were terminated; {intact}", rank)
    message = "" if code in TOLD_BY_RANK else f"rank {rank} ended with exit code {code}; all ranks were terminated"
    return Outcome(code, message, rank)


def _find_nodes(config: LaunchConfig) -> None:
    """Check that the rendezvous is known, and if another node hosts it, wait for it. Raises CommunicationError."""
    host, _, port = config.rdzv_endpoint.rpartition(":")
    if not host or not port.isdigit():
        return
    check_name(host, f"--master-addr or --rdzv-endpoint {config.rdzv_endpoint} must be known to this machine")
    if config.rdzv_backend == "c10d":
        parameters = RendezvousParameters("c10d", config.rdzv_endpoint, config.run_id, 1, 1, **config.rdzv_configs)
        is_host = parameters.get_as_bool("is_host")
        if not (_matches_machine_hostname(host) if is_host is None else is_host):
            await_listener(host, int(port), float(config.rdzv_configs.get("timeout", RENDEZVOUS_SECONDS)))


def free_port() -> int:
    """Return a free port of the loopback device."""
    with socket.socket() as found:
        found.bind((LOOPBACK, 0))
        return int(found.getsockname()[1])


class _Agent(LocalElasticAgent):
    """torchrun's agent, whose ranks are known to the forwarder and get GRACE_SECONDS once one of them has failed.

    --max-restarts: not after a signal, nor if a restart would not help (FINAL). Ranks that are restarted because a node
    joined may save first if they are all on this node: those of other nodes would take part, exit with code 0 and count
    as finished.
    """

    def __init__(
        self, forwarder: Forwarder, config: LaunchConfig, command: Any, command_arguments: Sequence[str]
    ) -> None:
        parameters = RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **config.rdzv_configs,
        )
        rendezvous = rendezvous_registry.get_rendezvous_handler(parameters)
        if isinstance(rendezvous, StaticTCPRendezvous):  # its store would listen on every network interface
            rendezvous = _Static(rendezvous)
        address, _, port = config.rdzv_endpoint.rpartition(":") if config.rdzv_backend == "static" else ("", "", "")
        spec = WorkerSpec(
            role=config.role,
            local_world_size=config.nproc_per_node,
            entrypoint=command,
            args=tuple(command_arguments),
            rdzv_handler=rendezvous,
            max_restarts=config.max_restarts,
            monitor_interval=config.monitor_interval,
            master_addr=address or None,
            master_port=int(port) if port else None,
            local_addr=config.local_addr,
            numa_options=config.numa_options,
        )
        assert config.logs_specs is not None  # config_from_args sets it
        super().__init__(spec=spec, logs_specs=config.logs_specs)
        self._forwarder = forwarder
        self._end = signal.SIGTERM, GRACE_SECONDS  # how ranks are ended

    def last_words(self, rank: int, local_rank: int) -> str:
        """Return the end of a rank's log if its standard error went only to a file (--log-dir with --redirects)."""
        assert self._pcontext is not None
        path = Path(self._pcontext.stderrs.get(local_rank) or os.devnull)
        lines: list[str] = []
        with suppress(OSError):
            lines = path.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join([f"the last lines of rank {rank}, {path}:", *lines]) if lines else ""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with self._forwarder.starting_ranks() as process_ids:
            started: dict[int, Any] = super()._start_workers(worker_group)
            process_ids += [int(process_id) for process_id in started.values()]
        context = self._pcontext
        assert context is not None
        close = context.close
        self._end = signal.SIGTERM, GRACE_SECONDS
        context.close = lambda death_sig=None, timeout=0: close(*self._end)  # type: ignore[method-assign]
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._forwarder.repeat_request()
        result = super()._monitor_workers(worker_group)
        if result.is_failed() and self._remaining_restarts:
            received = self._forwarder.received
            outcome = outcome_of({rank: failure.exitcode for rank, failure in result.failures.items()}, received)
            if received is not None or outcome.exit_code in FINAL:
                self._remaining_restarts = 0
            else:
                limit = self._worker_group.spec.max_restarts
                number = limit - self._remaining_restarts + 1
                why = re.split("[.;]", outcome.message)[0] or "see above"
                print(f"restart {number} of at most {limit} (--max-restarts): {why}", file=sys.stderr, flush=True)
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state is WorkerState.HEALTHY:
            alone = worker_group.group_world_size == 1
            self._end = (signal.SIGTERM, SAVING_SECONDS) if alone else (signal.SIGKILL, GRACE_SECONDS)
            print("the number of nodes changed: all ranks are restarted", file=sys.stderr, flush=True)
        self._forwarder.forget_ranks()
        super()._restart_workers(worker_group)


class _Static(StaticTCPRendezvous):
    """torch's static rendezvous with megapipe's store, which listens only on the job's network interface."""

    def __init__(self, of: StaticTCPRendezvous) -> None:
        super().__init__(
            of.master_addr, of.master_port, of.rank, of.world_size, of.run_id, int(of.timeout.total_seconds())
        )

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            seconds, num_nodes, is_first = self.timeout.total_seconds(), self.world_size, self.rank == 0
            self._store = create_store(self.master_addr, self.master_port, num_nodes, is_first, seconds, num_nodes)
        return super().next_rendezvous()


@contextmanager
def _silence() -> Iterator[None]:
    """Turn off torchrun's log, and keep it from replacing our signal handlers."""
    set_for_libraries(TORCHELASTIC_SIGNALS_TO_HANDLE=" ")
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
