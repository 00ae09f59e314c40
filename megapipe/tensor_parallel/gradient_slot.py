"""`GradientSlot`: the main gradient of one parameter, written by hand-written backwards and by autograd hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor

# (main_grad, grad_output, inputs): main_grad += grad_output^T @ inputs
WeightGradientKernel = Callable[[Tensor, Tensor, Tensor], None]


class GradientSlot:
    """The tensor in which the gradient of one parameter accumulates over microbatches.

    main_grad: the parameter's local shape, fp32 (fp64 in fp64 runs), usually a view into a flat buffer.
    uses: how often one microbatch's backward uses the parameter (2 for a tied embedding whose head is on the same
    rank).
    on_ready: called with the slot after the last use in a microbatch; autograd hooks cannot report this, because they
    do not fire for gradients that a hand-written backward or the weight queue adds.
    kernel: replaces torch's GEMM in `add_outer`.
    """

    __slots__ = ("_done", "kernel", "main_grad", "on_ready", "uses")

    def __init__(
        self,
        main_grad: Tensor,
        uses: int = 1,
        on_ready: Callable[[GradientSlot], None] | None = None,
        kernel: WeightGradientKernel | None = None,
    ) -> None:
        self.main_grad = main_grad
        self.uses = uses
        self.on_ready = on_ready
        self.kernel = kernel
        self._done = 0

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
        elif inputs.is_cuda and main_grad.dtype == torch.float32 and gemm_adds_to_fp32(inputs.device, inputs.dtype):
            torch.ops.aten.addmm.dtype_out(main_grad, grad_output.t(), inputs, torch.float32, out=main_grad)
        elif inputs.is_cuda and main_grad.dtype == torch.float32:
            main_grad.add_(torch.mm(grad_output.t(), inputs, out_dtype=torch.float32))
        else:
            main_grad.add_(torch.mm(grad_output.t(), inputs))

    def add_column_sum(self, grad_output: Tensor) -> None:
        """Add a bias gradient: grad_output [tokens, out] summed over tokens in main_grad's dtype."""
        # fp32: in bf16 256 + 1 == 256, so a long sum stops growing
        self.main_grad.add_(grad_output.sum(0, dtype=self.main_grad.dtype))

    def add_rows(self, rows: Tensor, gradient: Tensor) -> None:
        """Add gradient[i] to main_grad[rows[i]] in a fixed order, without a dense [vocabulary, h] gradient.

        rows: [n] int64, gradient: [n, h].
        """
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


Slots = Mapping[str, GradientSlot]  # parameter name within a module, "weight" or "bias" -> its slot


@cache
def gemm_adds_to_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if GEMMs of this dtype can accumulate into fp32 on this device, found by running a small one."""
    if device.type != "cuda" or not hasattr(torch.ops.aten.addmm, "dtype_out"):
        return False  # in a dry run too, which cannot try it: the plan counts the product as a temporary
    total = torch.ones(16, 16, device=device)
    factor = torch.full((16, 16), 0.5, dtype=dtype, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, factor.t(), factor, torch.float32, out=total)
    except (RuntimeError, NotImplementedError):
        return False
    return bool((total == 5.0).all())
