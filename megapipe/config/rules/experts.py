"""Rules of a mixture of experts: the choice of experts, their division over ranks, and what cannot be combined yet."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.config.config import Config
from megapipe.config.layers import LayerConfig, kinds_of, of_each_kind
from megapipe.config.problems import chosen, use_divisors, use_multiples
from megapipe.config.rules.pairs import EITHER


@of_each_kind
def choice(config: Config, layer: LayerConfig) -> Iterator[str]:
    """Check the number of chosen experts and the groups they are chosen from."""
    experts, topk, groups = layer.num_experts, layer.moe_router_topk, layer.moe_router_num_groups
    if experts is None or not layer.has_mlp:
        return
    is_softmax, taken = layer.moe_router_score_function == "softmax", layer.moe_router_group_topk
    if topk > experts:
        yield f"--moe-router-topk {topk} is above --num-experts {experts}; use at most {experts}"
    if topk == 1 and is_softmax and not layer.moe_router_pre_softmax and not layer.has_sinkhorn:
        rule = "the softmax over one chosen expert is 1 for any score, so that the router would not learn"
        yield f"--moe-router-topk 1: {rule}; add --moe-router-pre-softmax"
    if not layer.moe_router_norm_topk_prob and is_softmax:
        way = "--moe-router-pre-softmax leaves the weights of a softmax as they are"
        yield f"--no-moe-router-norm-topk-prob belongs to --moe-router-score-function sigmoid: {way}"
    if groups is None:
        return
    if taken is None:
        yield f"--moe-router-num-groups {groups} needs --moe-router-group-topk, the groups that a token takes"
    elif experts % groups:
        ways = use_divisors(experts, wanted=groups)
        yield f"--moe-router-num-groups {groups} does not divide --num-experts {experts}; {ways}"
    elif taken > groups:
        yield f"--moe-router-group-topk {taken} is above --moe-router-num-groups {groups}; use at most {groups}"
    elif taken > topk and layer.moe_router_group_score_topk is None:
        rule = "a group's score is the sum of its topk // group-topk best experts, of which there would be none"
        way = f"use at most {topk}, or give --moe-router-group-score-topk"
        yield f"--moe-router-group-topk {taken} is above --moe-router-topk {topk}: {rule}; {way}"
    elif (layer.moe_router_group_score_topk or 1) > experts // groups:
        rule = f"a group has {experts // groups} experts"
        yield f"--moe-router-group-score-topk {layer.moe_router_group_score_topk}: {rule}; use at most as many"
    elif topk > taken * (experts // groups):
        held = f"{taken} of {groups} groups hold {taken * (experts // groups)} experts"
        yield f"--moe-router-topk {topk}: {held}; raise --moe-router-group-topk"


@of_each_kind
def division(config: Config, layer: LayerConfig) -> Iterator[str]:
    """Check the division of experts over ep and etp, and the slices of the sequence that tp ranks route."""
    experts, parallel = layer.num_experts, config.parallel
    if experts is None or not layer.has_mlp:
        return
    ep, tp = parallel.expert_model_parallel_size, parallel.tensor_model_parallel_size
    etp, width = parallel.expert_tensor_parallel_size or tp, layer.expert_ffn_size
    if experts % ep:
        ways = use_divisors(experts, wanted=ep)
        yield f"--expert-model-parallel-size {ep} does not divide --num-experts {experts}; {ways}"
    if width % etp:
        ways = use_multiples(etp, width)
        yield f"expert tensor parallel size {etp} does not divide --moe-ffn-hidden-size {width}; {ways}"
    if layer.add_bias_linear and layer.hidden_size % etp:
        rule = "which the biases of experts are cut by"
        yield f"expert tensor parallel size {etp} does not divide --hidden-size {layer.hidden_size}, {rule}"
    if tp > 1 and not parallel.sequence_parallel:
        rule = "without it every tp rank would send the same tokens to the experts"
        yield f"--num-experts with --tensor-model-parallel-size {tp} needs --sequence-parallel: {rule}"
    shared = layer.moe_shared_expert_intermediate_size
    if shared is not None and shared % tp:
        ways = use_multiples(tp, shared)
        yield f"--tensor-model-parallel-size {tp} does not divide the shared experts' width {shared}; {ways}"


def balance(config: Config) -> Iterator[str]:
    """Check that every load balancing loss has one coefficient."""
    model = config.model
    if model.num_experts is None:
        return
    types, coefficients = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    flag = "--moe-router-load-balancing-type"
    if len(types) != len(coefficients):
        yield f"{flag} names {len(types)} losses, --moe-aux-loss-coeff gives {len(coefficients)}; give one for each"
    if len(types) > len(set(types)):
        yield f"{flag} {' '.join(types)}: a loss is named twice; add its coefficients"
    for alone in {"none", "sinkhorn"}.intersection(types):
        if len(types) > 1:
            yield f"{flag} {' '.join(types)}: {alone} cannot be combined with others; leave it out"
    if not model.has_sinkhorn:
        return
    reasons = chosen(
        ("--moe-aux-loss-coeff above 0: the choice of experts is balanced, without a loss", any(coefficients)),
        ("--moe-expert-capacity-factor: rows are dropped by weights", model.moe_expert_capacity_factor is not None),
        ("--moe-router-enable-expert-bias: the choice reads no bias", model.moe_router_enable_expert_bias),
    )
    yield from (f"{flag} sinkhorn with {reason}; {EITHER}" for reason in reasons)


def dispatcher(config: Config) -> Iterator[str]:
    """Check what cannot be combined with tokens that are sent once to a node."""
    model = config.model
    if model.moe_token_dispatcher_type == "flex" and model.moe_pad_expert_input_to_capacity:
        flag, rule = "--moe-token-dispatcher-type flex", "padding belongs to no token that could be sent once to a node"
        yield f"{flag} with --moe-pad-expert-input-to-capacity: {rule}; use alltoall, or leave one of the two out"


def recompute(config: Config) -> Iterator[str]:
    """Check the modules of selective recompute against the layers that there are."""
    asked = config.recompute
    if asked.recompute_granularity != "selective":
        return
    modules, layers = asked.recompute_modules, kinds_of(config.model)
    mixtures = [layer for layer in layers if layer.num_experts is not None and layer.has_mlp]
    dense = [layer for layer in layers if layer.num_experts is None and layer.has_mlp]
    has_shared = any(layer.moe_shared_expert_intermediate_size is not None for layer in mixtures)
    nothing = {
        "mla_up_proj": (
            not config.model.multi_latent_attention,
            "attention has no latents; add --multi-latent-attention",
        ),
        "moe": (not mixtures, "no layer has experts; add --num-experts N"),
        "moe_act": (not mixtures, "no layer has experts; add --num-experts N"),
        "shared_experts": (not has_shared, "there are none; add --moe-shared-expert-intermediate-size N"),
        "activation": (
            bool(mixtures) and not dense and not has_shared,
            "every layer has experts, and none has shared ones; use moe_act",
        ),
    }
    for module in dict.fromkeys(modules):
        is_nothing, reason = nothing.get(module, (False, ""))
        if is_nothing:
            yield f"--recompute-modules {module} recomputes nothing: {reason}, or leave it out"
    inside = [module for module in ("moe_act", "shared_experts") if module in modules]
    if inside and "moe" in modules:
        left_out = inside[0] if len(inside) == 1 else "both"
        yield f"--recompute-modules moe already recomputes {' and '.join(inside)} inside it; leave {left_out} out"


def overlap(config: Config) -> Iterator[str]:
    """Check what --overlap-moe-expert-parallel-comm needs."""
    parallel, flag = config.parallel, "--overlap-moe-expert-parallel-comm"
    if not parallel.overlap_moe_expert_parallel_comm or config.model.num_experts is None:
        return
    if parallel.expert_model_parallel_size == 1:
        yield f"{flag} with --expert-model-parallel-size 1: there is no all-to-all; use 2 or more, or leave it out"


def remarks(config: Config) -> Iterator[str]:
    """Yield a remark for options that are accepted, as in Megatron, though another one takes their effect, and for a
    result that depends on the grid.
    """
    model, asked = config.model, config.recompute
    if model.num_experts is None:
        return
    if model.moe_token_dispatcher_type == "allgather":
        yield "--moe-token-dispatcher-type allgather runs as alltoall: the same results up to rounding"
    score, coefficients = model.moe_router_score_function, model.moe_aux_loss_coeff
    if model.has_sinkhorn:
        sizes = "--tensor-model-parallel-size, --context-parallel-size and --micro-batch-size"
        yield f"--moe-router-load-balancing-type sinkhorn balances each rank's tokens: results depend on {sizes}"
        unread = chosen(
            (f"--moe-router-score-function {score}", score != "softmax"),
            ("--moe-router-pre-softmax", model.moe_router_pre_softmax),
            ("--moe-router-topk-scaling-factor", model.moe_router_topk_scaling_factor is not None),
            ("--moe-router-num-groups", model.moe_router_num_groups is not None),
        )
        yield from (f"{flag} has no effect with --moe-router-load-balancing-type sinkhorn" for flag in unread)
    elif model.moe_router_pre_softmax and score != "softmax":
        rule = "scores of experts do not depend on each other"
        yield f"--moe-router-pre-softmax has no effect with --moe-router-score-function {score}: {rule}"
    if model.moe_router_load_balancing_type == ("none",) and any(coefficients):
        given = " ".join(f"{coefficient:g}" for coefficient in coefficients)
        yield f"--moe-aux-loss-coeff {given} has no effect with --moe-router-load-balancing-type none"
    modules = asked.recompute_modules if asked.recompute_granularity == "selective" else ()
    has_shared = model.moe_shared_expert_intermediate_size is not None
    if "mlp" in modules and all(layer.num_experts is not None for layer in kinds_of(model) if layer.has_mlp):
        yield "--recompute-modules mlp has no effect: every layer has experts, for which there are moe and moe_act"
    if {"layernorm", "shared_experts"} <= set(modules) and has_shared:
        rule = "shared experts that run again keep the output of the norm before them"
        yield f"--recompute-modules layernorm shared_experts: {rule}, so only attention's norms are recomputed"


RULES = (choice, division, balance, dispatcher, recompute, overlap)
