"""Heads of latent attention from projections, and its core attention with values narrower than keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megapipe.model.attention import fused_attention, rotated
from megapipe.model.block_attention import FusedBlocks, MaskedBlock
from megapipe.model.context_parallel import ALONE
from megapipe.model.latent_attention import LatentHeads, _Heads, heads_of_latents, latent_gradients
from megapipe.model.ring_attention import BlockAttention
from megapipe.sharding.sequence import KeyBlock

SEQ, BATCH, HEADS, PLAIN, TURNED, VALUES = 6, 2, 3, 4, 6, 5
SCALE = 0.5


def inputs(dtype: torch.dtype) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """Return the projections of queries, of keys and values, and the shared key; cos and sin."""
    generator = torch.Generator().manual_seed(3)
    widths = HEADS * (PLAIN + TURNED), HEADS * (PLAIN + VALUES), TURNED
    made = [torch.randn(SEQ, BATCH, width, generator=generator, dtype=torch.float64).to(dtype) for width in widths]
    angles = torch.rand(SEQ, 1, 1, 1, TURNED // 2, generator=generator, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    return made, (angles.cos().to(wide), angles.sin().to(wide))


def plain_heads(q: Tensor, keys_values: Tensor, shared: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Return q, k and v as separate operations make them."""
    heads = SEQ, BATCH, HEADS, 1, -1
    q, keys = q.view(heads), keys_values.view(heads)
    turned = rotated(shared.view(SEQ, BATCH, 1, 1, -1), cos, sin).expand(*heads)
    return (
        torch.cat((q[..., :PLAIN], rotated(q[..., PLAIN:], cos, sin)), -1),
        torch.cat((keys[..., :PLAIN], turned), -1),
        keys[..., PLAIN:].contiguous(),
    )


def our_heads(owns: bool, q: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    sizes = LatentHeads(HEADS, PLAIN, heads_of_latents, latent_gradients)
    q, k, v = _Heads.apply(q.clone(), *others, None, sizes, owns)
    return q.view(k.shape), k, v


@pytest.mark.parametrize("owns", [True, False], ids=["owned gradients", "shared gradients"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_heads_equal_separate_operations(dtype: torch.dtype, owns: bool) -> None:
    given, tables = inputs(dtype)
    found: dict[Any, list[Tensor]] = {}
    for name in ("ours", "plain"):
        leaves = [x.clone().requires_grad_() for x in given]
        made = our_heads(owns, *leaves, *tables) if name == "ours" else plain_heads(*leaves, *tables)
        grads = [torch.linspace(-1, 1, x.numel(), dtype=torch.float64).to(dtype).view_as(x) for x in made]
        kept = [grad.clone() for grad in grads]
        torch.autograd.backward(made, grads)
        if name == "ours":  # only q's rotated channels, and only if nothing else has the gradient
            assert torch.equal(grads[0], kept[0]) != owns
            assert all(torch.equal(a, b) for a, b in zip(grads[1:], kept[1:], strict=True))
        found[name] = [*made, *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    assert len(found["ours"]) == 6
    for ours, plain in zip(found["ours"], found["plain"], strict=True):
        # the sum over heads is rounded once, not after each head
        tolerance = 1e-12 if dtype is torch.float64 else 2e-2
        torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)


def test_heads_keep_nothing_but_their_results() -> None:
    given, tables = inputs(torch.float64)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        our_heads(True, *(x.requires_grad_() for x in given), *tables)
    assert not saved


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_one_block_equals_attention_with_padded_values_to_the_bit(dtype: torch.dtype) -> None:
    given, tables = inputs(dtype)
    q, k, v = plain_heads(*given, *tables)
    block = MaskedBlock(KeyBlock((0, SEQ), (0, SEQ), "causal"))
    found = []
    for in_blocks in (True, False):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        if in_blocks:
            output = BlockAttention(0, {0: (block,)}, FusedBlocks(SCALE), ALONE, False)(*leaves, None)
        else:
            padded = F.pad(leaves[2], (0, PLAIN + TURNED - VALUES))
            wide = fused_attention(leaves[0], leaves[1], padded, None, SCALE).unflatten(-1, (-1, PLAIN + TURNED))
            output = wide[..., :VALUES].flatten(2)
        output.backward(torch.linspace(-1, 1, output.numel(), dtype=torch.float64).to(dtype).view_as(output))
        found.append([output, *(leaf.grad for leaf in leaves)])
    assert all(torch.equal(ours, padded) for ours, padded in zip(*found, strict=True))
