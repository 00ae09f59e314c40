"""WeightQueue: weight gradients wait here between I (input gradient) and W (weight gradient) of a split backward.

A Python autograd Function cannot see which half of a backward split through autograd.grad it is in and would do both GEMMs twice.
So the whole autograd backward runs at I, linears and embeddings hand their weight's half to this queue, and W runs it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol


class QueuedGradient(Protocol):
    """What waits: `launch` starts the communication it needs, `accumulate` finishes it and adds the gradient to its parameter."""

    def launch(self) -> None: ...

    def accumulate(self) -> None: ...


class WeightQueue:
    """First-in first-out lists of weight gradients, one per key: the microbatch, where each stage has its own queue.

    Between `defer` and `immediate` what is submitted waits; otherwise nothing is ever queued: `is_deferring` is False and a linear
    computes its weight gradient inside its own backward.
    """

    def __init__(self) -> None:
        self.is_deferring = False
        self._current: list[QueuedGradient] = []
        self._waiting: dict[Hashable, list[QueuedGradient]] = {}

    def defer(self, key: Hashable) -> None:
        """From now on queue under `key`. Raises RuntimeError if already deferring, or if gradients of `key` still wait."""
        if self.is_deferring or key in self._waiting:
            reason = "the queue is deferring already" if self.is_deferring else "its last ones still wait"
            raise RuntimeError(f"weight gradients of {key!r} cannot be deferred: {reason}")
        self._current = self._waiting[key] = []
        self.is_deferring = True

    def immediate(self) -> None:
        """From now on compute at once what is submitted."""
        self._current = []
        self.is_deferring = False

    def submit(self, gradient: QueuedGradient) -> None:
        """Queue a weight gradient while deferring, else compute it at once."""
        if self.is_deferring:
            self._current.append(gradient)
        else:
            gradient.launch()
            gradient.accumulate()

    def run(self, key: Hashable) -> None:
        """Compute what waits under `key`, in order of submission; the communication of the next runs under the GEMM of the current one.

        Raises RuntimeError if nothing was deferred under `key`.
        """
        gradients = self._waiting.pop(key, None)
        if gradients is None:
            raise RuntimeError(f"no weight gradients wait under {key!r}; waiting: {list(self._waiting)!r}")
        gradients.reverse()
        if gradients:
            gradients[-1].launch()
        while gradients:
            current = gradients.pop()  # popped: its tensors are freed as soon as it is done
            if gradients:
                gradients[-1].launch()
            current.accumulate()

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """What waits, oldest first; empty between steps."""
        return tuple(self._waiting)

    def clear(self) -> None:
        """Forget everything that waits (after an error, say)."""
        self.immediate()
        self._waiting.clear()
