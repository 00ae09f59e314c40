"""Joining the world of ranks and leaving it, with the store through which the ranks of a job find each other."""

from __future__ import annotations

import gc
import os
import secrets
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from megapipe.comm.network import await_listener, check_name, interface_towards, listening_address
from megapipe.config.config import Config
from megapipe.environment import Environment, set_for_libraries
from megapipe.errors import CommunicationError, ConfigError
from megapipe.monitor.process import allow_open_files

START_KEY = "megapipe start"
POLL_SECONDS = 0.02
RANKS_PER_WAIT = 1024
OPEN_FILES = 1024  # of a rank: data, libraries, NCCL's connections; what grows with the world is added


@dataclass(frozen=True)
class World:
    """This process's rank in the world, with its backend and device."""

    global_rank: int
    world_size: int
    backend: str  # 'gloo' or 'nccl'
    device: torch.device
    timeout_seconds: float


def join(config: Config, environment: Environment) -> World:
    """Meet the other ranks over the backend that the configuration asks for, as `start` does."""
    parallel, device = config.parallel, config.training.device
    return start(environment, parallel.distributed_backend, 60.0 * parallel.distributed_timeout_minutes, device)


def start(
    environment: Environment, backend: str = "auto", timeout_seconds: float = 600.0, device: str = "auto"
) -> World:
    """Choose backend and device, and initialize torch.distributed unless the world has a single rank.

    backend, device: see `choose_backend`. Raises ConfigError if one is not available, CommunicationError if the other
    ranks do not come.
    """
    rank, world_size = environment.global_rank, environment.world_size
    backend, torch_device = choose_backend(backend, device, environment.local_rank)
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise CommunicationError(
                f"torch.distributed was initialized as rank {dist.get_rank()} of {dist.get_world_size()}, "
                f"but the launcher set rank {rank} of {world_size}"
            )
    elif world_size > 1:
        remark = allow_open_files(open_files_needed(world_size, environment.num_nodes, backend, rank == 0))
        if remark and rank == 0:  # it needs most
            print(remark, file=sys.stderr)
        _initialize(environment, backend, timeout_seconds, torch_device)
    return World(rank, world_size, backend, torch_device, timeout_seconds)


def open_files_needed(world_size: int, num_nodes: int, backend: str, hosts_store: bool) -> int:
    """Return how many files and sockets a rank, or a launcher that hosts the store, opens at most."""
    needed = OPEN_FILES
    if hosts_store:  # a connection of every rank; one for the heartbeats of every host, and of every rank after a hang
        needed += 2 * world_size + num_nodes
    if backend == "gloo":  # a connection to every member of each of this rank's groups
        needed += 4 * world_size
    return needed


def choose_backend(backend: str, device: str, local_rank: int) -> tuple[str, torch.device]:
    """Return backend and device of this process. A requested one is used or rejected, never replaced.

    backend: 'auto' (NCCL on GPUs, gloo on CPUs), 'gloo', 'nccl'. device: 'auto' (a GPU where torch sees one), 'cpu',
    'cuda'. Raises ConfigError if the choice is not available, or if torch is built for GPUs and can use none.
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
            raise ConfigError(
                f"this torch is built for {'CUDA' if torch.version.cuda else 'ROCm'} {built_for}, but it cannot use a "
                f"GPU: {_why_no_gpu()}; repair that (`nvidia-smi` shows the driver), or use the CPU with "
                "--device cpu"
            )
        if device == "cuda":
            raise ConfigError("--device cuda: torch sees no GPU (this is a CPU build of torch); use --device cpu")
        if backend == "nccl":
            raise ConfigError("--distributed-backend nccl needs GPUs, but torch sees none; use gloo")
        return "gloo", torch.device("cpu")
    # each rank has its own GPU, or sees only its own (srun --gpus-per-task=1): _check_own_gpu; with gloo ranks may
    # share GPUs, as tensors travel through host memory
    index = local_rank % torch.cuda.device_count()
    return "gloo" if backend == "gloo" else "nccl", torch.device("cuda", index)


def _why_no_gpu() -> str:
    """Return torch's reason for not using a GPU."""
    try:
        torch.cuda.init()
        torch.cuda.current_device()
    except (RuntimeError, AssertionError) as error:
        return first_line(error).rstrip(".")
    return "no GPU is visible (CUDA_VISIBLE_DEVICES hides all of them, or the container was started without)"


def _check_own_gpu(store: dist.Store, environment: Environment, device: torch.device) -> None:
    """Raise ConfigError if another rank has this rank's GPU. One request, where a node has more ranks than GPUs."""
    num_gpus = torch.cuda.device_count()
    if num_gpus >= environment.local_world_size:
        return
    if store.add(f"gpu {torch.cuda.get_device_properties(device).uuid}", 1) > 1:
        raise ConfigError(
            f"rank {environment.global_rank} (local rank {environment.local_rank}) has no GPU of its own: it sees "
            f"{num_gpus} on a node with {environment.local_world_size} ranks, and another rank uses {device}; start at "
            "most one rank per GPU, let ranks share GPUs with --distributed-backend gloo (slow, for tests), or use "
            "--device cpu"
        )


def _initialize(environment: Environment, backend: str, timeout_seconds: float, device: torch.device) -> None:
    rank, world_size, num_nodes = environment.global_rank, environment.world_size, environment.num_nodes
    host, port = environment.master_addr, environment.master_port
    this_rank = f"rank {rank} of {world_size}"
    timeout = timedelta(seconds=timeout_seconds)
    check_name(host)
    if backend == "gloo":
        # by default gloo listens at the address of the machine's host name, which other ranks cannot always reach
        # and which can be open to other machines
        interface = interface_towards(host, num_nodes)
        if interface is not None:
            set_for_libraries(GLOO_SOCKET_IFNAME=interface)
    try:
        if environment.launcher == "torchrun":
            if rank != 0:
                await_listener(host, port, timeout_seconds)
            torchruns, *_ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
            torchruns.set_timeout(timeout)
            store: dist.Store = fresh_store(torchruns, rank, world_size, timeout_seconds)
        else:
            store = create_store(host, port, world_size, rank == 0, timeout_seconds, num_nodes)
        if backend == "nccl":
            _check_own_gpu(store, environment, device)
        # no device_id: with it, every new group is split from the world's communicator, a collective that also blocks
        # non-members
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except ValueError as error:
        raise ConfigError(f"{this_rank} cannot find the other ranks: {error}; start it with torchrun") from error
    except OSError as error:
        raise CommunicationError(
            f"{this_rank} cannot listen at {host}:{port}: {error.strerror}; set MASTER_PORT to a free port"
        ) from error
    except RuntimeError as error:
        raise CommunicationError(
            f"{this_rank} could not connect to the other ranks at {host}:{port} over {backend} "
            f"(timeout {timeout_seconds:g} s): {first_line(error)}"
        ) from error


def create_store(
    host: str, port: int, world_size: int, is_server: bool, timeout_seconds: float, num_nodes: int
) -> dist.TCPStore:
    """Return the store at an address once all ranks have connected. is_server: this process hosts the store.

    torch's own store listens on every interface and has no password, so any program that can reach it can read and
    write it. This one listens only where ranks can connect from: on the loopback interface, or that of the job's host.
    Raises OSError if the port is taken, RuntimeError (torch's DistError) or CommunicationError if the other ranks do
    not connect in time.
    """
    listener = None
    check_name(host)
    if not is_server:
        await_listener(host, port, timeout_seconds)
    else:
        address = listening_address(host, num_nodes)
        is_ipv6 = ":" in address if address else socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
        dual = is_ipv6 and not address  # on every interface, of both protocols
        server = socket.create_server((address, port), family=family, dualstack_ipv6=dual, backlog=4096)
        listener = server.detach()  # torch closes it
    timeout = timedelta(seconds=timeout_seconds)
    return dist.TCPStore(host, port, world_size, is_server, timeout, multi_tenant=True, master_listen_fd=listener)


def fresh_store(store: dist.Store, rank: int, world_size: int, timeout_seconds: float) -> dist.PrefixStore:
    """Return a view of the store that no earlier start has written to, the same for all ranks of this start.

    Called by all of them. torchrun's agents keep one store across restarts (torch 2.13: with a static rendezvous,
    always; with c10d, as long as its store lives). Ranks that read an earlier start's addresses from it cannot connect,
    or connect to a rank that is about to be terminated. Counting restarts does not help: each agent has its own count,
    which leaves out the restarts that a joining node causes.

    Rank 0 draws a new name for this start, waits for a token from each rank under that name, and echoes it. A rank that
    has read the name of an earlier start gets no echo and reads again. Raises RuntimeError if the other ranks do not
    come in time.
    """
    timeout = timedelta(seconds=timeout_seconds)

    def key(start: str, what: str, of_rank: int) -> str:
        return f"{START_KEY} {start} {what} {of_rank}"

    if rank == 0:
        start = secrets.token_hex(8)
        store.set(START_KEY, start)
        for first in range(1, world_size, RANKS_PER_WAIT):
            others = range(first, min(world_size, first + RANKS_PER_WAIT))
            tokens = [key(start, "token", other) for other in others]
            store.wait(tokens, timeout)
            echoes = [key(start, "echo", other) for other in others]
            store.multi_set(echoes, store.multi_get(tokens))  # type: ignore[attr-defined]  # missing in torch's stubs
        return dist.PrefixStore(f"megapipe {start}", store)
    token, deadline, asked = secrets.token_hex(8), time.monotonic() + timeout_seconds, ""
    store.wait([START_KEY], timeout)
    while time.monotonic() < deadline:
        start = store.get(START_KEY).decode()
        if start != asked:
            store.set(key(start, "token", rank), token)
            asked = start
        echo = key(start, "echo", rank)
        if store.check([echo]) and store.get(echo).decode() == token:
            return dist.PrefixStore(f"megapipe {start}", store)
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"rank 0 did not answer within {timeout_seconds:g} s")


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
