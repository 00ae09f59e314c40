"""Megatron's `torch_dist` checkpoints: whole tensors of any grid, layers of one kind stacked, norms under Transformer Engine's names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megapipe.errors import CheckpointError
from megapipe.extras.convert.dcp_folder import METADATA, StoredTensor, StoredValue, read_folder
from megapipe.extras.convert.megatron_legacy import iteration_folder
from megapipe.extras.convert.megatron_optimizer import MASTER, MOMENTS, OptimizerState, one_step
from megapipe.extras.convert.megatron_ranks import FUSED_NORMS, NOT_WEIGHTS
from megapipe.extras.convert.megatron_run import run_snapshot
from megapipe.extras.convert.megatron_settings import read_config
from megapipe.extras.convert.pickled import load_pickled
from megapipe.extras.convert.snapshot import LazyTensor, Snapshot, unpadded
from megapipe.layers.embedding import WORD_EMBEDDING
from megapipe.layers.model import model_parameters
from megapipe.sharding.boxes import Box
from megapipe.sharding.spec import ParamSpec

COMMON = "common.pt"
OPTIMIZER = "optimizer.state."
MASTERS = ("fp32_param", "param")  # of a plain, of a distributed optimizer
RESHARDABLE = ("fully_reshardable", "fully_sharded_model_space", None)


def looks_distributed(root: Path) -> bool:
    """A folder of torch_dist, or one of its iterations."""
    return (root / METADATA).exists() or any(root.glob(f"*/{METADATA}"))


def read(root: Path, step: int | None = None, vocab_size: int | None = None, weights_only: bool = False) -> Snapshot:
    """A run of Megatron as a Snapshot: with optimizer state where there is some, unless weights_only.

    Raises ConfigError, CheckpointError.
    """
    folder = iteration_folder(root, step)
    common = load_pickled(folder / COMMON)
    if "args" not in common:
        raise CheckpointError(f"{folder / COMMON} holds no args, so that nothing says what the model is")
    args = vars(common["args"])
    stored, others = read_folder(folder)
    config = read_config(args, vocab_size)
    optimizer = None if weights_only else _optimizer(folder, common, stored, others)
    keys = {MASTER: ""} if optimizer is None else _optimizer_keys(stored)
    specs = model_parameters(unpadded(config.model), sequence_parallel=False)
    tensors = {
        f"{key}/{spec.name}": _lazy(folder, stored, prefix, spec) for spec in specs for key, prefix in keys.items()
    }
    placed = {_find(folder, stored, prefix, spec)[0].name for spec in specs for prefix in ("", *keys.values())}
    passed_over = () if optimizer is not None else ("optimizer.",)
    left = sorted(name for name in stored.keys() - placed if not name.startswith(passed_over) and not _is_extra(name))
    if left:
        more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        raise CheckpointError(f"{folder}: the tensor {left[0]}{more} has no place in the model that its args describe")
    return run_snapshot(config, tensors, args, common, optimizer)


def _lazy(folder: Path, stored: Mapping[str, StoredTensor], prefix: str, spec: ParamSpec) -> LazyTensor:
    entry, layer = _find(folder, stored, prefix, spec)
    shape = entry.shape if layer is None else entry.shape[1:]
    rows = spec.shape[0] if spec.true_rows is not None else shape[0]  # of a vocabulary the padding is left behind
    if (min(rows, shape[0]), *shape[1:]) != spec.shape:
        raise CheckpointError(f"{folder}: {entry.name} has shape {list(shape)}, its args ask for {list(spec.shape)}")
    return LazyTensor(spec.shape, entry.dtype, partial(_read, entry, layer, spec.shape))


def _is_extra(name: str) -> bool:
    return any(end in name for end in NOT_WEIGHTS)


def _find(
    folder: Path, stored: Mapping[str, StoredTensor], prefix: str, spec: ParamSpec
) -> tuple[StoredTensor, int | None]:
    """The stored tensor of a parameter, and its place in a stack of layers; None where it stands alone."""
    candidates: list[tuple[str, int | None]] = [(spec.name, None)]
    if isinstance(spec.owner, int):
        candidates.append((spec.name.replace(f"layers.{spec.owner}.", "layers.", 1), spec.owner))
    for name, layer in list(candidates):
        for fused, plain in FUSED_NORMS.items():
            if plain in name:
                candidates.append((name.replace(plain, fused), layer))
    for name, layer in candidates:
        if prefix + name in stored:
            return stored[prefix + name], layer
    raise CheckpointError(f"{folder} lacks the tensor {prefix}{spec.name}, which its args ask for")


def _read(entry: StoredTensor, layer: int | None, shape: tuple[int, ...]) -> Tensor:
    if layer is None:
        return entry.read(Box((0,) * len(shape), shape))
    return entry.read(Box((layer, *(0,) * len(shape)), (1, *shape)))[0]


def _optimizer_keys(stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Our keys -> prefixes of their names."""
    keys = {key: f"{OPTIMIZER}{key}." for key in MOMENTS}
    master = next((name for name in MASTERS if f"{OPTIMIZER}{name}.{WORD_EMBEDDING}" in stored), None)
    return {MASTER: "" if master is None else f"{OPTIMIZER}{master}.", **keys}


def _optimizer(
    folder: Path, common: Mapping[str, Any], stored: Mapping[str, StoredTensor], others: Mapping[str, StoredValue]
) -> OptimizerState | None:
    """What is no tensor of the optimizer's state; None if the checkpoint has none. Raises CheckpointError if it is tied to its grid."""
    kind = (common.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    names = [name for name in (*stored, *others) if name.startswith("optimizer.")]
    if not names:
        return None
    if kind not in RESHARDABLE or not any(name.startswith(OPTIMIZER) for name in names):
        raise CheckpointError(
            f"{folder}: the distributed optimizer's state is stored as {kind or 'its own buffers'}, which follows the buckets of the tp "
            "and pp that wrote it: the format is tied to that grid. Save once with --dist-ckpt-optim-fully-reshardable, or convert with "
            "--weights-only"
        )
    content = common.get("optimizer")
    if not isinstance(content, Mapping) or 0 in content:
        raise CheckpointError(
            f"{folder}: the optimizer is a chain of several, which cannot be converted; convert with --weights-only"
        )
    inner = content.get("optimizer", content)
    steps = {int(group["step"]) for group in inner["param_groups"] if group.get("step") is not None}
    if "common_step" in inner.get("state", {}):
        steps = {int(inner["state"]["common_step"])}
    return OptimizerState([], one_step(folder / COMMON, steps), content.get("grad_scaler"))
