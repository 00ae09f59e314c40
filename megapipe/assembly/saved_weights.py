"""Weights between a checkpoint and the buffers of this rank's stages, in the parameters' own dtype. Used by training and inference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megapipe.checkpoint.folder import CheckpointFolder
from megapipe.checkpoint.load import load_tensors
from megapipe.checkpoint.tensor_box import TensorBox, tensor_box
from megapipe.comm.groups import ProcessGroups
from megapipe.data_parallel.buffers import StageBuffers
from megapipe.sharding.boxes import pieces


def held_weights(
    buffers: Mapping[int, StageBuffers], groups: ProcessGroups, key: str = "weights"
) -> Iterator[tuple[bool, TensorBox]]:
    """Every piece of a parameter on this rank but vocabulary padding: (of all ranks this one answers for it, box named `key`/parameter)."""
    for stage, stage_buffers in buffers.items():
        for buffer in stage_buffers.buffers:
            is_copy = buffer.layout.kind == "tied" and stage != 0
            for slot in buffer.layout.slots:
                for piece in pieces(slot.spec, groups.tp.rank, groups.tp.size):
                    box = tensor_box(key, piece, buffer.parameters[slot.start + piece.start : slot.start + piece.stop])
                    if box is not None:
                        yield piece.owned and not is_copy and groups.replicas.rank == 0, box


def load_weights(buffers: Mapping[int, StageBuffers], groups: ProcessGroups, folder: CheckpointFolder) -> int:
    """Fill the parameters from a checkpoint of any grid; called by all ranks. Returns the bytes filled on this rank.

    Taken from the master weights where the checkpoint holds them, rounded to the parameters' dtype as the optimizer rounds them. Vocabulary
    padding becomes zero. Raises CheckpointError on all ranks.
    """
    key = "master" if folder.manifest.holds("master") else "weights"
    for stage_buffers in buffers.values():
        for buffer in stage_buffers.buffers:
            buffer.parameters.zero_()
    return load_tensors(folder, (box for _, box in held_weights(buffers, groups, key)), groups.world, may_round=True)
