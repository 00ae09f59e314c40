"""Examinations of hosts and of whole allocations.

Four ranks: every group is measured, and all ranks name the same slow direction. Remarks about hosts: missing resources
and differences between hosts. No secret is ever printed.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.comm.groups import Group, build_process_groups
from megapipe.environment import Environment, library_settings, read_environment
from megapipe.extras.doctor import timing
from megapipe.extras.doctor.examination import Request, clock_remarks, examine_allocation, host_remarks, named_hosts
from megapipe.extras.doctor.host import Gpu, GpuDirect, HostReport, Port, examine_host, gpu_direct
from megapipe.extras.doctor.report import allocation_json, allocation_text, host_text, single_json, single_text
from megapipe.schedule.placement import linear
from megapipe.topology import Topology
from tests.harness import RankPool

DRIVER = "proc/driver/nvidia/version"
DRIVER_AND_PORT = {DRIVER: "", "sys/class/infiniband/mlx5_0/ports/1/state": "ACTIVE"}
SLOW_SECONDS = 0.1  # delay of a planted slow message, far above the noise of a busy machine


def examined(rank: int, world_size: int, factor: float, slow_rank: int | None) -> tuple[dict[str, Any], str]:
    topology = Topology(tp=2, pp=2)
    environment = Environment(rank, world_size, rank, world_size, 1, 0, "127.0.0.1", 0, "torchrun")
    groups = build_process_groups(topology, rank, "gloo", 60)
    send = timing.send

    def slow_send(tensor: torch.Tensor, group: Group, peer: int) -> None:
        if tensor.numel() > 2:  # neither header nor acknowledgement
            time.sleep(SLOW_SECONDS)
        send(tensor, group, peer)

    if rank == slow_rank:
        timing.send = slow_send
    try:
        found = examine_allocation(
            Request(topology, linear(2), None, factor, 0.01), groups, environment, torch.device("cpu")
        )
    finally:
        timing.send = send
    return allocation_json(found, None), allocation_text(found, None, "4 ranks")


def test_every_group_of_a_layout_is_measured(rank_pools: Callable[[int], RankPool]) -> None:
    answers = rank_pools(4).run(examined, 1000.0, None)
    found, text = answers[0]
    assert {(row["kind"], *row["ranks"]) for row in found["measured"]} == {
        *(("tp all_reduce", *ranks) for ranks in ((0, 1), (2, 3))),
        *(("pp forward", *ranks) for ranks in ((0, 2), (1, 3))),
        *(("pp backward", *ranks) for ranks in ((2, 0), (3, 1))),
    }
    assert all(row["seconds"] > 0 and row["bytes_per_second"] > 0 for row in found["measured"])
    assert {row["bytes"] for row in found["measured"]} >= {8}
    assert (found["fine"], found["slow"], found["blame"], found["hardware"]) == (True, [], [], None)
    assert [other["measured"] for other, _ in answers] == [found["measured"]] * 4, "all ranks have the same result"
    assert "tp all_reduce  2       in a host" in text
    assert text.splitlines()[-1].startswith("fine (examined in ")


def test_a_slow_direction_of_the_pipeline_is_named_by_its_ranks(rank_pools: Callable[[int], RankPool]) -> None:
    found, text = rank_pools(4).run(examined, 5.0, 3)[0]
    assert not found["fine"]
    assert {tuple(row["ranks"]) for row in found["slow"] if row["operation"] == "send"} == {(3, 1)}
    assert any("the link from rank 3 to rank 1 (on " in line for line in text.splitlines() if line.startswith("slow"))


MIB = 1 << 20


@pytest.fixture(scope="module")
def here() -> HostReport:
    found = examine_host(read_environment({}), torch.device("cpu"))
    return dataclasses.replace(found, load=0.0, threads_of_a_rank=1, num_ranks=1)


def remarks_by_kind(*reports: HostReport) -> dict[str, tuple[bool, str]]:
    return {remark.kind: (remark.is_wrong, remark.text) for remark in host_remarks(reports)}


def with_resources(report: HostReport, **changes: object) -> HostReport:
    return dataclasses.replace(
        report,
        resources=dataclasses.replace(report.resources, **changes),  # type: ignore[arg-type]
    )


def test_a_host_without_faults_is_fine(here: HostReport) -> None:
    well = with_resources(here, open_files=65536, shared_memory_bytes=1 << 30, cores=8, cpu_limit=None)
    assert remarks_by_kind(well) == {}
    one_each = dataclasses.replace(well, gpus=(Gpu("H100", 80),), num_ranks=4)  # srun --gpus-per-task=1
    assert "ranks without a GPU" not in remarks_by_kind(one_each)


@pytest.mark.parametrize(
    ("changes", "resources", "kind", "is_wrong", "words"),
    [
        ({}, {"shared_memory_bytes": 32 * MIB}, "shared memory", False, "/dev/shm holds 32 MiB"),
        ({}, {"open_files": 256, "most_open_files": 1 << 20}, "open files", False, "ulimit -n 1048576"),
        (
            {"num_ranks": 4, "threads_of_a_rank": 2},
            {"cores": 4},
            "threads",
            False,
            "4 ranks of 2 threads on 4 cores: set OMP_NUM_THREADS=1",
        ),
        ({"num_ranks": 4}, {"cores": 2}, "oversubscribed", False, "4 ranks on 2 cores take turns"),
        ({"num_ranks": 4}, {"cores": 64, "cpu_limit": 2.0}, "oversubscribed", False, "4 ranks on 2 cores"),
        ({"load": 9.5}, {"cores": 4}, "busy", False, "load 9.5 on 4 cores"),
        ({"has_nvidia_driver": True}, {}, "torch without CUDA", True, "built without CUDA"),
        (
            {"gpus": (Gpu("H100", 80),) * 2, "num_ranks": 3},
            {"cores": 4},
            "ranks without a GPU",
            True,
            "3 ranks and 2 GPUs",
        ),
        (
            {"rdma_ports": (Port("mlx5_0", 1, "1: DOWN", "", "InfiniBand"),)},
            {},
            "RDMA ports",
            False,
            "not active: mlx5_0/1",
        ),
    ],
    ids=["shm", "files", "threads", "ranks", "ranks in a container", "load", "CPU build", "GPUs", "port"],
)
def test_missing_resources_of_a_host_are_reported(
    here: HostReport, changes: dict[str, object], resources: dict[str, object], kind: str, is_wrong: bool, words: str
) -> None:
    report = with_resources(
        dataclasses.replace(here, **changes),  # type: ignore[arg-type]
        **{"cores": 8, "cpu_limit": None, **resources},
    )
    found = remarks_by_kind(report)
    assert found[kind][0] == is_wrong
    assert words in found[kind][1]


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, GpuDirect("", "no NVIDIA driver is loaded")),
        ({DRIVER: ""}, GpuDirect("", "no RDMA device")),
        (DRIVER_AND_PORT | {"proc/modules": "nv_peer_mem 1 0"}, GpuDirect("kernel module nv_peer_mem")),
        (
            DRIVER_AND_PORT
            | {"proc/driver/nvidia/version": "Open Kernel Module", "proc/kallsyms": "ib_umem_dmabuf_get"},
            GpuDirect("dma-buf: the driver's open kernel module and RDMA with dma-buf"),
        ),
    ],
    ids=["no driver", "no port", "module", "dma-buf"],
)
def test_gpu_direct_is_read_from_the_kernel(tmp_path: Path, files: dict[str, str], found: GpuDirect) -> None:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert gpu_direct(tmp_path) == found


def test_missing_gpu_direct_is_reported(here: HostReport) -> None:
    port = Port("mlx5_0", 1, "4: ACTIVE", "400 Gb/sec", "InfiniBand")
    report = dataclasses.replace(
        here, gpus=(Gpu("H100", 80),), rdma_ports=(port,), gpu_direct=GpuDirect("", "nvidia_peermem is not loaded")
    )
    assert "through host memory: nvidia_peermem is not loaded" in remarks_by_kind(report)["GPUDirect"][1]
    assert "GPUDirect" not in remarks_by_kind(
        dataclasses.replace(report, gpu_direct=GpuDirect("kernel module nvidia_peermem"))
    )


def test_hosts_that_differ_are_reported_and_in_torch_it_is_an_error(here: HostReport) -> None:
    other = dataclasses.replace(
        here, name="other", versions={**here.versions, "torch": "2.11.0"}, settings={"NCCL_IB_HCA": "mlx5"}
    )
    remarks = {remark.text.partition(":")[0]: remark for remark in host_remarks([here, other])}
    assert remarks["hosts differ in torch"].is_wrong
    assert remarks["hosts differ in torch"].text.endswith(f"{here.versions['torch']} on {here.name}; 2.11.0 on other")
    assert not remarks["hosts differ in setting NCCL_IB_HCA"].is_wrong


def test_a_clock_is_an_error_only_if_it_is_certainly_off() -> None:
    (remark,) = clock_remarks({"b": (-3.0, 0.001), "c": (0.2, 0.001), "d": (2.0, 1.5)}, "a")
    assert (remark.is_wrong, remark.hosts) == (True, ("b",))
    assert "the clock of b is -3.000 s off that of a" in remark.text


def test_nodes_with_equal_names_get_numbers() -> None:
    assert named_hosts([(0, "n"), (0, "n"), (1, "n")]) == ("n#0", "n#0", "n#1")
    assert named_hosts([(0, "a"), (1, "b")]) == ("a", "b")


def test_no_secret_is_printed(here: HostReport, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "do-not-tell-3f9c"
    for name in (
        "WANDB_API_KEY",
        "HF_TOKEN",
        "NCCL_AUTH_TOKEN",
        "TORCH_SECRET",
        "CUDA_PASSWORD",
        "AWS_SECRET_ACCESS_KEY",
    ):
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("NCCL_DEBUG", "seen")
    found = examine_host(read_environment({}), torch.device("cpu"))
    assert found.settings["NCCL_DEBUG"] == "seen"
    assert secret not in repr(found) + json.dumps(single_json(found)) + single_text(found)
    assert "HF_TOKEN" not in library_settings({"HF_TOKEN": secret})


def test_the_text_of_one_host_has_every_line(here: HostReport) -> None:
    text = "\n".join(host_text(here))
    for word in (
        "versions",
        "torch 2.",
        "fused AdamW",
        "GPUDirect  RDMA not found",
        "127.0.0.1",
        "/dev/shm",
        "open files",
    ):
        assert word in text
    assert json.loads(json.dumps(single_json(here)))["hosts"][0]["name"] == here.name
