"""The checkpoint formats that are read and written, and how the format of a folder is found."""

from __future__ import annotations

from pathlib import Path

from megapipe.checkpoint.folder import steps_in
from megapipe.checkpoint.manifest import MANIFEST_NAME
from megapipe.errors import CheckpointError
from megapipe.extras.convert import dcp_run, hugging_face, megatron_dist, megatron_legacy

HUGGING_FACE, OWN, MEGATRON, DCP = "hugging-face", "megapipe", "megatron", "dcp"
FORMATS = (HUGGING_FACE, OWN, MEGATRON, DCP)


def guess(folder: Path) -> str:
    """Return the format of a folder. Raises CheckpointError if it is unknown."""
    if not folder.is_dir():
        way_out = "give a checkpoint of megapipe, Megatron or torch, or a Hugging Face model"
        raise CheckpointError(f"{folder} is not a folder; {way_out}")
    if (folder / MANIFEST_NAME).exists() or steps_in(folder):
        return OWN
    if dcp_run.find(folder) is not None:
        return DCP
    if megatron_legacy.is_legacy(folder) or megatron_dist.is_distributed(folder):
        return MEGATRON
    if (folder / hugging_face.CONFIG).exists():
        return HUGGING_FACE
    raise CheckpointError(f"{folder} looks like none of {', '.join(FORMATS)}; give its format with --from")
