"""`Recorder`: the bytes that the run of some layers makes and keeps, with the element of a layer that has made each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor

from megapipe.layers.table import Kept
from megapipe.model.block import Block
from megapipe.model.segments import Again, Element, Elements, Operator
from megapipe.model.stage import GPTStage
from megapipe.trace.meta import LiveBytes

STEP, MESSAGES = "step", "messages"  # labels: what is counted, and what passes between stages or parts


class Recorder(LiveBytes):
    """Counts live bytes; those with other labels than these (weights, masks, the microbatch) aside."""

    def __init__(self, *labels: str) -> None:
        super().__init__()
        self._labels = labels
        self._levels: list[int] = []  # after each new tensor, since `watch`
        self._element = "stage"
        # of every storage, by the address that only live ones have: its number, element, bytes of one of its values
        self._made: dict[int, tuple[int, str, int]] = {}
        self._numbers = count()

    @property
    def level(self) -> int:
        """Bytes that are counted and alive."""
        return sum(self.by_label[label] for label in self._labels)

    def watch(self) -> int:
        """Return the level, and note it whenever a tensor is made from now on."""
        self._levels = [self.level]
        return self.level

    def levels_over(self, level: int) -> tuple[int, ...]:
        """Return the levels since `watch`, over this one."""
        return tuple(each - level for each in self._levels)

    def alive(self) -> dict[int, Kept]:
        """Return the tensors that are counted and alive, in the order in which they were made, by number."""
        found = {}
        for address, (_, size, label) in self._live.items():
            if label in self._labels:
                number, element, element_bytes = self._made[address]
                found[number] = Kept(element, size // element_bytes, element_bytes)
        return found

    def number_of(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor that is counted, None for others."""
        address = tensor.untyped_storage()._cdata
        return self._made[address][0] if address in self._live and self._live[address][2] in self._labels else None

    def follow_elements(self, stage: GPTStage) -> None:
        """Let every element of the stage's layers give its name to what it makes."""
        for layer in stage.modules():
            if isinstance(layer, Block):
                layer.attention_branch = self._named(layer.attention_branch)
                layer.mlp_branch = self._named(layer.mlp_branch)
                layer.elements = Elements([*layer.attention_branch, *layer.mlp_branch])

    def _named(self, elements: Elements) -> Elements:
        found: list[Element] = []
        for each in elements:
            if isinstance(each, Again):
                found.append(each._replace(elements=self._named(each.elements)))
            elif isinstance(each, Operator):
                found.append(each._replace(function=partial(self._within, each.name, each.function)))
            elif each.module is not None:
                module: Any = partial(self._within, each.name, each.module)
                found.append(each._replace(module=module))
            else:
                found.append(each._replace(function=partial(self._within, each.name, each.function)))
        return Elements(found)

    def _within(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        before, self._element = self._element, name
        try:
            return function(*args)
        finally:
            self._element = before

    def _see(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        is_new = key not in self._live
        super()._see(tensor)
        if is_new:
            self._made[key] = next(self._numbers), self._element, tensor.element_size()
            self._levels.append(self.level)
