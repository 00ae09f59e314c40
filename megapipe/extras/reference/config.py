"""`ReferenceConfig`: the shape of the reference GPT under Megatron's names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

GATED_ACTIVATIONS = ("swiglu", "geglu_tanh", "quick_geglu")
BALANCE_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
NAMES = {
    "position_embedding_type": ("learned_absolute", "rope", "none"),
    "rope_scaling_type": ("none", "linear", "llama3", "yarn"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "norm_position": ("before", "after", "around"),
    "qk_layernorm_scope": ("head", "projection"),
    "attention_kind": ("softmax", "chunked"),
    "softmax_type": ("vanilla", "off-by-one", "learnable"),
    "moe_router_score_function": ("softmax", "sigmoid"),
    "moe_token_drop_policy": ("probs", "position"),
    "activation": ("gelu", "gelu_tanh", "relu", "squared_relu", *GATED_ACTIVATIONS),
}


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """A GPT with every size given: no field is derived from another, so no derivation can differ.

    Raises ValueError, naming the field, for an unknown name or for inconsistent sizes.
    """

    num_layers: int
    # what each layer has in place of the fields below, by name; empty: the layers are alike
    layers: tuple[Mapping[str, Any], ...] = ()
    has_attention: bool = True
    has_mlp: bool = True

    hidden_size: int
    ffn_hidden_size: int  # width after the activation; a gated linear_fc1 has twice as many rows
    num_attention_heads: int
    num_query_groups: int  # heads: multi-head, 1: multi-query, between: grouped-query attention
    kv_channels: int  # size of one head
    seq_length: int  # longest sequence that forward accepts
    max_position_embeddings: int  # rows of the learned position table
    vocab_size: int  # ids that exist
    padded_vocab_size: int  # rows of the embedding and of the head; those from vocab_size on are not part of the loss

    position_embedding_type: str = "learned_absolute"
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0  # the first kv_channels * rotary_percent channels of a head are rotated
    rope_scaling_type: str = "none"
    rope_scaling_factor: float = 8.0
    rope_low_freq_factor: float = 1.0  # llama3
    rope_high_freq_factor: float = 4.0  # llama3
    rope_original_max_position_embeddings: int = 8192  # llama3, yarn
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: float = 1.0
    yarn_mscale_all_dim: float = 0.0
    yarn_correction_range_round_to_int: bool = True
    # latent attention: queries times 1 + this x ln(1 + floor(position / original length))
    yarn_query_scale: float = 0.0

    normalization: str = "LayerNorm"
    norm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False  # the scale is weight + 1, in every norm of the model
    norm_position: str = "before"  # before: x + f(norm(x)); after: x + norm(f(x)); around: x + norm(f(norm(x)))
    qk_layernorm: bool = False  # norms of q and of k, before the rotation
    # head: each head by itself, with one weight for all; projection: all heads as one vector
    qk_layernorm_scope: str = "head"

    activation: str = "gelu"
    glu_linear_offset: float = 0.0  # gated: act(gate) * (up + offset)
    activation_func_clamp_value: float | None = None  # gated: c; gate is at most c, up between -c and c
    # factor on word embeddings, rounded to their dtype; positions are added to the product
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # factor on the outputs of attention and MLP in the residual sums
    logits_scaling: float = 1.0  # logits are divided by it
    qk_layernorm_after_rope: bool = False  # norms of q and of k after the rotation
    qk_l2_norm: bool = False  # heads of q and of k divided by their root mean square, before the rotation
    # queries of layers without positions: times 1 + this x ln(1 + floor((position + 1) / length))
    nope_query_scale: float = 0.0
    nope_query_scale_length: int = 8192
    attention_output_gate: bool = False  # attention's output times sigmoid of a projection, part of linear_qkv
    add_bias_linear: bool = True  # a bias in linear_qkv, linear_proj, linear_fc1 and linear_fc2
    add_qkv_bias: bool = False  # a bias in linear_qkv even without add_bias_linear
    untie_embeddings_and_output_weights: bool = False

    # latent attention: low-rank latents of the queries (None: no latent), and of keys and values
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 32
    qk_head_dim: int = 128  # not rotated; kv_channels = qk_head_dim + qk_pos_emb_head_dim
    qk_pos_emb_head_dim: int = 64  # rotated
    v_head_dim: int = 128
    latent_norm_epsilon: float | None = None  # None: norm_epsilon

    # multi-token prediction: modules, and the factor on the mean of their losses
    mtp_num_layers: int | None = None
    mtp_loss_scaling_factor: float = 0.1

    # a mixture of experts in place of the MLP, where num_experts is not None
    num_experts: int | None = None
    moe_ffn_hidden_size: int | None = None  # None: ffn_hidden_size
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_router_topk: int = 2
    moe_router_score_function: str = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    # experts that a group's score is the sum of; None: topk / group_topk
    moe_router_group_score_topk: int | None = None
    moe_router_norm_topk_prob: bool = True  # sigmoid: weights are divided by their sum
    moe_apply_probs_on_input: bool = False  # weights multiply the inputs of experts, not their results
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3
    moe_expert_capacity_factor: float | None = None
    moe_token_drop_policy: str = "probs"
    # positions of each slice of the sequence that has its own capacity, or is balanced by sinkhorn; empty: one slice
    moe_capacity_slices: tuple[tuple[int, ...], ...] = ()
    moe_router_load_balancing_type: tuple[str, ...] = ("aux_loss",)
    moe_aux_loss_coeff: tuple[float, ...] = (0.0,)
    moe_z_loss_coeff: float | None = None

    window_size: int | None = None  # a query at i sees the keys i - window_size + 1 .. i
    attn_logit_softcapping: float | None = None  # scores -> cap * tanh(scores / cap)
    final_logit_softcapping: float | None = None
    attention_kind: str = "softmax"
    softmax_type: str = "vanilla"  # off-by-one: one more logit of every query, 0, without a value; learnable: a weight
    softmax_scale: float | None = None  # None: 1 / sqrt(kv_channels)

    # functions in place of the named ones; normalization, activation and attention are then only names
    norm_function: Callable[..., Any] | None = None  # (x, weight, bias or None, epsilon) -> x's shape
    norm_has_bias: bool = False
    activation_function: Callable[..., Any] | None = None  # [..., F], or gated [..., 2 F], -> [..., F]
    activation_is_gated: bool = False
    # (q, k, v, mask, heads) -> output, [b, n, s, c]; mask: 0 or -inf, [1 or b, 1, s, s]; heads: passed on
    attention_function: Callable[..., Any] | None = None
    attention_heads: Any = None
    # () -> a module in attention's place, [b, s, h] -> [b, s, h]; and of each of its linears the equal matrices stacked
    # in the weight
    mixer: Callable[[], Any] | None = None
    mixer_matrices: Mapping[str, int] | None = None

    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0  # coefficient of logsumexp(logits)^2

    def __post_init__(self) -> None:
        functions = {
            "normalization": self.norm_function,
            "activation": self.activation_function,
            "attention_kind": self.attention_function or self.mixer,
        }
        for field, allowed in NAMES.items():
            if getattr(self, field) not in allowed and functions.get(field) is None:
                raise ValueError(f"{field} is {getattr(self, field)!r}; it is one of {', '.join(allowed)}")
        unknown = set(self.moe_router_load_balancing_type) - set(BALANCE_LOSSES)
        if unknown:
            raise ValueError(f"moe_router_load_balancing_type has {unknown}; known are {', '.join(BALANCE_LOSSES)}")
        heads, groups = self.num_attention_heads, self.num_query_groups
        if heads % groups:
            raise ValueError(f"num_query_groups {groups} does not divide num_attention_heads {heads}")
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(f"padded_vocab_size {self.padded_vocab_size} is below vocab_size {self.vocab_size}")
        rotary = self.rotary_channels
        if self.position_embedding_type == "rope" and (rotary % 2 or not 0 < rotary <= self.kv_channels):
            raise ValueError(
                f"rotary_percent {self.rotary_percent} of kv_channels {self.kv_channels} is {rotary} channels; rotary "
                "positions rotate pairs of channels: the number must be even, above 0 and at most kv_channels"
            )
        if self.layers and len(self.layers) != self.num_layers:
            raise ValueError(f"layers describes {len(self.layers)} layers, num_layers is {self.num_layers}")
        for layer in range(len(self.layers)):
            self.layer(layer)

    def layer(self, number: int) -> "ReferenceConfig":
        """Return the configuration as one layer has it."""
        return replace(self, layers=(), **self.layers[number]) if self.layers else self

    @property
    def rotary_channels(self) -> int:
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        return int(self.kv_channels * self.rotary_percent)

    @property
    def gated(self) -> bool:
        return self.activation_is_gated or self.activation in GATED_ACTIVATIONS

    @property
    def has_norm_bias(self) -> bool:
        return self.norm_has_bias or self.normalization == "LayerNorm"
