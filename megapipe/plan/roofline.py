"""The roofline of a step: its kernels, the bytes that they read and write, and the seconds that these take.

`layer_work` and `step_work` are the budget of what the code asks of a GPU: one row for each part, with the kernels that
it launches and the reason for them. They hold for layers as those of Llama; tests/fake_cuda/test_budget.py counts the
same on a fake CUDA device and compares row by row. `megapipe plan --roofline` prints them with the time at rates that
good kernels reach. Nothing of this was measured on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megapipe.errors import ConfigError
from megapipe.formatting import text_table
from megapipe.layers.attention import AttentionTable
from megapipe.layers.ends import loss_block_bytes
from megapipe.layers.mlp import MLPTable
from megapipe.layers.model import LayerSpec
from megapipe.layers.table import CommChunks
from megapipe.plan.hardware import GIGA, Hardware
from megapipe.plan.layer_costs import layer_flops, step_flops
from megapipe.plan.layer_time import layer_seconds, ring_link
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import optimizer_bytes, predict_step, update_bytes

# Shares of data-sheet peaks that good kernels reach on large tensors of an H100 SXM: 690 of 989 TFLOP/s in GEMMs (and
# as much of the peak in fp8), 2.5 of 3.35 TB/s, attention 600 TFLOP/s forward and 480 backward.
GEMM_SHARE, MEMORY_SHARE = 690 / 989, 2.5 / 3.35
ATTENTION_SHARES = (600 / 989, 480 / 989)
KERNEL_SECONDS = 2e-6  # from the end of one kernel to the start of the next
NORMS = "forward 1, backward 2 and the sum of the weight's gradient, twice; sequence parallel a copy to sum it over tp"
SMALL_BLOCKS = 1 << 23  # bytes of logits raised to fp32 at a time before they had a budget for GPUs


@dataclass(frozen=True)
class Forms:
    """How parts are computed that have more than one form; the defaults are those of a run without options."""

    compiles: bool = False  # --compile-pointwise: the activation
    compiles_loss: bool = False  # --compile-loss
    fuses_casts: bool = True  # casts to fp8 are one kernel each
    loss_block_bytes: int = loss_block_bytes(is_cuda=True)
    fuses_rotary: bool = False  # one kernel each way, as compiled blocks make of it
    fuses_update: bool = False  # --optimizer-impl compiled
    hides_tp: bool = False  # --tp-comm-overlap


@dataclass(frozen=True)
class PartWork:
    """The kernels of one part of a layer or step. kernels: launches, GEMMs and attention included."""

    part: str
    kernels: float
    num_bytes: float  # read and written, but by GEMMs and attention
    reason: str
    seconds: float | None = None  # of GEMMs, attention and collectives; None: by bytes
    is_per_step: bool = False  # else for each microbatch

    def time(self, hardware: Hardware) -> float:
        """Return its seconds."""
        if self.seconds is not None:
            return self.seconds
        return self.num_bytes / hardware.memory_bytes_per_second + self.kernels * KERNEL_SECONDS


def achievable(hardware: Hardware) -> Hardware:
    """Return hardware with the rates of good kernels in place of those fitted to published runs."""
    rate = hardware.memory_bytes_per_second * MEMORY_SHARE
    shares = ((1, GEMM_SHARE), (2, GEMM_SHARE))
    return replace(hardware, gemm_shares=shares, memory_bytes_per_second=rate, attention_share=ATTENTION_SHARES[0])


def check_counted(plan: RunPlan) -> None:
    """Raise ConfigError for a model or option whose kernels have not been counted."""
    config, model = plan.config, plan.config.model
    wanted = {
        "--normalization RMSNorm": model.normalization == "RMSNorm",
        "--position-embedding-type rope": model.position_embedding_type == "rope",
        "--swiglu": model.activation == "swiglu",
        "--disable-bias-linear": not model.add_bias_linear and not model.add_qkv_bias,
        "--hidden-dropout 0 --attention-dropout 0": not model.hidden_dropout and not model.attention_dropout,
        "norms before attention and MLP alone": model.norm_position == "before" and not model.qk_layernorm,
        "--bf16 or --fp16": config.precision.dtype in ("bf16", "fp16"),
        "--context-parallel-size 1": plan.topology.cp == 1,
        "no --pipe-sp-splits": plan.num_slices == 1,
        "no --multi-latent-attention": not model.multi_latent_attention,
        "alike layers": len(plan.model.kinds) == 1,
        "no --window-size, soft-caps or reset masks": not (
            model.window_size or model.attn_logit_softcapping or config.data.reset_attention_mask
        ),
        "no recomputation or offloading": config.recompute.recompute_granularity is None
        and not config.offload.cpu_offloading_num_layers,
        "a schedule without I and W": not plan.splits_backward,
        "the default kernels": (config.kernels.transformer_impl == "local" and config.kernels.attention_impl == "sdpa"),
        "no --use-precision-aware-optimizer": not config.optimizer.use_precision_aware_optimizer,
    }
    if lacking := [name for name, is_met in wanted.items() if not is_met]:
        raise ConfigError(
            f"--roofline has counted the kernels of layers like Llama's; it needs {', '.join(lacking)}; "
            "megapipe plan --gpus N --gpu NAME predicts the time of any configuration"
        )


def layer_work(plan: RunPlan, hardware: Hardware, forms: Forms) -> tuple[PartWork, ...]:
    """Return the work of one layer for one microbatch, forward and backward, on one rank."""
    shape, layer = plan.shape, plan.model.kinds[0]
    attention, mlp = _parts(layer)
    tokens, own, element = shape.tokens, shape.own_tokens, shape.element
    hidden, qkv = layer.hidden_size, attention.gemms(shape.tp)[0].outputs
    channels = attention.model.kv_channels
    rotated = qkv - max(1, attention.model.num_query_groups // shape.tp) * channels  # all but v
    ffn = mlp.gemms(shape.tp)[1].inputs
    ring = ring_link(plan.topology, "tp", hardware.node, hardware.network)
    times = layer_seconds(layer, replace(shape, chunks=CommChunks(4, 4)) if forms.hides_tp else shape, hardware, ring)
    core = sum(
        operation.attention.flops
        * (1 / ATTENTION_SHARES[0] + operation.attention.backward_forwards / ATTENTION_SHARES[1])
        for operation in attention.table(shape).operations
        if operation.attention is not None
    ) / hardware.peak(shape.dtype)
    gemm = times.forward["gemm"] + times.inputs["gemm"] + times.weights["gemm"]
    rows = [
        PartWork("GEMMs", 12, 0.0, "four linears: output, input gradient, weight gradient added in fp32", gemm),
        PartWork("attention", 2, 0.0, "one fused kernel forward; one call backward", core),
        PartWork("norms", 10 if shape.sequence_parallel else 8, 14.0 * own * hidden * element, NORMS),
        PartWork("residual", 4, 12.0 * own * hidden * element, "two sums, and two of gradients"),
        _rotary(tokens * rotated, tokens * qkv * element, shape.seq * channels // 2, element, forms.fuses_rotary),
        PartWork("qkv gradient", 1, 2.0 * tokens * qkv * element, "gradients of q, k and v are copied side by side"),
        PartWork("activation", 2, 8.0 * tokens * ffn * element, "one compiled kernel each way")
        if forms.compiles
        else PartWork("activation", 7, 18.0 * tokens * ffn * element, "silu and product; backward five kernels"),
    ]
    if layer.is_fp8:
        rows += _casts(layer, plan, forms)
    if shape.tp > 1:
        exposed = times.forward["tp"] + times.inputs["tp"] + times.weights["tp"] - times.hidden
        rows.append(PartWork("tp messages", 0, 0.0, "gathers and sums that no GEMM hides", exposed))
    return tuple(rows)


def _parts(layer: LayerSpec) -> tuple[AttentionTable, MLPTable]:
    assert layer.attention is not None and layer.mlp is not None
    return layer.attention, layer.mlp


def _rotary(rotated: int, qkv_bytes: int, table: int, element: int, is_fused: bool) -> PartWork:
    """Return the work of rotating so many elements of q and k, and their gradients, of qkv_bytes with those of v.

    table: elements of cos, and of sin.
    """
    wide = 4
    if is_fused:
        moved = 4.0 * rotated * element + 4.0 * table * wide
        return PartWork("rotary", 2, moved, "one kernel each way, in place")
    casts, copies = rotated * (element + wide), rotated * (wide + element)
    products, sums = 4 * rotated / 2 * 2 * wide, 2 * rotated / 2 * 3 * wide
    each_way = casts + products + sums + copies
    tables = 10.0 * table * wide  # a product reads one, and the gradient turns by -sin
    reason = "raise both halves, four products, two sums, write both halves; the gradient is copied first"
    return PartWork("rotary", 22, 2.0 * each_way + 2.0 * qkv_bytes + tables, reason)


def _casts(layer: LayerSpec, plan: RunPlan, forms: Forms) -> Iterator[PartWork]:
    """Yield the work of the casts to fp8 of a layer, with delayed scales."""
    element, tokens = plan.shape.element, plan.shape.tokens
    gemms = layer.gemms(plan.shape.tp)
    read, written = (tokens * sum(getattr(gemm, side) for gemm in gemms) for side in ("inputs", "outputs"))
    weights = sum(gemm.num_weights for gemm in gemms)
    if forms.fuses_casts:
        moved, kernels = (element + 1.0) * 2 * read + (element + 2.0) * written, 3 * len(gemms)
        reason = "input in F and W, gradient with its transpose: one kernel each, with its amax"
    else:
        chain = 2 * element + 4 + 8 + 8 + 4 + 1.0
        moved, kernels = (2 * chain + 2) * (read + written), 4 * 6 * len(gemms)
        reason = "amax, raise, scale, clamp, round, transpose as kernels, of input and gradient, twice each"
    sums = 3 * len(gemms)  # an amax joins those of its step twice, and a weight gradient leaves its GEMM in fp32
    yield PartWork("fp8 casts", kernels + sums, moved + 12.0 * weights, f"{reason}; weight gradients added in fp32")
    once = "weights cast in both layouts into fixed memory; new scales of three operands a linear"
    yield PartWork("fp8 weights", 35 * len(gemms), (element + 6.0) * weights, once, is_per_step=True)


def step_work(plan: RunPlan, forms: Forms) -> dict[str, PartWork]:
    """Return the work outside of the layers: 'loss' for one microbatch, 'update' for one parameter on one rank."""
    shape = plan.shape
    vocabulary = plan.config.model.padded_vocab_size // shape.tp
    logits = float(shape.tokens * vocabulary)
    blocks = math.ceil(shape.tokens / max(forms.loss_block_bytes // (4 * vocabulary), 1))
    # the terms of all ranks are summed; the embedding looks for the tokens that are in this rank's rows
    over_tp = 3 + 5 if shape.tp > 1 else 0
    if forms.compiles_loss:
        loss = PartWork(
            "loss", 31 + over_tp, 8 * logits, "maximum, sum of exponentials, gradient: a pass over the logits each"
        )
    else:
        reason = (
            "maximum; by blocks in fp32: difference, exponential, sum; backward difference, exponential, factor, copy"
        )
        loss = PartWork("loss", 21 + over_tp + 17 * blocks, 48 * logits, reason)
    dtypes = plan.state_dtypes(0)
    moved = update_bytes(dtypes, shape.element, forms.fuses_update) + dtypes.gradient_bytes
    pass_bytes = "one pass 30 that writes 16-bit weights" if forms.fuses_update else "AdamW 32, weights 6"
    update = PartWork("update", 0, float(moved), f"bytes a parameter: norm 4, {pass_bytes}, zeros 4")
    return {"loss": loss, "update": update}


@dataclass(frozen=True)
class Roofline:
    """The predicted step of a configuration in some forms."""

    layer: tuple[PartWork, ...]
    layer_seconds: float
    loss_seconds: float  # of a microbatch, with the output layer
    update_seconds: float
    seconds: float  # of the step
    mfu: float  # causal attention counted half
    layer_mfu: float


def roofline(plan: RunPlan, hardware: Hardware, forms: Forms) -> Roofline:
    """Return the step of the busiest rank. hardware: of the table; its rates are replaced by achievable ones."""
    check_counted(plan)
    fast = achievable(hardware)
    layer = layer_work(plan, fast, forms)
    count = plan.batch.num_microbatches
    one_layer = sum(work.time(fast) / (count if work.is_per_step else 1) for work in layer)
    step = step_work(plan, forms)
    head = plan.model.head.gemm(plan.shape.tp)
    peak = hardware.peak(plan.config.precision.dtype)
    product = 2.0 * plan.shape.tokens * head.num_weights / (peak * GEMM_SHARE)
    loss = step["loss"].time(fast) + 3 * product
    moved = max(optimizer_bytes(plan, rank, forms.fuses_update) for rank in range(plan.topology.pp))
    update = moved / fast.memory_bytes_per_second
    held = [
        [plan.partition.stages[stage] for stage in plan.placement.stages_of(rank)] for rank in range(plan.topology.pp)
    ]
    microbatch = max(sum(stage.num_layers * one_layer + stage.has_head * loss for stage in stages) for stages in held)
    busiest = microbatch * count
    simulated = predict_step(plan, fast)
    others = simulated.parts["reduce"] + simulated.parts["gather"]
    span = simulated.seconds - others - simulated.parts["optimizer"]
    seconds = busiest * span / (span - simulated.parts["bubble"]) + others + update
    flops = step_flops(plan.config.model, plan.batch.full, causal=True) / plan.topology.world_size
    of_layer = (
        3.0 * plan.shape.tokens / plan.shape.tp * layer_flops(plan.model.kinds[0], plan.shape.whole_seq, causal=True)
    )
    return Roofline(layer, one_layer, loss, update, seconds, flops / seconds / peak, of_layer / one_layer / peak)


def configured_forms(plan: RunPlan) -> Forms:
    """Return the forms that the configuration chooses."""
    kernels = plan.config.kernels
    return Forms(
        compiles=kernels.compile_pointwise,
        compiles_loss=bool(kernels.compile_loss),
        fuses_update=kernels.optimizer_impl == "compiled",
        hides_tp=plan.config.parallel.tp_comm_overlap,
    )


def remedies(plan: RunPlan) -> Iterator[tuple[str, Forms]]:
    """Yield the forms as a review found them, and then with one remedy after the other, those before it included."""
    forms = Forms(fuses_casts=False, loss_block_bytes=SMALL_BLOCKS)
    yield "as reviewed", forms
    if plan.config.precision.fp8_format is not None:
        forms = replace(forms, fuses_casts=True)
        yield "casts to fp8 fused, always on CUDA", forms
    forms = replace(forms, loss_block_bytes=Forms.loss_block_bytes)
    yield "cross entropy in blocks of 128 MiB", forms
    forms = replace(forms, compiles=True, compiles_loss=True)
    yield "--compile-pointwise: activation, loss", forms
    forms = replace(forms, fuses_rotary=True)
    yield "rotary positions in one kernel", forms
    forms = replace(forms, fuses_update=True)
    yield "--optimizer-impl compiled", forms
    if plan.shape.tp > 1:
        yield "--tp-comm-overlap", replace(forms, hides_tp=True)


def roofline_text(plan: RunPlan, hardware: Hardware) -> str:
    """Return the table of one layer, the step, and its time before and after each remedy."""
    found, fast = roofline(plan, hardware, configured_forms(plan)), achievable(hardware)
    peak = hardware.peak(plan.config.precision.dtype)
    tera = [share * peak / 1e12 for share in (GEMM_SHARE, *ATTENTION_SHARES)]
    layer = [("part", "kernels", "GB", "ms", "share", "made of")]
    for work in found.layer:
        seconds = work.time(fast) / (plan.batch.num_microbatches if work.is_per_step else 1)
        moved = "" if work.seconds is not None else f"{work.num_bytes / GIGA:.2f}"
        share = f"{seconds / found.layer_seconds:.1%}"
        part = f"{work.part}, once a step" if work.is_per_step else work.part
        layer.append((part, f"{work.kernels:g}", moved, f"{1e3 * seconds:.2f}", share, work.reason))
    rows: list[tuple[str, ...]] = [("", "layer ms", "loss ms", "update ms", "step ms", "MFU")]
    for name, forms in (("as configured", configured_forms(plan)), *remedies(plan)):
        each = roofline(plan, hardware, forms)
        times = (each.layer_seconds, each.loss_seconds, each.update_seconds, each.seconds)
        rows.append((name, *(f"{1e3 * seconds:.2f}" for seconds in times), f"{each.mfu:.1%}"))
    lines = [
        f"roofline of {hardware.name}: derived, not measured. TFLOP/s: GEMMs {tera[0]:.0f}, attention {tera[1]:.0f} "
        f"forward and {tera[2]:.0f} backward; memory {fast.memory_bytes_per_second / 1e12:.2f} TB/s, "
        f"{1e6 * KERNEL_SECONDS:.0f} us between kernels",
        "one layer, one microbatch, forward and backward: "
        f"{1e3 * found.layer_seconds:.2f} ms, MFU {found.layer_mfu:.1%}",
        *text_table(layer, left=(0, -1), indent=2),
        "a step, loss with the output layer for one microbatch; below each remedy on top of those above it",
        *text_table(rows, left=(0,), indent=2),
    ]
    return "\n".join(lines)
