"""The formats by name: how each is recognised, read and written. Used by `megapipe convert`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megapipe.checkpoint.folder import steps_in
from megapipe.checkpoint.manifest import MANIFEST_NAME
from megapipe.config.yaml_file import to_yaml
from megapipe.errors import CheckpointError
from megapipe.extras.convert import dcp_run, hugging_face, megatron_dist, megatron_legacy, megatron_write, own
from megapipe.extras.convert.snapshot import Snapshot


@dataclass(frozen=True)
class Wishes:
    """What a person may say about a conversion; each format takes what concerns it."""

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


def _write_own(snapshot: Snapshot, target: Path, wishes: Wishes) -> str:
    report = own.write(snapshot, target)
    return f"{report.path} ({report.num_bytes:,} bytes): --load {target}"


def _write_hugging_face(snapshot: Snapshot, target: Path, wishes: Wishes) -> str:
    architecture = hugging_face.write(snapshot, target, wishes.architecture, wishes.max_file_bytes)
    return f"{target} ({architecture})"


def _read_megatron(source: Path, wishes: Wishes) -> Snapshot:
    folder = megatron_legacy.iteration_folder(source, wishes.step)
    module = megatron_dist if megatron_dist.looks_distributed(folder) else megatron_legacy
    return module.read(source, wishes.step, wishes.vocab_size, wishes.weights_only)


def _write_megatron(snapshot: Snapshot, target: Path, wishes: Wishes) -> str:
    folder = megatron_write.write(
        snapshot, target, megatron_write.Grid(wishes.tp, wishes.pp, wishes.transformer_engine)
    )
    return f"{folder}: in Megatron --load {target} --finetune --ckpt-format torch"


def _write_dcp(snapshot: Snapshot, target: Path, wishes: Wishes) -> str:
    return f"{dcp_run.write(snapshot, target)}: torch.distributed.checkpoint.load(state_dict, checkpoint_id=...)"


READERS: dict[str, Callable[[Path, Wishes], Snapshot]] = {
    "hugging-face": lambda source, wishes: hugging_face.read(source, wishes.ignored_keys),
    "megapipe": lambda source, wishes: own.read(source, wishes.step),
    "megatron": _read_megatron,
    "dcp": lambda source, wishes: dcp_run.read(source, wishes.step, wishes.config, wishes.weights_only),
}
WRITERS: dict[str, Callable[[Snapshot, Path, Wishes], str]] = {
    "hugging-face": _write_hugging_face,
    "megapipe": _write_own,
    "megatron": _write_megatron,
    "dcp": _write_dcp,
}

LOOKS: dict[str, Callable[[Path], bool]] = {
    "megapipe": lambda folder: (folder / MANIFEST_NAME).exists() or bool(steps_in(folder)),
    "dcp": lambda folder: dcp_run.find(folder) is not None,
    "megatron": lambda folder: megatron_legacy.looks_legacy(folder) or megatron_dist.looks_distributed(folder),
    "hugging-face": lambda folder: (folder / hugging_face.CONFIG).exists(),
}


def guess(folder: Path) -> str:
    """The format that a folder looks like. Raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no folder; give one with a checkpoint of megapipe, Megatron or torch, or a Hugging Face model"
        )
    for name, looks in LOOKS.items():
        if looks(folder):
            return name
    raise CheckpointError(f"{folder} looks like none of {', '.join(LOOKS)}; say with --from what it is")


def config_text(snapshot: Snapshot) -> str:
    """The configuration as YAML that `--config` loads."""
    return to_yaml(snapshot.config)
