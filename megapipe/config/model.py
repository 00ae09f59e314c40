"""The model and precision sections: the shape of the GPT, and the dtypes of its tensors and GEMMs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megapipe.config.layer_pattern import read_block_configs
from megapipe.config.options import EXPERTS, Flag, Need, count, option
from megapipe.dtypes import TENSOR_DTYPES
from megapipe.registry import Registry


@dataclass(frozen=True)
class NormKind:
    """A norm over the last dimension.

    function: of an extension: (x, weight, bias or None, epsilon) -> x's shape, all in at least fp32. The norms of
    megapipe are in model/norm.py.
    """

    statistics: int = 0  # numbers in at least fp32 that are kept of each vector
    has_bias: bool = False
    function: Callable[..., Any] | None = None


@dataclass(frozen=True)
class ActivationKind:
    """An activation of the MLP.

    function: of an extension: [..., F], or gated [..., 2 F] of halves [gate | up], -> [..., F]. Those of megapipe are
    in model/mlp.py.
    """

    is_gated: bool = False
    keeps_output: bool = False  # the backward needs the output, which the next linear keeps, in place of the input
    function: Callable[..., Any] | None = None
    is_wide: bool = False  # gated, and 4 x hidden size wide without --ffn-hidden-size: Megatron narrows SwiGLU alone


@dataclass(frozen=True)
class AttentionHeads:
    """Facts for an attention kind besides q, k, v and the mask."""

    scale: float  # factor on scores: --softmax-scale
    heads: range  # global numbers of the query heads of this tensor-parallel rank
    num_heads: int  # of the model


@dataclass(frozen=True)
class MixerKind:
    """A token mixer of an extension, which stands in attention's place with linears and parameters of its own.

    module: a subclass of `model.mixer.Mixer`. reference: (hidden size, has biases, options) -> a plain PyTorch module
    of one process, [b, s, h] -> [b, s, h], whose parameters have the same names. options: names with defaults, which
    --attention-options replaces. check: (configuration, layer, options) -> errors, after megapipe's own.
    """

    module: Any
    reference: Callable[..., Any]
    options: Mapping[str, float]
    check: Callable[..., Iterable[str]]


@dataclass(frozen=True)
class AttentionKind:
    """Core attention: from queries, keys and values to a weighted sum of values; or what stands in attention's place.

    function: of an extension: (q, k, v, mask, AttentionHeads) -> output. Softmax: model/attention.py. mixer: the whole
    branch of an extension. has_chunks: a window is a chunk of the sequence, of which a query sees what comes before it
    (Llama-4).
    """

    function: Callable[..., Any] | None = None
    has_chunks: bool = False
    mixer: MixerKind | None = None


NORMALIZATIONS = Registry(
    "norm", "--normalization", {"LayerNorm": NormKind(statistics=2, has_bias=True), "RMSNorm": NormKind(statistics=1)}
)
ACTIVATIONS = Registry(
    "activation",
    "--activation",
    {
        "gelu": ActivationKind(),
        "gelu_tanh": ActivationKind(),
        "swiglu": ActivationKind(is_gated=True),
        "geglu_tanh": ActivationKind(is_gated=True),
        "quick_geglu": ActivationKind(is_gated=True, is_wide=True),
        "squared_relu": ActivationKind(),
        "relu": ActivationKind(keeps_output=True),
    },
)
ATTENTIONS = Registry(
    "attention kind", "--attention-kind", {"softmax": AttentionKind(), "chunked": AttentionKind(has_chunks=True)}
)
EXPERT_SCORES = ("softmax", "sigmoid")
LOAD_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
FP8_FORMATS = ("e4m3", "hybrid")
OWN_FP8_RECIPES = ("tensorwise", "blockwise", "mxfp8")
FP8_RECIPES = (*OWN_FP8_RECIPES, "delayed")

ROPE = Need("model.position_embedding_type", "--position-embedding-type rope", ("rope",))
QUERY_SCALE = Need("model.nope_query_scale", "--nope-query-scale")
LATENT = Need("model.multi_latent_attention", "--multi-latent-attention")
SHARED_EXPERT = Need("model.moe_shared_expert_intermediate_size", "--moe-shared-expert-intermediate-size N")
ROUTER_GROUPS = Need("model.moe_router_num_groups", "--moe-router-num-groups N")
CAPACITY = Need("model.moe_expert_capacity_factor", "--moe-expert-capacity-factor")
FLEX = Need("model.moe_token_dispatcher_type", "--moe-token-dispatcher-type flex", ("flex",))
EXPERT_BIAS = Need("model.moe_router_enable_expert_bias", "--moe-router-enable-expert-bias")
WINDOW = Need("model.window_size", "--window-size")
PREDICTION = Need("model.mtp_num_layers", "--mtp-num-layers N")
FP16 = Need("precision.dtype", "--fp16", ("fp16",), without="the loss is not scaled")
BF16_LAYERS = Need("precision.first_last_layers_bf16", "--first-last-layers-bf16")
FP8 = Need("precision.fp8_format", "--fp8-format e4m3 or hybrid")
FP8_OR_NOT = replace(FP8, without="linears are multiplied in --dtype")


def read_window(text: str) -> str:
    """Rewrite Megatron's window LEFT,0 (tokens before a token, and after it) as one number: '127,0' is 128."""
    left, comma, right = text.strip("()[] ").partition(",")
    if not comma or right.strip() != "0" or not left.strip().isdecimal():
        return text
    return str(int(left) + 1)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model, from GPT-2 (the defaults) to Llama."""

    num_layers: int = count(
        2,
        "transformer layers",
        "layers",
        at_most=100_000,
        required=True,
        more_flags=(Flag("--encoder-num-layers"),),
    )
    hidden_size: int = count(128, "width of the residual stream", required=True)
    ffn_hidden_size: int | None = count(
        None,
        "width between the linears of the MLP",
        derived="4 x hidden size; gated, except quick_geglu: int(4 x hidden x 2/3 / 64) x 64",
    )
    num_attention_heads: int = count(4, "attention heads", "heads", required=True)
    num_query_groups: int | None = count(
        None,
        "key/value heads, each shared by num-attention-heads / num-query-groups query heads; as a flag it needs "
        "--group-query-attention",
        "heads",
        derived="num-attention-heads",
        more_flags=(Flag("--group-query-attention", 1, only_from=(None,), help="one group, or --num-query-groups N"),),
    )
    kv_channels: int | None = count(None, "width of one attention head", derived="hidden-size / num-attention-heads")
    seq_length: int = option(
        128,
        "training sequence length",
        "tokens",
        at_least=2,
        required=True,
        more_flags=(Flag("--encoder-seq-length"),),
    )
    max_position_embeddings: int | None = count(None, "length of the position table", "tokens", derived="seq-length")
    vocab_size: int | None = option(
        None, "true size of the vocabulary", "tokens", at_least=2, derived="the tokenizer's"
    )
    padded_vocab_size: int | None = count(
        None,
        "rows of the embedding table",
        "tokens",
        derived="vocab-size rounded up to a multiple of make-vocab-size-divisible-by x tp",
    )
    make_vocab_size_divisible_by: int = count(
        128, "the padded vocabulary is a multiple of this times tp", "tokens", at_most=10**9
    )

    position_embedding_type: str = option(
        "learned_absolute",
        "how positions enter the model",
        choices=("learned_absolute", "rope", "none"),
        more_flags=(
            Flag("--use-rotary-position-embeddings", "rope"),
            Flag(
                "--no-position-embedding",
                "none",
                only_from=("learned_absolute",),
                help="no position embedding; with rotary positions, as in Megatron, nothing else",
            ),
        ),
    )
    rotary_base: float = option(10000.0, "base of the rotary frequencies (theta)", above=1)
    rotary_percent: float = option(1.0, "fraction of each head's channels that is rotated", above=0, at_most=1)
    rope_scaling_type: str = option(
        "none",
        "how rotary frequencies are scaled to sequences longer than they were trained for",
        choices=("none", "linear", "llama3", "yarn"),
        more_flags=(
            Flag("--use-rope-scaling", "llama3"),
            Flag("--rope-type", help="rope (no scaling) or yarn"),
        ),
        read=lambda text: "none" if text == "rope" else text,  # as Megatron's --rope-type has it
    )
    rope_scaling_factor: float = option(
        8.0,
        "factor by which the context is extended (linear, llama3, yarn)",
        at_least=1,
        more_flags=(
            Flag(
                "--rotary-seq-len-interpolation-factor",
                also_sets=(("rope_scaling_type", "linear"),),
                help="same as --rope-scaling-type linear --rope-scaling-factor N",
            ),
            Flag(
                "--rotary-scaling-factor",
                also_sets=(("rope_scaling_type", "yarn"),),
                or_else=(("rope_original_max_position_embeddings", 4096),),
                needs=LATENT,
                help="same as --rope-scaling-type yarn --rope-scaling-factor N, with a default of 4096 for "
                "--rope-original-max-position-embeddings",
            ),
        ),
    )
    rope_low_freq_factor: float = option(
        1.0, "llama3: wavelengths above original length / this are fully scaled", above=0
    )
    rope_high_freq_factor: float = option(4.0, "llama3: wavelengths below original length / this are unscaled", above=0)
    rope_original_max_position_embeddings: int = count(
        8192,
        "llama3 and yarn: length the frequencies were trained for",
        "tokens",
        more_flags=(Flag("--yarn-original-max-position-embeddings"),),
    )
    yarn_beta_fast: float = option(32.0, "yarn: frequencies with more rotations than this are unchanged", above=0)
    yarn_beta_slow: float = option(
        1.0, "yarn: frequencies with fewer rotations than this are fully interpolated", above=0
    )
    yarn_mscale: float = option(
        1.0, "yarn: numerator of the attention temperature", at_least=0, more_flags=(Flag("--mscale"),)
    )
    yarn_mscale_all_dim: float = option(
        0.0,
        "yarn: denominator of the attention temperature (0: none); with latent attention a factor of the softmax scale",
        at_least=0,
        more_flags=(Flag("--mscale-all-dim"),),
    )
    yarn_correction_range_round_to_int: bool = option(
        True, "yarn: the ramp between the two kinds of frequencies starts and ends at whole pairs of channels"
    )

    yarn_query_scale: float = option(
        0.0,
        "yarn: queries are multiplied by 1 + this x ln(1 + floor(position / original length)) (Mistral-4)",
        at_least=0,
        needs=LATENT,
    )
    no_rope_freq: str | None = option(
        None,
        "layers without rotary positions: N, every N-th layer, or a list with 1 for each of them, '([0]*3+[1])*2'; "
        "unset: none",
        reads_lists=True,
        needs=ROPE,
    )
    nope_query_scale: float = option(
        0.0,
        "queries of layers without positions are multiplied by 1 + this x ln(1 + floor((position + 1) / "
        "nope-query-scale-length)) (Llama-4: attn_scale and floor_scale)",
        at_least=0,
    )
    nope_query_scale_length: int = count(8192, "tokens of a step of nope-query-scale", "tokens", needs=QUERY_SCALE)
    normalization: str = option("LayerNorm", "normalization layer", choices=NORMALIZATIONS)
    norm_position: str = option(
        "before",
        "where attention and MLP are normalized: their input, x + f(norm(x)), their output, x + norm(f(x)), or both",
        choices=("before", "after", "around"),
    )
    norm_epsilon: float = option(1e-5, "added to the variance in normalization", above=0, at_most=1)
    layernorm_zero_centered_gamma: bool = option(False, "store norm weights as gamma - 1", flag="--apply-layernorm-1p")
    activation: str = option(
        "gelu_tanh",
        "activation of the MLP (gelu is the erf form)",
        choices=ACTIVATIONS,
        more_flags=(
            Flag("--swiglu", "swiglu"),
            Flag("--squared-relu", "squared_relu"),
            Flag("--quick-geglu", "quick_geglu"),
            Flag("--no-bias-gelu-fusion", "gelu", only_from=("gelu_tanh",), help="erf GELU, as in Megatron"),
        ),
    )
    glu_linear_offset: float = option(0.0, "gated activations are act(gate) x (up + this)")
    activation_func_clamp_value: float | None = option(
        None, "gated activations: largest gate, and largest and smallest up (c and -c); unset: none", above=0
    )
    add_bias_linear: bool = option(
        True,
        "biases in the linear layers",
        off_flag=Flag(
            "--disable-bias-linear",
            False,
            or_else=(("activation", "gelu"),),
            help="no biases; unless an activation is given, erf GELU, as in Megatron, whose tanh form adds a bias",
        ),
    )
    add_qkv_bias: bool = option(False, "bias in the query-key-value projection even without other biases")
    untie_embeddings_and_output_weights: bool = option(False, "separate weights for word embedding and output layer")
    embedding_scale: float = option(1.0, "factor on word embeddings (Gemma: the root of hidden-size)", above=0)
    residual_scale: float = option(
        1.0, "factor on the outputs of attention and MLP in the residual sums (Granite: residual_multiplier)", above=0
    )
    logits_scaling: float = option(1.0, "output logits are divided by this (Granite)", above=0)
    qk_layernorm: bool = option(False, "normalize queries and keys")
    qk_layernorm_scope: str = option(
        "head",
        "what --qk-layernorm normalizes: each head, or all heads together",
        choices=("head", "projection"),
        needs=Need("model.qk_layernorm", "--qk-layernorm"),
    )
    qk_layernorm_after_rope: bool = option(
        False,
        "normalize queries and keys after their rotation (Hunyuan)",
        needs=Need("model.qk_layernorm", "--qk-layernorm"),
    )
    qk_l2_norm: bool = option(False, "divide heads of queries and keys by their root mean square, without weights")
    attention_output_gate: bool = option(
        False,
        "multiply each channel of attention's output by a sigmoid of a projection of its input, whose rows are part of "
        "linear_qkv (Qwen3-Next, Trinity)",
    )
    window_size: int | None = count(
        None,
        "sliding window: a token attends to itself and window-size - 1 tokens before it (or Megatron's pair LEFT,0); "
        "unset: to all tokens before it",
        "tokens",
        read=read_window,
    )
    window_attn_skip_freq: str | None = option(
        None,
        "layers without the window: N, every N-th layer, or a list with 0 for each of them, '([1]*3+[0])*2'; "
        "unset: none",
        reads_lists=True,
        needs=WINDOW,
    )
    layer_pattern: tuple[str, ...] = option(
        (),
        "layers that differ from the model, in order: 'COUNT NAME=VALUE ...' for each run of layers, such as "
        "'5 window_size=1024 rotary_base=10000'; a last word '...' repeats the runs to the last layer "
        "(docs/layers.md)",
        more_flags=(
            Flag(
                "--heterogeneous-layers-config-path",
                read=read_block_configs,
                help="layer-pattern from a JSON file with block_configs (Llama-Nemotron)",
            ),
        ),
    )
    multi_latent_attention: bool = option(
        False, "multi-head latent attention: queries, keys and values from low-rank latents (docs/layers.md)"
    )
    q_lora_rank: int | None = count(
        None, "width of the latent of the queries; unset: queries are projected at once", "channels", needs=LATENT
    )
    kv_lora_rank: int = count(32, "width of the latent of keys and values", "channels", needs=LATENT)
    qk_head_dim: int = count(128, "channels of a query or key head that are not rotated", "channels", needs=LATENT)
    qk_pos_emb_head_dim: int = count(
        64, "rotated channels of a query head, and of the one key that all heads share", "channels", needs=LATENT
    )
    v_head_dim: int = count(128, "channels of a value head", "channels", needs=LATENT)
    latent_norm_epsilon: float | None = option(
        None,
        "norm-epsilon of the norms of latents (--qk-layernorm), which DeepSeek's files have apart from the others",
        above=0,
        at_most=1,
        derived="norm-epsilon",
        needs=LATENT,
    )
    num_experts: int | None = count(
        None,
        "experts of each layer with a mixture of experts (docs/experts.md); unset: dense MLPs",
        "experts",
        at_most=100_000,
    )
    moe_layer_freq: str | None = option(
        None,
        "layers with experts: N, every N-th layer from the first, or a list with 1 for each of them, '[0]+[1]*23'; "
        "unset: all",
        derived="1",
        reads_lists=True,
        needs=EXPERTS,
    )
    moe_ffn_hidden_size: int | None = count(
        None, "width between the linears of one expert", derived="ffn-hidden-size", needs=EXPERTS
    )
    moe_shared_expert_intermediate_size: int | None = count(
        None, "width of the shared experts together, which see every token; unset: none", needs=EXPERTS
    )
    moe_shared_expert_gate: bool = option(
        False, "multiply the shared experts' output by a sigmoid of a learned score of the token", needs=SHARED_EXPERT
    )
    moe_router_topk: int = count(2, "experts that see a token", "experts", needs=EXPERTS)
    moe_router_score_function: str = option(
        "softmax", "how the router's logits become scores", choices=EXPERT_SCORES, needs=EXPERTS
    )
    moe_router_pre_softmax: bool = option(
        False, "softmax over all experts before the choice, in place of over the chosen ones", needs=EXPERTS
    )
    moe_router_norm_topk_prob: bool = option(
        True, "divide the weights of several experts by their sum (sigmoid scores; others: pre-softmax)", needs=EXPERTS
    )
    moe_apply_probs_on_input: bool = option(
        False, "multiply the inputs of experts by the router's weights, in place of their results", needs=EXPERTS
    )
    moe_router_topk_scaling_factor: float | None = option(
        None, "factor on the weights of the chosen experts; unset: 1", above=0, needs=EXPERTS
    )
    moe_router_num_groups: int | None = count(
        None, "groups of experts, of which a token chooses first; unset: none", "groups", needs=EXPERTS
    )
    moe_router_group_topk: int | None = count(
        None, "groups whose experts a token can choose: those of the largest scores", "groups", needs=ROUTER_GROUPS
    )
    moe_router_group_score_topk: int | None = count(
        None,
        "best experts of a group whose scores are added up to the group's (DeepSeek-V3: 2)",
        "experts",
        derived="moe-router-topk / moe-router-group-topk",
        needs=ROUTER_GROUPS,
    )
    moe_router_dtype: str | None = option(
        None, "dtype of the router's GEMM; unset: --dtype", choices=("fp32", "fp64"), needs=EXPERTS
    )
    moe_router_enable_expert_bias: bool = option(
        False,
        "add a bias to each expert's score for the choice alone, raised after a step for experts below the mean load "
        "and lowered for those above it",
        needs=EXPERTS,
    )
    moe_router_bias_update_rate: float = option(
        1e-3, "change of an expert's bias in a step; 0 keeps it", at_least=0, needs=EXPERT_BIAS
    )
    moe_router_force_load_balancing: bool = option(
        False, "for measurements: give every expert the same number of tokens, whatever the scores", needs=EXPERTS
    )
    moe_expert_capacity_factor: float | None = option(
        None,
        "most rows that a rank sends to an expert for a microbatch, in multiples of the mean; the others are dropped; "
        "unset: none are",
        above=0,
        needs=EXPERTS,
    )
    moe_token_drop_policy: str = option(
        "probs",
        "rows beyond the capacity that are dropped: those of the smallest weights, or of the last positions (in "
        "Megatron arbitrary rows on CPUs)",
        choices=("probs", "position"),
        needs=CAPACITY,
    )
    moe_pad_expert_input_to_capacity: bool = option(
        False,
        "send every expert as many rows as its capacity, so that the host need not wait for counts",
        needs=CAPACITY,
    )
    moe_token_dispatcher_type: str = option(
        "alltoall",
        "how tokens reach their experts: k rows of each by all-to-alls over ep; or once to each node that has an "
        "expert of it, and from there k rows (flex); allgather, Megatron's default, runs as alltoall (docs/experts.md)",
        choices=("alltoall", "flex", "allgather"),
        read=lambda text: "alltoall" if text == "alltoall_seq" else text,  # of older versions: the same rows
        needs=EXPERTS,
    )
    moe_combine_in_node: bool = option(
        False,
        "add the results of a token in the node of its experts, so that one row a node comes back: fewer bytes, equal "
        "up to rounding",
        needs=FLEX,
    )
    moe_flex_dispatcher_backend: str | None = option(
        None,
        "library that sends tokens with --moe-token-dispatcher-type flex: DeepEP where it is installed and fits (bf16, "
        "NCCL, etp 1), with sums on the way back; others and unset: megapipe's all-to-alls",
        choices=("deepep", "hybridep", "ncclep"),
        needs=FLEX,
        more_flags=(Flag("--moe-enable-deepep", "deepep"),),
    )
    moe_router_load_balancing_type: tuple[str, ...] = option(
        ("aux_loss",),
        "losses that balance the experts' load: over a microbatch, each sequence (seq_aux_loss) or the microbatches of "
        "the global batch so far (global_aux_loss); sinkhorn: a choice that balances the tokens of each rank, no loss",
        choices=LOAD_BALANCING,
        needs=EXPERTS,
    )
    moe_aux_loss_coeff: tuple[float, ...] = option(
        (0.0,), "coefficient of each load balancing loss", at_least=0, needs=EXPERTS
    )
    moe_z_loss_coeff: float | None = option(
        None, "coefficient of the mean squared logsumexp of the router's logits; unset: 0", at_least=0, needs=EXPERTS
    )
    mtp_num_layers: int | None = count(
        None,
        "multi-token prediction: modules that each predict one token further ahead (docs/layers.md); unset: none",
        "modules",
    )
    mtp_loss_scaling_factor: float = option(
        0.1, "factor on the mean of the modules' losses, which is added to the loss", at_least=0, needs=PREDICTION
    )
    attn_logit_softcapping: float | None = option(None, "attention logits become c tanh(x / c); unset: none", above=0)
    final_logit_softcapping: float | None = option(None, "output logits become c tanh(x / c); unset: none", above=0)
    attention_kind: str = option(
        "softmax",
        "how scores become weights of the values; chunked: a softmax over the tokens before a token in its chunk of "
        "window-size tokens (Llama-4)",
        choices=ATTENTIONS,
    )
    attention_options: tuple[str, ...] = option(
        (), "NAME=NUMBER for each option of an extension's token mixer (docs/extend.md)"
    )
    softmax_type: str = option(
        "vanilla",
        "attention may also choose no token: off-by-one adds 1 to the softmax's denominator, learnable exp of a weight "
        "of each head (attention sinks)",
        choices=("vanilla", "off-by-one", "learnable"),
    )
    softmax_scale: float | None = option(None, "factor on attention logits", above=0, derived="1 / sqrt(kv-channels)")
    attention_softmax_in_fp32: bool = option(
        False, "compute attention logits and softmax in at least fp32 (unfused attention instead of a flash kernel)"
    )
    hidden_dropout: float = option(0.1, "dropout after embedding, attention, MLP", "probability", at_least=0, below=1)
    attention_dropout: float = option(0.1, "dropout of attention probabilities", "probability", at_least=0, below=1)
    init_method_std: float = option(
        0.02, "standard deviation of initial weights (output linears: / sqrt(2 x num-layers))", above=0
    )

    @property
    def has_embedding_at_both_ends(self) -> bool:
        """True if the last stage uses the word embedding too: as the output layer, or for multi-token prediction."""
        return not self.untie_embeddings_and_output_weights or self.mtp_num_layers is not None

    @property
    def balance_losses(self) -> dict[str, float]:
        """The load balancing losses with their coefficients, without those of coefficient 0."""
        pairs = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff, strict=False)
        return {name: coefficient for name, coefficient in pairs if coefficient and name != "none"}

    @property
    def has_sinkhorn(self) -> bool:
        """True if training chooses experts so that each of them gets as many of a rank's tokens."""
        return self.moe_router_load_balancing_type == ("sinkhorn",)

    def head_size(self) -> int:
        """Return the width of one query head: kv-channels, or hidden-size / num-attention-heads; with latent attention
        its rotated and other channels.
        """
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.kv_channels if self.kv_channels is not None else self.hidden_size // self.num_attention_heads

    def rotary_channels(self) -> int:
        """Return the rotated channels of a query or key head."""
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        return int(self.head_size() * self.rotary_percent)

    def attention_scale(self) -> float:
        """Return the factor on attention logits: softmax-scale, or 1 / sqrt(width of a query head). With latent
        attention and YaRN the latter is multiplied by (0.1 x mscale-all-dim x ln(factor) + 1)^2.
        """
        if self.softmax_scale is not None:
            return self.softmax_scale
        scale = 1.0 / math.sqrt(self.head_size())
        if self.multi_latent_attention and self.rope_scaling_type == "yarn":
            scale *= (0.1 * self.yarn_mscale_all_dim * math.log(self.rope_scaling_factor) + 1.0) ** 2
        return scale

    def latent_epsilon(self) -> float | None:
        """Return the epsilon of the norms of latents, None without latent attention."""
        own = self.latent_norm_epsilon
        return (self.norm_epsilon if own is None else own) if self.multi_latent_attention else None

    def group_score_topk(self) -> int | None:
        """Return the number of experts that a group's score is the sum of, None without groups."""
        if self.moe_router_num_groups is None or self.moe_router_group_score_topk is not None:
            return self.moe_router_group_score_topk
        return self.moe_router_topk // (self.moe_router_group_topk or self.moe_router_num_groups)

    def query_groups(self) -> int:
        """Return the number of key/value heads: num-query-groups, or one for each attention head."""
        return self.num_query_groups if self.num_query_groups is not None else self.num_attention_heads

    def feed_forward_size(self) -> int:
        """Return the width of the MLP: ffn-hidden-size, or Megatron's 4 h, of SwiGLU int(4 h x 2/3 / 64) x 64."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        kind = ACTIVATIONS[self.activation]
        if kind.is_gated and not kind.is_wide:
            return int((4 * self.hidden_size * 2 / 3) / 64) * 64
        return 4 * self.hidden_size


@dataclass(frozen=True)
class PrecisionConfig:
    """The dtype of weights and activations; master weights, moments and main gradients are fp32 (fp64 with fp64)."""

    dtype: str = option(
        "fp32",
        "weights and activations; fp64 is for verification",
        choices=tuple(TENSOR_DTYPES),
        more_flags=(Flag("--bf16", "bf16"), Flag("--fp16", "fp16"), Flag("--fp64", "fp64")),
    )
    loss_scale: float | None = option(None, "fp16: a fixed loss scale; unset: dynamic", above=0, needs=FP16)
    initial_loss_scale: float = option(float(2**32), "fp16: initial dynamic loss scale", above=0, needs=FP16)
    min_loss_scale: float = option(1.0, "fp16: smallest dynamic loss scale", above=0, needs=FP16)
    loss_scale_window: int = count(1000, "fp16: steps without overflow before the scale doubles", "steps", needs=FP16)
    hysteresis: int = count(2, "fp16: overflows before the scale halves", "steps", needs=FP16)
    fp8_format: str | None = option(
        None,
        "run the GEMMs of the layers' linears in 8 bits, forward and backward: e4m3, or "
        "hybrid with e5m2 for output gradients; weights, activations between GEMMs and messages stay in --dtype",
        choices=FP8_FORMATS,
        more_flags=(Flag("--fp8"), Flag("--fp8-hybrid", "hybrid"), Flag("--fp8-e4m3", "e4m3")),
    )
    fp8_recipe: str = option(
        "tensorwise",
        "fp8: a tensor's scale comes from its own largest value (tensorwise), or from those of earlier steps "
        "(delayed, with --transformer-impl transformer_engine); blockwise: one for each 128 elements of a row, and 128 "
        "x 128 of a weight (DeepSeek-V3's recipe); mxfp8: one for each 32 elements of a row (Blackwell's)",
        choices=FP8_RECIPES,
        needs=FP8_OR_NOT,  # saved configurations of earlier versions have delayed, the default there
    )
    fp8_margin: int = option(0, "fp8: scales are divided by 2 to this power", at_least=0, needs=FP8)
    fp8_amax_history_len: int = count(1, "fp8, delayed: steps whose largest values are kept", "steps", needs=FP8)
    fp8_amax_compute_algo: str = option(
        "most_recent", "fp8, delayed: scale from the latest or the largest", choices=("most_recent", "max"), needs=FP8
    )
    first_last_layers_bf16: bool = option(False, "fp8: some first and last layers stay in --dtype", needs=FP8)
    num_layers_at_start_in_bf16: int = option(
        1, "first layers, with --first-last-layers-bf16", "layers", at_least=0, needs=BF16_LAYERS
    )
    num_layers_at_end_in_bf16: int = option(
        1, "last layers, with --first-last-layers-bf16", "layers", at_least=0, needs=BF16_LAYERS
    )
