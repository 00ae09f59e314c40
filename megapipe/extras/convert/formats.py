"""All formats by name: how each is recognized, read and written. Used by `megapipe convert`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megapipe.checkpoint.folder import steps_in
from megapipe.checkpoint.manifest import MANIFEST_NAME
from megapipe.errors import CheckpointError
from megapipe.extras.convert import dcp_run, hugging_face, megatron_dist, megatron_legacy, megatron_write, own
from megapipe.extras.convert.snapshot import Snapshot


@dataclass(frozen=True)
class ConversionOptions:
    """The flags of a conversion; each format uses those that concern it."""

    step: int | None = None
    ignored_keys: frozenset[str] = frozenset()
    vocab_size: int | None = None
    weights_only: bool = False
    architecture: str | None = None
    max_file_bytes: int = 5 * 10**9
    tp: int = 1
    pp: int = 1
    transformer_engine: bool = True
    config: Path | None = None


def _read_megatron(source: Path, options: ConversionOptions) -> Snapshot:
    folder = megatron_legacy.iteration_folder(source, options.step)
    module = megatron_dist if megatron_dist.looks_distributed(folder) else megatron_legacy
    return module.read(source, options.step, options.vocab_size, options.weights_only)


def _write_own(snapshot: Snapshot, target: Path, options: ConversionOptions) -> str:
    report = own.write(snapshot, target)
    return f"{report.path} ({report.num_bytes:,} bytes): --load {target}"


def _write_hugging_face(snapshot: Snapshot, target: Path, options: ConversionOptions) -> str:
    architecture = hugging_face.write(snapshot, target, options.architecture, options.max_file_bytes)
    return f"{target} ({architecture})"


def _write_megatron(snapshot: Snapshot, target: Path, options: ConversionOptions) -> str:
    grid = megatron_write.Grid(options.tp, options.pp, options.transformer_engine)
    return f"{megatron_write.write(snapshot, target, grid)}: in Megatron --load {target} --finetune --ckpt-format torch"


def _write_dcp(snapshot: Snapshot, target: Path, options: ConversionOptions) -> str:
    return f"{dcp_run.write(snapshot, target)}: torch.distributed.checkpoint.load(state_dict, checkpoint_id=...)"


READERS: dict[str, Callable[[Path, ConversionOptions], Snapshot]] = {
    "hugging-face": lambda source, options: hugging_face.read(source, options.ignored_keys),
    "megapipe": lambda source, options: own.read(source, options.step),
    "megatron": _read_megatron,
    "dcp": lambda source, options: dcp_run.read(source, options.step, options.config, options.weights_only),
}
WRITERS: dict[str, Callable[[Snapshot, Path, ConversionOptions], str]] = {
    "hugging-face": _write_hugging_face,
    "megapipe": _write_own,
    "megatron": _write_megatron,
    "dcp": _write_dcp,
}
# checked in this order
IS_FORMAT: dict[str, Callable[[Path], bool]] = {
    "megapipe": lambda folder: (folder / MANIFEST_NAME).exists() or bool(steps_in(folder)),
    "dcp": lambda folder: dcp_run.find(folder) is not None,
    "megatron": lambda folder: megatron_legacy.looks_legacy(folder) or megatron_dist.looks_distributed(folder),
    "hugging-face": lambda folder: (folder / hugging_face.CONFIG).exists(),
}


def guess(folder: Path) -> str:
    """Return the format of a folder. Raises CheckpointError for an unknown format."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder; give a checkpoint of megapipe, Megatron or torch, or a Hugging Face model"
        )
    for name, is_format in IS_FORMAT.items():
        if is_format(folder):
            return name
    raise CheckpointError(f"{folder} looks like none of {', '.join(IS_FORMAT)}; give its format with --from")
