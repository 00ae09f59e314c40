"""Stand-ins for libraries that compute attention, with what each keeps for its backward.

A plan is made where the libraries are not installed. They keep q, k and v as they are given, their output and the
log-sum-exp of the logits in fp32; what else they allocate is freed within one call. Linears and norms of Transformer
Engine are traced as megapipe's own, which keep the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapipe.gpu.libraries import AttentionKernel, AttentionShape, fold_groups
from megapipe.gpu.packed_attention import DocumentBorders, packed_attention


@dataclass(frozen=True)
class LibraryAttention:
    """The attention of a library, without values.

    name: of the kernel. batch_first: its tensors are [b, s, ...], not [s, b, ...], so that its output is copied.
    """

    name: str
    batch_first: bool

    def attention(self, shape: AttentionShape) -> AttentionKernel:
        """Build the attention of one layer: the interface of `gpu.libraries`."""

        def packed(q: Tensor, k: Tensor, v: Tensor, borders: DocumentBorders) -> Tensor:
            return _Attention.apply(self.name, q, k, v)  # type: ignore[no-any-return]

        def attend(q: Tensor, k: Tensor, v: Tensor, borders: DocumentBorders | None = None) -> Tensor:
            if borders is not None:
                return packed_attention(q, k, v, borders, packed)
            heads = [fold_groups(x) for x in (q, k, v)]
            if self.batch_first:
                output = _Attention.apply(self.name, *(x.transpose(0, 1) for x in heads)).transpose(0, 1)
            else:
                output = _Attention.apply(self.name, *heads)
            return output.reshape(*q.shape[:2], -1)  # type: ignore[no-any-return]

        return attend


LIBRARIES = {  # --attention-impl
    "flash": LibraryAttention("flash2", batch_first=True),  # flash_attn.flash_attn_interface.FlashAttnFunc
    "te": LibraryAttention("cudnn", batch_first=False),  # transformer_engine.pytorch.DotProductAttention
}


def _forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)


NAMESPACE = "megapipe_trace"  # the kernels are operations, so that a recorder sees them
OPERATIONS = torch.library.Library(NAMESPACE, "DEF")
for library in LIBRARIES.values():
    OPERATIONS.define(f"{library.name}(Tensor q, Tensor k, Tensor v) -> (Tensor output, Tensor statistics)")
    OPERATIONS.impl(library.name, _forward, "Meta")


class _Attention(torch.autograd.Function):
    """q [..., n, d], k [..., 1, d], v [..., 1, e] -> [..., n, e]."""

    @staticmethod
    def forward(ctx: Any, library: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output, statistics = getattr(torch.ops.megapipe_trace, library)(q, k, v)
        ctx.save_for_backward(q, k, v, output, statistics)
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *(torch.empty_like(x) for x in ctx.saved_tensors[:3])
