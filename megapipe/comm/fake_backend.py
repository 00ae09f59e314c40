"""Fake process groups for the dry run: operations move nothing, return at once, and are counted in a `Traffic`.

Results have the right shapes and undefined values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

OperationKey = tuple[str, str]  # (kind of group, operation): ("tp", "all_gather"), ("pp", "send")


@dataclass
class Traffic:
    """Counts and bytes of the operations that one rank would have run.

    The bytes of a collective are those of its whole tensor (the output of an all-gather, the input of a
    reduce-scatter). observe: called with every tensor that is sent or received between pipeline ranks.
    """

    counts: Counter[OperationKey] = field(default_factory=Counter)
    bytes: Counter[OperationKey] = field(default_factory=Counter)
    observe: Callable[[Tensor], None] | None = None

    def record(self, kind: str, operation: str, num_bytes: int) -> None:
        self.counts[kind, operation] += 1
        self.bytes[kind, operation] += num_bytes

    def copy(self) -> Traffic:
        return Traffic(Counter(self.counts), Counter(self.bytes))

    def since(self, earlier: Traffic) -> Traffic:
        """Return what was recorded after `earlier` was copied from this."""
        return Traffic(self.counts - earlier.counts, self.bytes - earlier.bytes)

    def add(self, other: Traffic, times: int, kinds: Collection[str]) -> None:
        """Add the operations of `other` on these kinds of groups, `times` times."""
        for key in other.counts:
            if key[0] in kinds:
                self.counts[key] += times * other.counts[key]
                self.bytes[key] += times * other.bytes[key]


class FakeWork:
    """An operation of the fake backend, complete at once."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        return False  # as with gloo before `wait`, so that a channel keeps its tensors in flight as in a real run


class FakeHandle:
    """A replacement for torch's process group that records the operations of one kind of group in a Traffic."""

    def __init__(self, kind: str, traffic: Traffic) -> None:
        self._kind = kind
        self._traffic = traffic

    def start(self, operation: str, tensors: Sequence[Tensor]) -> FakeWork:
        """Record one collective. tensors: its inputs and outputs, the whole tensor among them."""
        self._traffic.record(self._kind, operation, max((tensor.nbytes for tensor in tensors), default=0))
        return FakeWork()

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> FakeWork:
        return self._message("send", tensors)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> FakeWork:
        return self._message("receive", tensors)

    def _message(self, operation: str, tensors: Sequence[Tensor]) -> FakeWork:
        for tensor in tensors:
            self._traffic.record(self._kind, operation, tensor.nbytes)
            if self._traffic.observe is not None:
                self._traffic.observe(tensor)
        return FakeWork()
