"""GPU support, tested without a GPU.

Covers out-of-memory errors, profiler ranges named by actions, and host synchronization in a step.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import megapipe
from megapipe.config.files import LoggingConfig
from megapipe.config.gpu import GpuConfig
from megapipe.environment import read_environment
from megapipe.errors import ConfigError, TrainingError
from megapipe.pipeline.stage import StageRunner
from megapipe.plan.resolve import resolve
from megapipe.train import gpu_setup
from megapipe.train.gpu_setup import (
    check_deterministic,
    check_fp8,
    marks_of,
    out_of_memory,
    snapshot_path,
    watched_memory,
    ways_out,
)
from megapipe.train.loop import Training
from megapipe.train.step import TrainStep
from tests.train.jobs import job
from tests.train.runs import tiny


def test_an_out_of_memory_error_is_explained_by_the_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forward = StageRunner.forward

    def too_large(self: StageRunner, microbatch: int, *arguments: object) -> object:
        if microbatch == 3:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79 GiB"
            )
        return forward(self, microbatch, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(StageRunner, "forward", too_large)
    code, said = job(f"--train-iters 2 --save {tmp_path}")
    assert code == 1
    assert "rank 0 (pp 0) ran out of memory" in said
    assert "--recompute-granularity selective; --micro-batch-size 1; --recompute-granularity full" in said
    assert "--record-memory-history" in said
    assert any(
        "ran out of memory" in json.loads(line).get("text", "")
        for line in (tmp_path / "run.jsonl").read_text().splitlines()
    )


@pytest.mark.parametrize(
    ("capability", "hip", "arch", "words"),
    [
        ((8, 0), None, "", "compute capability 8.0, has no fp8 matrix units"),
        ((8, 9), None, "", None),
        ((10, 0), None, "", None),
        ((9, 4), "6.4", "gfx942:sramecc+", "has other 8-bit formats"),
        ((9, 5), "7.0", "gfx950:sramecc+", None),
    ],
)
def test_fp8_is_refused_at_the_start_on_a_gpu_without_it(
    capability: tuple[int, int], hip: str | None, arch: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=arch))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr("megapipe.tensor_parallel.fp8.has_triton", lambda: True)
    config, card = tiny(fp8_format="hybrid"), torch.device("cuda")
    check_fp8(config, torch.device("cpu"))
    check_fp8(tiny(), card)
    if words is None:
        check_fp8(config, card)
    else:
        with pytest.raises(ConfigError, match=f"--fp8-format hybrid: a card.* {words}.*; leave it out"):
            check_fp8(config, card)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_gradients_in_e5m2_are_refused_with_blocks_on_a_gpu(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_setup, "fp8_unsupported_reason", lambda *_: None)
    hybrid, plain = (tiny(fp8_format=name, fp8_recipe=recipe) for name in ("hybrid", "e4m3"))
    with pytest.raises(ConfigError, match=r"--fp8-format hybrid --fp8-recipe .* give --fp8-format e4m3"):
        check_fp8(hybrid, torch.device("cuda"))
    check_fp8(plain, torch.device("cuda"))
    check_fp8(hybrid, torch.device("cpu"))


def test_the_history_of_the_allocator_ends_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **named: calls.append(named))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append({"path": path}))
    plan = resolve(tiny(device="cuda", record_memory_history=True, memory_snapshot_path="memory.pickle"), 1)
    with pytest.raises(TrainingError), watched_memory(plan, torch.device("cpu"), 0):
        raise torch.OutOfMemoryError("x")
    assert [next(iter(call)) for call in calls] == ["max_entries", "path", "enabled"]
    assert calls[-1] == {"enabled": None}


def test_ways_out_name_only_what_is_not_done_yet() -> None:
    plain = ways_out(resolve(tiny(tensor_model_parallel_size=2, micro_batch_size=1), 4))
    assert (
        "--use-distributed-optimizer; --sequence-parallel; --recompute-granularity selective; "
        "--recompute-granularity full" in plain
    )
    done = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "use_distributed_optimizer": True,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "micro_batch_size": 1,
        "cpu_offloading_num_layers": 1,
    }
    assert ways_out(resolve(tiny(**done), 4)).startswith("Ways out: more tensor- or pipeline-parallel ranks")


def test_message_shows_the_largest_items_of_its_own_pipeline_rank() -> None:
    plan = resolve(tiny(pipeline_model_parallel_size=2), 4)
    text = out_of_memory(plan, torch.device("cpu"), 3, torch.OutOfMemoryError("no room. more"))
    assert text.startswith("rank 3 (pp 1) ran out of memory: planned")
    assert text.count("optimizer") == 2, "as an item, and in a way out"
    assert text.endswith("torch: no room")


def test_other_errors_pass_through() -> None:
    with pytest.raises(KeyError), watched_memory(resolve(tiny(), 1), torch.device("cpu"), 0):
        raise KeyError("x")
    with pytest.raises(TrainingError), watched_memory(resolve(tiny(), 1), torch.device("cpu"), 0):
        raise torch.OutOfMemoryError("x")


def test_each_rank_writes_its_own_snapshot() -> None:
    assert snapshot_path(GpuConfig(memory_snapshot_path="runs/a/memory.pickle"), 12) == Path(
        "runs/a/memory_rank_00012.pickle"
    )


def test_profiled_steps_name_actions_and_phases(tmp_path: Path) -> None:
    code, said = job(f"--train-iters 2 --save {tmp_path} --profile --profile-step-start 1 --profile-step-end 2")
    assert code == 0, said
    trace = json.loads((tmp_path / "trace_rank_00000.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {f"0{op}{microbatch}" for op in "FB" for microbatch in range(4)} <= names
    assert {"forward-backward", "optimizer"} <= names


def test_profiler_ranges_are_nvtx_or_torch_ranges_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    @contextmanager
    def span(name: str) -> Iterator[None]:
        opened.append(name)
        yield

    monkeypatch.setattr(torch.cuda.nvtx, "range", span)
    marks = marks_of(GpuConfig(nvtx_ranges=True), LoggingConfig(), 0)
    assert marks is not None
    with marks("3B7"):
        pass
    assert opened == ["3B7"]
    assert marks_of(GpuConfig(), LoggingConfig(profile=True, profile_ranks=(1,)), 1) is torch.profiler.record_function
    assert marks_of(GpuConfig(), LoggingConfig(profile=True, profile_ranks=(1,)), 0) is None


READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique_dim"}
METHODS = {Tensor.tolist, Tensor.numpy, Tensor.cpu}
PACKAGE = str(Path(megapipe.__file__).parent)
OTHERWISE_ON_A_GPU = ("check_ids", "_local_rows")  # these functions take another branch on a GPU


@contextmanager
def host_waits(seen: list[str]) -> Iterator[None]:
    """Record every place where the host reads a tensor, which on a GPU makes it wait for the device."""

    def note() -> None:
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
        if not any(frame.name in OTHERWISE_ON_A_GPU for frame in frames):
            seen.append(f"{Path(frames[-1].filename).stem}.{frames[-1].name}")

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ in READS:
                note()
            return func(*args, **(kwargs or {}))

    class Methods(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in METHODS:
                note()
            return func(*args, **(kwargs or {}))

    with Operations(), Methods():
        yield


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Record where the host reads device values in each part of a step."""
    found: dict[str, list[str]] = {"gradients": [], "run": []}  # of which the first is a part
    for part, seen in found.items():
        run = getattr(TrainStep, part)

        def watched(self: TrainStep, *arguments: Any, run: Any = run, seen: list[str] = seen) -> Any:
            with host_waits(seen):
                return run(self, *arguments)

        monkeypatch.setattr(TrainStep, part, watched)
    return found


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("", id="plain"),
        pytest.param(
            "--hidden-dropout 0.1 --attention-dropout 0.1 --bf16 --use-distributed-optimizer", id="dropout bf16"
        ),
        pytest.param(
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --label-smoothing 0.1",
            id="recompute",
        ),
        pytest.param("--log-num-zeros-in-grad --decoupled-lr 0.1 --fp16 --initial-loss-scale 64", id="fp16"),
    ],
)
def test_host_reads_nothing_of_the_device_until_the_gradients_of_a_step_are_launched(
    flags: str, waits: dict[str, list[str]]
) -> None:
    code, said = job(f"--train-iters 3 {flags}")
    assert code == 0, said
    assert waits["gradients"] == []
    per_step = [sorted(set(waits["run"]))]
    assert 0 < len(waits["run"]) <= 3 * 8, per_step
    assert set(waits["run"]) == {"streams.values"}, per_step


@pytest.mark.parametrize("before", [0, 1, 2], ids=["off", "warnings", "on"])
def test_deterministic_mode_ends_with_the_job(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    run, seen = Training.run, []

    def observed(self: Training) -> object:
        seen.append((torch.get_deterministic_debug_mode(), os.environ.get("NCCL_ALGO")))
        return run(self)

    monkeypatch.setattr(Training, "run", observed)
    torch.set_deterministic_debug_mode(before)
    try:
        for flags in ("--deterministic-mode", ""):
            code, said = job(f"--train-iters 1 {flags}")
            assert code == 0, said
            seen.append((torch.get_deterministic_debug_mode(), os.environ.get("NCCL_ALGO")))
    finally:
        torch.set_deterministic_debug_mode(0)
    assert seen == [(2, "Ring"), (before, None), (before, None), (before, None)]


def test_deterministic_mode_ends_with_a_job_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Training, "run", lambda self: (_ for _ in ()).throw(TrainingError("planted")))
    code, said = job("--train-iters 1 --deterministic-mode")
    assert code == 1 and "planted" in said
    assert torch.get_deterministic_debug_mode() == 0


def test_settings_of_the_allocator_and_of_products_are_made_before_cuda_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in expected:
        monkeypatch.setenv(name, "")  # is removed, and restored after the test
        monkeypatch.delenv(name)
    seen: dict[str, str | None] = {}

    def starts_cuda(*_: object) -> tuple[str, torch.device]:
        seen.update({name: os.environ.get(name) for name in expected})
        return "gloo", torch.device("cuda")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpu_setup, "choose_backend", starts_cuda)
    gpu_setup.prepare(resolve(tiny(device="auto"), 1), read_environment({}))
    assert seen == expected


def test_deterministic_mode_that_comes_too_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.ones(1, 1)
    monkeypatch.setattr(torch, "ones", lambda *_, device: ones)

    def raises(*_: Tensor) -> Tensor:
        raise RuntimeError("it uses CuBLAS and you must set CUBLAS_WORKSPACE_CONFIG=:4096:8 before running")

    monkeypatch.setattr(torch, "mm", raises)
    config, card = tiny(deterministic_mode=True), torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="--deterministic-mode: CUBLAS_WORKSPACE_CONFIG"):
        check_deterministic(config, card)
    check_deterministic(tiny(), card)
    check_deterministic(config, torch.device("cpu"))
