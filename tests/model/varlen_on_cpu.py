"""torch's variable-length attention written out for CPUs, behind torch's operator and with its kernel's contract."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

RUNS: list[tuple[tuple[int, ...], int]] = []  # shape of q and longest document of each forward


def check(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, is_causal: bool, window: list[int]) -> None:
    """Assert what the kernel demands, but for half types."""
    tokens, heads, channels = q.shape
    assert k.shape == v.shape == (tokens, k.shape[1], channels) and heads % k.shape[1] == 0
    assert all(x.stride(-1) == 1 and x.dtype == q.dtype for x in (q, k, v)) and channels % 8 == 0
    assert starts.dtype == torch.int32 and starts.is_contiguous()
    lengths = starts.diff()
    assert starts[0] == 0 and starts[-1] == tokens and (lengths > 0).all() and longest == lengths.max()
    assert is_causal == (tuple(window) == (-1, 0)) and window[1] == 0


def logits_of(q: Tensor, k: Tensor, scale: float, window: list[int]) -> Tensor:
    """Return the logits of one document, [heads, queries, keys]; -inf where a key is not seen."""
    index = torch.arange(len(q))
    distance = index[:, None] - index
    hidden = (distance < 0) | ((distance > window[0]) if window[0] >= 0 else False)
    return (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(hidden, -torch.inf)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    starts_of_keys: Tensor,
    longest: int,
    longest_of_keys: int,
    is_causal: bool,
    scale: float,
    window: list[int],
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    check(q, k, v, starts, longest, is_causal, window)
    assert torch.equal(starts, starts_of_keys) and longest == longest_of_keys
    RUNS.append((tuple(q.shape), longest))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    outputs, sums = [], []
    for start, stop in pairwise(starts.tolist()):
        logits = logits_of(q[start:stop], k[start:stop], scale, window)
        outputs.append(torch.einsum("hqk,khd->qhd", logits.softmax(-1), v[start:stop]))
        sums.append(logits.logsumexp(-1))
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.cat(outputs), torch.cat(sums, dim=1).to(wide), q.new_empty(0, dtype=torch.uint64)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    sums: Tensor,
    starts: Tensor,
    starts_of_keys: Tensor,
    longest: int,
    longest_of_keys: int,
    is_causal: bool,
    random: Tensor,
    scale: float,
    window: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    assert grad.shape == output.shape == q.shape and grad.stride(-1) == 1 and sums.shape == (q.shape[1], q.shape[0])
    groups = k.shape[1]
    k, v = (x.repeat_interleave(q.shape[1] // groups, dim=1) for x in (k, v))
    gradients: list[tuple[Tensor, Tensor, Tensor]] = []
    for start, stop in pairwise(starts.tolist()):
        here = slice(start, stop)
        probs = torch.exp(logits_of(q[here], k[here], scale, window) - sums[:, here, None])
        of_probs = torch.einsum("qhd,khd->hqk", grad[here], v[here])
        of_logits = probs * (of_probs - (of_probs * probs).sum(-1, keepdim=True)) * scale
        dq = torch.einsum("hqk,khd->qhd", of_logits, k[here])
        dk = torch.einsum("hqk,qhd->khd", of_logits, q[here])
        gradients.append((dq, dk, torch.einsum("hqk,qhd->khd", probs, grad[here])))
    dq, dk, dv = (torch.cat(parts) for parts in zip(*gradients, strict=True))
    dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))  # over the query heads that share one
    return dq, dk, dv


varlen._varlen_attn.register_kernel("cpu")(forward)
varlen._varlen_attn_backward.register_kernel("cpu")(backward)
