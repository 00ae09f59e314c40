"""Experts in Megatron's args and checkpoints, where each expert has tensors of its own, or all of a layer are stacked.

Their linears are those of an MLP: linear_fc1 [gates x width, hidden] and linear_fc2 [hidden, width]. Here all experts
of a layer are one tensor for each, of which linear_fc2's is transposed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from megapipe.config.model import EXPERT_SCORES, LOAD_BALANCING
from megapipe.errors import ConfigError
from megapipe.extras.convert.tables import Layers, Rule, Settings
from megapipe.sharding.boxes import pieces
from megapipe.sharding.spec import Experts, ParamSpec

FREQUENCY, BALANCE, COEFFICIENT = "moe_layer_freq", "moe_router_load_balancing_type", "moe_aux_loss_coeff"
# args with the name and meaning of our field, and their defaults, which a layer without experts has
SAME_NAME: dict[str, Any] = {
    "num_experts": None,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_router_topk": 2,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_dtype": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_bias_update_rate": 1e-3,
    "moe_z_loss_coeff": None,
    "moe_expert_capacity_factor": None,
    "moe_token_drop_policy": "probs",
    "moe_pad_expert_input_to_capacity": False,
}
NAME = re.compile(
    r"(?P<module>.*\.mlp\.experts)\."
    r"(?:local_experts\.(?P<number>\d+)\.linear_fc(?P<linear>[12])\.(?P<kind>weight|bias)"
    r"|linear_fc(?P<grouped_linear>[12])\.(?P<grouped_kind>weight|bias)(?P<grouped_number>\d+))"
)
STACKED = {  # the end of our name -> that of all experts of a layer in torch_dist
    ".mlp.experts.weight1": ".mlp.experts.experts.linear_fc1.weight",
    ".mlp.experts.weight2": ".mlp.experts.experts.linear_fc2.weight",
    ".mlp.experts.bias1": ".mlp.experts.experts.linear_fc1.bias",
    ".mlp.experts.bias2": ".mlp.experts.experts.linear_fc2.bias",
}


def read_experts(args: Settings) -> dict[str, Any]:
    """Read the options of experts, which have no effect without --num-experts."""
    if not args.get("num_experts"):
        return {}
    fields = {name: default if args.get(name) is None else args[name] for name, default in SAME_NAME.items()}
    if fields["moe_router_score_function"] not in EXPERT_SCORES:
        raise ConfigError(f"moe_router_score_function {fields['moe_router_score_function']} cannot be expressed")
    kinds, coefficients = (
        tuple(given) if isinstance(given, list) else (default if given is None else given,)
        for given, default in ((args.get(BALANCE), "aux_loss"), (args.get(COEFFICIENT), 0.0))
    )
    for kind in kinds:
        if kind not in LOAD_BALANCING:
            raise ConfigError(f"{BALANCE} {kind} cannot be expressed; it can be {', '.join(LOAD_BALANCING)}")
    frequency = args.get(FREQUENCY)
    return fields | {
        BALANCE: kinds,
        COEFFICIENT: (0.0,) if kinds == ("none",) else coefficients,
        FREQUENCY: None if frequency in (None, 1) else str(frequency),
    }


def write_experts(layers: Layers) -> dict[str, Any]:
    marks = [int(layer.num_experts is not None) for layer in layers]
    layer = layers[marks.index(1)] if any(marks) else layers[0]
    args = {name: getattr(layer, name) if any(marks) else default for name, default in SAME_NAME.items()}
    width = layer.expert_ffn_size if any(marks) else None
    return args | {
        "moe_ffn_hidden_size": width,
        BALANCE: _one_or_list(layer.moe_router_load_balancing_type),
        COEFFICIENT: _one_or_list(layer.moe_aux_loss_coeff),
        FREQUENCY: 1 if all(marks) or not any(marks) else marks,
    }


def _one_or_list(values: tuple[Any, ...]) -> Any:
    """Return what Megatron's arguments hold: a single value, or a list."""
    return values[0] if len(values) == 1 else list(values)


EXPERT_RULE = Rule((*SAME_NAME, BALANCE, COEFFICIENT, FREQUENCY), read_experts, write_experts)


def expert_tensor(name: str) -> tuple[str, int] | None:
    """Return our name of the tensor of all experts to which one expert's belongs, and its number; None for others."""
    match = NAME.fullmatch(name)
    if match is None:
        return None
    number, linear, kind = (match[group] or match[f"grouped_{group}"] for group in ("number", "linear", "kind"))
    return f"{match['module']}.{kind}{linear}", int(number)


def local_names(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the tensors of a rank's experts, in the order of the experts, by our name of all of them."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        place = expert_tensor(name)
        if place is not None:
            found.setdefault(place[0], {})[place[1]] = name
    return {ours: [numbered[number] for number in sorted(numbered)] for ours, numbered in found.items()}


def local_slice(spec: ParamSpec, parts: Sequence[Tensor], rank: int) -> Tensor:
    """Return a rank's slice of the tensor of all experts. parts: that of each of its experts.

    rank: ep_rank x etp + etp_rank. A bias of linear_fc2 is whole on all ranks of etp there, and cut here.
    """
    assert isinstance(spec.slicing, Experts)
    if spec.name.endswith("weight2"):
        return torch.cat([part.t() for part in parts])
    if spec.name.endswith("bias2"):
        etp = spec.slicing.etp
        return torch.cat([part.chunk(etp)[rank % etp] for part in parts])
    return torch.cat(tuple(parts))


def local_part_shape(spec: ParamSpec, num_local: int, local_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that one expert's tensor must have on a rank with so many experts."""
    assert isinstance(spec.slicing, Experts)
    rows, *others = local_shape
    if spec.name.endswith("weight2"):
        return (*others, rows // num_local)
    return (rows // num_local * (spec.slicing.etp if spec.name.endswith("bias2") else 1), *others)


@dataclass(frozen=True)
class Member:
    """One tensor of a rank in Megatron: a parameter's slice, or that of one of the rank's experts."""

    spec: ParamSpec
    expert: int | None = None  # its number on the rank

    def name(self, is_grouped: bool) -> str:
        """Return Megatron's name of an expert's tensor, else ours. is_grouped: by Transformer Engine's grouped GEMM."""
        if self.expert is None:
            return self.spec.name
        module, kind = self.spec.name.rsplit(".", 1)
        place = f"linear_fc{kind[-1]}.{kind[:-1]}"
        return f"{module}.{place}{self.expert}" if is_grouped else f"{module}.local_experts.{self.expert}.{place}"

    def num_elements(self, rank: int, ranks: int, num_local: int) -> int:
        """Return its size on a rank of tp, or of ep x etp, that has so many experts."""
        local = self.spec.local_shape(rank, ranks)
        if self.expert is None:
            return math.prod(local)
        return math.prod(local_part_shape(self.spec, num_local, local))


def members(specs: Iterable[ParamSpec], ep: int, is_grouped: bool) -> list[Member]:
    """Return the tensors of a rank in Megatron's order. specs: its parameters, in that order but for experts."""
    found: list[Member] = []
    for (is_expert, _), group in groupby(specs, lambda spec: (spec.is_expert, spec.owner)):
        same = list(group)
        if not is_expert:
            found += [Member(spec) for spec in same]
            continue
        linears = [[spec for spec in same if spec.name.endswith(number)] for number in "12"]  # weight, bias
        assert isinstance(same[0].slicing, Experts)
        numbers = range(same[0].slicing.count // ep)
        if is_grouped:
            found += [Member(spec, number) for linear in linears for number in numbers for spec in linear]
        else:
            found += [Member(spec, number) for number in numbers for linear in linears for spec in linear]
    return found


def local_parts(spec: ParamSpec, whole: Tensor, rank: int, ep: int) -> tuple[Tensor, ...]:
    """Return the tensors of a rank's experts, the inverse of `local_slice`. whole: that of all experts.

    rank: ep_rank x etp + etp_rank.
    """
    assert isinstance(spec.slicing, Experts)
    etp, num_local = spec.slicing.etp, spec.slicing.count // ep
    if spec.name.endswith("bias2"):
        return whole.chunk(spec.slicing.count)[rank // etp * num_local :][:num_local]
    parts = torch.cat([whole[piece.box.slices] for piece in pieces(spec, rank, ep * etp)]).chunk(num_local)
    return tuple(part.t() if spec.name.endswith("weight2") else part for part in parts)


def stacked_name(name: str) -> str:
    """Return the name in torch_dist of a tensor of all experts of a layer, or the name of another tensor."""
    end = next((end for end in STACKED if name.endswith(end)), None)
    return name if end is None else name.removesuffix(end) + STACKED[end]


def stacked_shape(spec: ParamSpec) -> tuple[int, ...]:
    """Return the shape in torch_dist of a tensor of all experts of a layer."""
    assert isinstance(spec.slicing, Experts)
    rows, *others = spec.shape
    per_expert = (rows // spec.slicing.count, *others)
    return (spec.slicing.count, *(per_expert[::-1] if spec.name.endswith("weight2") else per_expert))


def from_stack(spec: ParamSpec, stack: Tensor) -> Tensor:
    """Return a tensor of all experts of a layer from that of torch_dist."""
    return (stack.transpose(1, 2) if spec.name.endswith("weight2") else stack).flatten(0, 1)


def to_stack(spec: ParamSpec, whole: Tensor) -> Tensor:
    """Return the tensor of torch_dist from ours of all experts of a layer."""
    assert isinstance(spec.slicing, Experts)
    stack = whole.unflatten(0, (spec.slicing.count, -1))
    return stack.transpose(1, 2) if spec.name.endswith("weight2") else stack


def grid_of(args: Mapping[str, Any]) -> tuple[int, int]:
    """Return (ep, etp)."""
    tp = int(args.get("tensor_model_parallel_size") or 1)
    return int(args.get("expert_model_parallel_size") or 1), int(args.get("expert_tensor_parallel_size") or tp)
