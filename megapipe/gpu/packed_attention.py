"""Attention within packed documents by kernels of variable lengths, which take the documents' borders, not a mask.

A mask costs b s^2 elements a microbatch, and its kernels compute what it hides. Borders are computed on the host when
the batch is read, since kernels need the length of the longest document as a number.

Shapes: s sequence, b batch, g key/value heads, n query heads per key/value head, d head_dim, all of this rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class DocumentBorders:
    """The documents of one microbatch, whose sequences follow each other; a document is within one sequence."""

    starts: Tensor  # [documents + 1], int32: the first token of each document, then the number of tokens
    longest: int  # tokens

    @classmethod
    def of(cls, document_ids: NDArray[np.int64], to_device: Callable[[NDArray[np.int32]], Tensor]) -> DocumentBorders:
        """Return the borders between unequal neighbours. document_ids: [b, s], on the host."""
        is_start = np.ones(document_ids.shape, dtype=np.bool_)
        is_start[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
        starts = np.append(np.flatnonzero(is_start), document_ids.size).astype(np.int32)
        return cls(to_device(starts), int(np.diff(starts).max()))


# (q [b s, g n, d], k [b s, g, d], v [b s, g, d], borders) -> [b s, g n, d], causal within each document
PackedKernel = Callable[[Tensor, Tensor, Tensor, DocumentBorders], Tensor]


def packed_attention(q: Tensor, k: Tensor, v: Tensor, borders: DocumentBorders, kernel: PackedKernel) -> Tensor:
    """Return attention within documents, [s, b, g n, d] as [s, b, g n d].

    q: [s, b, g, n, d]; k, v: [s, b, g, 1, d], any strides. Copies what is not in the kernel's order of tokens and
    heads: all with b > 1; with b = 1, q where groups of several query heads are parts of one tensor with k and v.
    """
    seq, batch = q.shape[:2]
    rows, keys, values = (x.transpose(0, 1).reshape(batch * seq, -1, x.shape[-1]) for x in (q, k, v))
    if rows.is_contiguous() and not q.is_contiguous():  # a copy: with k and v copied too, the whole is freed
        keys, values = keys.contiguous(), values.contiguous()
    output = kernel(rows, keys, values, borders)
    return output.reshape(batch, seq, -1).transpose(0, 1).contiguous()


def torch_kernel(
    q: Tensor, k: Tensor, v: Tensor, borders: DocumentBorders, *, scale: float, window: int | None
) -> Tensor:
    """Run torch's flash kernel. window: tokens that a token sees, itself included; None: all before it."""
    kernel = _varlen_attention()
    left = -1 if window is None or window >= borders.longest else window - 1
    starts, longest = borders.starts, borders.longest
    output = kernel(q, k, v, starts, starts, longest, longest, scale=scale, window_size=(left, 0))
    assert isinstance(output, Tensor)
    return output


@cache
def _varlen_attention() -> Callable[..., Any]:
    """Return torch's kernel. It is imported where it is used: it imports dynamo, which takes two seconds."""
    from torch.nn.attention.varlen import varlen_attn

    # versions differ in whether grouped queries have to be allowed
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return partial(varlen_attn, **grouped)
