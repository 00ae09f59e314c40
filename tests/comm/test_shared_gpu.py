"""Several ranks on a GPU: which GPU, what NCCL reads, how much memory; and a grid of such ranks on CPUs."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megapipe.comm.bootstrap import _process, choose_backend
from megapipe.comm.shared_gpu import nccl_variables, share_gpu
from megapipe.config.gpu import CONTEXT_BYTES
from megapipe.environment import Environment
from megapipe.errors import ConfigError
from tests.comm.test_bootstrap import environment_of
from tests.harness import run_ranks
from tests.train.jobs import job, job_on_rank

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GIB = 1 << 30
# what NCCL 2.28.9 needs to connect two ranks of one GPU by sockets
NEEDED = {
    "NCCL_NET": "Socket",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_SOCKET_IFNAME": "lo",
    **{f"NCCL_{transport}_DISABLE": "1" for transport in ("P2P", "SHM", "IB")},
    **{f"NCCL_{feature}_ENABLE": "0" for feature in ("NVLS", "MNNVL", "CUMEM", "RAS")},
}


def sharing(rank: int, world_size: int, ranks_per_gpu: int) -> Environment:
    return dataclasses.replace(environment_of(rank, world_size), ranks_per_gpu=ranks_per_gpu)


@pytest.fixture
def nccl_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove NCCL's variables, and those that a test sets when it ends."""
    for name in nccl_variables(sharing(0, 8, 8)):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, torch.device]]:
    """Put one GPU of 80 GiB here and return the shares of its memory that are set."""
    found: list[tuple[float, torch.device]] = []
    properties = SimpleNamespace(total_memory=80 * GIB, uuid="a1b2")
    stand_ins = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_arch_list": list,
        "get_device_properties": lambda _: properties,
        "set_per_process_memory_fraction": lambda share, device: found.append((share, device)),
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return found


def test_eight_ranks_of_a_gpu_are_eight_hosts_of_nccl_on_the_loopback() -> None:
    found = [nccl_variables(sharing(rank, 8, 8)) for rank in range(8)]
    assert all(one.items() >= NEEDED.items() for one in found)
    assert len({one.pop("NCCL_HOSTID") for one in found}) == 8
    assert all(one == found[0] for one in found)
    assert nccl_variables(sharing(3, 8, 1)) == {}


def test_ranks_of_several_nodes_choose_no_interface_and_differ_as_hosts() -> None:
    nodes = [
        dataclasses.replace(sharing(rank, 2, 2), global_rank=2 * node + rank, num_nodes=2, node_rank=node)
        for node in range(2)
        for rank in range(2)
    ]
    found = [nccl_variables(each) for each in nodes]
    assert len({one["NCCL_HOSTID"] for one in found}) == 4
    assert not any("NCCL_SOCKET_IFNAME" in one for one in found)


@pytest.mark.parametrize("visible", [2, 1], ids=["both GPUs visible", "each rank sees its own"])
def test_a_gpu_has_so_many_ranks_and_no_more(visible: int, limits: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    ranks = [sharing(rank, 8, 4) for rank in range(8)]
    chosen = [choose_backend("auto", "auto", each.gpu_index) for each in ranks]
    assert chosen == [("nccl", torch.device("cuda", rank // 4 % visible)) for rank in range(8)]
    held = [_process(each, device).device for each, (_, device) in zip(ranks, chosen, strict=True)]
    if visible == 2:
        assert held == [""] * 8  # nothing to compare: each GPU gets four
    else:  # if all of them are one GPU, a fifth rank holds what the first does
        assert len(set(held[:4])) == 4 and held[4:] == held[:4]


def test_a_rank_has_its_share_of_the_memory(
    limits: list[tuple[float, torch.device]], nccl_unset: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    said = " ".join(share_gpu(sharing(1, 8, 8), GPU))
    assert "mean nothing" in said and "MPS" not in said
    ((fraction, device),) = limits
    assert fraction == pytest.approx((10 * GIB - CONTEXT_BYTES) / (80 * GIB)) and device == GPU
    (tmp_path / "control").touch()
    again = " ".join(share_gpu(sharing(1, 8, 8), GPU))
    assert f"MPS does (its control pipe is {tmp_path}/control)" in again
    assert share_gpu(sharing(1, 8, 1), GPU) == () and len(limits) == 2


def test_ranks_for_which_a_gpu_has_no_memory_are_refused(limits: list[object], nccl_unset: None) -> None:
    with pytest.raises(ConfigError, match=r"--ranks-per-gpu 80: .* use at most 79"):
        share_gpu(sharing(0, 80, 80), GPU)
    share_gpu(sharing(0, 79, 79), GPU)
    assert len(limits) == 1


def test_what_the_user_has_set_is_kept_and_named(nccl_unset: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_RAS_ENABLE", "0")  # as it would be set
    remarks = share_gpu(sharing(0, 2, 2), CPU)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7" and os.environ["NCCL_NET"] == "Socket"
    kept = [remark for remark in remarks if "NCCL_SOCKET_IFNAME=eth7" in remark]
    assert len(kept) == 1 and "NCCL_RAS_ENABLE" not in kept[0]
    assert share_gpu(sharing(0, 2, 2), CPU) == remarks  # what this process has set is not the user's


def test_one_host_id_for_all_ranks_is_refused(nccl_unset: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "node7")
    with pytest.raises(ConfigError, match="NCCL_HOSTID=node7"):
        share_gpu(sharing(0, 2, 2), CPU)
    share_gpu(sharing(0, 2, 1), CPU)


def share(rank: int) -> None:
    os.environ["MEGAPIPE_RANKS_PER_GPU"] = "4"


def shared_job(rank: int, world_size: int, flags: str) -> tuple[str, str | None, dict[str, str]]:
    """Run a job as one of four ranks of a GPU; return its error and what NCCL would have read."""
    _, kind, text = job_on_rank(rank, world_size, flags, share)
    return kind, text, {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}


def losses(path: Path) -> list[float]:
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]


def test_four_ranks_of_a_gpu_train_on_cpus_like_one_process(tmp_path: Path) -> None:
    plain, shared = tmp_path / "plain.jsonl", tmp_path / "shared.jsonl"
    flags = "--train-iters 3 --hidden-dropout 0 --attention-dropout 0"
    grid = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    code, said = job(f"{flags} --metrics-file {plain}")
    assert code == 0, said
    found = run_ranks(shared_job, 4, f"{flags} {grid} --metrics-file {shared}")
    assert [(kind, text) for kind, text, _ in found] == [("", None)] * 4
    assert [variables for *_, variables in found] == [nccl_variables(sharing(rank, 4, 4)) for rank in range(4)]
    assert losses(shared) == pytest.approx(losses(plain), rel=1e-5) and len(losses(plain)) == 3
