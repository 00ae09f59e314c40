"""Megatron's `torch_dist` checkpoints: whole tensors, layers possibly stacked, norms under either of their names.

They are read in each form that Megatron writes, and written as Megatron-Core 0.19 does: layers stacked, norms under
Transformer Engine's names, args among the tensors, optimizer state by parameter (fully reshardable).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megapipe.config.config import ResolvedModelConfig, resolve_model
from megapipe.errors import CheckpointError
from megapipe.extras.convert import megatron_buckets
from megapipe.extras.convert.megatron import (
    COMMON,
    EXTRA_STATE,
    MOMENTS,
    TRACKER,
    TRY_WEIGHTS_ONLY,
    OptimizerState,
    iteration_folder,
    read_run_config,
    renamed,
    run_snapshot,
)
from megapipe.extras.convert.megatron_experts import from_stack, stacked_name, stacked_shape
from megapipe.extras.convert.megatron_writing import (
    EXTRA_STATE_MODULES,
    common_content,
    optimizer_content,
    param_groups,
    prepare,
    with_padding,
)
from megapipe.extras.convert.pickled import METADATA, StoredTensor, StoredValue, load_pickled, read_folder
from megapipe.extras.convert.snapshot import LazyTensor, Snapshot, check_nothing_left, new_folder, one_step
from megapipe.extras.convert.tables import unpadded
from megapipe.layers.embedding import WORD_EMBEDDING
from megapipe.layers.model import model_parameters, model_states
from megapipe.sharding.boxes import Box
from megapipe.sharding.spec import ParamSpec

if TYPE_CHECKING:
    from megapipe.comm.torch_checkpoint import LazyStack

COMMON_VALUE = "common_state/shard_0_1"
OPTIMIZER = "optimizer.state."
MASTERS = ("fp32_param", "param")  # of a plain, of a distributed optimizer
FULLY_RESHARDABLE = "fully_reshardable"
RESHARDABLE = (FULLY_RESHARDABLE, "fully_sharded_model_space", None)
BACKEND, BACKEND_VERSION = "metadata.json", {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}  # of the state dict, by Megatron


def is_distributed(root: Path) -> bool:
    """Return True for a folder of torch_dist, or one of its iterations."""
    return (root / METADATA).exists() or any(root.glob(f"*/{METADATA}"))


def read(
    root: Path,
    step: int | None = None,
    vocab_size: int | None = None,
    weights_only: bool = False,
    drop_padding: bool = False,
) -> Snapshot:
    """Read a Megatron run, with any optimizer state unless weights_only. Raises ConfigError, CheckpointError.

    A run with optimizer state keeps its vocabulary padding unless drop_padding.
    """
    folder = iteration_folder(root, step)
    stored, others = read_folder(folder)
    common = _common(folder, others)
    args = vars(common["args"])
    has_buckets = any(megatron_buckets.GROUP.fullmatch(name) for name in stored)
    optimizer = None if weights_only else _optimizer(folder, common, [*stored, *others], others, has_buckets)
    config, remarks = read_run_config(args, vocab_size, optimizer is not None and not drop_padding)
    prefixes = {"master": ""}  # of their names, by our key
    if optimizer is not None and not has_buckets:
        masters = (f"{OPTIMIZER}{name}." for name in MASTERS)
        prefixes["master"] = next((prefix for prefix in masters if prefix + WORD_EMBEDDING in stored), "")
        prefixes |= {key: f"{OPTIMIZER}{key}." for key in MOMENTS}
    plain = {renamed(name): entry for name, entry in stored.items()}  # by names with Megatron's own norms
    tensors: dict[str, LazyTensor] = {}
    used: set[str] = set()
    model = unpadded(config.model)
    states = model_states(model)  # stored as buffers, which optimizers do not have
    for spec in (*model_parameters(model, sequence_parallel=False), *states):
        name = stacked_name(spec.name)
        sources = {"master": ""} if spec in states else prefixes
        for key, prefix in (*sources.items(), (None, "")):  # the weights are there in any case
            entry, layer = plain.get(prefix + name), None
            if entry is None and isinstance(spec.owner, int):  # all layers in one stack
                layer = spec.owner
                entry = plain.get(prefix + name.replace(f"layers.{layer}.", "layers.", 1))
            if entry is None:
                raise CheckpointError(f"{folder} lacks the tensor {prefix}{name}, which its args require")
            used.add(entry.name)
            if key is not None:
                tensors[f"{key}/{spec.name}"] = _lazy(folder, entry, layer, spec)
    used |= {name for name in stored if megatron_buckets.GROUP.fullmatch(name)}
    skipped = () if optimizer is not None else ("optimizer.",)
    left = sorted(name for name in stored.keys() - used if not name.startswith(skipped) and EXTRA_STATE not in name)
    check_nothing_left(folder, left, "the model that its args describe")
    if optimizer is not None and has_buckets:
        whole = dataclasses.replace(config.model, padded_vocab_size=int(args["padded_vocab_size"]))
        weights = {name.removeprefix("master/"): tensor for name, tensor in tensors.items()}
        tensors = megatron_buckets.state_by_parameter(folder, resolve_model(whole, 1), args, stored, weights)
    return run_snapshot(config, tensors, args, common, optimizer, remarks)


def _common(folder: Path, others: Mapping[str, StoredValue]) -> Mapping[str, Any]:
    """Return everything but tensors: of `common.pt`, since Megatron-Core 0.19 a value among the tensors."""
    inside = others.get(COMMON_VALUE)
    common: Any
    if inside is None:
        common, place = load_pickled(folder / COMMON), f"{folder / COMMON}"
    else:
        content, place = inside.read(with_stand_ins=True), f"{inside.path}: {COMMON_VALUE}"
        common = content[0] if isinstance(content, list) and content else None
    if not isinstance(common, Mapping) or not isinstance(common.get("args"), argparse.Namespace):
        raise CheckpointError(f"{place} holds no args, so the model is unknown")
    return common


def _lazy(folder: Path, entry: StoredTensor, layer: int | None, spec: ParamSpec) -> LazyTensor:
    shape = entry.shape if layer is None else entry.shape[1:]
    if spec.is_expert:
        return _lazy_experts(folder, entry, layer, spec, shape)
    rows = spec.shape[0] if spec.true_rows is not None else shape[0]  # a vocabulary may have padding, which is dropped
    if (min(rows, shape[0]), *shape[1:]) != spec.shape:
        raise CheckpointError(f"{folder}: {entry.name} has shape {list(shape)}, its args require {list(spec.shape)}")
    box = Box((0,) * len(spec.shape), spec.shape)
    if layer is not None:
        box = Box((layer, *box.offset), (1, *box.shape))
    return LazyTensor(spec.shape, entry.dtype, lambda: entry.read(box).view(spec.shape))


def _lazy_experts(
    folder: Path, entry: StoredTensor, layer: int | None, spec: ParamSpec, shape: tuple[int, ...]
) -> LazyTensor:
    expected = stacked_shape(spec)
    if shape != expected:
        raise CheckpointError(f"{folder}: {entry.name} has shape {list(shape)}, its args require {list(expected)}")
    box = Box((0,) * len(expected), expected)
    if layer is not None:
        box = Box((layer, *box.offset), (1, *box.shape))
    return LazyTensor(spec.shape, entry.dtype, lambda: from_stack(spec, entry.read(box).view(expected)))


def _optimizer(
    folder: Path,
    common: Mapping[str, Any],
    stored: Collection[str],
    others: Mapping[str, StoredValue],
    has_buckets: bool,
) -> OptimizerState | None:
    """Return the optimizer's state other than tensors, or None if the checkpoint has no optimizer state.

    stored: all names. Raises CheckpointError for a kind of state that cannot be read.
    """
    if not any(name.startswith("optimizer.") for name in stored):
        return None
    content: Any
    if has_buckets:
        found = {name: megatron_buckets.content(others, name) for name in ("optimizer", "grad_scaler")}
        content = {name: value for name, value in found.items() if value is not None}
    else:
        kind = (common.get("content_metadata") or {}).get("distrib_optim_sharding_type")
        if kind not in RESHARDABLE or not any(name.startswith(OPTIMIZER) for name in stored):
            raise CheckpointError(
                f"{folder}: the distributed optimizer's state is stored as {kind or 'separate objects'}, which "
                "cannot be read; load it in Megatron and save once with --dist-ckpt-optim-fully-reshardable, or "
                f"{TRY_WEIGHTS_ONLY}"
            )
        content = common.get("optimizer")
    if not isinstance(content, Mapping) or 0 in content or not content:
        raise CheckpointError(f"{folder}: a chain of several optimizers cannot be converted; {TRY_WEIGHTS_ONLY}")
    inner = content.get("optimizer", content)
    steps = {int(group["step"]) for group in inner["param_groups"] if group.get("step") is not None}
    if "common_step" in inner.get("state", {}):
        steps = {int(inner["state"]["common_step"])}
    return OptimizerState([], one_step(folder, steps), content.get("grad_scaler"))


def write(
    snapshot: Snapshot,
    root: Path,
    tp: int = 1,
    pp: int = 1,
    transformer_engine: bool = True,
    distributed_optimizer: bool = False,
) -> Path:
    """Write a run in a new directory atomically, to --load in Megatron with any tp and pp. Returns its folder.

    Its optimizer state is written if Megatron can continue it (`has_writable_optimizer`), for its distributed optimizer
    or for the plain one; else weights to --finetune. One tensor is in memory at a time.

    tp, pp: recorded in the args, and the vocabulary is padded for this tp. Raises ConfigError for a model that
    Megatron's args cannot express, CheckpointError if root exists.
    """
    from megapipe.comm.torch_checkpoint import save_state_dict  # its import takes as long as all others together

    run = prepare(snapshot, "torch_dist", tp, pp, transformer_engine, distributed_optimizer)
    common = common_content(snapshot, run) | {"content_metadata": dict(CONTENT)}
    sources: dict[str, Mapping[str, LazyTensor]] = {"": run.weights}  # by the prefix of their names
    if run.continues:
        kinds = dict(zip(MOMENTS, MOMENTS, strict=True))
        groups, steps = param_groups(snapshot), float(snapshot.state["optimizer"]["num_steps"])
        if distributed_optimizer:
            kinds["param"] = "master"
            common["content_metadata"] |= {
                "distrib_optim_sharding_type": FULLY_RESHARDABLE,
                "distrib_optim_fully_reshardable_mem_efficient": False,
            }
            inner = optimizer_content(snapshot, {"param_groups": groups})
            common["optimizer"] = inner | {"param_state_sharding_type": FULLY_RESHARDABLE}
        else:
            inner = {"state": {"common_step": torch.tensor(steps)}, "param_groups": groups}
            is_fp32 = snapshot.config.precision.dtype == "fp32"
            common["optimizer"] = inner if is_fp32 else optimizer_content(snapshot, inner)
            kinds |= {} if is_fp32 else {"fp32_param": "master"}
        for theirs, ours in kinds.items():
            sources[f"{OPTIMIZER}{theirs}."] = {
                name: snapshot.tensors[f"{ours}/{name}"].to(torch.float32) for name in run.weights
            }
    content: dict[str, Any] = {COMMON_VALUE: [common], **_extra_states(run.model, transformer_engine)}
    for prefix, tensors in sources.items():
        content |= {prefix + name: entry for name, entry in _stacked(run.model, tensors).items()}
    folder = f"iter_{snapshot.step:07d}"
    with new_folder(root) as (disk, temporary):
        disk.make_folder(temporary / folder)
        save_state_dict(content, temporary / folder, is_flat=True)
        disk.write_file(temporary / folder / BACKEND, json.dumps(BACKEND_VERSION).encode())
        disk.sync_folder(temporary / folder)
        disk.write_file(temporary / TRACKER, str(snapshot.step).encode())
    return root / folder


def _extra_states(model: ResolvedModelConfig, transformer_engine: bool) -> dict[str, Any]:
    """Return the extra states that Megatron asks for, empty as without fp8, by name and place among the layers."""
    modules = EXTRA_STATE_MODULES[0 if transformer_engine else 1 :]
    if transformer_engine and model.qk_layernorm:
        modules = (*modules, "self_attention.q_layernorm", "self_attention.k_layernorm")
    layers, number = "decoder.layers", model.num_layers
    states: dict[str, Any] = {
        f"{layers}.{module}.{EXTRA_STATE}/shard_{layer}_{number}": [None]
        for module in modules
        for layer in range(number)
    }
    return states | ({f"decoder.final_layernorm.{EXTRA_STATE}/shard_0_1": [None]} if transformer_engine else {})


def _stacked(model: ResolvedModelConfig, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor | LazyStack]:
    """Return tensors by Megatron's names, those of layers stacked in the order of the layers.

    model: with its padded vocabulary, for which rows of zeros are added.
    """
    from megapipe.comm.torch_checkpoint import LazyStack

    found: dict[str, LazyTensor] = {}
    stacks: dict[str, list[LazyTensor]] = {}
    for spec in model_parameters(model, sequence_parallel=False):
        tensor, name = tensors[spec.name], renamed(spec.name, fused=True)
        if isinstance(spec.owner, int):
            stacks.setdefault(name.replace(f"layers.{spec.owner}.", "layers.", 1), []).append(tensor)
        elif tensor.shape == spec.shape:
            found[name] = tensor
        else:
            found[name] = LazyTensor(spec.shape, tensor.dtype, partial(_padded, tensor, spec.shape[0]))
    return found | {name: LazyStack(rows) for name, rows in stacks.items()}


def _padded(tensor: LazyTensor, num_rows: int) -> Tensor:
    return with_padding(tensor.detach(), num_rows)
