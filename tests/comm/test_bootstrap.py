"""Startup and shutdown of a rank.

The requested backend is used, ranks that do not connect are named, a process exits with its code.
"""

from __future__ import annotations

import random
import resource
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megapipe.comm import bootstrap
from megapipe.comm.bootstrap import (
    choose_backend,
    create_store,
    open_files_needed,
    shutdown,
    start,
)
from megapipe.comm.collectives import all_reduce
from megapipe.comm.groups import build_process_groups
from megapipe.environment import Environment
from megapipe.errors import CommunicationError, ConfigError
from megapipe.monitor.process import allow_open_files
from megapipe.topology import Topology
from tests.harness import RankFailure, run_ranks


def free_port() -> int:
    """Return a free port below those that the system gives to outgoing connections, which other tests make."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as listening, suppress(OSError):
            listening.bind(("127.0.0.1", port))
            return port


def environment_of(rank: int, world_size: int, port: int = 1, launcher: str = "slurm") -> Environment:
    return Environment(
        global_rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        num_nodes=1,
        node_rank=0,
        master_addr="127.0.0.1",
        master_port=port,
        launcher=launcher,
    )


def join_and_leave(rank: int, world_size: int, port: int, code: int, folder: Path) -> None:
    """Start, communicate once and shut down, without the harness's own process group."""
    dist.barrier()  # wait until all have joined: gloo fails if a peer leaves while others still connect
    dist.destroy_process_group()
    world = start(environment_of(rank, world_size, port), timeout_seconds=30, device="cpu", facts_of=lambda _: {})
    groups = build_process_groups(
        Topology(dp=world.world_size), world.global_rank, world.backend, world.timeout_seconds
    )
    total = torch.tensor([world.global_rank + 1.0])
    all_reduce(total, groups.dp)
    (folder / f"rank{rank}").write_text(f"{total.item()} {world.device}")
    print("left unflushed", end="")
    shutdown(code)
    raise AssertionError("shutdown returned")


@pytest.mark.parametrize("code", [0, 7], ids=["clean end", "failing end"])
def test_ranks_meet_compute_and_leave_with_their_code(code: int, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=rf"died with exit code {code} and without an answer") as caught:
        run_ranks(join_and_leave, 2, free_port(), code, tmp_path)
    assert "left unflushed" in caught.value.report
    if code == 0:  # a failing rank exits without waiting for the others
        assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["3.0 cpu"] * 2


def wait_for_nobody(rank: int, world_size: int, port: int) -> str:
    with pytest.raises(CommunicationError) as caught:
        start(environment_of(0, 2, port), timeout_seconds=1, device="cpu", facts_of=lambda _: {})
    return str(caught.value)


def test_ranks_that_do_not_come_are_named() -> None:
    port = free_port()
    assert run_ranks(wait_for_nobody, 1, port)[0].startswith("rank 1 did not arrive within 1 s; rank 0 did, from ")


def meet_at(rank: int, world_size: int, port: int) -> str:
    """Return the error of a rank that starts at a port where something else listens."""
    dist.barrier()
    dist.destroy_process_group()
    bootstrap.STORE_SECONDS = 1.0
    with pytest.raises(CommunicationError) as caught:
        start(environment_of(rank, world_size, port), timeout_seconds=100, device="cpu", facts_of=lambda _: {})
    return str(caught.value)


@pytest.mark.parametrize("accepts", [True, False], ids=["accepts", "never accepts"])
def test_a_port_that_another_program_holds_is_named_by_every_rank(accepts: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted = []
        if accepts:
            threading.Thread(target=lambda: accepted.extend(server.accept() for _ in range(9)), daemon=True).start()
        port = server.getsockname()[1]
        began = time.monotonic()
        texts = run_ranks(meet_at, 2, port)
        assert time.monotonic() - began < 60.0
    assert all("MASTER_PORT" in text and f":{port}" in text for text in texts), texts
    assert "does not answer like the store" in texts[1]


def join_again(rank: int, world_size: int) -> tuple[int, int, str]:
    world = start(environment_of(rank, world_size), device="cpu", facts_of=lambda _: {})
    return world.global_rank, world.world_size, world.backend


def test_a_world_that_is_already_there_is_used() -> None:
    assert run_ranks(join_again, 2) == [(0, 2, "gloo"), (1, 2, "gloo")]


def test_one_rank_needs_no_rendezvous() -> None:
    world = start(environment_of(0, 1, launcher="single"), device="cpu", facts_of=lambda _: {})
    assert (world.global_rank, world.world_size, world.device) == (0, 1, torch.device("cpu"))
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("backend", "device", "message"),
    [
        pytest.param("nccl", "cpu", "needs GPUs, but --device is cpu", id="nccl on cpu"),
        pytest.param("nccl", "auto", "needs GPUs, but torch sees none", id="nccl without a gpu"),
        pytest.param("auto", "cuda", "torch sees no GPU", id="cuda without a gpu"),
        pytest.param("auto", "tpu", "unknown --device .tpu.; use auto, cpu or cuda", id="unknown device"),
    ],
)
def test_backend_that_is_not_there_is_refused_and_not_replaced(
    backend: str, device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=message):
        choose_backend(backend, device, 0)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_driver_that_cannot_be_used_is_an_error_and_never_training_on_the_cpu(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nUpdate it.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", too_old)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"CUDA 13.0, .*11040.*--device cpu$"):
        choose_backend("auto", device, 0)
    assert choose_backend("auto", "cpu", 0) == ("gloo", torch.device("cpu"))


WHEELS = {
    "cu126": "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90",
    "cu130": "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120",
    "Hopper only": "sm_90a",
}


@pytest.mark.parametrize(
    ("wheel", "capability", "wanted"),
    [
        pytest.param("cu126", (9, 0), None, id="H100"),
        pytest.param("cu126", (8, 9), None, id="L40S, by sm_86"),
        pytest.param("cu126", (10, 0), "cu130", id="B200 and a wheel of CUDA 12.6"),
        pytest.param("cu130", (10, 3), None, id="B300, by sm_100"),
        pytest.param("cu130", (7, 0), "cu126", id="V100 and a wheel of CUDA 13"),
        pytest.param("cu130", (13, 0), None, id="a later GPU, by PTX"),
        pytest.param("Hopper only", (9, 0), None, id="code for one architecture"),
        pytest.param("Hopper only", (9, 1), "cu130", id="a GPU beside it"),
    ],
)
def test_a_gpu_that_this_torch_has_no_code_for_is_an_error(
    wheel: str, capability: tuple[int, int], wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_arch_list": WHEELS[wheel].split,
        "get_device_capability": lambda _: capability,
        "get_device_name": lambda _: "NVIDIA X",
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    if wanted is None:
        assert choose_backend("auto", "auto", 0) == ("nccl", torch.device("cuda", 0))
        return
    words = (
        rf"^NVIDIA X has compute capability {capability[0]}.{capability[1]}, and torch .* has code for sm_.* only; .*"
    )
    with pytest.raises(ConfigError, match=f"{words}TORCH_CUDA={wanted} launch/install.sh"):
        choose_backend("auto", "auto", 0)


def test_ranks_have_the_gpu_of_their_local_rank_or_the_only_one_they_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose_backend("auto", "auto", 3) == ("nccl", torch.device("cuda", 3))
    assert choose_backend("gloo", "cuda", 5) == ("gloo", torch.device("cuda", 1)), "ranks share GPUs over gloo"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # srun --gpus-per-task=1
    assert choose_backend("auto", "auto", 3) == ("nccl", torch.device("cuda", 0))


def serve_many(rank: int, world_size: int) -> tuple[str, bytes, str, tuple[int, int]]:
    """Hold 512 connections to a store; return the remark, its answer, the remark on too many files, and the limits."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    remark = allow_open_files(open_files_needed(512, 64, "nccl", True))
    port = free_port()
    store = create_store("127.0.0.1", port, 1, True, 30.0, 1)
    ranks = [socket.create_connection(("127.0.0.1", port)) for _ in range(512)]
    store.set("a", "b")
    answer = store.get("a")
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 300))
    refused = allow_open_files(2000)
    assert len(ranks) == 512
    return remark, answer, refused, resource.getrlimit(resource.RLIMIT_NOFILE)


def test_a_store_serves_512_ranks_where_the_limit_is_256_open_files() -> None:
    ((remark, answer, refused, limits),) = run_ranks(serve_many, 1)
    assert remark == "" and answer == b"b" and limits == (300, 300)
    assert refused.startswith(
        "a process may have 300 open files and sockets here (ulimit -Hn), and this run may need 2000"
    )
