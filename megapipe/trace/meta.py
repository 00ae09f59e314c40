"""`LiveBytes`, the bytes of all live storages; `WithoutValues`, a mode of tensors without values in code that reads
values; `MetaMode`, that of meta tensors.

torch chooses kernels of attention and RMSNorm by the device of their inputs. On the meta device they are chosen here,
so that each keeps for its backward what the kernel of the real device keeps.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from megapipe.gpu.meta_results import MetaResults

Answer = Callable[..., Any]
HALF_TYPES = (torch.float16, torch.bfloat16)
ALIGNED_BIAS = 16  # torch pads masks for CUDA's memory-efficient kernel to a multiple of this many columns


class LiveBytes(MetaResults):
    """A dispatch mode that counts each storage among the results of operations, from its first appearance until freed.

    Views share storages. Memory that a kernel allocates and frees within one operation is not seen. Works for real
    tensors and on the meta device. The sum is split by labels: a storage gets the current `label`, or the one that
    `name` gives it later.
    """

    def __init__(self) -> None:
        super().__init__()
        self.label = "other"
        self.now = 0
        self.peak = 0
        self.by_label: Counter[str] = Counter()
        self.at_peak: Mapping[str, int] = {}
        self.at_new_peak: Callable[[], None] = lambda: None
        self._is_paused = False
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, str]] = {}
        self._resized: list[tuple[int, torch.UntypedStorage]] = []  # with their keys

    def name(self, tensors: Iterable[Tensor], label: str) -> None:
        """Count the storages of these tensors under `label`, also those not seen so far."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            self._see(tensor)
            reference, size, old = self._live[key]
            self.by_label[old] -= size
            self.by_label[label] += size
            self._live[key] = reference, size, label

    def label_of(self, tensor: Tensor) -> str:
        """Return the label of a tensor's storage; '' if it is not counted."""
        found = self._live.get(tensor.untyped_storage()._cdata)
        return "" if found is None else found[2]

    def follow(self, tensors: Iterable[Tensor], label: str) -> None:
        """Count the storages of these tensors under `label` with the sizes to which they are resized from now on."""
        for tensor in tensors:
            self.name([tensor], label)
            storage = tensor.untyped_storage()
            self._resized.append((storage._cdata, storage))
        self._measure()

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Stop counting the storages of these tensors, which are in host memory."""
        self.name(tensors, "outside")
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.now -= self._live.pop(storage._cdata)[1]
            self._keep(storage, 0, "outside")
        self.by_label["outside"] = 0

    def uncounted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same without counting new memory, which is the host's."""

        def call(*args: Any) -> Any:
            self._is_paused = True
            try:
                return function(*args)
            finally:
                self._is_paused = False

        return call

    def outside(self, make: Callable[[int], Tensor], num_bytes: int) -> Tensor:
        """Return make(num_bytes), a buffer in host memory, without counting it."""
        tensor: Tensor = self.uncounted(make)(num_bytes)
        self._keep(tensor.untyped_storage(), 0, "outside")
        return tensor

    def begin(self) -> None:
        """Restart the peak from the current bytes."""
        self.peak = 0
        self._rise()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._resized:
            self._measure()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        results = result if isinstance(result, tuple | list) else (result,)
        for each in results:
            if isinstance(each, Tensor):
                self._see(each)
        return result

    def _measure(self) -> None:
        """Take the sizes of the storages that are resized."""
        for key, storage in self._resized:
            reference, old, label = self._live[key]
            size = storage.nbytes()
            if size != old:
                self._live[key] = reference, size, label
                self.by_label[label] += size - old
                self.now += size - old
        if self.now > self.peak:
            self._rise()

    def _see(self, tensor: Tensor) -> bool:
        """Count the storage of a tensor. Return True for a new one."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or self._is_paused:
            return False
        size = storage.nbytes()
        self._keep(storage, size, self.label)
        self.by_label[self.label] += size
        self.now += size
        if self.now > self.peak:
            self._rise()
        return True

    def _keep(self, storage: torch.UntypedStorage, size: int, label: str) -> None:
        key = storage._cdata

        def freed(_: object) -> None:
            _, size, label = self._live.pop(key)
            self.by_label[label] -= size
            self.now -= size

        self._live[key] = weakref.ref(storage, freed), size, label

    def _rise(self) -> None:
        self.peak, self.at_peak = self.now, dict(self.by_label)
        self.at_new_peak()


NUMBERS = {Tensor.item: 1.0, Tensor.__float__: 1.0, Tensor.__int__: 1, Tensor.__bool__: True}  # read without values


def kernels_of(device: str) -> dict[Any, Answer]:
    """Return the functions of torch that choose a kernel by their tensors' device, with those of a given device."""
    rms_norm = {F.rms_norm: lambda x, normalized_shape, weight, eps: RMSNormOfCuda.apply(x, weight)}
    return {
        F.scaled_dot_product_attention: partial(attention_on, device),
        torch._fused_sgd_: lambda *tensors, **options: None,  # in place, and without a kernel for such tensors
        **(rms_norm if device == "cuda" else {}),
    }


class WithoutValues(TorchFunctionMode):
    """A function mode in which every number read from a tensor without values is 1: a finite norm, no overflow.

    device: 'cuda' or 'cpu', whose kernels are used. attention: the kernel that torch would choose for it. Truth values
    are True: on the CPU every token then belongs to this rank's part of the vocabulary, which is the case in which an
    embedding's backward holds most.
    """

    def __init__(self, device: str, attention: SDPBackend) -> None:
        super().__init__()
        self.numbers = dict(NUMBERS)
        self.answers = kernels_of(device) | {torch._fused_sdp_choice: lambda *tensors, **options: attention.value}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.numbers or func is Tensor.tolist:
            return self.read(func, *args)
        return self.answers.get(func, func)(*args, **(kwargs or {}))

    def read(self, func: Any, tensor: Tensor) -> Any:
        """Return what the host reads of a tensor."""
        return self.numbers[func] if func in self.numbers else np.ones(tuple(tensor.shape)).tolist()


class MetaMode(WithoutValues):
    """The mode of meta tensors, which say that they are on a device."""

    def __init__(self, device: str) -> None:
        super().__init__(device, SDPBackend.FLASH_ATTENTION)
        self.answers[torch.autograd.backward] = self._backward
        if device == "cuda":
            self.answers[Tensor.is_cuda.__get__] = lambda tensor: True  # type: ignore[attr-defined]

    def _backward(self, outputs: tuple[Tensor], grad_tensors: Tensor, **_: Any) -> None:
        """Run a backward inside another, that of recomputed layers, within the mode: inside an answer it is off."""
        gradients = (grad_tensors,)
        with self:
            _engine_run_backward(outputs, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def attention_on(
    device: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run the kernel that torch chooses for scaled_dot_product_attention on a device.

    'cpu': the flash kernel for CPUs, which keeps q, k, v, its output and the log-sum-exp. 'cuda': the flash kernel for
    half types without a mask, the math one for fp64, else the memory-efficient one.
    """
    if device == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]  # type: ignore[no-any-return]
    if attn_mask is None and q.dtype in HALF_TYPES:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q, k, v, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    if q.dtype is torch.float64:
        bias = attn_mask
        if is_causal:
            bias = q.new_zeros(q.shape[-2], k.shape[-2]).masked_fill_(
                q.new_ones(q.shape[-2], k.shape[-2]).triu_(1).bool(), -torch.inf
            )
        math = torch.ops.aten._scaled_dot_product_attention_math
        return math(q, k, v, bias, dropout_p, False, scale=scale)[0]  # type: ignore[no-any-return]
    bias = None
    if attn_mask is not None:
        bias = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        if k.shape[2] % ALIGNED_BIAS:
            padded = F.pad(attn_mask, (0, -k.shape[2] % ALIGNED_BIAS))
            bias = padded[..., : k.shape[2]].expand(bias.shape)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


class RMSNormOfCuda(torch.autograd.Function):
    """CUDA's fused kernel, which keeps x, weight and 1 / rms of each row in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        statistics = x.new_empty((*x.shape[:-1], 1), dtype=torch.promote_types(x.dtype, torch.float32))
        read = None if weight is None else weight.detach()  # an operation that reads it, which is recorded
        ctx.save_for_backward(x, read, statistics)
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None
