"""Undoing updates that are made before the gradient norm is known (--optimizer-post-validation).

Qi et al. 2023, arXiv:2401.10241, section 4 and appendix: update first, validate later. They undo AdamW by arithmetic;
here the old values are kept, so that an update that is undone and repeated gives the bits of one that waited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from megapipe.optimizer.shards import Shard

# undoing an update costs about as much as waiting for the norm: from every second step on, early updates do not pay
WINDOW, STOP_AT, RESUME_AT = 8, 4, 1


class ShardSnapshot:
    """A copy of all that an update changes in this rank's shards: master weights, moments and raw gradients.

    Gradients are included because the update kernels scale them in place.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = [
            (live, torch.empty_like(live))
            for shard in shards
            for live in (shard.gradient, shard.master.detach(), *shard.moments.values())
        ]

    @property
    def copies(self) -> list[Tensor]:
        return [copy for _, copy in self._pairs]

    @torch.no_grad()
    def take(self) -> None:
        """Copy the current values."""
        for live, copy in self._pairs:
            copy.copy_(live)

    @torch.no_grad()
    def restore(self) -> None:
        """Write the values of the last `take` back. Parameters that are not master weights are left to the caller."""
        for live, copy in self._pairs:
            live.copy_(copy)


class EarlyUpdatePolicy:
    """Decides whether the next update is made before the norm is known; the same on all ranks, as norms are.

    Early updates stop when 4 of the last 8 steps were clipped or skipped (whether or not an update had to be undone),
    and resume once at most 1 of the last 8 was.
    """

    def __init__(self) -> None:
        self.allows = True
        self._recent: deque[bool] = deque(maxlen=WINDOW)  # True for a step that was clipped or skipped

    def add(self, is_plain: bool) -> str:
        """Add a step, plain if it was neither clipped nor skipped.

        Returns a note for the log if the decision changes.
        """
        self._recent.append(not is_plain)
        count = sum(self._recent)
        if self.allows and count >= STOP_AT:
            self.allows = False
            return (
                f"{count} of the last {len(self._recent)} steps had their gradients clipped or skipped: waiting for "
                f"the norm before each update, until at most {RESUME_AT} of {WINDOW} do"
            )
        if not self.allows and len(self._recent) == WINDOW and count <= RESUME_AT:
            self.allows = True
            return (
                f"{count} of the last {WINDOW} steps had their gradients clipped or skipped: "
                "updating before the norm is known again"
            )
        return ""
