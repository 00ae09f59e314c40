"""Megatron's `torch_dist` checkpoints: whole tensors, layers possibly stacked, norms under either of their names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megapipe.errors import CheckpointError
from megapipe.extras.convert.megatron import (
    COMMON,
    EXTRA_STATE,
    MOMENTS,
    TRY_WEIGHTS_ONLY,
    OptimizerState,
    iteration_folder,
    read_config,
    renamed,
    run_snapshot,
)
from megapipe.extras.convert.pickled import METADATA, StoredTensor, load_pickled, read_folder
from megapipe.extras.convert.snapshot import LazyTensor, Snapshot, check_nothing_left, one_step
from megapipe.extras.convert.tables import unpadded
from megapipe.layers.embedding import WORD_EMBEDDING
from megapipe.layers.model import model_parameters
from megapipe.sharding.boxes import Box
from megapipe.sharding.spec import ParamSpec

OPTIMIZER = "optimizer.state."
MASTERS = ("fp32_param", "param")  # of a plain, of a distributed optimizer
RESHARDABLE = ("fully_reshardable", "fully_sharded_model_space", None)


def is_distributed(root: Path) -> bool:
    """Return True for a folder of torch_dist, or one of its iterations."""
    return (root / METADATA).exists() or any(root.glob(f"*/{METADATA}"))


def read(root: Path, step: int | None = None, vocab_size: int | None = None, weights_only: bool = False) -> Snapshot:
    """Read a Megatron run, with any optimizer state unless weights_only. Raises ConfigError, CheckpointError."""
    folder = iteration_folder(root, step)
    common = load_pickled(folder / COMMON)
    if "args" not in common:
        raise CheckpointError(f"{folder / COMMON} holds no args, so the model is unknown")
    args = vars(common["args"])
    stored, others = read_folder(folder)
    config = read_config(args, vocab_size)
    optimizer = None if weights_only else _optimizer(folder, common, [*stored, *others])
    prefixes = {"master": ""}  # of their names, by our key
    if optimizer is not None:
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
    skipped = () if optimizer is not None else ("optimizer.",)
    left = sorted(name for name in stored.keys() - used if not name.startswith(skipped) and EXTRA_STATE not in name)
    check_nothing_left(folder, left, "the model that its args describe")
    return run_snapshot(config, tensors, args, common, optimizer)


def _lazy(folder: Path, entry: StoredTensor, layer: int | None, spec: ParamSpec) -> LazyTensor:
    shape = entry.shape if layer is None else entry.shape[1:]
    rows = spec.shape[0] if spec.true_rows is not None else shape[0]  # a vocabulary may have padding, which is dropped
    if (min(rows, shape[0]), *shape[1:]) != spec.shape:
        raise CheckpointError(f"{folder}: {entry.name} has shape {list(shape)}, its args require {list(spec.shape)}")
    box = Box((0,) * len(spec.shape), spec.shape)
    if layer is not None:
        box = Box((layer, *box.offset), (1, *box.shape))
    return LazyTensor(spec.shape, entry.dtype, lambda: entry.read(box).view(spec.shape))


def _optimizer(folder: Path, common: Mapping[str, Any], stored: Collection[str]) -> OptimizerState | None:
    """Return the optimizer's state other than tensors, or None if the checkpoint has no optimizer state.

    stored: all names. Raises CheckpointError if the state is tied to the grid that wrote it.
    """
    if not any(name.startswith("optimizer.") for name in stored):
        return None
    kind = (common.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    if kind not in RESHARDABLE or not any(name.startswith(OPTIMIZER) for name in stored):
        raise CheckpointError(
            f"{folder}: the distributed optimizer's state is stored as {kind or 'its own buffers'}, which follows the "
            "buckets of the tp and pp that wrote it: the format is tied to that grid. Save once with "
            f"--dist-ckpt-optim-fully-reshardable, or {TRY_WEIGHTS_ONLY}"
        )
    content = common.get("optimizer")
    if not isinstance(content, Mapping) or 0 in content:
        raise CheckpointError(f"{folder}: a chain of several optimizers cannot be converted; {TRY_WEIGHTS_ONLY}")
    inner = content.get("optimizer", content)
    steps = {int(group["step"]) for group in inner["param_groups"] if group.get("step") is not None}
    if "common_step" in inner.get("state", {}):
        steps = {int(inner["state"]["common_step"])}
    return OptimizerState([], one_step(folder / COMMON, steps), content.get("grad_scaler"))
