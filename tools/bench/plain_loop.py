"""A plain PyTorch training loop of the GPT-2 shape, as a good engineer would write it for one process: the baseline.

nn.Linear, scaled_dot_product_attention, F.cross_entropy, fused AdamW, tied embeddings; nothing of megapipe. Activations
are [b, s, h]. Imported by tools/bench/bench_cpu.py, which also checks that it computes what megapipe computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.proj = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        # q, k, v: [b, heads, s, d], no copies
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        # the kernel's output is [b, s, heads, d] in memory: a view
        return self.proj(y.transpose(1, 2).reshape(b, s, h))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.attention = Attention(shape)
        self.fc1 = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.fc2 = nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """tokens [b, s] -> logits [b, s, V]; the head is the word embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.seq, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.final_norm = nn.LayerNorm(shape.hidden)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("proj.weight", "fc2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.final_norm(x), self.words.weight)


class PlainLoop:
    """A training step: forward and backward of every microbatch, clipping, AdamW without decay of norms and biases."""

    def __init__(self, shape: Shape, lr: float, weight_decay: float, clip: float) -> None:
        self.shape, self.clip = shape, clip
        self.model = PlainGPT(shape)
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8, fused=True)
        self._parameters = list(self.model.parameters())

    def step(self, rows: Tensor) -> tuple[float, float]:
        """Make a step and return the mean loss and the gradient norm. rows: [microbatches x micro_batch, s + 1]."""
        total = torch.zeros(())
        for batch in rows.split(self.shape.micro_batch):
            logits = self.model(batch[:, :-1])
            loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
            (loss / self.shape.microbatches).backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self._parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(total) / self.shape.microbatches, float(norm)
