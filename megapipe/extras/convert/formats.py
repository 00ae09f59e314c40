"""All formats by name: how each is recognized, read and written. Used by `megapipe convert`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megapipe.checkpoint.folder import steps_in
from megapipe.checkpoint.manifest import MANIFEST_NAME
from megapipe.errors import CheckpointError
from megapipe.extras.convert import dcp_run, hugging_face, megatron_dist, megatron_legacy
from megapipe.extras.convert.megatron import iteration_folder
from megapipe.extras.convert.snapshot import Snapshot, read_checkpoint, write_checkpoint


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


NAMES = ("hugging-face", "megapipe", "megatron", "dcp")
# checked in this order
IS_FORMAT: dict[str, Callable[[Path], bool]] = {
    "megapipe": lambda folder: (folder / MANIFEST_NAME).exists() or bool(steps_in(folder)),
    "dcp": lambda folder: dcp_run.find(folder) is not None,
    "megatron": lambda folder: megatron_legacy.is_legacy(folder) or megatron_dist.is_distributed(folder),
    "hugging-face": lambda folder: (folder / hugging_face.CONFIG).exists(),
}


def guess(folder: Path) -> str:
    """Return the format of a folder. Raises CheckpointError for an unknown format."""
    if not folder.is_dir():
        way_out = "give a checkpoint of megapipe, Megatron or torch, or a Hugging Face model"
        raise CheckpointError(f"{folder} is not a folder; {way_out}")
    for name, is_format in IS_FORMAT.items():
        if is_format(folder):
            return name
    raise CheckpointError(f"{folder} looks like none of {', '.join(IS_FORMAT)}; give its format with --from")


def read(name: str, source: Path, options: ConversionOptions) -> Snapshot:
    """Read a folder of a format. Raises ConfigError, CheckpointError."""
    if name == "megapipe":
        return read_checkpoint(source, options.step)
    if name == "hugging-face":
        return hugging_face.read(source, options.ignored_keys)
    if name == "dcp":
        return dcp_run.read(source, options.step, options.config, options.weights_only)
    is_distributed = megatron_dist.is_distributed(iteration_folder(source, options.step))
    module = megatron_dist if is_distributed else megatron_legacy
    return module.read(source, options.step, options.vocab_size, options.weights_only)


def write(name: str, snapshot: Snapshot, target: Path, options: ConversionOptions) -> str:
    """Write a new folder of a format. Returns what was written, for the user. Raises ConfigError, CheckpointError."""
    if name == "megapipe":
        report = write_checkpoint(snapshot, target)
        return f"{report.path} ({report.num_bytes:,} bytes): --load {target}"
    if name == "hugging-face":
        return f"{target} ({hugging_face.write(snapshot, target, options.architecture, options.max_file_bytes)})"
    if name == "dcp":
        return f"{dcp_run.write(snapshot, target)}: torch.distributed.checkpoint.load(state_dict, checkpoint_id=...)"
    folder = megatron_legacy.write(snapshot, target, options.tp, options.pp, options.transformer_engine)
    return f"{folder}: in Megatron --load {target} --finetune --ckpt-format torch"
