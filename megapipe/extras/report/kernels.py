"""The lines at the start of a run: which library computes what, what CUDA graphs record, how tokens are dispatched."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend

from megapipe.config.config import Config, ResolvedModelConfig
from megapipe.config.layers import has_narrow_values, is_explicit, layer_configs
from megapipe.config.model import ATTENTIONS
from megapipe.config.problems import chosen
from megapipe.config.training import OPTIMIZERS
from megapipe.dtypes import DTYPES, FP8_BLOCKS
from megapipe.gpu.kernels import Kernels, missing_compiler, why_not_grouped, why_not_packed
from megapipe.gpu.libraries import Apex, FlashAttention
from megapipe.layers.model import model_spec
from megapipe.model.deep_ep import why_not_deep_ep
from megapipe.plan.hardware import hardware_named, hardware_of
from megapipe.plan.layer_time import layer_seconds, ring_link
from megapipe.plan.run_plan import RunPlan
from megapipe.registry import BUILT_IN
from megapipe.tensor_parallel.fp8_matrix import why_no_grouped_product
from megapipe.tensor_parallel.gradients import gemm_adds_to_fp32
from megapipe.train.gpu_setup import device_kind

ATTENTION_KERNELS = {
    SDPBackend.FLASH_ATTENTION: "torch's flash kernel",
    SDPBackend.CUDNN_ATTENTION: "cuDNN's fused kernel",
    SDPBackend.EFFICIENT_ATTENTION: "torch's memory-efficient kernel",
    SDPBackend.MATH: "separate kernels, not fused",
}
FEW_TOKENS = 256  # the choice depends on the GPU, dtype and sizes of heads


def kernel_lines(plan: RunPlan, kernels: Kernels, device: torch.device, backend: str) -> tuple[str, ...]:
    """Return the lines of a rank. backend: of the communicators."""
    return (
        *describe_kernels(kernels, plan.config, device),
        *active_kernels(plan, kernels, device),
        *graph_words(plan),
        *dispatch_words(plan, backend),
    )


def describe_kernels(kernels: Kernels, config: Config, device: torch.device) -> tuple[str, ...]:
    """Return one line per part of the model: the active implementation, and why."""
    asked = config.kernels
    if kernels.layers is not None:
        norms = f"Transformer Engine {kernels.layers.version}"
        model = config.model
        own = chosen(
            ("experts' products", model.num_experts is not None),
            ("down-projections of latent attention", model.multi_latent_attention),
            ("projections of multi-token prediction", model.mtp_num_layers is not None),
        )
        linears = f"{norms}, megapipe's own for {' and '.join(own)}" if own else norms
    else:
        linears = "megapipe's on torch's GEMMs"
        norms = "torch's" if kernels.norms is None else "apex's fused norms"
    precision = config.precision
    fp8 = "no fp8"
    if precision.fp8_format is not None:
        fp8 = f"fp8 {precision.fp8_format}, {precision.fp8_recipe} scaling"
        if kernels.layers is None and device.type == "cuda":
            in_blocks = precision.fp8_recipe in FP8_BLOCKS
            fp8 += " (torch.nn.functional.scaled_mm)" if in_blocks else " (torch._scaled_mm)"
        elif kernels.layers is None:
            fp8 += " (emulated on this CPU, for tests: operands rounded to fp8, products in fp32)"
    pointwise = "compiled" if kernels.compiles else "not compiled"
    if kernels.fp8 is not None and kernels.layers is None and device.type == "cuda" and not kernels.compiles:
        pointwise += ", casts to fp8 compiled"
    lacking = missing_compiler("cuda") if device.type == "cuda" else None
    why = f": {lacking}" if lacking else ""
    attention = _describe_attention(kernels, config, device)
    if isinstance(kernels.optimizer, Apex):
        optimizer = "FusedAdam of apex, and its accumulating weight gradient"
    elif kernels.optimizer is not None:
        optimizer = f"FusedAdam of Transformer Engine {kernels.optimizer.version}"
    elif OPTIMIZERS.origin(config.optimizer.optimizer) != BUILT_IN:
        optimizer = f"{config.optimizer.optimizer} of {OPTIMIZERS.origin(config.optimizer.optimizer)}"
    elif kernels.compiles_update:
        optimizer = "AdamW, compiled, which writes the weights in the same pass"
    elif config.optimizer.optimizer == "muon":
        steps, products = config.optimizer.muon_num_ns_steps, config.optimizer.muon_fp32_matmul_prec
        optimizer = (
            f"Muon for the matrices of hidden layers, {steps} steps of Newton-Schulz (fp32 on GPUs: {products}), "
            "torch's fused AdamW for the rest"
        )
    else:
        optimizer = f"torch's fused {'AdamW' if config.optimizer.optimizer == 'adam' else 'SGD'}{why}"
    experts: tuple[str, ...] = ()
    if config.model.num_experts is not None:
        experts = (f"experts    {_describe_experts(kernels, config, device)} (--moe-grouped-gemm)",)
    return (
        f"linears    {linears} (--transformer-impl {asked.transformer_impl}); {fp8}",
        f"norms      {norms}; pointwise functions {pointwise} (--compile-pointwise)",
        f"loss       {'compiled' if kernels.compiles_loss else f'not compiled{why}'} (--compile-loss)",
        f"blocks     {_describe_blocks(config, device.type)} (--compile-blocks {asked.compile_blocks})",
        f"attention  {attention} (--attention-impl {asked.attention_impl})",
        *experts,
        f"optimizer  {optimizer} (--optimizer-impl {asked.optimizer_impl})",
    )


def _describe_experts(kernels: Kernels, config: Config, device: torch.device) -> str:
    how = f"one GEMM after the other: {why_not_grouped(config)}"
    how = "torch's grouped GEMM, weight gradients one by one in fp32" if kernels.groups_experts else how
    has_own_line = kernels.fp8 is not None and kernels.fp8.fp8_recipe == "mxfp8" and device.type == "cuda"
    return how if kernels.fp8 is None or has_own_line else f"in fp8 one GEMM after the other, else {how}"


def _describe_blocks(config: Config, device_type: str) -> str:
    wanted = config.kernels.compile_blocks
    if wanted == "off" or (wanted == "auto" and device_type != "cuda"):
        return "not compiled"
    return "compiled before the first step, if equal" + (" and faster" if wanted == "auto" else "")


def _describe_attention(kernels: Kernels, config: Config, device: torch.device) -> str:
    if isinstance(kernels.attention, FlashAttention):
        return f"flash-attn {kernels.attention.version}" + ", by documents" * config.data.reset_attention_mask
    if kernels.attention is not None:
        return f"DotProductAttention of Transformer Engine {kernels.attention.version}"
    model = config.model
    explicit = {
        "--attention-dropout": model.attention_dropout > 0,
        "--attn-logit-softcapping": any(layer.attn_logit_softcapping is not None for layer in layer_configs(model)),
        "--attention-softmax-in-fp32": model.attention_softmax_in_fp32,
        f"--softmax-type {model.softmax_type}": model.softmax_type != "vanilla",
        "--attention-kind": any(
            ATTENTIONS[layer.attention_kind].function is not None for layer in layer_configs(model)
        ),
    }
    reasons = [flag for flag, is_on in explicit.items() if is_on]
    if reasons:
        return f"explicit, not fused, for {' and '.join(reasons)}"
    if config.data.reset_attention_mask:
        reason = why_not_packed(config, device)
        if reason is None:
            return "torch's variable-length flash kernel, by documents"
        return f"scaled_dot_product_attention under a mask of documents: {reason}"
    is_half = device.type == "cuda" and config.precision.dtype in ("bf16", "fp16")
    return "scaled_dot_product_attention" + (", a fused kernel" if is_half else "")


def active_kernels(plan: RunPlan, kernels: Kernels, device: torch.device) -> tuple[str, ...]:
    """Return lines on the attention and the weight gradients of this device; () on a CPU."""
    if device.type == "cpu":
        return ()
    config = plan.config
    model, dtype = config.model, getattr(torch, DTYPES[config.precision.dtype].torch_name)
    lines = [*dropout_line(plan, device_kind(device))]
    plain = [layer for layer in layer_configs(model) if not is_explicit(layer)]
    packs = config.data.reset_attention_mask and why_not_packed(config, device) is None
    if kernels.attention is None and plain and not packs:
        # what scaled_dot_product_attention chooses for the heads of one layer, as in model.attention
        queries, head, parts = plain[0].num_attention_heads // plain[0].query_groups(), plain[0].head_size(), []
        q, k = (
            torch.empty(1, heads, FEW_TOKENS, head, dtype=dtype, device=device, requires_grad=True)
            for heads in (queries, 1)
        )
        for masked in sorted({layer.window_size is not None or config.data.reset_attention_mask for layer in plain}):
            mask = torch.zeros(1, 1, FEW_TOKENS, FEW_TOKENS, dtype=dtype, device=device) if masked else None
            # only kernels without a mask get values narrower than keys
            v = k[..., : plain[0].v_head_dim] if has_narrow_values(plain[0]) and not masked else k
            choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, not masked, enable_gqa=queries > 1)
            name = ATTENTION_KERNELS.get(SDPBackend(choice), SDPBackend(choice).name)
            parts.append(f"{name}{' under a mask' * masked}")
        lines.append(f"           on this GPU: {', '.join(parts)}")
    if kernels.layers is None and dtype in (torch.bfloat16, torch.float16):
        adds = kernels.norms is not None or gemm_adds_to_fp32(device, dtype)
        lines.append(f"gradients  of weights are added to fp32 {'inside' if adds else 'by a kernel after'} their GEMMs")
    if model.num_experts is not None and kernels.fp8 is not None and kernels.fp8.fp8_recipe == "mxfp8":
        why = why_no_grouped_product(device) if kernels.groups_experts else "not asked for"
        how = "torch's grouped GEMM for e4m3, weight gradients one by one" if why is None else why
        lines.append(f"experts    in fp8 {'' if why is None else 'one GEMM after the other: '}{how}")
    return tuple(lines)


def dropout_line(plan: RunPlan, device_name: str) -> tuple[str, ...]:
    """Return a line on what --attention-dropout costs by the planner's model; () where attention has none.

    A GPU that is not in the planner's table is taken to be an H100.
    """
    config, hardware = plan.config, hardware_of(device_name) or hardware_named("h100")
    if not config.model.attention_dropout or config.precision.dtype not in hardware.flops:
        return ()
    tp_link = ring_link(plan.topology, "tp", hardware.node, hardware.network)

    def seconds(model: ResolvedModelConfig) -> float:
        spec = model_spec(model, config.precision, config.parallel.cp_comm_type)
        times = (layer_seconds(kind, plan.shape, hardware, tp_link) for kind in spec.kinds)
        return sum(sum(part.values()) for each in times for part in (each.forward, each.inputs, each.weights))

    ratio = seconds(config.model) / seconds(replace(config.model, attention_dropout=0.0))
    rate = config.model.attention_dropout
    return (
        f"           --attention-dropout {rate:g} has no fused kernel: layers take {ratio:.1f} times as long as with 0 "
        f"(an estimate, with the rates of {hardware.name})",
    )


def graph_words(plan: RunPlan) -> tuple[str, ...]:
    """Describe what CUDA graphs record and when, in one line for the start of a run; () without CUDA graphs."""
    gpu = plan.config.gpu
    if gpu.cuda_graph_impl == "none":
        return ()
    slots = [sum(plan.num_slots(pp_rank).values()) for pp_rank in range(plan.topology.pp)]
    parts = "forward, I and W" if plan.splits_backward else "forward and backward"
    recorded = f"{parts} of each of {'/'.join(map(str, slots))} microbatches in flight (by pp_rank), recorded after"
    rest = f"steps; evaluation runs without graphs (--cuda-graph-impl {gpu.cuda_graph_impl})"
    return (f"graphs     {recorded} {gpu.cuda_graph_warmup_steps} {rest}",)


def dispatch_words(plan: RunPlan, backend: str) -> tuple[str, ...]:
    """Describe how --moe-token-dispatcher-type flex sends tokens, in one line for the start of a run; () without it.

    backend: of the communicators.
    """
    model, topology = plan.config.model, plan.topology
    if model.num_experts is None or model.moe_token_dispatcher_type != "flex":
        return ()
    flag, places = "(--moe-token-dispatcher-type flex)", topology.ep_inner
    why_not = why_not_deep_ep(plan.config, topology, plan.parts is not None, backend)
    if not why_not:
        sums = "results are added on the way, equal up to rounding (--moe-flex-dispatcher-backend deepep)"
        return (f"dispatch   a token once to each rank by DeepEP {flag}; {sums}",)
    if model.moe_flex_dispatcher_backend is not None:
        why_not = why_not if model.moe_flex_dispatcher_backend == "deepep" else "megapipe has no adapter of it"
        flag += f", not --moe-flex-dispatcher-backend {model.moe_flex_dispatcher_backend}: {why_not}"
    if not plan.shape.has_levels:
        where = "lies on one node" if places == topology.ep else "has one rank on each node"
        return (f"dispatch   k rows of each token by all-to-all, since ep {topology.ep} {where} {flag}",)
    back = "all rows come back, added in the order of the choice"
    if model.moe_combine_in_node:
        back = "results are added in the node before they come back, equal up to rounding (--moe-combine-in-node)"
    nodes = f"each of {topology.ep // places} nodes, which copies it for its {places} ranks"
    return (f"dispatch   a token once to {nodes} {flag}; {back}",)
