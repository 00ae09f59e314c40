"""The model of a plain PyTorch training loop of the GPT-2 shape, as a good engineer would write it for one process.

nn.Linear, scaled_dot_product_attention, F.cross_entropy, tied embeddings; nothing of megapipe. Activations are
[b, s, h]. Parameters have Megatron's names and order, so that they can be copied. `card_bench.contenders.Peer` trains
it for tools/bench/bench_cpu.py, which checks that it computes what megapipe computes; bench_schedules.py makes stages
of its blocks.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

Linear = Callable[[int, int], nn.Module]  # of inputs and outputs, with a bias


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, and of a step: `microbatches` of `micro_batch` sequences."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    seq: int = 256
    vocab: int = 8192
    micro_batch: int = 4
    microbatches: int = 8

    @property
    def step_tokens(self) -> int:
        return self.microbatches * self.micro_batch * self.seq


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, linear: Linear) -> None:
        super().__init__()
        self.heads = heads
        self.linear_qkv, self.linear_proj = linear(hidden, 3 * hidden), linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        # q, k, v: [b, heads, s, d], no copies
        q, k, v = self.linear_qkv(x).view(b, s, self.heads, 3, h // self.heads).permute(3, 0, 2, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        # the kernel's output is [b, s, heads, d] in memory: a view
        return self.linear_proj(y.transpose(1, 2).reshape(b, s, h))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, linear: Linear = nn.Linear) -> None:
        super().__init__()
        self.input_layernorm, self.pre_mlp_layernorm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.self_attention = Attention(hidden, heads, linear)
        fc1, fc2 = linear(hidden, 4 * hidden), linear(4 * hidden, hidden)
        self.mlp = nn.Sequential(OrderedDict(linear_fc1=fc1, gelu=nn.GELU("tanh"), linear_fc2=fc2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.pre_mlp_layernorm(x))


class Embedding(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocab, shape.hidden)
        self.position_embeddings = nn.Embedding(shape.seq, shape.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.word_embeddings(tokens) + self.position_embeddings.weight[: tokens.shape[1]]


class PlainGPT(nn.Module):
    """tokens [b, s] -> logits [b, s, V]; the head is the word embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = Embedding(shape)
        layers = nn.Sequential(*(Block(shape.hidden, shape.heads) for _ in range(shape.layers)))
        self.decoder = nn.Sequential(OrderedDict(layers=layers, final_layernorm=nn.LayerNorm(shape.hidden)))
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.decoder(self.embedding(tokens)), self.embedding.word_embeddings.weight)

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy."""
        return F.cross_entropy(self(tokens).flatten(0, 1), labels.reshape(-1))
