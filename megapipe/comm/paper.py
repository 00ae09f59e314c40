"""A world on paper: what stands for a process group where no other rank exists. Nothing travels; what would have is written down.

The dry run gives such handles to its groups. Results have the right shapes and no values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

Sent = tuple[str, str]  # (kind of group, operation): ("tp", "all_gather"), ("pp", "send")


@dataclass
class Ledger:
    """What one rank would have sent and received.

    counts, bytes: by kind of group and operation; the bytes of a collective are those of its whole tensor (an all-gather's result, a
    reduce-scatter's input), of a message its own. observe: called with every tensor that is sent or received between pipeline ranks.
    """

    counts: Counter[Sent] = field(default_factory=Counter)
    bytes: Counter[Sent] = field(default_factory=Counter)
    observe: Callable[[Tensor], None] | None = None

    def enter(self, kind: str, operation: str, size: int) -> None:
        self.counts[kind, operation] += 1
        self.bytes[kind, operation] += size

    def copy(self) -> Ledger:
        return Ledger(Counter(self.counts), Counter(self.bytes))

    def since(self, earlier: Ledger) -> Ledger:
        """What was entered after `earlier` was copied from this."""
        return Ledger(self.counts - earlier.counts, self.bytes - earlier.bytes)

    def add(self, other: Ledger, times: int, kinds: Collection[str]) -> None:
        """Enter so many times what `other` holds of these kinds of groups."""
        for what in other.counts:
            if what[0] in kinds:
                self.counts[what] += times * other.counts[what]
                self.bytes[what] += times * other.bytes[what]


class PaperWork:
    """An operation on paper: its wait returns at once. It is never known to be complete before, as with gloo, so that what is sent is held
    for as long as a channel allows."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def is_completed(self) -> bool:
        return False


class PaperHandle:
    """In the place of torch's process group, for one kind of group."""

    backend = "paper"

    def __init__(self, kind: str, ledger: Ledger) -> None:
        self._kind = kind
        self._ledger = ledger

    def start(self, operation: str, tensors: Sequence[Tensor]) -> PaperWork:
        """A collective; tensors: those it works on, the whole one among them."""
        self._ledger.enter(self._kind, operation, max((tensor.nbytes for tensor in tensors), default=0))
        return PaperWork()

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> PaperWork:
        return self._message("send", tensors)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> PaperWork:
        return self._message("receive", tensors)

    def _message(self, operation: str, tensors: Sequence[Tensor]) -> PaperWork:
        for tensor in tensors:
            self._ledger.enter(self._kind, operation, tensor.nbytes)
            if self._ledger.observe is not None:
                self._ledger.observe(tensor)
        return PaperWork()
