"""Checkpoints of models with experts, written by Megatron-Core 0.16.1: weights bit by bit, and its own logits."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.errors import CheckpointError
from megapipe.extras.cli.convert import main
from megapipe.extras.convert import megatron_dist, megatron_legacy
from megapipe.extras.convert.megatron_args import read_config
from megapipe.extras.convert.snapshot import Snapshot, read_checkpoint
from megapipe.extras.convert.tables import meaning
from megapipe.extras.verify.conversion import stage_logits

ARCHIVE = Path(__file__).parents[2] / "fixtures" / "megatron_experts" / "checkpoints.tar.xz"
CASES = ("sigmoid_tp2_ep2", "sinks_pp2_ep2", "softmax_tp2_etp2_ep2")
READERS: dict[str, Callable[[Path], Snapshot]] = {"dist": megatron_dist.read, "legacy": megatron_legacy.read}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(root, filter="data")
    return root


def stacked(truth: dict[str, Tensor], name: str) -> Tensor:
    """Return a tensor of ours from those of Megatron on one rank."""
    name = name.replace("self_attention.softmax_offset", "self_attention.core_attention.softmax_offset")
    if ".mlp.experts." not in name:
        return truth[name]
    module, kind = name.rsplit(".", 1)
    parts = [truth[f"{module}.local_experts.{expert}.linear_fc{kind[-1]}.{kind[:-1]}"] for expert in range(4)]
    return torch.cat([part.t() if kind == "weight2" else part for part in parts])


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("case", CASES)
def test_weights_and_logits_are_megatrons(real: Path, case: str, kind: str) -> None:
    truth = load_file(real / case / "truth.safetensors")
    tokens, logits = truth.pop("tokens"), truth.pop("logits")
    snapshot = READERS[kind](real / case / kind)
    weights = {name: tensor.detach() for name, tensor in snapshot.weights.items()}
    assert [name for name, tensor in weights.items() if not torch.equal(tensor, stacked(truth, name))] == []
    assert sum(tensor.numel() for tensor in weights.values()) == sum(tensor.numel() for tensor in truth.values())
    torch.testing.assert_close(stage_logits(snapshot, tokens), logits, rtol=0.0, atol=1e-5)


def test_grouped_experts_have_the_names_of_transformer_engine(real: Path, tmp_path: Path) -> None:
    """Transformer Engine stores weight0, weight1 ... of one module in place of a module for each expert."""
    case = "sinks_pp2_ep2"
    expected = megatron_legacy.read(real / case / "legacy").weights
    shutil.copytree(real / case / "legacy", tmp_path / "legacy")
    for path in (tmp_path / "legacy").rglob("model_optim_rng.pt"):
        content = torch.load(path, weights_only=False)
        content["model"] = {grouped(name): tensor for name, tensor in content["model"].items()}
        torch.save(content, path)
    found = megatron_legacy.read(tmp_path / "legacy").weights
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].detach(), expected[name].detach()) for name in expected)


def grouped(name: str) -> str:
    module, is_expert, rest = name.partition(".local_experts.")
    number, _, rest = rest.partition(".")
    return f"{module}.{rest}{number}" if is_expert and not rest.endswith("_extra_state") else name


def _without_a_rank(root: Path) -> None:
    shutil.rmtree(root / "iter_0000001" / "mp_rank_00_001")


def _without_an_expert(root: Path) -> None:
    path = root / "iter_0000001" / "mp_rank_01_001" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    del content["model"]["decoder.layers.2.mlp.experts.local_experts.1.linear_fc1.weight"]
    torch.save(content, path)


def _cut_too_often(root: Path) -> None:
    for path in root.rglob("model_optim_rng.pt"):
        content = torch.load(path, weights_only=False)
        content["args"].expert_tensor_parallel_size = 4
        torch.save(content, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_a_rank, r"holds \[3\] slices of the experts of its stages, expected 4 of each"),
        (_without_an_expert, "holds 1 experts in decoder.layers.2.mlp.experts.weight1, its args require 2"),
        (_cut_too_often, "expert_tensor_parallel_size 4 does not divide tp 2"),
    ],
    ids=["rank", "expert", "etp"],
)
def test_a_damaged_checkpoint_is_refused(
    real: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    shutil.copytree(real / "softmax_tp2_etp2_ep2" / "legacy", tmp_path / "legacy")
    damage(tmp_path / "legacy")
    with pytest.raises(CheckpointError, match=message):
        megatron_legacy.read(tmp_path / "legacy")


ARGS: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "seq_length": 8, "max_position_embeddings": 8,
    "ffn_hidden_size": 24, "padded_vocab_size": 64, "vocab_size": 64, "swiglu": True, "add_bias_linear": False,
    "num_experts": 8,
}  # fmt: skip


def test_capacities_and_lists_of_losses_are_read() -> None:
    given = {"moe_expert_capacity_factor": 1.5, "moe_token_drop_policy": "position"}
    given |= {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2]}
    model = read_config(ARGS | given, None).model
    assert (model.moe_expert_capacity_factor, model.moe_token_drop_policy) == (1.5, "position")
    assert model.balance_losses == {"aux_loss": 0.1, "seq_aux_loss": 0.2}


def test_a_layer_frequency_counts_from_the_first_layer() -> None:
    layers = meaning(read_config(ARGS | {"moe_layer_freq": 2}, None).model)
    assert [layer.num_experts for layer in layers] == [8, None, 8, None]
    assert meaning(read_config(ARGS | {"moe_layer_freq": [1, 0, 1, 0]}, None).model) == layers


def test_a_checkpoint_becomes_a_hugging_face_model(real: Path, tmp_path: Path) -> None:
    source = real / CASES[2] / "legacy"
    assert main([str(source), str(tmp_path / "ours"), "--no-check"]) == 0
    model: ModelConfig = read_checkpoint(tmp_path / "ours").config.model
    assert model.moe_router_pre_softmax and model.moe_layer_freq is None
    assert main([str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 0
    found = load_file(tmp_path / "theirs" / "model.safetensors")
    truth = load_file(real / CASES[2] / "truth.safetensors")
    name = "mlp.experts.local_experts.3.linear_fc2.weight"
    assert torch.equal(found["model.layers.2.mlp.experts.3.down_proj.weight"], truth[f"decoder.layers.2.{name}"])


@pytest.mark.parametrize("case", CASES)
def test_weights_go_to_megatron_and_back_by_command(real: Path, tmp_path: Path, case: str) -> None:
    assert main([str(real / case / "dist"), str(tmp_path / "ours"), "--no-check"]) == 0
    line = f"{tmp_path / 'ours'} {tmp_path / 'out'} --to megatron --expert-model-parallel-size 2"
    assert main([*line.split(), "--tensor-model-parallel-size", "2"]) == 0
    again, expected = (megatron_dist.read(path).weights for path in (tmp_path / "out", real / case / "dist"))
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name].detach(), tensor.detach()) for name, tensor in expected.items())
