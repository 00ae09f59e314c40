"""Joining the world and leaving it."""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from megapipe.comm.meeting import fresh_store
from megapipe.comm.store import interface_towards, meeting_store
from megapipe.environment import Environment, set_for_libraries
from megapipe.errors import CommunicationError, ConfigError


@dataclass(frozen=True)
class World:
    """This process among all."""

    global_rank: int
    world_size: int
    local_rank: int
    backend: str  # 'gloo' or 'nccl'
    device: torch.device
    timeout_seconds: float


def start(
    environment: Environment, backend: str = "auto", timeout_seconds: float = 600.0, device: str = "auto"
) -> World:
    """Choose backend and device, and meet the other ranks; a world of one meets nobody.

    backend: 'auto' (NCCL on GPUs, gloo on CPUs), 'gloo', 'nccl'. device: 'auto' (a GPU where torch sees one), 'cpu', 'cuda'.
    Raises ConfigError for a backend or device that is not there, CommunicationError if the others do not come.
    """
    chosen, place = choose_backend(backend, device, environment.local_rank)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (environment.global_rank, environment.world_size):
            raise CommunicationError(
                f"torch.distributed runs as rank {dist.get_rank()} of {dist.get_world_size()}, "
                f"the launcher says rank {environment.global_rank} of {environment.world_size}"
            )
    elif environment.world_size > 1:
        _meet(environment, chosen, timeout_seconds)
    return World(
        environment.global_rank, environment.world_size, environment.local_rank, chosen, place, timeout_seconds
    )


def choose_backend(backend: str, device: str, local_rank: int) -> tuple[str, torch.device]:
    """(backend, device) of this process; never another than asked for. gloo on GPUs, when asked for, lets ranks share cards."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind == "cpu" and device == "auto" and backend == "nccl":
        raise ConfigError("--distributed-backend nccl needs GPUs and torch sees none; use gloo")
    if kind == "cpu":
        if backend == "nccl":
            raise ConfigError(
                "--distributed-backend nccl moves tensors of GPUs, but --device is cpu; use gloo or --device cuda"
            )
        return "gloo", torch.device("cpu")
    if kind != "cuda":
        raise ConfigError(f"--device {device!r} is none of auto, cpu, cuda")
    if not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: torch sees no GPU (a CPU build of torch, no driver, or an empty CUDA_VISIBLE_DEVICES); use --device cpu"
        )
    if backend == "gloo":  # ranks may share a card: what travels goes through host memory
        return "gloo", torch.device("cuda", local_rank % torch.cuda.device_count())
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own: this node shows {torch.cuda.device_count()}; start at most one rank a GPU, "
            "let ranks share cards over host memory with --distributed-backend gloo (slow, for tests), or use --device cpu"
        )
    return "nccl", torch.device("cuda", local_rank)


def _meet(environment: Environment, backend: str, timeout_seconds: float) -> None:
    """Initialise torch.distributed: under torchrun through the store that its agent keeps, else at the address of the first node."""
    me = f"rank {environment.global_rank} of {environment.world_size}"
    place = f"{environment.master_addr}:{environment.master_port}"
    if backend == "gloo":
        _keep_to_one_interface(environment)
    try:
        # no device_id: it would make every new group a collective split of the world's communicator, non-members included
        dist.init_process_group(
            backend,
            store=_store(environment, timeout_seconds),
            rank=environment.global_rank,
            world_size=environment.world_size,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except ValueError as error:
        raise ConfigError(f"{me} cannot find the others: {error}; start it with torchrun") from error
    except OSError as error:
        raise CommunicationError(
            f"{me} cannot listen at {place}: {error.strerror}; set MASTER_PORT to a port that is free"
        ) from error
    except RuntimeError as error:
        raise CommunicationError(
            f"{me} could not join the others at {place} over {backend} (time-out {timeout_seconds:g} s): {error}"
        ) from error


def _store(environment: Environment, timeout_seconds: float) -> dist.Store:
    """Where the ranks meet: in the store of torchrun's agent apart from earlier starts, else at the address of the first node."""
    rank, world_size = environment.global_rank, environment.world_size
    if environment.launcher == "torchrun":
        timeout = timedelta(seconds=timeout_seconds)
        store, *_ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
        return fresh_store(store, rank, world_size, timeout_seconds)
    return meeting_store(
        environment.master_addr, environment.master_port, world_size, rank == 0, timeout_seconds, environment.num_nodes
    )


def _keep_to_one_interface(environment: Environment) -> None:
    """gloo otherwise listens where the machine's own name leads, which may be no way for the other ranks, and open to more than them."""
    interface = interface_towards(environment.master_addr, environment.num_nodes)
    if interface is not None:
        set_for_libraries(GLOO_SOCKET_IFNAME=interface)


def shutdown(code: int = 0) -> None:
    """Leave the world and end the process with `code`; without a process group, return.

    Order matters: gloo can abort at interpreter exit after all went well. With code 0 all ranks first meet, so that none takes the store
    away from another; if one does not come, the code becomes 1. With another code nobody is waited for: the launcher ends the others.
    """
    if not dist.is_initialized():
        return
    if code == 0:
        try:
            devices = [torch.cuda.current_device()] if dist.get_backend() == "nccl" else None
            dist.barrier(device_ids=devices)
        except RuntimeError as error:
            print(f"rank {dist.get_rank()}: the other ranks did not come to the end: {error}", file=sys.stderr)
            code = 1
    gc.collect()
    if code == 0:
        dist.destroy_process_group()
    leave(code)


def leave(code: int) -> NoReturn:
    """Flush what was printed and end the process at once, without the destructors of threads and communicators."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
