"""`ReferenceGPT`: the GPT that all grids are compared with, in one process and plain PyTorch.

Parameters carry Megatron's names and layouts, full tensors. Shapes: b batch, s sequence, h hidden_size, n
num_attention_heads, g num_query_groups, c kv_channels.

Rotary positions (Su et al. 2021, arXiv:2104.09864): channel c is paired with c + rotary_channels / 2 (the "half" layout
of GPT-NeoX, Llama and Megatron-LM).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.extras.reference.config import ReferenceConfig
from megapipe.extras.reference.experts import MLP, MoE

# (layer, site, shape) -> mask already divided by 1 - p, or None for no dropout there.
#   site "embedding"         layer -1        [b, s, h]
#   site "attention_probs"   layer 0, 1, ..  [b, n, s, s]
#   site "attention_output"                  [b, s, h]
#   site "mlp_output"                        [b, s, h]
DropoutMasks = Callable[[int, str, tuple[int, ...]], Tensor | None]


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums and tables: fp32 for half types, otherwise the dtype itself."""
    return torch.promote_types(dtype, torch.float32)


class Context(NamedTuple):
    """The places of tokens and the dropout masks, as `ReferenceGPT.forward` takes them; positions are known here."""

    position_ids: Tensor
    document_ids: Tensor | None = None
    dropout_masks: DropoutMasks | None = None


class ReferenceGPT(nn.Module):
    """Embedding, layers, final norm, head. Weights are NaN until loaded, to expose omissions."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.decoder = Decoder(config)
        if config.untie_embeddings_and_output_weights:
            self.output_layer = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        if config.mtp_num_layers:
            modules = (Prediction(config, number) for number in range(config.mtp_num_layers))
            self.mtp = nn.ModuleDict({"layers": nn.ModuleList(modules)})
        self.losses_ahead: list[tuple[Tensor, Tensor]] = []  # of the last forward's predictions, as `forward` returns
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(torch.nan)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        dropout_masks: DropoutMasks | None = None,
        padding: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses weighted by loss_mask, and the sum of loss_mask.

        tokens, labels, loss_mask: [b, s]. position_ids: [b, s], 0 .. s - 1 if None. document_ids: [b, s]; a query sees
        only the keys of its document. Without dropout_masks there is no dropout, whatever the configured rates: the
        caller provides all randomness. padding: [b, s] bool, positions that experts do not see; needs document_ids.
        """
        for each in self.experts():
            each.padding = padding
        context = self._context(tokens, position_ids, document_ids=document_ids, dropout_masks=dropout_masks)
        hidden = self._hidden(tokens, context)
        self.losses_ahead = []
        for depth in range(1, (self.config.mtp_num_layers or 0) + 1):
            # position i holds what belongs to position i + depth; nothing does where that is another document
            ahead, label, counts = (shifted(each, depth) for each in (tokens, labels, loss_mask))
            module = self.mtp.get_submodule(f"layers.{depth - 1}")
            if document_ids is not None:
                numbers = document_ids - document_ids.min() + 1  # above 0, which marks positions past the end
                is_same = shifted(numbers, depth) == numbers
                counts = counts * is_same
                for mixture in self.experts(module):
                    mixture.padding = None if padding is None else padding | ~is_same
            if depth == 1:
                deeper = hidden
            layer = self.config.num_layers + depth - 1
            embedded = self.embedding(ahead, context.position_ids, context.dropout_masks, layer)
            deeper = module(deeper, embedded, context)
            self.losses_ahead.append(self._loss(deeper, label, counts))
        return self._loss(hidden, labels, loss_mask)

    def _loss(self, hidden: Tensor, labels: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        losses = token_losses(self.config, self._logits(hidden), labels)
        loss_mask = loss_mask.to(losses.dtype)
        return (losses * loss_mask).sum(), loss_mask.sum()

    def logits(self, tokens: Tensor, position_ids: Tensor | None = None, **others: Any) -> Tensor:
        """Return logits [b, s, vocab_size] in at least fp32, without the padded rows of the head.

        others: document_ids and dropout_masks of `forward`.
        """
        return self._logits(self._hidden(tokens, self._context(tokens, position_ids, **others)))

    def _context(self, tokens: Tensor, position_ids: Tensor | None, **others: Any) -> Context:
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return Context(position_ids, **others)

    def _hidden(self, tokens: Tensor, context: Context) -> Tensor:
        """Return the hidden states [b, s, h] that the head takes in."""
        longest = self.config.seq_length
        if tokens.shape[1] > longest:
            raise ValueError(f"a sequence of {tokens.shape[1]} tokens is longer than seq_length {longest}")
        return self.decoder(self.embedding(tokens, context.position_ids, context.dropout_masks), context)

    def _logits(self, hidden: Tensor) -> Tensor:
        config = self.config
        untied = config.untie_embeddings_and_output_weights
        head = self.output_layer.weight if untied else self.embedding.word_embeddings.weight
        logits = F.linear(hidden, head)[..., : config.vocab_size]
        logits = logits.to(at_least_fp32(logits.dtype)) / config.logits_scaling
        return soft_cap(logits, config.final_logit_softcapping)

    def balance(self) -> None:
        """End a step: update the biases of all routers by the loads of its forwards."""
        for module in self.experts():
            module.balance()

    def experts(self, of: nn.Module | None = None) -> list[MoE]:
        """Return the mixtures of experts, or those of one of its modules."""
        return [module for module in (of or self).modules() if isinstance(module, MoE)]

    def states(self) -> dict[str, Tensor]:
        """Return the biases of all routers that have one, by name."""
        found = {name: module.choice_bias() for name, module in self.named_modules() if isinstance(module, MoE)}
        return {f"{name}.router.expert_bias": bias for name, bias in found.items() if bias is not None}

    def load_states(self, states: Mapping[str, Tensor]) -> None:
        """Set the biases of routers, given by name as `states` returns them."""
        for name, bias in states.items():
            mixture = self.get_submodule(name.removesuffix(".router.expert_bias"))
            assert isinstance(mixture, MoE)
            mixture.expert_bias = bias

    def router_losses(self) -> Tensor | float:
        """Return the sum of the losses of all routers in the last forward: load balancing and z loss, with their
        coefficients; 0.0 without experts. It is a loss of one microbatch, added to the mean over its tokens.
        """
        return sum((module.loss for module in self.experts()), 0.0)


class Embedding(nn.Module):
    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(
        self, tokens: Tensor, position_ids: Tensor, dropout_masks: DropoutMasks | None, layer: int = -1
    ) -> Tensor:
        hidden = self.word_embeddings(tokens)
        hidden = hidden * torch.tensor(self.config.embedding_scale, dtype=hidden.dtype, device=hidden.device)
        if self.config.position_embedding_type == "learned_absolute":
            hidden = hidden + self.position_embeddings(position_ids)
        return dropout(hidden, self.config.hidden_dropout, dropout_masks, layer, "embedding")


class Prediction(nn.Module):
    """A module of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    norm(layer(eh_proj [norm(embedding of the tokens ahead); norm(hidden)])); the layer is like the last one.
    """

    def __init__(self, config: ReferenceConfig, number: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.enorm, self.hnorm, self.final_layernorm = (Norm(config, size) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.transformer_layer = Block(config.layer(config.num_layers - 1), config.num_layers + number)

    def forward(self, hidden: Tensor, embedded: Tensor, context: Context) -> Tensor:
        hidden = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        return self.final_layernorm(self.transformer_layer(hidden, *context))


class Decoder(nn.Module):
    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config.layer(layer), layer) for layer in range(config.num_layers))
        self.final_layernorm = Norm(config, config.hidden_size)

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, *context)
        return self.final_layernorm(hidden)


class Block(nn.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), without the parts that the layer lacks."""

    def __init__(self, config: ReferenceConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        norms_input = config.norm_position in ("before", "around")
        norms_output = config.norm_position in ("after", "around")
        if config.has_attention or config.mixer is not None:
            self.input_layernorm = Norm(config, config.hidden_size) if norms_input else nn.Identity()
            kind = LatentAttention if config.multi_latent_attention else SelfAttention
            self.self_attention = kind(config, layer) if config.mixer is None else config.mixer()
            self.post_self_attn_layernorm = Norm(config, config.hidden_size) if norms_output else nn.Identity()
        if config.has_mlp:
            self.pre_mlp_layernorm = Norm(config, config.hidden_size) if norms_input else nn.Identity()
            self.mlp = MLP(config) if config.num_experts is None else MoE(config)
            self.post_mlp_layernorm = Norm(config, config.hidden_size) if norms_output else nn.Identity()

    def forward(self, hidden: Tensor, *fields: Any) -> Tensor:
        """Return [b, s, h]. fields: of Context."""
        context = Context(*fields)
        rate, scale = self.config.hidden_dropout, self.config.residual_scale
        if self.config.has_attention or self.config.mixer is not None:
            inputs = (self.input_layernorm(hidden), *([context] if self.config.mixer is None else []))
            update = self.post_self_attn_layernorm(self.self_attention(*inputs))
            hidden = hidden + scale * dropout(update, rate, context.dropout_masks, self.layer, "attention_output")
        if self.config.has_mlp:
            update = self.post_mlp_layernorm(self.mlp(self.pre_mlp_layernorm(hidden)))
            hidden = hidden + scale * dropout(update, rate, context.dropout_masks, self.layer, "mlp_output")
        return hidden


class SelfAttention(nn.Module):
    """Explicit softmax attention. linear_qkv's rows: [q_0 .. q_{n/g-1}, k, v] x kv_channels for each query group;
    with gates of the output [q_0 .. q_{n/g-1}, gate_0 .. gate_{n/g-1}, k, v].
    """

    q_layernorm: nn.Module

    def __init__(self, config: ReferenceConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        heads, groups, channels = config.num_attention_heads, config.num_query_groups, config.kv_channels
        has_qkv_bias = config.add_bias_linear or config.add_qkv_bias
        rows = (heads * (2 if config.attention_output_gate else 1) + 2 * groups) * channels
        self.linear_qkv = nn.Linear(config.hidden_size, rows, bias=has_qkv_bias)
        self.linear_proj = nn.Linear(heads * channels, config.hidden_size, bias=config.add_bias_linear)
        if config.qk_layernorm:
            is_whole = config.qk_layernorm_scope == "projection"
            self.q_layernorm = Norm(config, heads * channels if is_whole else channels)
            self.k_layernorm = Norm(config, groups * channels if is_whole else channels)
        if config.softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.empty(heads))

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        config = self.config
        batch, seq, _ = hidden.shape
        groups, queries_per_group = config.num_query_groups, config.num_attention_heads // config.num_query_groups
        qkv = self.linear_qkv(hidden).view(batch, seq, groups, -1, config.kv_channels)
        q = qkv[:, :, :, :queries_per_group].flatten(2, 3)  # [b, s, n, c]
        k, v = qkv[:, :, :, -2], qkv[:, :, :, -1]  # [b, s, g, c]
        if not config.qk_layernorm_after_rope:
            q, k = self._normed(q, k)
        if config.position_embedding_type == "rope":
            rotary = cos_sin(config, context.position_ids, at_least_fp32(hidden.dtype))
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        if config.qk_layernorm_after_rope:
            q, k = self._normed(q, k)
        if config.position_embedding_type == "none" and config.nope_query_scale:
            steps = ((context.position_ids + 1) // config.nope_query_scale_length).to(at_least_fp32(q.dtype))
            q = (q * (1.0 + config.nope_query_scale * torch.log(1.0 + steps))[..., None, None]).to(q.dtype)
        k, v = (x.repeat_interleave(queries_per_group, dim=2) for x in (k, v))  # [b, s, n, c]
        output = self.attend(q, k, v, context)
        if config.attention_output_gate:
            gate = qkv[:, :, :, queries_per_group:-2].flatten(2)
            output = (output * torch.sigmoid(gate.to(at_least_fp32(gate.dtype)))).to(output.dtype)
        return self.linear_proj(output)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.qk_layernorm and self.config.qk_layernorm_scope == "projection":
            return self.q_layernorm(q.flatten(2)).view(q.shape), self.k_layernorm(k.flatten(2)).view(k.shape)
        if self.config.qk_l2_norm:
            wide = [x.to(at_least_fp32(x.dtype)) for x in (q, k)]
            roots = [torch.sqrt(x.square().mean(-1, keepdim=True) + self.config.norm_epsilon) for x in wide]
            return (wide[0] / roots[0]).to(q.dtype), (wide[1] / roots[1]).to(k.dtype)
        return (self.q_layernorm(q), self.k_layernorm(k)) if self.config.qk_layernorm else (q, k)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Return the weighted values, [b, s, n x their channels]. q, k: [b, s, n, c], v: [b, s, n, any]."""
        config, visible = self.config, visible_keys(self.config, context)
        if config.attention_function is not None:
            mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill(~visible, -torch.inf)
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, n, s, c]
            output = config.attention_function(q, k, v, mask, config.attention_heads)
            return output.transpose(1, 2).flatten(2, 3)
        scale = config.kv_channels**-0.5 if config.softmax_scale is None else config.softmax_scale
        scores = soft_cap(torch.einsum("bqnc,bknc->bnqk", q, k) * scale, config.attn_logit_softcapping)
        scores = scores.to(at_least_fp32(scores.dtype)).masked_fill(~visible, -torch.inf)
        if config.softmax_type != "vanilla":
            offset = self.softmax_offset if config.softmax_type == "learnable" else scores.new_zeros(scores.shape[1])
            scores = torch.cat((scores, offset.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)), dim=-1)
        probs = scores.softmax(dim=-1)[..., : k.shape[1]].to(v.dtype)
        probs = dropout(probs, config.attention_dropout, context.dropout_masks, self.layer, "attention_probs")
        return torch.einsum("bnqk,bknc->bqnc", probs, v).flatten(2, 3)


class LatentAttention(SelfAttention):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): the last channels of a query head are rotated, and
    all heads share one rotated key. Rows of linear_kv_up_proj: [key, value] for each head.
    """

    def __init__(self, config: ReferenceConfig, layer: int) -> None:
        nn.Module.__init__(self)
        self.config, self.layer = config, layer
        heads, hidden = config.num_attention_heads, config.hidden_size
        query, rank = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim), config.kv_lora_rank
        if config.q_lora_rank is None:
            self.linear_q_proj = nn.Linear(hidden, query, bias=False)
        else:
            self.linear_q_down_proj = nn.Linear(hidden, config.q_lora_rank, bias=False)
            self.q_layernorm = (
                Norm(config, config.q_lora_rank, config.latent_norm_epsilon) if config.qk_layernorm else nn.Identity()
            )
            self.linear_q_up_proj = nn.Linear(config.q_lora_rank, query, bias=False)
        self.linear_kv_down_proj = nn.Linear(hidden, rank + config.qk_pos_emb_head_dim, bias=False)
        self.kv_layernorm = Norm(config, rank, config.latent_norm_epsilon) if config.qk_layernorm else nn.Identity()
        self.linear_kv_up_proj = nn.Linear(rank, heads * (config.qk_head_dim + config.v_head_dim), bias=False)
        self.linear_proj = nn.Linear(heads * config.v_head_dim, hidden, bias=config.add_bias_linear)

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        config, (batch, seq, _) = self.config, hidden.shape
        heads, plain, rotated = config.num_attention_heads, config.qk_head_dim, config.qk_pos_emb_head_dim
        if config.q_lora_rank is None:
            q = self.linear_q_proj(hidden)
        else:
            q = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))
        q, q_rotated = q.view(batch, seq, heads, plain + rotated).split((plain, rotated), dim=-1)
        latent, k_rotated = self.linear_kv_down_proj(hidden).split((config.kv_lora_rank, rotated), dim=-1)
        k, v = (
            self.linear_kv_up_proj(self.kv_layernorm(latent))
            .view(batch, seq, heads, plain + config.v_head_dim)
            .split((plain, config.v_head_dim), dim=-1)
        )
        rotary = cos_sin(config, context.position_ids, at_least_fp32(hidden.dtype))
        q = torch.cat((q, rotate(q_rotated, *rotary)), dim=-1)
        if config.yarn_query_scale:
            turns = (context.position_ids // config.rope_original_max_position_embeddings).to(rotary[0].dtype)
            q = q * (1.0 + config.yarn_query_scale * torch.log(1.0 + turns))[..., None, None].to(q.dtype)
        k = torch.cat((k, rotate(k_rotated[:, :, None], *rotary).expand(-1, -1, heads, -1)), dim=-1)
        return self.linear_proj(self.attend(q, k, v, context))


class Norm(nn.Module):
    """LayerNorm, or RMSNorm (no mean, no bias), over the last dim in at least fp32."""

    def __init__(self, config: ReferenceConfig, size: int, epsilon: float | None = None) -> None:
        super().__init__()
        self.config, self.epsilon = config, epsilon or config.norm_epsilon
        self.weight = nn.Parameter(torch.empty(size))
        if config.has_norm_bias:
            self.bias = nn.Parameter(torch.empty(size))

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.to(at_least_fp32(hidden.dtype))
        weight, zero_centered = self.weight.to(x.dtype), self.config.layernorm_zero_centered_gamma
        if self.config.norm_function is not None:
            bias = self.bias.to(x.dtype) if self.config.has_norm_bias else None
            scale = weight + 1.0 if zero_centered else weight
            return self.config.norm_function(x, scale, bias, self.epsilon).to(hidden.dtype)
        if self.config.normalization == "LayerNorm":
            x = x - x.mean(dim=-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.epsilon)
        # not x * (weight + 1): autograd would keep the sum, which does not follow a weight that changes before backward
        x = x * weight + x if zero_centered else x * weight
        if self.config.normalization == "LayerNorm":
            x = x + self.bias.to(x.dtype)
        return x.to(hidden.dtype)


def visible_keys(config: ReferenceConfig, context: Context) -> Tensor:
    """Return which keys (last dim) each query sees, bool [1 or b, 1, s, s]: up to itself in its window and document.

    A window counts tokens, not positions.
    """
    index = torch.arange(context.position_ids.shape[1], device=context.position_ids.device)
    distance = index[:, None] - index  # [query, key]
    visible = distance >= 0
    if config.window_size is not None and config.attention_kind == "chunked":
        visible = visible & (index[:, None] // config.window_size == index // config.window_size)
    elif config.window_size is not None:
        visible = visible & (distance < config.window_size)
    visible = visible[None, None]
    if (document_ids := context.document_ids) is not None:
        visible = visible & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    return visible


def token_losses(config: ReferenceConfig, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each token, [b, s], over the true vocabulary.

    logits: [b, s, vocab_size], at least fp32; labels: [b, s]. Label smoothing a gives the label the probability 1 - a
    and each of the other K - 1 ids a / (K - 1), as in Megatron-LM. With smoothing = a K / (K - 1) the loss is
    (1 - smoothing) CE - smoothing mean_k log p_k, torch's label_smoothing = smoothing. z-loss (PaLM, arXiv:2204.02311)
    adds z_loss * logsumexp(logits)^2 to each token.
    """
    smoothing = config.label_smoothing * config.vocab_size / (config.vocab_size - 1)
    rows, ids = logits.flatten(0, 1), labels.flatten()
    losses = F.cross_entropy(rows, ids, reduction="none", label_smoothing=smoothing).view(labels.shape)
    if config.z_loss:
        losses = losses + config.z_loss * logits.logsumexp(dim=-1).square()
    return losses


def shifted(x: Tensor, count: int) -> Tensor:
    """Return x [b, s] `count` positions earlier, with zeros at the end."""
    return torch.cat((x[:, count:], torch.zeros_like(x[:, :count])), dim=1)


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def dropout(x: Tensor, rate: float, dropout_masks: DropoutMasks | None, layer: int, site: str) -> Tensor:
    """Return x times the mask of this site; x itself at rate 0 or without a mask."""
    mask = dropout_masks(layer, site, tuple(x.shape)) if dropout_masks is not None and rate > 0.0 else None
    return x if mask is None else x * mask.to(x.dtype)


def cos_sin(config: ReferenceConfig, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [b, s, rotary_channels], in dtype (at least fp32). position_ids: [b, s] integers."""
    angles = position_ids[..., None].to(dtype) * inverse_frequencies(config, dtype, position_ids.device)
    angles = torch.cat((angles, angles), dim=-1)
    amplitude = yarn_attention_factor(config) if config.rope_scaling_type == "yarn" else 1.0
    return angles.cos() * amplitude, angles.sin() * amplitude


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first rotary_channels of x [b, s, heads, kv_channels]. cos, sin: [b, s, rotary_channels]."""
    rotated, passed = x[..., : cos.shape[-1]].to(cos.dtype), x[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos[:, :, None] + torch.cat((-second, first), dim=-1) * sin[:, :, None]
    return torch.cat((rotated.to(x.dtype), passed), dim=-1)


def inverse_frequencies(config: ReferenceConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return radians per position for each pair of channels, [rotary_channels / 2], after the configured scaling."""
    channels = torch.arange(0, config.rotary_channels, 2, dtype=dtype, device=device)
    frequencies = 1.0 / config.rotary_base ** (channels / config.rotary_channels)
    if config.rope_scaling_type == "none":
        return frequencies
    if config.rope_scaling_type == "linear":  # position interpolation (Chen et al. 2023, arXiv:2306.15595)
        return frequencies / config.rope_scaling_factor
    return {"llama3": _llama3, "yarn": _yarn}[config.rope_scaling_type](config, frequencies)


def _llama3(config: ReferenceConfig, frequencies: Tensor) -> Tensor:
    """Llama 3.1: slow wavelengths above original / low_factor, keep those below original / high_factor, else blend."""
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    # full turns within the original context
    turns = config.rope_original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / config.rope_scaling_factor


def _yarn(config: ReferenceConfig, frequencies: Tensor) -> Tensor:
    """YaRN's NTK-by-parts (Peng et al. 2023, arXiv:2309.00071): a ramp over the pairs between beta_fast and beta_slow
    turns.
    """
    first = _yarn_pair_with_turns(config, config.yarn_beta_fast)
    last = _yarn_pair_with_turns(config, config.yarn_beta_slow)
    if config.yarn_correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rotary_channels - 1)
    width = max(last - first, 1e-3)  # of an empty ramp, a step
    pairs = torch.arange(config.rotary_channels // 2, dtype=frequencies.dtype, device=frequencies.device)
    slowed = ((pairs - first) / width).clamp(0.0, 1.0)
    return (1.0 - slowed) * frequencies + slowed * frequencies / config.rope_scaling_factor


def _yarn_pair_with_turns(config: ReferenceConfig, turns: float) -> float:
    """Return the index (a real number) of the channel pair that makes `turns` turns in the original context."""
    wavelength = config.rope_original_max_position_embeddings / turns
    return config.rotary_channels * math.log(wavelength / (2 * math.pi)) / (2 * math.log(config.rotary_base))


def yarn_attention_factor(config: ReferenceConfig) -> float:
    """Return YaRN's factor of cos and sin: 0.1 ln(factor) + 1, or with both mscales the quotient of two such terms."""

    def term(mscale: float) -> float:
        return 0.1 * mscale * math.log(config.rope_scaling_factor) + 1.0 if config.rope_scaling_factor > 1.0 else 1.0

    if config.yarn_mscale and config.yarn_mscale_all_dim:
        return term(config.yarn_mscale) / term(config.yarn_mscale_all_dim)
    return term(1.0)
