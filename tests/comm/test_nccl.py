"""NCCL settings without NCCL: environment variables, communicator options, the flight recorder, user errors."""

from __future__ import annotations

import ast
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megapipe.comm import groups
from megapipe.comm.nccl import COMMUNICATOR_KEYS, NcclSettings, channels_of_messages, read_communicators
from megapipe.config.gpu import NCCL_GROUPS, GpuConfig
from megapipe.errors import ConfigError
from megapipe.topology import GROUP_NAMES


def fields_of(*path: str) -> dict[str, str]:
    """Return the names and types of a class in torch's description of its C++ classes."""
    text = (Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi").read_text()
    body: list[ast.stmt] = ast.parse(text).body
    for name in path:
        body = next(each.body for each in body if isinstance(each, ast.ClassDef) and each.name == name)
    return {ast.unparse(each.target): ast.unparse(each.annotation) for each in body if isinstance(each, ast.AnnAssign)}


class Config:
    """Stub of torch.distributed.ProcessGroupNCCL.NCCLConfig, of which a CPU build of torch has no class."""

    # torch binds net_name, too (torch/csrc/distributed/c10d/init.cpp), but does not describe it
    __slots__ = (*fields_of("ProcessGroupNCCL", "NCCLConfig"), "net_name")


class Options:
    """Stub of torch.distributed.ProcessGroupNCCL.Options."""

    __slots__ = (*fields_of("ProcessGroupNCCL", "Options"), "_timeout")

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = Config()
        self._timeout: timedelta | None = None


@pytest.fixture
def _with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)


@pytest.mark.usefixtures("_with_nccl")
def test_communicators_get_the_options_of_their_kind_of_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "nccl.yaml"
    file.write_text("dp: {min_ctas: 2, max_ctas: 8, net_name: IB}\n")
    settings = NcclSettings.of(GpuConfig(nccl_communicator_config_path=str(file)))
    made = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **arguments: made.append(arguments))
    for kind in ("cp", "pp", "dp"):
        groups.new_handle((0, 1), kind, "nccl", 5.0, kind, settings.options)
        groups.new_handle((0, 1), kind, "gloo", 5.0, kind, settings.options)
    cp, _, pp, _, dp, _ = (arguments["pg_options"] for arguments in made)
    assert cp is None
    assert pp.is_high_priority_stream and pp._timeout == timedelta(seconds=5)
    assert not dp.is_high_priority_stream
    assert (dp.config.min_ctas, dp.config.max_ctas, dp.config.net_name) == (2, 8, "IB")
    assert not hasattr(dp.config, "cga_cluster_size"), "what is not given is NCCL's"
    assert all(arguments["pg_options"] is None for arguments in made[1::2]), "gloo has no options"


@pytest.mark.usefixtures("_with_nccl")
def test_a_default_number_of_ctas_is_that_of_one_kind_of_group() -> None:
    settings = NcclSettings(high_priority=("tp", "pp")).with_default("pp", 4)
    pp = settings.options("pp", None)
    assert pp.config.max_ctas == 4 and pp.is_high_priority_stream
    assert not hasattr(settings.options("tp", None).config, "max_ctas")
    assert all(settings.options(kind, None) is None for kind in NCCL_GROUPS if kind not in ("tp", "pp"))


def test_the_options_of_communicators_are_those_of_torch() -> None:
    assert fields_of("ProcessGroupNCCL", "Options") == {
        "config": "ProcessGroupNCCL.NCCLConfig",
        "is_high_priority_stream": "bool",
        "split_from": "ProcessGroupNCCL",
        "split_color": "int",
    }
    described = fields_of("ProcessGroupNCCL", "NCCLConfig")
    assert {key: described[key] for key in COMMUNICATOR_KEYS if key != "net_name"} == dict.fromkeys(
        ("cga_cluster_size", "min_ctas", "max_ctas"), "int"
    )


def test_nccl_rounds_the_channels_of_messages_up_to_a_power_of_two() -> None:
    assert [channels_of_messages(ctas) for ctas in (1, 2, 3, 4, 5, 8, 9, 32)] == [1, 2, 4, 4, 8, 8, 16, 32]


def test_environment_is_set_but_never_overridden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"NCCL_IB_HCA": "mlx5_0"}
    monkeypatch.setattr("megapipe.environment.os.environ", variables)
    NcclSettings.of(GpuConfig(nccl_settings=("NCCL_DEBUG=INFO", "NCCL_IB_HCA=mlx5_0"))).prepare(tmp_path / "nccl")
    assert variables["NCCL_DEBUG"] == "INFO"
    assert variables["TORCH_FR_BUFFER_SIZE"] == variables["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"
    assert variables["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "nccl" / "rank_")
    assert (tmp_path / "nccl").is_dir()
    with pytest.raises(ConfigError, match=r"NCCL_IB_HCA=mlx5_1, .*NCCL_IB_HCA=mlx5_0"):
        NcclSettings.of(GpuConfig(nccl_settings=("NCCL_IB_HCA=mlx5_1",))).prepare(None)


@pytest.mark.parametrize("word", ["DEBUG=INFO", "NCCL_DEBUG", "NCCL_DEBUG=", "nccl_debug=INFO", "LD_PRELOAD=x.so"])
def test_only_variables_of_nccl_are_settings(word: str) -> None:
    with pytest.raises(ConfigError, match=f"{word}: expected NCCL_NAME=VALUE"):
        NcclSettings.of(GpuConfig(nccl_settings=(word,)))


def test_a_setting_given_twice_is_refused() -> None:
    same = NcclSettings.of(GpuConfig(nccl_settings=("NCCL_ALGO=Ring", "NCCL_ALGO=Ring")))
    assert same.variables == {"NCCL_ALGO": "Ring"}
    with pytest.raises(ConfigError, match="sets NCCL_ALGO twice, to Ring and to Tree"):
        NcclSettings.of(GpuConfig(nccl_settings=("NCCL_ALGO=Ring", "NCCL_ALGO=Tree")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("- 1", "expected kinds of groups with options", id="list"),
        pytest.param("sp: {max_ctas: 1}", "unknown kind of group sp; use one of tp, cp", id="group"),
        pytest.param("dp: {ctas: 1}", "unknown option dp.ctas; use one of cga_cluster_size", id="key"),
        pytest.param("dp: {max_ctas: many}", "dp.max_ctas is 'many'; expected an integer", id="value"),
        pytest.param("dp: [", "cannot be read", id="yaml"),
    ],
)
def test_the_message_names_the_error_in_a_file(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "nccl.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_communicators(path)


def test_kinds_of_groups_are_those_of_the_topology() -> None:
    assert {*NCCL_GROUPS, "world"} == set(GROUP_NAMES)
