"""Loss and gradient-norm curves of Megatron-Core in tests/fixtures.

Each has weights, data, settings, expected numbers and tolerances. The tests of the reference use them and, with the
same numbers, those of the parallel training step.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

FIXTURES = Path(__file__).parents[2] / "fixtures"
NAMES = ("megatron_gpt2", "megatron_llama")


@dataclass(frozen=True)
class Curve:
    config: dict[str, Any]  # keyword arguments of ReferenceConfig
    weights: dict[str, Tensor]
    rows: Tensor  # [steps * 8, seq + 1]; step n takes rows 8n .. 8n+7 as 4 microbatches of 2
    lrs: list[float]
    losses: list[float]
    grad_norms: list[float]
    tolerances: list[tuple[float, float]]  # per step: (absolute for the loss, relative for the gradient norm)

    def microbatches(self, step: int) -> list[dict[str, Tensor]]:
        rows = self.rows[8 * step : 8 * step + 8]
        return [
            {"tokens": r[:, :-1], "labels": r[:, 1:], "loss_mask": torch.ones_like(r[:, 1:])} for r in rows.split(2)
        ]


def load_curve(name: str) -> Curve:
    folder = FIXTURES / name
    expected = json.loads((folder / "expected.json").read_text())
    steps = expected["steps"]
    return Curve(
        config=_config(expected["model"]),
        weights=load_file(folder / "weights.safetensors"),
        rows=torch.from_numpy(np.load(folder / "tokens.npy")),
        lrs=expected.get("lrs", [expected["optimizer"]["lr"]] * steps),
        losses=expected["losses"],
        grad_norms=expected["grad_norms_before_clipping"],
        tolerances=_tolerances(expected["tolerance"], steps),
    )


def _config(model: dict[str, Any]) -> dict[str, Any]:
    taken = {
        "init_method_std",
        "extra",
        "gelu",
        "tied_embeddings",
        "dropout",
        "norm_eps",
        "rotary",
    }  # set elsewhere, or not part of the model's shape
    config = {key: value for key, value in model.items() if key not in taken}
    config["ffn_hidden_size"] = model["ffn_hidden_size"] or 4 * model["hidden_size"]
    config["num_query_groups"] = model["num_query_groups"] or model["num_attention_heads"]
    config["kv_channels"] = model["kv_channels"] or model["hidden_size"] // model["num_attention_heads"]
    config["max_position_embeddings"] = model["max_position_embeddings"] or model["seq_length"]
    return config | {"norm_epsilon": model["norm_eps"], "padded_vocab_size": model["vocab_size"]}


def _tolerances(stated: dict[str, Any], steps: int) -> list[tuple[float, float]]:
    if "loss_abs" in stated:
        return [(stated["loss_abs"], stated["grad_norm_rel"])] * steps
    early, later = stated["steps 0-3"], stated["later"]
    return [(early["loss_abs"], early["grad_norm_rel"])] * 4 + [(later["loss_abs"], later["grad_norm_rel"])] * (
        steps - 4
    )
