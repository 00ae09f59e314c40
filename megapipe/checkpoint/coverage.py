"""Do the boxes of a saved tensor cover each of its elements exactly once?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megapipe.errors import CheckpointError
from megapipe.sharding.boxes import Box


def check_covered(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Raises CheckpointError naming the tensor and two boxes that overlap, or how much is missing. Imports no torch.

    A sweep along dim 0: each box meets only those that are still open at its first row.
    """
    whole = Box((0,) * len(shape), shape)
    still_open: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offset):
        if box.intersect(whole) != box:
            raise CheckpointError(f"{name}: {_text(box)} does not lie within shape {list(shape)}")
        still_open = [other for other in still_open if other.offset[0] + other.shape[0] > box.offset[0]]
        for other in still_open:
            if other.intersect(box) is not None:
                raise CheckpointError(
                    f"{name}: {_text(other)} and {_text(box)} overlap: two ranks hold the same elements as their own"
                )
        still_open.append(box)
    covered, size = sum(box.num_elements for box in boxes), math.prod(shape)
    if covered != size:
        raise CheckpointError(f"{name}: only {covered} of its {size} elements are held by some rank")


def _text(box: Box) -> str:
    return f"the box at {list(box.offset)} of shape {list(box.shape)}"
