"""Settings of a run before CUDA and NCCL start: work queues, channels of messages, tuned settings, overlap over tp."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import megapipe.config.rules.gpu as gpu_rules
from megapipe import environment
from megapipe.comm.nccl import MAX_CTAS, P2P_CHANNELS, NcclSettings
from megapipe.config.load import load_config
from megapipe.config.tuned import Tuned, read_tuned, to_yaml
from megapipe.errors import ConfigError
from megapipe.extras.report.kernels import describe_kernels
from megapipe.gpu.kernels import choose_kernels
from megapipe.plan.resolve import resolve
from megapipe.train.gpu_setup import CONNECTIONS, check_compiler, connections_line, limit_channels, tuned_line
from tests.tiny import TINY_FLAGS, small_config
from tests.train.jobs import job

GPIPE = {"pipeline_model_parallel_size": 4, "pipeline_schedule": "gpipe", "global_batch_size": 16}


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in (CONNECTIONS, P2P_CHANNELS, MAX_CTAS):  # what a test sets is taken away after it
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("world_size", "changes", "given", "expected"),
    [
        (4, GPIPE, "1", "32"),
        (4, GPIPE, None, "32"),
        (4, GPIPE, "8", "32"),
        (4, GPIPE, "32", "32"),
        (4, {"global_batch_size": 16}, "1", "8"),
        (4, {"global_batch_size": 16}, "16", "16"),
        (4, {"global_batch_size": 16}, None, None),
        (1, {}, "1", "1"),
    ],
    ids=["pp-1", "pp-unset", "pp-8", "pp-32", "dp-1", "dp-16", "dp-unset", "one-rank"],
)
def test_too_few_connections_are_raised_with_one_line(
    world_size: int,
    changes: dict[str, object],
    given: str | None,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if given is not None:
        monkeypatch.setenv(CONNECTIONS, given)
    said = connections_line(resolve(small_config(**changes), world_size))
    assert os.environ.get(CONNECTIONS) == expected
    assert [line.split(",")[0] for line in said] == [f"{CONNECTIONS}: {expected} instead of {given or 8}"] * (
        expected != given
    )


def test_only_messages_between_stages_inside_a_node_get_four_channels() -> None:
    settings, (line,) = limit_channels(resolve(small_config(**GPIPE), 4, 4), NcclSettings())
    assert line == "NCCL: max_ctas 4 for communicators of the pipeline: a waiting receive holds at most 4 SMs"
    assert settings.communicators == {"pp": {"max_ctas": 4}}
    assert not {P2P_CHANNELS, MAX_CTAS} & os.environ.keys(), "all-to-alls and rings use all channels"
    over_network = limit_channels(resolve(small_config(**GPIPE), 4, 1), NcclSettings())
    without_pipeline = limit_channels(resolve(small_config(global_batch_size=16), 4, 4), NcclSettings())
    assert over_network == without_pipeline == (NcclSettings(), ())


@pytest.mark.parametrize("name", [P2P_CHANNELS, MAX_CTAS])
def test_variables_of_the_user_win_over_the_limit_of_channels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, given = resolve(small_config(**GPIPE), 4, 4), NcclSettings(variables={name: "8"})
    assert limit_channels(plan, given) == (given, ())
    monkeypatch.setenv(name, "16")
    assert limit_channels(plan, NcclSettings()) == (NcclSettings(), ())


def test_ctas_of_the_file_win_over_the_limit_of_channels() -> None:
    """NCCL uses 8 channels for messages of a communicator with 6 CTAs."""
    plan, given = resolve(small_config(**GPIPE), 4, 4), NcclSettings(communicators={"pp": {"max_ctas": 6}})
    settings, (line,) = limit_channels(plan, given)
    assert settings is given
    assert line.endswith("of --nccl-communicator-config-path: a waiting receive holds at most 8 SMs")
    least = NcclSettings(communicators={"pp": {"min_ctas": 8}})
    assert limit_channels(plan, least) == (least, ())
    named = NcclSettings(communicators={"pp": {"net_name": "IB"}, "ep": {"max_ctas": 16}})
    settings, _ = limit_channels(plan, named)
    assert settings.communicators == {"pp": {"net_name": "IB", "max_ctas": 4}, "ep": {"max_ctas": 16}}


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


@pytest.mark.parametrize("lacks", ["triton", "gcc", "headers", "dynamo"])
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
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1" if lacks == "dynamo" else "0")
    config = resolve(small_config(**ON_CUDA), 1).config
    assert (config.kernels.compile_loss, config.kernels.optimizer_impl) == (False, "torch")
    words = {"triton": "the package triton", "gcc": "a C compiler", "headers": "Python's headers"}.get(
        lacks, "TORCHDYNAMO_DISABLE"
    )
    said = describe_kernels(choose_kernels(config), config, torch.device("cuda"))
    assert sum(line.startswith(("loss  ", "optimizer  ")) and words in line for line in said) == 2
    asked = resolve(small_config(**ON_CUDA, compile_loss=True), 1).config
    with pytest.raises(ConfigError, match=rf"^--compile-loss: .*{words}.* or give --no-compile-loss"):
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
    with pytest.raises(ConfigError, match=r"NVIDIA H100 80GB HBM3, .*cpu"):
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
