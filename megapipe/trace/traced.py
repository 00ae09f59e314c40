"""`Traced`: what the run of some layers has kept and made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from megapipe.layers.table import Kept, total_bytes

SIZES = ("masks", "rotary", "shared_masks", "shared_rotary", "waiting")


@dataclass(frozen=True)
class Traced:
    """Bytes that one microbatch, or a slice of it, keeps and makes on one rank.

    forward, backward, weights: of F, B (I where the shape splits the backward) and W, at each tensor that it makes, the
    bytes over those that are there when it starts, the gradient of the output aside; of F over what it keeps.
    """

    kept: tuple[Kept, ...]  # from F to B or I, the input included; named after the element that has made it
    masks: int = 0  # of documents, kept besides; and rotary tables of this microbatch's positions
    rotary: int = 0
    shared_masks: int = 0  # that all microbatches have in common
    shared_rotary: int = 0
    waiting: int = 0  # from I to W
    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()

    @cached_property
    def kept_bytes(self) -> int:
        return total_bytes(self.kept)

    @cached_property
    def peaks(self) -> tuple[int, int, int]:
        """The most that F, B or I, and W make over what is there when they start, and F over what it keeps."""
        forward, backward, weights = (max((0, *levels)) for levels in (self.forward, self.backward, self.weights))
        return forward, backward, weights

    def at(self, larger: Traced, more: int) -> Traced | None:
        """Return it for so many sequences more. larger: for one more.

        Every size is affine in the number of sequences, so a peak, their maximum, is not: hence all levels. None if
        other tensors are made, such as more blocks of a loss.
        """

        def line(one: int, two: int) -> int:
            return one + more * (two - one)

        names = [[(tensor.name, tensor.element_bytes) for tensor in each.kept] for each in (self, larger)]
        levels = [(self.forward, larger.forward), (self.backward, larger.backward), (self.weights, larger.weights)]
        if names[0] != names[1] or any(len(one) != len(two) for one, two in levels):
            return None
        kept = (
            replace(one, elements=line(one.elements, two.elements))
            for one, two in zip(self.kept, larger.kept, strict=True)
        )
        sizes = {name: line(getattr(self, name), getattr(larger, name)) for name in SIZES}
        forward, backward, weights = (tuple(map(line, *each)) for each in levels)
        return Traced(tuple(kept), **sizes, forward=forward, backward=backward, weights=weights)
