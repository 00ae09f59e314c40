"""Updates before their verdict (--optimizer-post-validation): what takes one back, and when it is no longer worth making them.

Qi et al. 2023, arXiv:2401.10241, section 4 and appendix: update first, validate later. They undo AdamW by arithmetic; here the old values
are kept, so that an update taken back and made again gives the bits of one that waited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from megapipe.optimizer.shards import Shard

# an update taken back costs about what the barrier costs: not worth trying from every second one on
WINDOW, STOP_AT, GO_ON_AT = 8, 4, 1


class KeptShards:
    """A copy of what an update changes: raw gradients, which the kernels scale in place, master weights and moments of this rank."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = [
            (live, torch.empty_like(live))
            for shard in shards
            for live in (shard.gradient, shard.master.detach(), *shard.moments.values())
        ]

    @property
    def copies(self) -> list[Tensor]:
        return [kept for _, kept in self._pairs]

    @torch.no_grad()
    def keep(self) -> None:
        """Copy what there is now."""
        for live, kept in self._pairs:
            kept.copy_(live)

    @torch.no_grad()
    def put_back(self) -> None:
        """Make everything what it was at `keep`. Parameters that are no masters are the caller's."""
        for live, kept in self._pairs:
            live.copy_(kept)


class Confidence:
    """Whether the next update is made before its verdict: not after 4 of the last 8 steps had a clip or an overflow (whether or not one
    had to be taken back for it), and again once at most 1 of the last 8 had. The same on all ranks, because verdicts are."""

    def __init__(self) -> None:
        self.holds = True
        self._recent: deque[bool] = deque(maxlen=WINDOW)

    def learn(self, amended: bool) -> str:
        """Account for a step's verdict. Returns what a person should know, '' if nothing changed."""
        self._recent.append(amended)
        count = sum(self._recent)
        if self.holds and count >= STOP_AT:
            self.holds = False
            return (
                f"{count} of the last {len(self._recent)} steps had their gradients clipped or skipped: waiting for the norm before each "
                f"update, until at most {GO_ON_AT} of {WINDOW} do"
            )
        if not self.holds and len(self._recent) == WINDOW and count <= GO_ON_AT:
            self.holds = True
            return f"{count} of the last {WINDOW} steps had their gradients clipped or skipped: updating before the norm is known again"
        return ""
