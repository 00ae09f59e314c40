"""A norm, an activation and a kind of attention of your own.

megapipe launch --nproc-per-node 4 pretrain --extension examples/extend_layer.py --normalization lp-norm \
    --activation gated-relu2 --attention-kind sigmoid --attention-dropout 0 --tensor-model-parallel-size 2 \
    --pipeline-model-parallel-size 2 --config configs/quickstart.yaml --mock-data --vocab-size 1000 --verify-grid

The functions are plain PyTorch. Only their inputs are kept for the backward, which runs them again.
"""

import math

import torch
from torch import Tensor

from megapipe.extend import AttentionHeads, register_activation, register_attention, register_norm


@register_norm("lp-norm")
def lp_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """Divide by the mean magnitude instead of the root of the mean square: the L1 norm (arXiv:1803.01814)."""
    return x / (x.abs().mean(dim=-1, keepdim=True) + epsilon) * weight


@register_activation("gated-relu2", is_gated=True)
def gated_relu2(x: Tensor) -> Tensor:
    """relu(gate)^2 x up: the square of Primer (arXiv:2109.08668) in a gated linear unit."""
    gate, up = x.chunk(2, dim=-1)
    return torch.relu(gate).square() * up


@register_attention("sigmoid")
def sigmoid_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, heads: AttentionHeads) -> Tensor:
    """sigmoid(q k^T - ln keys) v: each key counts by itself, without a softmax over all (arXiv:2409.04431)."""
    scores = q @ k.transpose(-2, -1) * heads.scale - math.log(k.shape[-2])
    return torch.sigmoid(scores + mask) @ v
