"""Joining the world of ranks and leaving it, with the store through which the ranks of a job find each other."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from megapipe.comm.meeting import REFUSED_SECONDS, FactsOf, Notes, Process, attend, chair
from megapipe.comm.network import await_listener, check_name, interface_towards, listening_address
from megapipe.comm.shared_gpu import share_gpu
from megapipe.config.config import Config
from megapipe.environment import Environment, set_for_libraries
from megapipe.errors import CommunicationError, ConfigError, MegapipeError
from megapipe.monitor.process import allow_open_files, host, start_ticks
from megapipe.monitor.start_marks import leave_mark, remove_mark

TAKEN_SECONDS = 10.0  # for a second rank 0 to report to the first
STORE_SECONDS = 30.0  # within which a store answers a connection, also where thousands of ranks connect
OPEN_FILES = 1024  # of a rank: data, libraries, NCCL's connections; what grows with the world is added


@dataclass(frozen=True)
class World:
    """This process's rank in the world, with its backend and device."""

    global_rank: int
    world_size: int
    backend: str  # 'gloo' or 'nccl'
    device: torch.device
    timeout_seconds: float


def join(config: Config, environment: Environment, facts_of: FactsOf, notes: Notes | None = None) -> World:
    """Meet the other ranks over the backend that the configuration asks for, as `start` does."""
    parallel, device = config.parallel, config.training.device
    timeout_seconds = 60.0 * parallel.distributed_timeout_minutes
    backend = parallel.distributed_backend
    return start(environment, backend, timeout_seconds, device, facts_of=facts_of, notes=notes)


def start(
    environment: Environment,
    backend: str = "auto",
    timeout_seconds: float = 600.0,
    device: str = "auto",
    *,
    facts_of: FactsOf,
    notes: Notes | None = None,
) -> World:
    """Choose backend and device, meet the other ranks, and initialize torch.distributed; no meeting for a single rank.

    backend, device: see `choose_backend`. facts_of: from rank 0's notes to what must be the same on all ranks. notes:
    of rank 0. Raises ConfigError if a backend or device is not available, DisagreementError if ranks differ,
    CommunicationError if some do not come.
    """
    rank, world_size = environment.global_rank, environment.world_size
    backend, torch_device = choose_backend(backend, device, environment.gpu_index)
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
    for remark in share_gpu(environment, torch_device):
        if rank == 0:
            print(remark, file=sys.stderr)
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise CommunicationError(
                f"torch.distributed was initialized as rank {dist.get_rank()} of {dist.get_world_size()}, "
                f"but the launcher set rank {rank} of {world_size}"
            )
        if world_size > 1:
            store = dist.distributed_c10d._get_default_store()
            own = _process(environment)
            if rank == 0:
                chair(store, own, facts_of(notes or {}), notes or {}, timeout_seconds)
            else:
                attend(store, own, facts_of, timeout_seconds)
    elif world_size > 1:
        leave_mark(environment)  # for programs that start without a command of megapipe
        remark = allow_open_files(open_files_needed(world_size, environment.num_nodes, backend, rank == 0))
        if remark and rank == 0:  # it needs most
            print(remark, file=sys.stderr)
        check_name(environment.master_addr)
        if backend == "gloo":
            # by default gloo listens at the address of the machine's host name, which other ranks cannot always reach
            # and which can be open to other machines
            interface = interface_towards(environment.master_addr, environment.num_nodes)
            if interface is not None:
                set_for_libraries(GLOO_SOCKET_IFNAME=interface)
        own = _process(environment, torch_device if backend == "nccl" else None)
        with _connection_errors(environment, backend, timeout_seconds):
            store = _meet(environment, own, facts_of, notes or {}, timeout_seconds)
            # no device_id: with it, every new group is split from the world's communicator, a collective that also
            # blocks non-members
            timeout = timedelta(seconds=timeout_seconds)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        remove_mark(environment)
    return World(rank, world_size, backend, torch_device, timeout_seconds)


def open_files_needed(world_size: int, num_nodes: int, backend: str, hosts_store: bool) -> int:
    """Return how many files and sockets a rank, or a launcher that hosts the store, opens at most."""
    needed = OPEN_FILES
    if hosts_store:  # a connection of every rank; one for the heartbeats of every host, and of every rank after a hang
        needed += 2 * world_size + num_nodes
    if backend == "gloo":  # a connection to every member of each of this rank's groups
        needed += 4 * world_size
    return needed


def choose_backend(backend: str, device: str, gpu_index: int) -> tuple[str, torch.device]:
    """Return backend and device of this process. A requested one is used or rejected, never replaced.

    backend: 'auto' (NCCL on GPUs, gloo on CPUs), 'gloo', 'nccl'. device: 'auto' (a GPU where torch sees one), 'cpu',
    'cuda'. gpu_index: of the node's GPUs. Raises ConfigError if the choice is not available, or if torch is built for
    GPUs and can use none.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"unknown --device {device!r}; use auto, cpu or cuda")
    if device == "cpu":
        if backend == "nccl":
            raise ConfigError("--distributed-backend nccl needs GPUs, but --device is cpu; use gloo or --device cuda")
        return "gloo", torch.device("cpu")
    if not torch.cuda.is_available():
        built_for = torch.version.cuda or torch.version.hip
        if built_for is not None:  # silently training on the CPU would look like a very slow GPU
            why = "no GPU is visible (CUDA_VISIBLE_DEVICES hides all of them, or the container was started without)"
            try:
                torch.cuda.init()
                torch.cuda.current_device()
            except (RuntimeError, AssertionError) as error:
                why = first_line(error).rstrip(".")
            raise ConfigError(
                f"this torch is built for {'CUDA' if torch.version.cuda else 'ROCm'} {built_for}, but it cannot use a "
                f"GPU: {why}; repair that (`nvidia-smi` shows the driver), or use the CPU with "
                "--device cpu"
            )
        if device == "cuda":
            raise ConfigError("--device cuda: torch sees no GPU (this is a CPU build of torch); use --device cpu")
        if backend == "nccl":
            raise ConfigError("--distributed-backend nccl needs GPUs, but torch sees none; use gloo")
        return "gloo", torch.device("cpu")
    # each rank sees all GPUs of the node, or only its own (srun --gpus-per-task=1), see _process; with gloo ranks may
    # share GPUs, as tensors travel through host memory
    index = gpu_index % torch.cuda.device_count()
    if torch.version.hip is None:
        _check_architecture(index)
    return "gloo" if backend == "gloo" else "nccl", torch.device("cuda", index)


def _check_architecture(index: int) -> None:
    """Raise ConfigError if this torch has no code for a GPU: CUDA's error in the first kernel does not say what to do.

    Code for sm_90 runs on GPUs 9.0 and 9.1, PTX of compute_90 on all from 9.0 on.
    """
    built = torch.cuda.get_arch_list()
    if not built:
        return
    major, minor = torch.cuda.get_device_capability(index)
    for kind, text in (one.split("_", 1) for one in built):
        made_for = divmod(int(text.rstrip("af")), 10)
        newer = made_for <= (major, minor) and not text.endswith("a")
        if (newer and (kind == "compute" or made_for[0] == major)) or made_for == (major, minor):
            return
    wanted = "cu126" if (major, minor) < (7, 5) else "cu130"
    raise ConfigError(
        f"{torch.cuda.get_device_name(index)} has compute capability {major}.{minor}, and torch {torch.__version__} "
        f"has code for {', '.join(built)} only; install a build with it: TORCH_CUDA={wanted} launch/install.sh, or "
        f"pip install torch --index-url https://download.pytorch.org/whl/{wanted}"
    )


def _process(environment: Environment, device: torch.device | None = None) -> Process:
    """Return the description of this process for the meeting. device: its GPU, of which each rank may be one user."""
    pid, place, uuid = os.getpid(), f"local rank {environment.local_rank} of node {environment.node_rank}", ""
    if device is not None and torch.cuda.device_count() * environment.ranks_per_gpu < environment.local_world_size:
        user, users = environment.local_rank % environment.ranks_per_gpu, environment.ranks_per_gpu
        uuid = f"GPU {torch.cuda.get_device_properties(device).uuid}" + f", user {user} of {users}" * (users > 1)
    rank = None if environment.global_rank < 0 else environment.global_rank
    return Process(rank, environment.world_size, host(), pid, start_ticks(pid), place=place, device=uuid)


def _meet(
    environment: Environment, own: Process, facts_of: FactsOf, notes: Notes, timeout_seconds: float, text: str = ""
) -> dist.Store:
    """Connect to the store, meet the other ranks there and return the store of this start; see `meeting`.

    text: why this process cannot start. Raises what torch's stores raise, DisagreementError, CommunicationError.
    """
    address = environment.master_addr, environment.master_port
    if own.rank != 0:
        await_listener(*address, timeout_seconds)
        return attend(_connect(*address, timeout_seconds), own, facts_of, timeout_seconds, text)
    facts = {} if text else facts_of(notes)
    if environment.has_agent_store:
        return chair(_connect(*address, timeout_seconds), own, facts, notes, timeout_seconds, text)
    try:
        store: dist.Store = create_store(*address, None, True, timeout_seconds, environment.num_nodes)
    except OSError:
        if not text:  # the port may be that of a job with another rank 0, which then hears of this one
            with suppress(MegapipeError, RuntimeError):
                taken = "rank 0 is there already; each process needs a RANK of its own"
                attend(_connect(*address, TAKEN_SECONDS), own, lambda _: {}, TAKEN_SECONDS, taken)
        raise
    return chair(store, own, facts, notes, timeout_seconds, text)


def _connect(host: str, port: int, timeout_seconds: float) -> dist.TCPStore:
    """Return a store that another process hosts.

    Raises CommunicationError if what listens there does not answer like a store: torch would wait without a limit.
    """
    stores: list[dist.TCPStore] = []

    def connect() -> None:
        timeout = timedelta(seconds=timeout_seconds)
        with suppress(RuntimeError):
            stores.append(dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False))

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(STORE_SECONDS)
    if not stores:
        raise CommunicationError(
            f"what listens at {host}:{port} does not answer like the store of this job's rank 0: another program uses "
            "the port (set MASTER_PORT to a free port), or rank 0 has just ended"
        )
    return stores[0]


def refuse(environment: Environment, error: Exception) -> None:
    """Report to the ranks that wait for this one why it cannot start; do nothing if they have met.

    Rank 0 waits up to REFUSED_SECONDS for the others.
    """
    if dist.is_initialized():
        return
    text = str(error) if isinstance(error, MegapipeError) else f"{type(error).__name__}: {error}"
    if environment.global_rank == 0:
        print(
            f"waiting up to {REFUSED_SECONDS:g} s for the other ranks, which are told why rank 0 cannot start",
            file=sys.stderr,
            flush=True,
        )
    with suppress(MegapipeError, RuntimeError, OSError, ValueError):
        _meet(environment, _process(environment), lambda _: {}, {}, REFUSED_SECONDS, text)


@contextmanager
def _connection_errors(environment: Environment, backend: str, timeout_seconds: float) -> Iterator[None]:
    """Turn errors of torch's stores and backends into those of megapipe."""
    where = f"{environment.master_addr}:{environment.master_port}"
    this_rank = f"rank {environment.global_rank} of {environment.world_size}"
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{this_rank} cannot find the other ranks: {error}; start it with torchrun") from error
    except OSError as error:
        raise CommunicationError(
            f"{this_rank} cannot listen at {where}: {error.strerror}; set MASTER_PORT to a free port"
        ) from error
    except RuntimeError as error:
        raise CommunicationError(
            f"{this_rank} could not connect to the other ranks at {where} over {backend} "
            f"(timeout {timeout_seconds:g} s): {first_line(error)}"
        ) from error


def create_store(
    host: str, port: int, num_clients: int | None, is_server: bool, timeout_seconds: float, num_nodes: int
) -> dist.TCPStore:
    """Return the store at an address once so many processes have connected. is_server: this one hosts the store.

    torch's own store listens on every interface and has no password, so any program that can reach it can read and
    write it. This one listens only where ranks can connect from: on the loopback interface, or that of the job's host.
    num_clients: None to wait for no client. Raises OSError if the port is taken, RuntimeError (torch's DistError) or
    CommunicationError if the others do not connect in time.
    """
    listener = None
    check_name(host)
    if not is_server:
        await_listener(host, port, timeout_seconds)
        _connect(host, port, timeout_seconds)  # it is a store
    else:
        address = listening_address(host, num_nodes)
        is_ipv6 = ":" in address if address else socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
        dual = is_ipv6 and not address  # on every interface, of both protocols
        server = socket.create_server((address, port), family=family, dualstack_ipv6=dual, backlog=4096)
        listener = server.detach()  # torch closes it
    timeout = timedelta(seconds=timeout_seconds)
    waits = num_clients is not None
    return dist.TCPStore(
        host, port, num_clients, is_server, timeout, waits, multi_tenant=True, master_listen_fd=listener
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error of torch, without the C++ stack that follows, or the name of its type."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def is_joined() -> bool:
    """Return True if this process is a rank of a world of several."""
    return dist.is_initialized()


def disband() -> None:
    """Leave the world together with all other ranks; the process continues alone. Does nothing outside a world.

    Raises CommunicationError if a rank does not come. The barrier keeps a rank from taking the store away.
    """
    if not dist.is_initialized():
        return
    try:
        devices = [torch.cuda.current_device()] if dist.get_backend() == "nccl" else None
        dist.barrier(device_ids=devices)
    except RuntimeError as error:
        missing = f"the other ranks did not reach the end of the run: {first_line(error)}"
        raise CommunicationError(f"rank {dist.get_rank()}: {missing}") from error
    gc.collect()
    dist.destroy_process_group()


def shutdown(code: int = 0) -> None:
    """Leave the world and end the process with exit code `code`; return if there is no process group.

    The order matters: gloo can abort at interpreter exit after a successful run. With code 0 all ranks first meet at a
    barrier; if a rank does not come, the code becomes 1. With another code this rank does not wait: the launcher
    terminates the others.
    """
    if not dist.is_initialized():
        return
    if code == 0:
        try:
            disband()
        except CommunicationError as error:
            print(error, file=sys.stderr)
            code = 1
    leave(code)


def leave(code: int) -> NoReturn:
    """Flush the output and end the process at once, without running the destructors of threads and communicators."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
