"""GradientSlot: the place of one parameter's main gradient. Written by the hand-written backwards here, by hooks for other parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

Outer = Callable[
    [Tensor, Tensor, Tensor], None
]  # (main_grad, grad_output, inputs): main_grad += grad_output^T @ inputs


class GradientSlot:
    """Where the gradient of one parameter accumulates over microbatches.

    main_grad: the parameter's local shape, fp32 (fp64 in fp64 runs), usually a view into a flat buffer.
    uses: how often the parameter is used in one microbatch's backward (2 for a tied embedding whose head is on the same rank).
    on_ready: called with the slot when all uses of one microbatch are accumulated: gradient readiness cannot come from autograd hooks,
    which never fire for gradients that a hand-written backward or a queue adds itself.
    outer: a kernel for `add_outer`, instead of torch's.
    """

    __slots__ = ("_done", "main_grad", "on_ready", "outer", "uses")

    def __init__(
        self,
        main_grad: Tensor,
        uses: int = 1,
        on_ready: Callable[[GradientSlot], None] | None = None,
        outer: Outer | None = None,
    ) -> None:
        self.main_grad = main_grad
        self.uses = uses
        self.on_ready = on_ready
        self.outer = outer
        self._done = 0

    def add(self, gradient: Tensor) -> None:
        """Add a whole gradient (local shape, any floating dtype); the sum is formed in main_grad's dtype."""
        self.main_grad.add_(gradient)

    def add_outer(self, grad_output: Tensor, inputs: Tensor) -> None:
        """Add grad_output^T @ inputs, the weight GEMM of a linear, straight into main_grad.

        grad_output: [tokens, out], inputs: [tokens, in], main_grad: [out, in]. In equal dtypes nothing is allocated, nor where a GPU's
        GEMM adds 16-bit products to an fp32 matrix; else lower inputs are multiplied with an fp32 result where the device can (CUDA) or in
        their own dtype, and added in main_grad's.
        """
        main_grad = self.main_grad
        if self.outer is not None:
            self.outer(main_grad, grad_output, inputs)
        elif inputs.dtype == main_grad.dtype:
            main_grad.addmm_(grad_output.t(), inputs)
        elif inputs.is_cuda and main_grad.dtype == torch.float32 and gemm_adds_to_fp32(inputs.device, inputs.dtype):
            torch.ops.aten.addmm.dtype_out(main_grad, grad_output.t(), inputs, torch.float32, out=main_grad)
        elif inputs.is_cuda and main_grad.dtype == torch.float32:
            main_grad.add_(torch.mm(grad_output.t(), inputs, out_dtype=torch.float32))
        else:
            main_grad.add_(torch.mm(grad_output.t(), inputs))

    def add_column_sum(self, grad_output: Tensor) -> None:
        """Add the bias gradient: grad_output [tokens, out] summed over tokens in main_grad's dtype."""
        # fp32: in bf16 256 + 1 == 256, so a long sum stops growing
        self.main_grad.add_(grad_output.sum(0, dtype=self.main_grad.dtype))

    def add_rows(self, rows: Tensor, gradient: Tensor) -> None:
        """Add gradient[i] to main_grad[rows[i]], in a fixed order (the embedding's backward; no dense [vocabulary, h] is made).

        rows: [n] int64, gradient: [n, h].
        """
        gradient = gradient.to(self.main_grad.dtype)
        if self.main_grad.is_cuda:
            # index_add_ on CUDA adds atomically, in any order; accumulating index_put_ sorts first
            self.main_grad.index_put_((rows,), gradient, accumulate=True)
        else:
            self.main_grad.index_add_(0, rows, gradient)

    def ready(self) -> None:
        """One use of the parameter in the current microbatch's backward is accumulated; after the last use on_ready is called."""
        self._done += 1
        if self._done == self.uses:
            self._done = 0
            if self.on_ready is not None:
                self.on_ready(self)


@cache
def gemm_adds_to_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether GEMMs of this dtype on this device add their product to an fp32 matrix themselves: found out once, by a small one."""
    if device.type != "cuda" or not hasattr(torch.ops.aten.addmm, "dtype_out"):
        return False  # on paper, too, where nobody can find out: the plan counts the product apart
    total = torch.ones(16, 16, device=device)
    factor = torch.full((16, 16), 0.5, dtype=dtype, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, factor.t(), factor, torch.float32, out=total)
    except (RuntimeError, NotImplementedError):
        return False
    return bool((total == 5.0).all())
