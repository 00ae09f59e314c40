"""Checkpoints that Megatron-FSDP of Megatron-Core 0.19.2 wrote on CPU (gloo), and experts chosen in groups.

The README of the fixtures says what they are. Shards are uneven: a rank holds some rows of some parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megapipe.errors import CheckpointError
from megapipe.extras.convert import megatron_dist
from megapipe.extras.convert.pickled import read_folder
from tests.extras.convert.test_megatron_runs import read


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors as torch.distributed.checkpoint itself loads them, by their keys."""
    tensors, _ = read_folder(folder)
    state = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in tensors.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


@pytest.mark.parametrize("weights_only", [False, True], ids=["with its optimizer", "weights"])
def test_gates_and_experts_lie_where_torch_finds_their_parts(runs: Path, weights_only: bool) -> None:
    theirs = loaded(runs / "fsdp_experts" / "iter_0000003")
    found = read(runs / "fsdp_experts", *(["--weights-only"] if weights_only else [])).tensors
    states = {"master": "model.module.{}"}
    if not weights_only:
        states |= {key: f"optimizer.state.module.module.module.{{}}.{key}" for key in ("exp_avg", "exp_avg_sq")}
    assert {name.partition("/")[0] for name in found} == set(states)
    for key, form in states.items():
        layer = "decoder.layers.0.mlp.linear_fc1.weight"
        halves = [theirs[form.format(f"{layer}_{half}")] for half in "wv"]
        assert torch.equal(found[f"{key}/{layer}"].detach(), torch.cat(halves))
        experts = "decoder.layers.1.mlp.experts."
        local = f"{experts}local_experts.{{}}.linear_fc"
        first = [
            torch.cat([theirs[form.format(f"{local.format(n)}1.weight_{half}")] for half in "wv"]) for n in range(4)
        ]
        second = [theirs[form.format(f"{local.format(n)}2.weight")].T for n in range(4)]
        assert torch.equal(found[f"{key}/{experts}weight1"].detach(), torch.cat(first))
        assert torch.equal(found[f"{key}/{experts}weight2"].detach(), torch.cat(second))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_model_parallel_size": 2}, "is of pp 2, where fsdp_dtensor has the same names for layers"),
        ({"fp16": True}, "fsdp_dtensor does not store the loss scale of fp16; convert with --weights-only"),
    ],
    ids=["stages", "loss scale"],
)
def test_what_the_format_does_not_hold_is_refused(
    runs: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    common = megatron_dist._common

    def changed(*arguments: Any) -> Mapping[str, Any]:
        found = common(*arguments)
        vars(found["args"]).update(changes)
        return found

    monkeypatch.setattr(megatron_dist, "_common", changed)
    with pytest.raises(CheckpointError, match=message):
        read(runs / "fsdp")


def test_experts_of_grouped_linears_are_stacked_by_their_number(tmp_path: Path) -> None:
    """Transformer Engine's names, which need a GPU to be written by Megatron."""
    module = "module.decoder.layers.1.mlp.experts.linear_fc"
    state = {f"model.{module}1.weight{n}_{half}": torch.rand(3, 2) for n in range(2) for half in "wv"}
    state |= {f"model.{module}2.weight{n}": torch.rand(2, 3) for n in range(2)}
    dcp.save(dict(state), checkpoint_id=tmp_path, no_dist=True)
    tensors = megatron_dist._of_fsdp(tmp_path, read_folder(tmp_path)[0], {"tensor_model_parallel_size": 1}, True)
    stacked = "decoder.layers.1.mlp.experts.experts.linear_fc{}.weight"
    gates = [torch.cat([state[f"model.{module}1.weight{n}_{half}"] for half in "wv"]) for n in range(2)]
    assert torch.equal(tensors[stacked.format(1)].read(), torch.stack(gates))
    assert torch.equal(
        tensors[stacked.format(2)].read(), torch.stack([state[f"model.{module}2.weight{n}"] for n in (0, 1)])
    )
