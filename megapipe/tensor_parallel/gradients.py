"""Weight gradients: where they accumulate (`GradientSlot`), and where they wait between I and W (`WeightQueue`).

An autograd Function does not know which half of a split backward it runs in, and would compute both GEMMs twice. So the
whole autograd backward runs at I (input gradient), where linears and embeddings put their weight gradients into the
`WeightQueue`, and W (weight gradient) runs the queue. A queued gradient holds the layer's input (or what recomputes
it) and the output gradient, both still split over the sequence under sequence parallelism: it costs 1 / tp of the
bytes, and gathers when used.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# (main_grad, grad_output, inputs): main_grad += grad_output^T @ inputs
WeightGradientKernel = Callable[[Tensor, Tensor, Tensor], None]


@dataclass(eq=False, repr=False, slots=True)
class GradientSlot:
    """The tensor in which the gradient of one parameter accumulates over microbatches.

    main_grad: the parameter's local shape, fp32 (fp64 in fp64 runs), usually a view into a flat buffer.
    uses: how often one microbatch's backward uses the parameter (2 for a tied embedding with its head on the rank, more
    with multi-token prediction).
    on_ready: called with the slot after the last use in a microbatch; autograd hooks cannot report this, because they
    do not fire for gradients that a hand-written backward or the weight queue adds.
    kernel: replaces torch's GEMM in `add_outer`.
    """

    main_grad: Tensor
    uses: int = 1
    on_ready: Callable[[GradientSlot], None] | None = None
    kernel: WeightGradientKernel | None = None
    _done: int = 0

    def add(self, gradient: Tensor) -> None:
        """Add a gradient of the local shape and any floating dtype; the sum is computed in main_grad's dtype."""
        self.main_grad.add_(gradient)

    def add_outer(self, grad_output: Tensor, inputs: Tensor) -> None:
        """Add grad_output^T @ inputs, the weight gradient of a linear.

        grad_output: [tokens, out], inputs: [tokens, in], main_grad: [out, in]. Equal dtypes need no temporary, nor
        does a GPU whose GEMM accumulates 16-bit products into fp32. Otherwise the product is a temporary, in fp32 on
        CUDA and in the inputs' dtype elsewhere.
        """
        main_grad = self.main_grad
        if self.kernel is not None:
            self.kernel(main_grad, grad_output, inputs)
        elif inputs.dtype == main_grad.dtype:
            main_grad.addmm_(grad_output.t(), inputs)
        elif not inputs.is_cuda or main_grad.dtype != torch.float32:
            main_grad.add_(torch.mm(grad_output.t(), inputs))
        elif gemm_adds_to_fp32(inputs.device, inputs.dtype):
            torch.ops.aten.addmm.dtype_out(main_grad, grad_output.t(), inputs, torch.float32, out=main_grad)
        else:
            main_grad.add_(torch.mm(grad_output.t(), inputs, out_dtype=torch.float32))

    def add_rows(self, rows: Tensor, gradient: Tensor) -> None:
        """Add gradient [n, h] to main_grad[rows], rows [n] int64, in a fixed order and without a dense gradient."""
        gradient = gradient.to(self.main_grad.dtype)
        if self.main_grad.is_cuda:
            # index_add_ on CUDA uses atomics in any order; index_put_ with accumulate sorts first
            self.main_grad.index_put_((rows,), gradient, accumulate=True)
        else:
            self.main_grad.index_add_(0, rows, gradient)

    def ready(self) -> None:
        """Record one finished use in the current microbatch's backward; call on_ready after the last."""
        self._done += 1
        if self._done == self.uses:
            self._done = 0
            if self.on_ready is not None:
                self.on_ready(self)


@cache
def gemm_adds_to_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if GEMMs of this dtype can accumulate into fp32 on this device, found by running a small one."""
    if device.type != "cuda" or not hasattr(torch.ops.aten.addmm, "dtype_out"):
        return False  # in a dry run too, which cannot try it: the plan counts the product as a temporary
    total = torch.ones(16, 16, device=device)
    factor = torch.full((16, 16), 0.5, dtype=dtype, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, factor.t(), factor, torch.float32, out=total)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # torch refuses mixed dtypes here: `add_outer` then adds an fp32 product, which costs memory
        return False
    return bool((total == 5.0).all())


class InputRecompute(NamedTuple):
    """How to recompute the input of a linear, bit for bit, instead of saving it: function(*inputs).

    in_backward: the backward recomputes the input anyway, right after the linear's own backward (a
    `RecomputedSegment`); a gradient that waits for W then calls the function without inputs and holds none.
    """

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    in_backward: bool = False


def collect(slot: GradientSlot | None, parameter: Tensor, add: Callable[[GradientSlot], None]) -> Tensor | None:
    """Let `add` add a gradient to a slot and record the use; without a slot return the gradient, for autograd."""
    own = GradientSlot(torch.zeros_like(parameter)) if slot is None else slot
    add(own)
    own.ready()
    return own.main_grad if slot is None else None


def add_to_grad(parameter: Tensor | None, gradient: Tensor | None) -> None:
    """Add a deferred gradient without a slot to parameter.grad. Raises RuntimeError for a tensor that is not a leaf."""
    if parameter is None or gradient is None:
        return
    if not parameter.is_leaf:
        raise RuntimeError(
            "a deferred weight gradient needs a GradientSlot or a leaf parameter; "
            "this weight is the result of an operation"
        )
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


class QueuedGradient(Protocol):
    """A weight gradient that waits for W."""

    def launch(self) -> None:
        """Start the communication it needs, if any."""
        return  # what needs none inherits this

    def accumulate(self) -> None:
        """Finish the communication, compute the gradient and add it to its slot, or without one to .grad."""


class WeightQueue:
    """First-in, first-out lists of weight gradients of one stage, one list per key (the microbatch).

    Gradients submitted between `defer` and `immediate` wait; outside, `is_deferring` is False and a linear computes
    its weight gradient inside its own backward. waiting: the lists by key, oldest first; empty between steps.
    """

    def __init__(self) -> None:
        self.is_deferring = False
        self._current: list[QueuedGradient] = []
        self.waiting: dict[Hashable, list[QueuedGradient]] = {}

    def defer(self, key: Hashable) -> None:
        """Start to queue under `key`. Raises RuntimeError if the queue defers or still holds gradients of `key`."""
        if self.is_deferring or key in self.waiting:
            reason = "the queue is deferring already" if self.is_deferring else "its previous ones are still waiting"
            raise RuntimeError(f"weight gradients of {key!r} cannot be deferred: {reason}")
        self._current = self.waiting[key] = []
        self.is_deferring = True

    def immediate(self) -> None:
        """Stop queueing: compute at once what is submitted from now on."""
        self._current = []
        self.is_deferring = False

    def submit(self, gradient: QueuedGradient) -> None:
        """Queue a weight gradient while deferring, otherwise compute it at once."""
        if self.is_deferring:
            self._current.append(gradient)
        else:
            gradient.launch()
            gradient.accumulate()

    def run(self, key: Hashable) -> None:
        """Compute the gradients queued under `key` in order, each one's communication under the GEMM of the one before.

        Raises RuntimeError if nothing was deferred under `key`.
        """
        gradients = self.waiting.pop(key, None)
        if gradients is None:
            raise RuntimeError(f"no weight gradients are queued under {key!r}; queued: {list(self.waiting)!r}")
        gradients.reverse()
        if gradients:
            gradients[-1].launch()
        while gradients:
            current = gradients.pop()  # popped, so that its tensors are freed as soon as it is done
            if gradients:
                gradients[-1].launch()
            current.accumulate()

    def clear(self) -> None:
        """Drop everything queued, after an error for example."""
        self.immediate()
        self.waiting.clear()
