"""Megatron's `torch_dist` checkpoints: whole tensors, layers possibly stacked, norms under either of their names."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megapipe.errors import CheckpointError
from megapipe.extras.convert import megatron_buckets
from megapipe.extras.convert.megatron import (
    COMMON,
    EXTRA_STATE,
    MOMENTS,
    TRY_WEIGHTS_ONLY,
    OptimizerState,
    iteration_folder,
    read_run_config,
    renamed,
    run_snapshot,
)
from megapipe.extras.convert.pickled import METADATA, StoredTensor, StoredValue, load_pickled, read_folder
from megapipe.extras.convert.snapshot import LazyTensor, Snapshot, check_nothing_left, one_step
from megapipe.extras.convert.tables import unpadded
from megapipe.layers.embedding import WORD_EMBEDDING
from megapipe.layers.model import model_parameters
from megapipe.plan.resolve import resolve_model
from megapipe.sharding.boxes import Box
from megapipe.sharding.spec import ParamSpec

COMMON_VALUE = "common_state/shard_0_1"
OPTIMIZER = "optimizer.state."
MASTERS = ("fp32_param", "param")  # of a plain, of a distributed optimizer
RESHARDABLE = ("fully_reshardable", "fully_sharded_model_space", None)


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
    for spec in model_parameters(unpadded(config.model), sequence_parallel=False):
        for key, prefix in (*prefixes.items(), (None, "")):  # the weights are there in any case
            entry, layer = plain.get(prefix + spec.name), None
            if entry is None and isinstance(spec.owner, int):  # all layers in one stack
                layer = spec.owner
                entry = plain.get(prefix + spec.name.replace(f"layers.{layer}.", "layers.", 1))
            if entry is None:
                raise CheckpointError(f"{folder} lacks the tensor {prefix}{spec.name}, which its args require")
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
    rows = spec.shape[0] if spec.true_rows is not None else shape[0]  # a vocabulary may have padding, which is dropped
    if (min(rows, shape[0]), *shape[1:]) != spec.shape:
        raise CheckpointError(f"{folder}: {entry.name} has shape {list(shape)}, its args require {list(spec.shape)}")
    box = Box((0,) * len(spec.shape), spec.shape)
    if layer is not None:
        box = Box((layer, *box.offset), (1, *box.shape))
    return LazyTensor(spec.shape, entry.dtype, lambda: entry.read(box).view(spec.shape))


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
