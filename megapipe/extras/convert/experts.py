"""Experts in Hugging Face's configurations and tensors: rules and rows of the architectures that have them.

DeepSeek's have latent attention, too, whose rotary pairs are neighbouring channels, and like GLM-4.5 multi-token
prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megapipe.config.layers import LayerConfig
from megapipe.errors import ConfigError
from megapipe.extras.convert.layer_types import regular_period, runs_text
from megapipe.extras.convert.tables import (
    EXPERT,
    LLAMA,
    OURS,
    REQUIRED,
    Layers,
    Row,
    Rule,
    Settings,
    again,
    always,
    fixed,
    gate_and_up,
    key,
    nullable,
    of_experts,
    of_experts_transposed,
    rows_of,
    stated,
    unwritten,
)

# Multi-token prediction: module k of a model of n layers is `model.layers.{n + k}`: two norms, eh_proj, a layer like
# the last one, and a head with a norm of its own. Copies of the embedding and of the output layer belong to it, which
# here the modules share.
PREDICTED, OTHER_NAME = "num_nextn_predict_layers", "num_mtp_layers"
PREDICTION = key((PREDICTED, OTHER_NAME), "mtp_num_layers", 0, none=0)
PREDICTION_ROWS = rows_of("prediction")

SHARED, TOPK = "moe_shared_expert_intermediate_size", "num_experts_per_tok"


LLAMA_MLP, MIXTRAL_MLP = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
BIAS = "e_score_correction_bias"  # of experts, added to scores for the choice alone


def expert_rows(
    block: str = "mlp",
    linears: tuple[str, str, str] = LLAMA_MLP,
    router: str = "gate",
    shared: str | None = None,
    bias: str | None = None,
) -> tuple[Row, ...]:
    """Return the rows of router and experts, and of shared experts and biases of experts where they have a name. The
    names are theirs: of the mixture in a layer, of gate, up and down in an expert, and in the mixture.
    """
    theirs, mixture = f"{LLAMA}.{block}", f"{OURS}.mlp"
    gate, up, down = (f"{theirs}.experts.{EXPERT}.{name}.weight" for name in linears)
    rows = [
        Row(f"{mixture}.router", (f"{theirs}.{router}",)),
        Row(f"{mixture}.experts.weight1", (gate, up), of_experts),
        Row(f"{mixture}.experts.weight2", (down,), of_experts_transposed),
    ]
    if shared is not None:
        gate, up, down = (f"{theirs}.{shared}.{name}" for name in linears)
        rows.append(Row(f"{mixture}.shared_experts.linear_fc1", (gate, up), gate_and_up))
        rows.append(Row(f"{mixture}.shared_experts.linear_fc2", (down,)))
    if bias is not None:
        rows.append(Row(f"{mixture}.router.expert_bias", (f"{theirs}.{bias}",)))
    return tuple(rows)


ROWS = expert_rows()
GLM_ROWS = expert_rows(shared="shared_experts", bias=f"gate.{BIAS}")
STACKED_ROWS = (*GLM_ROWS, *rows_of("stacked"))  # of one tensor for all experts
QWEN_2_ROWS = (*expert_rows(shared="shared_expert"), *rows_of("qwen2_moe"))


def of_expert_layer(layers: Layers) -> LayerConfig:
    """Return the first layer with experts. Raises ConfigError if there is none."""
    found = next((layer for layer in layers if layer.num_experts is not None and layer.has_mlp), None)
    if found is None:
        raise ConfigError("the model has no experts")
    return found


def expert_key(theirs: str | Sequence[str], ours: str, default: Any = REQUIRED, **options: Any) -> Rule:
    """Return the rule of one key that corresponds to one field of layers with experts. Arguments as of `key`."""
    return key(theirs, ours, default, value_of=lambda layers: getattr(of_expert_layer(layers), ours), **options)


def count_and_choice(names: Sequence[str], topk: int) -> tuple[Rule, Rule]:
    """Return the rules of the number of experts, which has one of several names, and of how many see a token."""
    return expert_key(names, "num_experts"), expert_key(TOPK, "moe_router_topk", topk)


DENSE_WIDTH, WIDTH = "intermediate_size", "moe_intermediate_size"


def expert_width(theirs: str, ours: str, default: Any = REQUIRED) -> Rule:
    """Return the rule of the width of an expert, by the names of a key and of one of our two fields that state it."""
    return key(theirs, ours, default, value_of=lambda layers: of_expert_layer(layers).expert_ffn_size)


EXPERT_WIDTH = expert_width(WIDTH, "moe_ffn_hidden_size")


def all_layers(num_experts: Sequence[str], topk: int) -> tuple[Rule, ...]:
    """Return the rules of experts in all layers, whose width is intermediate_size. Arguments of `count_and_choice`."""
    return (*count_and_choice(num_experts, topk), expert_width(DENSE_WIDTH, "ffn_hidden_size"))


def dense_width(layers: Layers) -> int:
    """Return the width of the first layer without experts, of any layer if all have some."""
    dense = (layer.ffn_hidden_size for layer in layers if layer.num_experts is None and layer.has_mlp)
    return next(dense, layers[0].ffn_hidden_size)


def some_layers(num_experts: Sequence[str], topk: int) -> tuple[Rule, ...]:
    """Return the rules of experts in some layers, of another width than the MLPs of the others. Arguments likewise."""
    width = key(DENSE_WIDTH, "ffn_hidden_size", value_of=dense_width)
    return (*count_and_choice(num_experts, topk), width, EXPERT_WIDTH)


NORMALIZED = "norm_topk_prob"  # a softmax over all experts, divided by the sum over the chosen ones, or as it is
MAYBE_NORMALIZED = expert_key(NORMALIZED, "moe_router_pre_softmax", False, words={True: False, False: True})


def expert_layers(marks: list[bool], why: str) -> dict[str, Any]:
    """Return our field for the layers that have experts. Raises ConfigError if none has. why: the keys that say so."""
    if True not in marks:
        raise ConfigError(f"{why} leave no layer with experts")
    return {"moe_layer_freq": None if all(marks) else runs_text([int(mark) for mark in marks])}


STEP, DENSE = "decoder_sparse_step", "mlp_only_layers"


def read_sparse_step(settings: Settings) -> dict[str, Any]:
    """Read Qwen's layers with experts: every decoder_sparse_step-th, without those of mlp_only_layers."""
    step, dense, num_layers = stated(settings, STEP, 1), settings.get(DENSE) or (), int(settings["num_hidden_layers"])
    if not step > 0:
        raise ConfigError(f"{STEP} {step} cannot be expressed: it is the distance of layers with experts")
    marks = [layer % step == 0 and layer - 1 not in dense for layer in range(1, num_layers + 1)]
    return expert_layers(marks, f"{STEP} {step} and {DENSE}")


def write_sparse_step(layers: Layers) -> dict[str, Any]:
    marks = [layer.num_experts is not None for layer in layers]
    period = regular_period(marks)
    dense = [number for number, mark in enumerate(marks) if not mark] if period is None else []
    return {STEP: period or 1, DENSE: dense}


SPARSE_STEP = Rule((STEP, DENSE), read_sparse_step, write_sparse_step)
SHARED_GATED = (expert_key("shared_expert_intermediate_size", SHARED, 5632), always(moe_shared_expert_gate=True))


# --------------------------------------------------------------------------------------- GLM and its relatives

FIRST, SHARED_COUNT = "first_k_dense_replace", "n_shared_experts"
GROUPS, TAKEN = "n_group", "topk_group"


def dense_layers(default: int, name: str = FIRST) -> Rule:
    """Return the rule of the number of first layers that have no experts. name: of its key."""

    def read(settings: Settings) -> dict[str, Any]:
        dense, count = stated(settings, name, default), int(settings["num_hidden_layers"])
        if not 0 <= dense < count:
            raise ConfigError(f"{name} {dense} of {count} layers cannot be expressed: no layer would have experts")
        return expert_layers([layer >= dense for layer in range(count)], name)

    return Rule((name,), read, lambda layers: {name: [layer.num_experts is not None for layer in layers].index(True)})


MLP_TYPES, MLP_WORDS = "mlp_layer_types", {"dense": False, "sparse": True}


def mlp_types(default_dense: int) -> Rule:
    """Return the rule of layers with experts by mlp_layer_types, beside the number of dense layers."""

    def read(settings: Settings) -> dict[str, Any]:
        count, dense = int(settings["num_hidden_layers"]), stated(settings, FIRST, default_dense)
        types = settings.get(MLP_TYPES) or ["dense"] * dense + ["sparse"] * (count - dense)
        if unknown := sorted(set(types) - MLP_WORDS.keys()):
            raise ConfigError(f"{MLP_TYPES} {unknown[0]!r} cannot be expressed; it can be {', '.join(MLP_WORDS)}")
        if len(types) != count:
            raise ConfigError(f"{MLP_TYPES} has {len(types)} entries, num_hidden_layers is {count}")
        marks = [MLP_WORDS[kind] for kind in types]
        if settings.get(FIRST) is not None and marks != [layer >= dense for layer in range(count)]:
            raise ConfigError(f"{MLP_TYPES} and {FIRST} {dense} contradict each other; correct the file")
        return expert_layers(marks, MLP_TYPES)

    def write(layers: Layers) -> dict[str, Any]:
        return {MLP_TYPES: ["dense" if layer.num_experts is None else "sparse" for layer in layers]}

    return Rule((MLP_TYPES, FIRST), read, write)


def shared_experts(
    default_count: int, default_width: int | None = None, name: str = SHARED_COUNT, least: int = 1
) -> Rule:
    """Return the rule of the width of all shared experts together, a multiple of that of one expert. name: of the key
    with their number. least: the smallest one that the architecture can have.
    """

    def read(settings: Settings) -> dict[str, Any]:
        count = stated(settings, name, default_count)
        if not count >= least:
            raise ConfigError(f"{name} {count} cannot be expressed: this architecture has shared experts")
        return {SHARED: count * settings.get(WIDTH, default_width) or None}

    def write(layers: Layers) -> dict[str, Any]:
        layer = of_expert_layer(layers)
        shared, width = layer.moe_shared_expert_intermediate_size or 0, layer.expert_ffn_size
        if shared < least * width or shared % width:
            rule = f"its shared experts are as wide as a number of experts, {width} each"
            raise ConfigError(f"shared experts of {shared} channels cannot be expressed: {rule}")
        return {name: shared // width}

    return Rule((name,), read, write)


def groups(count: int, taken: int, scored: int = 2) -> Rule:
    """Return the rule of the groups that a token chooses first, with the defaults of its two keys. scored: the best
    experts of a group that its score is the sum of.
    """

    def read(settings: Settings) -> dict[str, Any]:
        of_all, chosen = stated(settings, GROUPS, count), stated(settings, TAKEN, taken)
        if of_all == chosen:  # all groups are taken
            return {}
        fields = {"moe_router_num_groups": of_all, "moe_router_group_topk": chosen}
        return fields | {"moe_router_group_score_topk": scored}

    def write(layers: Layers) -> dict[str, Any]:
        layer = of_expert_layer(layers)
        return {GROUPS: layer.moe_router_num_groups or 1, TAKEN: layer.moe_router_group_topk or 1}

    return Rule((GROUPS, TAKEN), read, write)


def normalized(default: bool) -> Rule:
    """Return the rule of whether sigmoid scores are divided by the sum over the chosen experts."""

    def read(settings: Settings) -> dict[str, Any]:
        value = stated(settings, NORMALIZED, default)
        if value and settings.get(TOPK) == 1:
            rule = "weights of one chosen expert are not normalized here"
            raise ConfigError(f"{TOPK} 1 with {NORMALIZED} true cannot be expressed: {rule}")
        return {"moe_router_norm_topk_prob": value}

    return Rule((NORMALIZED,), read, lambda layers: {NORMALIZED: of_expert_layer(layers).moe_router_norm_topk_prob})


SCALING, FACTOR = "routed_scaling_factor", "moe_router_topk_scaling_factor"  # on the weights of the chosen experts


def scaling(default: float = 1.0, name: str = SCALING) -> Rule:
    """Return the rule of the factor on the weights of the chosen experts."""
    return key(name, FACTOR, default, value_of=lambda layers: getattr(of_expert_layer(layers), FACTOR) or 1.0)


SIGMOID = always(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_dtype="fp32")


def sigmoid_router(shared: Rule, factor: float = 1.0, is_normalized: bool = True) -> tuple[Rule, ...]:
    """Return the rules of sigmoid scores with biases and shared experts. shared: of these; the others are defaults."""
    return (SIGMOID, normalized(is_normalized), scaling(factor), groups(1, 1), shared)


SIGMOID_ROUTER = sigmoid_router(shared_experts(1))

# ---------------------------------------------------------------------------------------------------- GPT-OSS

QUANTIZATION, LENGTH = "quantization_config", "original_max_position_embeddings"
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    LENGTH: 4096,
}
GPT_OSS = (
    always(
        add_bias_linear=True,
        activation="quick_geglu",
        glu_linear_offset=1.0,
        softmax_type="learnable",
        moe_router_score_function="softmax",
    ),
    key("swiglu_limit", "activation_func_clamp_value", 7.0),
    fixed("swiglu_alpha", 1.702, "it is the factor of quick GELU here"),
    fixed("attention_bias", True, "experts and routers have biases, and here all linears have them or none"),
    again("experts_per_token", TOPK, lambda settings: settings.get(TOPK, 4)),  # in the first files, as the next one
    again(
        "initial_context_length",
        LENGTH,
        lambda own: (own.get("rope_parameters") or own.get("rope_scaling") or GPT_OSS_ROPE).get(LENGTH),
    ),
    unwritten(fixed(QUANTIZATION, None, "weights are quantized; save them in bf16 with transformers (dequantize)")),
)

# --------------------------------------------------------------------------------------------------- DeepSeek


def check_deepseek(layers: Layers) -> dict[str, Any]:
    """Raise ConfigError for a model whose first layer with experts has no latent attention. Returns no keys."""
    found = next((layer for layer in layers if layer.num_experts is not None), None)
    if found is None or not found.multi_latent_attention:
        raise ConfigError("the model lacks experts or latent attention, which this architecture has")
    return {}


BY_GROUP, GREEDY, METHOD = "group_limited_greedy", "greedy", "topk_method"


def read_groups_of_v2(settings: Settings) -> dict[str, Any]:
    """Read the groups of DeepSeek-V2, whose score is that of their best expert."""
    method = settings.get(METHOD) or GREEDY
    if method not in (GREEDY, BY_GROUP):
        raise ConfigError(f"{METHOD} {method!r} cannot be expressed; it can be {GREEDY}, {BY_GROUP}")
    return {} if method == GREEDY else BEST_OF_GROUP.read(settings)


def write_groups_of_v2(layers: Layers) -> dict[str, Any]:
    if of_expert_layer(layers).moe_router_num_groups is not None:
        return BEST_OF_GROUP.write(layers) | {METHOD: BY_GROUP}
    return BEST_OF_GROUP.write(layers) | {GROUPS: None, TAKEN: None, METHOD: GREEDY}


BEST_OF_GROUP = groups(1, 1, scored=1)
PLAIN, ROTATED = "qk_nope_head_dim", "qk_rope_head_dim"
BY_OTHERS = "its value by the other keys"


def latent_sizes(
    queries: int = 1536,
    plain: int = 128,
    values: int = 128,
    epsilon: float = 1e-6,
    latent: int = 512,
    head: Callable[[int, int], int] = lambda rotated, plain: rotated,
) -> tuple[Rule, ...]:
    """Return the rules of the sizes of latent attention and of the norms' epsilon. The arguments are defaults; head:
    what head_dim repeats, of the rotated and the other channels of a head.
    """
    return (
        key("kv_lora_rank", "kv_lora_rank", latent),
        nullable("q_lora_rank", "q_lora_rank", queries),
        key(PLAIN, "qk_head_dim", plain),
        key(ROTATED, "qk_pos_emb_head_dim", 64),
        key("v_head_dim", "v_head_dim", values),
        again("head_dim", BY_OTHERS, lambda own: head(own.get(ROTATED, 64), own.get(PLAIN, plain))),
        again("qk_head_dim", BY_OTHERS, lambda own: own.get(ROTATED, 64) + own.get(PLAIN, plain)),
        key("rms_norm_eps", "norm_epsilon", epsilon),
    )


LATENT_ATTENTION = (
    Rule((), lambda settings: {}, check_deepseek),
    replace(
        again("num_key_value_heads", BY_OTHERS, lambda own: own["num_attention_heads"]),
        write=lambda layers: {"num_key_value_heads": layers[0].num_attention_heads},
    ),
    fixed("attention_bias", False, "projections of latent attention have no biases here"),
    unwritten(fixed("moe_layer_freq", 1, "all layers after the dense ones have experts")),
    # of training, without effect here, and of 8-bit weights, which the reader of tensors dequantizes
    Rule(("aux_loss_alpha", "ep_size", "seq_aux", QUANTIZATION), lambda settings: {}, lambda layers: {}),
    always(
        multi_latent_attention=True,
        qk_layernorm=True,
        latent_norm_epsilon=1e-6,  # whatever rms_norm_eps is
        add_bias_linear=False,
        moe_router_dtype="fp32",
        moe_shared_expert_gate=False,
    ),
)
OF_SIGMOIDS = (
    unwritten(fixed("scoring_func", "sigmoid", "scores of this architecture are sigmoids")),
    unwritten(fixed(METHOD, "noaux_tc", "experts of this architecture are chosen with a bias")),
)
COUNT = ("n_routed_experts", "num_local_experts")


def deepseek_experts(count: int, topk: Any, width: int, shared: int = 1) -> tuple[Rule, ...]:
    """Return the rules of experts and shared experts of latent attention. The arguments are defaults."""
    return (
        expert_key(COUNT, "num_experts", count),
        expert_key(TOPK, "moe_router_topk", topk),
        expert_width(WIDTH, "moe_ffn_hidden_size", width),
        shared_experts(shared, width),
    )


DEEPSEEK_V3 = (
    *LATENT_ATTENTION,
    *latent_sizes(),
    *deepseek_experts(256, 8, 2048),
    expert_key(SCALING, FACTOR, 2.5, none=1.0),
    dense_layers(3),
    groups(8, 4),
    normalized(True),
    *OF_SIGMOIDS,
    PREDICTION,
    SIGMOID,
)
DEEPSEEK_V2 = (
    *LATENT_ATTENTION,
    *latent_sizes(),
    *deepseek_experts(64, REQUIRED, 1407, shared=2),
    expert_key(SCALING, FACTOR, 1.0, none=1.0),
    dense_layers(0),
    Rule((GROUPS, TAKEN, METHOD), read_groups_of_v2, write_groups_of_v2),
    fixed(NORMALIZED, False, "transformers never normalizes the weights of the chosen experts in DeepSeek-V2"),
    fixed("mlp_bias", False, "projections of latent attention have no biases, and here all linears have or none has"),
    unwritten(fixed("scoring_func", "softmax", "scores of this architecture are a softmax")),
    always(moe_router_score_function="softmax", moe_router_pre_softmax=True),
)
