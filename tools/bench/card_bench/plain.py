"""A plain Llama in PyTorch, under transformers' names of its parameters: what torch.compile is given to work on.

Only its sizes are read from megapipe.

Activations are [b, s, h]; attention is scaled_dot_product_attention, causal, with grouped keys and values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.config.config import ResolvedModelConfig


class RMSNorm(nn.Module):
    def __init__(self, model: ResolvedModelConfig) -> None:
        super().__init__()
        self.eps, self.weight = model.norm_epsilon, nn.Parameter(torch.ones(model.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype) * self.weight


class Attention(nn.Module):
    def __init__(self, model: ResolvedModelConfig) -> None:
        super().__init__()
        self.head_size = model.hidden_size // model.num_attention_heads
        self.q_proj = nn.Linear(model.hidden_size, model.hidden_size, bias=False)
        self.k_proj = nn.Linear(model.hidden_size, model.num_query_groups * self.head_size, bias=False)
        self.v_proj = nn.Linear(model.hidden_size, model.num_query_groups * self.head_size, bias=False)
        self.o_proj = nn.Linear(model.hidden_size, model.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (
            project(x).view(b, s, -1, self.head_size).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(
            rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(y.transpose(1, 2).reshape(b, s, h))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [b, heads, s, d], whose halves of d are the two parts of a complex number, by (cos, sin) [s, d]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class MLP(nn.Module):
    def __init__(self, model: ResolvedModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.hidden_size, model.ffn_hidden_size, bias=False)
        self.up_proj = nn.Linear(model.hidden_size, model.ffn_hidden_size, bias=False)
        self.down_proj = nn.Linear(model.ffn_hidden_size, model.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, model: ResolvedModelConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(model), RMSNorm(model)
        self.self_attn, self.mlp = Attention(model), MLP(model)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, model: ResolvedModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.num_layers))
        self.norm = RMSNorm(model)


class PlainLlama(nn.Module):
    """tokens, labels [b, s] -> mean cross entropy."""

    def __init__(self, model: ResolvedModelConfig) -> None:
        super().__init__()
        self.model = Body(model)
        self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        head_size = model.hidden_size // model.num_attention_heads
        frequencies = model.rotary_base ** (-torch.arange(0, head_size, 2) / head_size)
        angles = torch.outer(torch.arange(model.seq_length), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.lm_head(self.model.norm(x))
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.reshape(-1))
