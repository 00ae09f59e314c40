"""Settings of a run before CUDA and NCCL start: work queues, channels of messages, tuned settings, overlap over tp."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import megapipe.config.rules.gpu as gpu_rules
from megapipe import environment
from megapipe.comm.nccl import NcclSettings
from megapipe.config.load import load_config
from megapipe.config.tuned import Tuned, read_tuned, to_yaml
from megapipe.errors import ConfigError
from megapipe.gpu.kernels import choose_kernels, describe_kernels
from megapipe.plan.resolve import resolve
from megapipe.train.gpu_setup import (
    CONNECTIONS,
    P2P_CHANNELS,
    channels_line,
    check_compiler,
    connections_line,
    tuned_line,
)
from tests.tiny import TINY_FLAGS, small_config
from tests.train.jobs import job

GPIPE = {"pipeline_model_parallel_size": 4, "pipeline_schedule": "gpipe", "global_batch_size": 16}


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in (CONNECTIONS, P2P_CHANNELS):  # what a test sets is taken away after it
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_connections_with_which_the_run_can_hang_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONNECTIONS, "1")
    (line,) = connections_line(resolve(small_config(**GPIPE, pipeline_receive_depth=2), 4))
    assert line.startswith(f"{CONNECTIONS}: 32 instead of 1, of the environment: with 1 a step can hang (rank ")
    assert os.environ[CONNECTIONS] == "32"


def test_safe_connections_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONNECTIONS, "1")
    assert connections_line(resolve(small_config(**GPIPE, pipeline_receive_depth=1), 4)) == ()
    assert connections_line(resolve(small_config(global_batch_size=16), 4)) == ()
    assert os.environ[CONNECTIONS] == "1"


def test_connections_with_which_only_an_evaluation_can_hang_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONNECTIONS, "1")
    changes = GPIPE | {"pipeline_schedule": "zb-v", "num_layers": 8}
    assert connections_line(resolve(small_config(**changes, pipeline_receive_depth=1), 4)) == ()
    (line,) = connections_line(resolve(small_config(**changes, pipeline_receive_depth=2), 4))
    assert " instead of 1, of the environment: with 1 a step can hang (rank " in line


def test_a_schedule_too_large_to_simulate_gets_the_most_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megapipe.train.gpu_setup.MOST_ACTIONS", 10)
    (line,) = connections_line(resolve(small_config(**GPIPE), 4))
    assert line == (
        f"{CONNECTIONS}: 32 instead of 8, CUDA's default: this schedule is too large to be simulated at the start"
    )


def test_messages_inside_a_node_get_four_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = resolve(small_config(**GPIPE), 4, 4)
    settings = NcclSettings(variables={P2P_CHANNELS: "8"})
    assert channels_line(plan, settings) == (), "--nccl-settings wins"
    assert channels_line(resolve(small_config(**GPIPE), 4, 1), NcclSettings()) == (), "over the network"
    assert P2P_CHANNELS not in os.environ
    assert channels_line(plan, NcclSettings()) == (f"{P2P_CHANNELS}=4: a waiting receive holds at most 4 SMs",)
    assert os.environ[P2P_CHANNELS] == "4"
    monkeypatch.setenv(P2P_CHANNELS, "16")
    assert channels_line(plan, NcclSettings()) == () and os.environ[P2P_CHANNELS] == "16"


@pytest.mark.parametrize(
    ("changes", "is_on"),
    [
        ({}, True),
        ({"tensor_model_parallel_size": 2}, False),
        ({"sequence_parallel": False}, False),
        ({"device": "cpu"}, False),
        ({"device": "auto"}, False),
        ({"transformer_impl": "transformer_engine"}, False),
        ({"tp_comm_overlap": False}, False),
        ({"tensor_model_parallel_size": 2, "tp_comm_overlap": True}, True),
    ],
)
def test_overlap_over_tp_is_on_by_default_from_tp_4_on_gpus(
    changes: dict[str, object], is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_rules, "sees_gpu", lambda: False)
    config = small_config(
        **{"tensor_model_parallel_size": 4, "sequence_parallel": True, "device": "cuda", "global_batch_size": 8}
        | changes
    )
    assert resolve(config, 4).config.parallel.tp_comm_overlap is is_on


def test_device_auto_overlaps_where_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_rules, "sees_gpu", lambda: True)
    config = small_config(tensor_model_parallel_size=4, sequence_parallel=True, global_batch_size=8)
    assert resolve(config, 4).config.parallel.tp_comm_overlap


ON_CUDA = {"device": "cuda", "global_batch_size": 8}


@pytest.mark.parametrize(
    ("changes", "loss", "optimizer"),
    [
        pytest.param({}, True, "compiled", id="GPU"),
        pytest.param({"device": "cpu"}, False, "torch", id="CPU"),
        pytest.param({"device": "auto"}, False, "torch", id="auto without a GPU"),
        pytest.param({"compile_loss": False, "optimizer_impl": "torch"}, False, "torch", id="turned off"),
        pytest.param({"device": "cpu", "compile_pointwise": True}, True, "torch", id="pointwise on a CPU"),
        pytest.param({"optimizer": "sgd"}, True, "torch", id="SGD"),
        pytest.param({"optimizer": "muon"}, True, "torch", id="Muon"),
        pytest.param({"dtype": "fp64"}, True, "torch", id="fp64"),
        pytest.param({"optimizer_cpu_offload": True}, True, "torch", id="state on the host"),
        pytest.param({"use_precision_aware_optimizer": True}, True, "torch", id="narrow state"),
        pytest.param({"num_experts": 4, "moe_router_topk": 2}, True, "compiled", id="experts"),
        pytest.param({"optimizer_impl": "apex"}, True, "apex", id="a library"),
    ],
)
def test_loss_and_optimizer_are_compiled_by_default_on_gpus(
    changes: dict[str, object], loss: bool, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_rules, "sees_gpu", lambda: False)
    kernels = resolve(small_config(**ON_CUDA | changes), 1).config.kernels
    assert (kernels.compile_loss, kernels.optimizer_impl) == (loss, optimizer)


@pytest.mark.parametrize("lacks", ["triton", "gcc", "headers"])
def test_a_gpu_without_a_compiler_runs_uncompiled_and_says_so(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_rules, "sees_gpu", lambda: True)
    monkeypatch.setattr(environment, "find_spec", lambda _: None if lacks == "triton" else object())
    monkeypatch.setattr(environment.shutil, "which", lambda name: None if lacks == "gcc" else name)
    monkeypatch.delenv("CC", raising=False)
    if lacks != "headers":
        (tmp_path / "Python.h").touch()
    monkeypatch.setattr(environment.sysconfig, "get_path", lambda *_: str(tmp_path))
    config = resolve(small_config(**ON_CUDA), 1).config
    assert (config.kernels.compile_loss, config.kernels.optimizer_impl) == (False, "torch")
    words = {"triton": "the package triton", "gcc": "a C compiler", "headers": "Python's headers"}[lacks]
    said = describe_kernels(choose_kernels(config), config, torch.device("cuda"))
    assert sum(line.startswith(("loss  ", "optimizer  ")) and words in line for line in said) == 2
    asked = resolve(small_config(**ON_CUDA, compile_loss=True), 1).config
    with pytest.raises(ConfigError, match=rf"^--compile-loss: .*{words}.*; install it, or give --no-compile-loss"):
        check_compiler(asked, torch.device("cuda"))
    check_compiler(config, torch.device("cuda"))


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    file = tmp_path / "tuned.yaml"
    settings = {
        "parallel.pipeline_receive_depth": 3,
        "parallel.tp_comm_overlap": True,
        "gpu.nccl_settings": ["NCCL_X=1"],
    }
    file.write_text(to_yaml(Tuned("cpu", settings, {"seconds": [1.0]})))
    return file


def test_explicit_flags_and_files_win_over_tuned_settings(tuned: Path, tmp_path: Path) -> None:
    loaded = load_config([*TINY_FLAGS, "--tuned", str(tuned)], is_job=False)
    assert loaded.config.parallel.pipeline_receive_depth == 3 and loaded.config.gpu.nccl_settings == ("NCCL_X=1",)
    assert loaded.origins["parallel.tp_comm_overlap"] == f"tuned {tuned}"
    given = load_config([*TINY_FLAGS, "--tuned", str(tuned), "--pipeline-receive-depth", "1"], is_job=False)
    assert given.config.parallel.pipeline_receive_depth == 1 and given.config.parallel.tp_comm_overlap
    (tmp_path / "run.yaml").write_text(f"gpu:\n  tuned: {tuned}\nparallel:\n  tp_comm_overlap: false\n")
    from_file = load_config([*TINY_FLAGS, "--config", str(tmp_path / "run.yaml")], is_job=False)
    assert from_file.config.parallel.pipeline_receive_depth == 3 and not from_file.config.parallel.tp_comm_overlap


def test_tuned_settings_are_said_and_refused_for_another_device(tuned: Path) -> None:
    code, said = job(f"--train-iters 1 --tuned {tuned}")
    assert code == 0
    words = "pipeline_receive_depth 3, tp_comm_overlap True, nccl_settings ['NCCL_X=1']"
    assert f"tuned by {tuned} (flags and --config win): {words}" in said
    other = to_yaml(Tuned("NVIDIA H100 80GB HBM3", {}))
    tuned.write_text(other)
    with pytest.raises(ConfigError, match="was measured on NVIDIA H100 80GB HBM3, this run is on cpu; tune here"):
        tuned_line(str(tuned), torch.device("cpu"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1", "cannot be read"),
        ("parallel: {}", "names no device"),
        ("device: cpu", "lacks settings"),
        ("device: cpu\nsettings: {training.lr: 1}\nmeasured: {}", "training.lr is not a tuned setting"),
        ("device: cpu\nsettings: {parallel.pipeline_receive_depth: 0}\nmeasured: {}", "expected a value at least 1"),
    ],
    ids=["syntax", "device", "settings", "key", "range"],
)
def test_a_wrong_tuned_file_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "tuned.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config([*TINY_FLAGS, "--tuned", str(tmp_path / "tuned.yaml")], is_job=False)
    with pytest.raises(ConfigError, match=r"--tuned .*missing.yaml cannot be read"):
        read_tuned(str(tmp_path / "missing.yaml"))
