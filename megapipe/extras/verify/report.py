"""What `--verify-grid` prints: what was kept, shrunk and replaced; a line for each step; the first difference and what speaks for its
cause."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from megapipe.config.model import ModelConfig
from megapipe.extras.verify.compare import Difference
from megapipe.extras.verify.parity import ParityStep, RankStep, worst
from megapipe.extras.verify.shrink import Shrunk
from megapipe.extras.verify.tolerance import Tolerance, tolerance_of
from megapipe.plan.run_plan import RunPlan
from megapipe.sharding.spec import ParamSpec
from megapipe.topology import Topology

LINE_WIDTH = 125
MARGIN = 15  # of the lines about a failure
MOST_NAMES = 4
MOST_RANKS = 16


# before


def plan_text(small: Shrunk) -> str:
    """What is going to be compared."""
    was, plan, topology = small.was, small.plan, small.plan.topology
    dtype = plan.config.precision.dtype
    chunks = f" x {plan.num_chunks} chunks" if plan.num_chunks > 1 else ""
    lines = [
        f"verify-grid ({small.mode}): tp {topology.tp} x pp {topology.pp}{chunks} x dp {topology.dp} in {dtype} beside one plain process "
        f"in fp64 (megapipe.extras.reference), {len(small.num_microbatches)} steps"
    ]
    allowed = iter([_allowed(tolerance_of(plan.config))])
    for title, entries in (
        ("against", _against(plan)),
        ("kept", _kept(small)),
        ("shrunk", _shrunk(was, plan)),
        ("replaced", _replaced(small)),
        ("allowed", allowed),
    ):
        wrapped = [line for entry in entries for line in textwrap.wrap(entry, LINE_WIDTH, subsequent_indent="  ")]
        lines += [f"  {title if place == 0 else '':<9}{line}" for place, line in enumerate(wrapped)]
    return "\n".join(lines)


def _against(plan: RunPlan) -> Iterator[str]:
    if not plan.is_synchronous:
        yield (
            f"NOT synchronous: {plan.schedule_name} is compared with its own emulation in one process (stage by stage the stale weights "
            "that its paper names), not with ordinary training; gradients and norm are those of a step's last update"
        )


def _kept(small: Shrunk) -> Iterator[str]:
    plan, config = small.plan, small.plan.config
    counts = " then ".join(str(count) for count in dict.fromkeys(small.num_microbatches))
    yield f"rank order {plan.topology.order}, stages {plan.partition}"
    yield f"schedule {plan.schedule_name}, {counts} microbatches on each dp rank, {_heads(config.model, plan.topology)}"
    yield ", ".join(_switches(plan))


def _heads(model: ModelConfig, topology: Topology) -> str:
    groups = model.query_groups()
    copies = f", each key/value head on {topology.tp // groups} tp ranks" if groups < topology.tp else ""
    return f"{model.num_attention_heads // groups} query head(s) for each key/value head{copies}"


def _switches(plan: RunPlan) -> Iterator[str]:
    """What is on, in words; every option that is no size has the value it has in training, on or off."""
    config, model = plan.config, plan.config.model
    parallel, training = config.parallel, config.training
    yield f"{model.normalization}, {model.activation}, positions {model.position_embedding_type}"
    yield "attention written out" if _is_explicit(model) else "torch's fused attention"
    yield "untied head" if model.untie_embeddings_and_output_weights else "tied head"
    yield f"optimizer {config.optimizer.optimizer}"
    recompute = config.recompute
    modules = (
        " (" + " ".join(recompute.recompute_modules) + ")" if recompute.recompute_granularity == "selective" else ""
    )
    words = {
        f"rope scaling {model.rope_scaling_type}": model.rope_scaling_type != "none",
        "qk-norm": model.qk_layernorm,
        "sliding window": model.window_size is not None,
        "attention soft-cap": model.attn_logit_softcapping is not None,
        "final soft-cap": model.final_logit_softcapping is not None,
        f"hidden dropout {model.hidden_dropout:g}": model.hidden_dropout > 0,
        f"attention dropout {model.attention_dropout:g}": model.attention_dropout > 0,
        "sequence parallel": parallel.sequence_parallel and plan.topology.tp > 1,
        "distributed optimizer": parallel.use_distributed_optimizer,
        "overlapped gradient reduce": parallel.overlap_grad_reduce,
        "overlapped parameter gather": parallel.overlap_param_gather,
        "gradients reduced in bf16": parallel.grad_reduce_in_bf16,
        f"{config.offload.cpu_offloading_num_layers} layers of each stage offloaded": config.offload.cpu_offloading_num_layers
        > 0,
        "attention kept through recompute": recompute.recompute_keep_attention,
        f"recompute {recompute.recompute_granularity}{modules}": recompute.recompute_granularity is not None,
        "per-token loss": training.calculate_per_token_loss,
        f"label smoothing {training.label_smoothing:g}": training.label_smoothing > 0,
        f"z-loss {training.z_loss:g}": training.z_loss > 0,
        "document masks": config.data.reset_attention_mask,
        "document positions": config.data.reset_position_ids,
        "no loss behind documents": config.data.eod_mask_loss,
        f"clipping at {config.optimizer.clip_grad:g}": config.optimizer.clip_grad > 0,
    }
    yield from (word for word, is_on in words.items() if is_on)


def _is_explicit(model: ModelConfig) -> bool:
    """Training takes the kernel that is not fused, and so does the verification (model.context.LayerContext)."""
    return model.attn_logit_softcapping is not None or model.attention_softmax_in_fp32 or model.attention_dropout > 0


def _shrunk(was: RunPlan, plan: RunPlan) -> Iterator[str]:
    a, b = was.config, plan.config
    sizes = (
        ("layers", a.model.num_layers, b.model.num_layers),
        ("hidden", a.model.hidden_size, b.model.hidden_size),
        ("ffn", a.model.ffn_hidden_size, b.model.ffn_hidden_size),
        ("heads", a.model.num_attention_heads, b.model.num_attention_heads),
        ("key/value heads", a.model.num_query_groups, b.model.num_query_groups),
        ("head size", a.model.kv_channels, b.model.kv_channels),
        ("sequence", a.model.seq_length, b.model.seq_length),
        ("window", a.model.window_size, b.model.window_size),
        ("vocabulary", a.model.vocab_size, b.model.vocab_size),
        ("padded vocabulary", a.model.padded_vocab_size, b.model.padded_vocab_size),
        ("micro batch", a.training.micro_batch_size, b.training.micro_batch_size),
        (
            "microbatches",
            was.batch.full // was.batch.samples_per_microbatch,
            plan.batch.full // plan.batch.samples_per_microbatch,
        ),
        ("parameters in a bucket", a.parallel.ddp_bucket_size, b.parallel.ddp_bucket_size),
    )
    changed = [
        f"{name} {before:,} -> {after:,}"
        for name, before, after in sizes
        if before != after and before is not None and after
    ]
    if len(was.batch.sizes) > 2:
        changed.append(f"batch ramp-up: its first and its last of {len(was.batch.sizes)} batch sizes")
    if changed:
        yield ", ".join(changed)
    else:
        yield "nothing: it is small already"


def _replaced(small: Shrunk) -> Iterator[str]:
    a, b = small.was.config, small.plan.config
    if a.precision.dtype != b.precision.dtype:
        yield f"{a.precision.dtype} by fp64 in every kernel; on a GPU attention then takes torch's math kernel: flash has no fp64"
    if a.precision.fp8_format is not None:
        yield f"fp8 {a.precision.fp8_format} by {b.precision.dtype}"
    if (a.kernels.transformer_impl, a.kernels.attention_impl, a.kernels.optimizer_impl) != ("local", "sdpa", "torch"):
        yield "other libraries' kernels by torch's: what is proven is the grid"
    if a.recompute.recompute_keep_attention and not b.recompute.recompute_keep_attention:
        yield "attention kept through full recompute by attention made again: in fp64 a GPU has no kernel whose results could be kept"
    if a.parallel.grad_reduce_in_bf16 and not b.parallel.grad_reduce_in_bf16:
        yield "gradients reduced in bf16 by gradients reduced in fp64"
    if b.precision.dtype == "fp16" and a.precision.initial_loss_scale != b.precision.initial_loss_scale:
        yield f"initial loss scale {a.precision.initial_loss_scale:g} by {b.precision.initial_loss_scale:g}: no search for it first"
    yield "data by random tokens; initial weights by weights drawn everywhere, norms and biases too"
    rate, eps = b.optimizer.lr, ""
    if b.optimizer.optimizer == "adam" and a.optimizer.adam_eps != b.optimizer.adam_eps:
        eps = f"; Adam's epsilon {a.optimizer.adam_eps:g} by {b.optimizer.adam_eps:g}, for at the first it multiplies rounding errors"
    yield f"learning rates by a constant {rate:g}{eps}"


def _allowed(tolerance: Tolerance) -> str:
    text = f"max|grid - plain| / max|plain| of a tensor: gradients {tolerance.gradient:.1e}, weights {tolerance.weight:.1e}"
    share = f"; gradients below {tolerance.least_share:g} of the largest count as that" if tolerance.least_share else ""
    return f"{text}; loss {tolerance.loss:.1e}, gradient norm {tolerance.grad_norm:.1e}{share}"


# after


def found_text(small: Shrunk, steps: Sequence[ParityStep]) -> str:
    """The table of steps, and the verdict."""
    lines = [
        f"  {'step':<6}{'loss grid':>18}{'loss plain':>18}{'difference':>12}{'norm diff.':>12}  {'worst gradient':<57}  worst weight"
    ]
    lines += [_row(step) for step in steps]
    failed = next((step for step in steps if not step.passes), None)
    if failed is None:
        count = len(small.plan.specs)
        lines.append(
            f"  same: loss, gradient norm, {count} gradients and {count} weights on {small.plan.topology.world_size} rank(s)"
        )
    else:
        width = LINE_WIDTH + MARGIN
        indent = " " * MARGIN
        lines += [
            "",
            *(
                line
                for text in _failure(small, failed)
                for line in textwrap.wrap(text, width, subsequent_indent=indent)
            ),
        ]
    return "\n".join(lines)


def _row(step: ParityStep) -> str:
    """The rank that is furthest off speaks for all."""
    rank = max(step.ranks, key=lambda rank: abs(rank.loss - step.loss))
    norm = max(step.ranks, key=lambda rank: abs(rank.grad_norm - step.grad_norm))
    gradient = worst(d for r in step.ranks if (d := r.worst_gradient) is not None)
    weight = worst(d for r in step.ranks if (d := r.worst_weight) is not None)
    mark = "" if step.passes else "  DIFFERS"
    repeats = f"  ({step.num_repeats} overflows before: loss scale searched)" if step.num_repeats else ""
    return (
        f"  {step.step + 1:<6}{rank.loss:>18.12f}{step.loss:>18.12f}{abs(rank.loss - step.loss):>12.1e}"
        f"{abs(norm.grad_norm - step.grad_norm):>12.1e}  {_measure(gradient):<57}  {_measure(weight)}{mark}{repeats}"
    )


def _measure(found: Difference | None) -> str:
    return "none" if found is None else f"{found.ratio:.1e} {_short(found.name)}"


def _short(name: str) -> str:
    return name.removeprefix("decoder.").replace("layers.", "layer ", 1).replace("self_attention.", "")


def _failure(small: Shrunk, step: ParityStep) -> Iterator[str]:
    kind, culprits = step.first_wrong
    if not culprits:
        what = "the loss" if not step.loss_passes else "the gradient norm"
        yield f"DIFFERENT in step {step.step + 1}: {what}, though all gradients and weights are the same: it is averaged or summed wrongly"
        return
    rank, found = max(culprits, key=lambda pair: pair[1].difference)
    yield f"DIFFERENT in step {step.step + 1}, first of all in the {kind} of {found.name} (gradients before weights, in model order)"
    yield f"  by how much  max|grid - plain| = {found.difference:.3e}, allowed {found.bound:.1e}; the largest element is {found.scale:.3e}"
    yield f"  where        {_where(small.plan, rank, found)}"
    part = f" ({found.part})" if found.part else ""
    index = ", ".join(map(str, found.index))
    yield f"  worst        [{index}]{part}: grid {found.grid:.12g}, plain {found.plain:.12g}; in the piece {_piece(found)}"
    yield f"  which rows   {_rows(found)}"
    yield f"  which ranks  {_ranks(small.plan, [r for r, _ in culprits])}"
    if found.factor is not None:
        yield f"  pattern      the grid's values are {found.factor:.6g} times the plain ones: a sum too many or too few, or a wrong divisor"
    yield f"  loss         {_loss_remark(step, kind)}"
    yield f"  also         {_others(step, found.name, kind)}"
    yield f"  declared     {_declared(small.plan.specs[found.place], small.plan)}"


def _where(plan: RunPlan, rank: RankStep, found: Difference) -> str:
    place = plan.topology.coordinates(rank.global_rank)
    return f"rank {rank.global_rank} (tp_rank {place.tp_rank}, pp_rank {place.pp_rank}, dp_rank {place.dp_rank}), stage {found.stage}"


def _piece(found: Difference) -> str:
    spans = (f"{start}:{start + size}" for start, size in zip(found.box.offset, found.box.shape, strict=True))
    return f"[{', '.join(spans)}]"


def _rows(found: Difference) -> str:
    rows = "" if found.rows is None else f"{found.rows[0]} to {found.rows[1]}, "
    return f"{rows}{found.num_wrong:,} of the {found.num_held:,} elements held there"


def _ranks(plan: RunPlan, wrong: Sequence[RankStep]) -> str:
    """Who is wrong, and along which axes: on all ranks of an axis or on some."""
    numbers = [rank.global_rank for rank in wrong]
    shown = " ".join(map(str, numbers[:MOST_RANKS])) + (" ..." if len(numbers) > MOST_RANKS else "")
    places = [plan.topology.coordinates(number) for number in numbers]
    axes = []
    for axis in ("tp", "pp", "dp"):
        members = sorted({getattr(place, f"{axis}_rank") for place in places})
        size = plan.topology.size(axis)
        if size > 1:
            axes.append(
                f"every {axis}_rank" if len(members) == size else f"{axis}_rank {' '.join(map(str, members))} of {size}"
            )
    return f"{shown} ({', '.join(axes)})" if axes else shown


def _loss_remark(step: ParityStep, kind: str) -> str:
    if step.loss_passes and kind == "weight":
        return "the same, and so is every gradient: look at the update, at decay and clipping, and at the gather of parameters"
    if step.loss_passes:
        return "the same: the forwards are right; look at the backward, at sums over tp, dp or the embedding group, and at the divisor"
    return "differs too: look at a forward, at which microbatches run, or at how the loss is averaged"


def _others(step: ParityStep, name: str, kind: str) -> str:
    gradients = dict.fromkeys(n for rank in step.ranks for n in rank.wrong_gradients if (n, kind) != (name, "gradient"))
    weights = dict.fromkeys(n for rank in step.ranks for n in rank.wrong_weights if (n, kind) != (name, "weight"))
    return f"in this step wrong gradients: {_names(list(gradients))}; wrong weights: {_names(list(weights))}"


def _names(names: list[str]) -> str:
    if not names:
        return "no others"
    more = ", ..." if len(names) > MOST_NAMES else ""
    return f"{len(names)} ({', '.join(_short(name) for name in names[:MOST_NAMES])}{more})"


def _declared(spec: ParamSpec, plan: RunPlan) -> str:
    """What ParamSpec says about the tensor: where to look if it is wrong."""
    tp, dim = plan.topology.tp, spec.slicing.dim
    cut = "whole on every tp_rank" if dim is None else f"cut over tp along dim {dim}"
    summed = {len(i.replicas) for rank in range(tp) for i in spec.summed_over_replicas(rank, tp)}
    sums = (
        f"gradient summed over the {max(summed)} tp_ranks that hold a row" if summed else "gradient not summed over tp"
    )
    tied = ", summed over the embedding group" if spec.tied and plan.tied_across_ranks else ""
    return f"{spec.name} {list(spec.shape)}, {cut}, {sums}{tied}"
