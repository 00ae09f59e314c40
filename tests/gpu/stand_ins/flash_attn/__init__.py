"""A stub of flash-attn: [b, s, heads, d], causal from the bottom right corner, grouped queries, window, soft-cap."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__version__ = "2.8.stub"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    **others: Any,
) -> Tensor:
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert q.shape[2] % k.shape[2] == 0
    assert causal
    assert dropout_p == 0.0
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    row = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    column = torch.arange(k.shape[1])[None, :]
    hidden = column > row
    if window_size[0] >= 0:
        hidden = hidden | (column < row - window_size[0])
    return torch.einsum("bhqk,bkhd->bqhd", logits.masked_fill(hidden, -torch.inf).softmax(-1), v)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    **others: Any,
) -> Tensor:
    """Run each document of q, k, v [tokens, heads, d] separately."""
    assert cu_seqlens_q.dtype == torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
    outputs = []
    for start, stop in pairwise(cu_seqlens_q.tolist()):
        document = (x[None, start:stop] for x in (q, k, v))
        outputs.append(flash_attn_func(*document, dropout_p, softmax_scale, causal, window_size, softcap)[0])
    return torch.cat(outputs)
