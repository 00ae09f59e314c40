"""The text that `--verify-grid` prints: the options kept, shrunk and replaced; each step; the first difference."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from megapipe.config.config import Config, all_fields, value_of
from megapipe.config.flags import flag_words
from megapipe.config.layers import expert_layers, is_explicit, layer_configs
from megapipe.extras.verify.compare import Difference, OtherChoice, ParityStep, RankStep, tolerance_of, worst
from megapipe.extras.verify.shrink import DATA_KEPT, NARROW, OPTIMIZER_KEPT, TRAINING_KEPT, Shrunk
from megapipe.formatting import grid_text
from megapipe.plan.run_plan import RunPlan
from megapipe.sharding.spec import ParamSpec
from megapipe.sharding.state_dtypes import state_dtypes

LINE_WIDTH = 125
MARGIN = 15  # columns of the titles in the lines about a failure
MAX_NAMES = 4
MAX_RANKS = 16
# sections that the small configuration takes over, but for sizes, and fields that it takes over of others
WHOLE_SECTIONS = ("model", "parallel", "recompute", "offload", "precision")
KEPT = {"training": TRAINING_KEPT, "optimizer": (*OPTIMIZER_KEPT, *NARROW), "data": DATA_KEPT}
SIZES = ("parallel.ddp_bucket_size", "training.micro_batch_size")  # besides those of the model


def plan_text(small: Shrunk) -> str:
    """Return what is going to be compared."""
    plan, topology = small.plan, small.plan.topology
    dtype = plan.config.precision.dtype
    grid = grid_text(topology.tp, topology.pp, topology.dp, topology.cp, plan.num_chunks)
    lines = [
        f"verify-grid ({small.mode}): {grid} in {dtype} "
        f"against one plain process in fp64 (megapipe.extras.reference), {len(small.num_microbatches)} steps"
    ]
    tolerance = tolerance_of(plan.config)
    share = tolerance.least_share
    small_ones = f"; gradients below {share:g} of the model's largest are held to that share" if share else ""
    allowed = (
        f"max|grid - plain| / max|plain| of a tensor: gradients {tolerance.gradient:.1e}, weights "
        f"{tolerance.weight:.1e}; loss {tolerance.loss:.1e}, gradient norm {tolerance.grad_norm:.1e}{small_ones}"
    )
    emulated = (
        f"NOT synchronous: {plan.schedule_name} is compared with an emulation of it in one process (with the stale "
        "weights that its paper gives for each stage), not with ordinary training; gradients and norm are those of a "
        "step's last update"
    )
    changed = list(_sizes_changed(small))
    if len(small.original.batch.sizes) > 2:
        num_sizes = len(small.original.batch.sizes)
        changed.append(f"batch ramp-up: its first and its last of {num_sizes} batch sizes")
    for title, entries in (
        ("against", [] if plan.is_synchronous else [emulated]),
        ("kept", _kept(small)),
        ("shrunk", [", ".join(changed) or "nothing: it is small already"]),
        ("replaced", _replaced(small)),
        ("allowed", [allowed]),
    ):
        shown = [line for entry in entries for line in _wrapped(entry, LINE_WIDTH, 2)]
        lines += [f"  {title if place == 0 else '':<9}{line}" for place, line in enumerate(shown)]
    return "\n".join(lines)


def _kept(small: Shrunk) -> Iterator[str]:
    plan, model, tp = small.plan, small.plan.config.model, small.plan.topology.tp
    counts = " then ".join(str(count) for count in dict.fromkeys(small.num_microbatches))
    groups = model.query_groups()
    heads = f"{model.num_attention_heads // groups} query head(s) for each key/value head"
    copies = f", each key/value head on {tp // groups} tp ranks" if groups < tp else ""
    explicit = [is_explicit(layer) for layer in layer_configs(model) if layer.has_attention]
    fused = "torch's fused attention"
    if any(explicit):
        fused = "unfused attention" if all(explicit) else f"{fused} and, in some layers, an unfused one"
    yield f"rank order {plan.topology.order}, stages {plan.partition}"
    yield f"schedule {plan.schedule_name}, {counts} microbatches on each dp rank, {heads}{copies}"
    strategy = plan.config.parallel.data_parallel_sharding_strategy
    yield f"data-parallel sharding {strategy}, {fused}"
    yield ", ".join(_flags_kept(small)) or "no other flag"
    if model.layer_pattern:
        yield f"layers {' '.join(map(repr, model.layer_pattern))}"


def _flags_kept(small: Shrunk) -> Iterator[str]:
    """Yield the flags of the run that the small configuration has as well: what is neither a size nor replaced."""
    for field in all_fields():
        is_kept = field.name in KEPT[field.section] if field.section in KEPT else field.section in WHOLE_SECTIONS
        value = value_of(small.plan.config, field)
        is_default = value == field.default or field.option.derived or field.key == "model.layer_pattern"
        if is_kept and not is_default and value == value_of(small.original.config, field):
            yield " ".join(flag_words(field, value))


def _sizes_changed(small: Shrunk) -> Iterator[str]:
    """Yield the sizes of the run and those of the small configuration, where they differ."""
    for field in all_fields():
        before, after = (value_of(plan.config, field) for plan in (small.original, small.plan))
        is_size = field.kind.scalar is int and not field.kind.many and (field.section == "model" or field.key in SIZES)
        if is_size and before != after and before is not None and after:
            yield f"{field.main_flag} {before:,} -> {after:,}"
    counts = [plan.batch.full // plan.batch.samples_per_microbatch for plan in (small.original, small.plan)]
    if counts[0] != counts[1]:
        yield f"microbatches {counts[0]:,} -> {counts[1]:,}"


def _narrow_text(config: Config) -> str:
    """Return the dtypes of gradients, masters and moments."""
    dtypes = state_dtypes(config.optimizer, config.precision)
    states = ", ".join(f"{state} {dtype}" for state, dtype in dtypes.states.items())
    return f"main gradients {dtypes.gradient}, {states}"


def _replaced(small: Shrunk) -> Iterator[str]:
    a, b = small.original.config, small.plan.config
    if a.precision.dtype != b.precision.dtype:
        why = "on a GPU attention then uses torch's math kernel, since flash attention has no fp64"
        yield f"{a.precision.dtype} by fp64 in every kernel; {why}"
    if a.precision.fp8_format is not None:
        yield f"fp8 {a.precision.fp8_format} by {b.precision.dtype}"
    is_own = a.kernels.optimizer_impl in ("torch", "compiled")
    if (a.kernels.transformer_impl, a.kernels.attention_impl, is_own) != ("local", "sdpa", True):
        yield "kernels of other libraries by torch's: the comparison is about the grid"
    if a.recompute.recompute_keep_attention and not b.recompute.recompute_keep_attention:
        why = "in fp64 a GPU has no kernel whose results could be kept"
        yield f"attention kept through full recompute by recomputed attention: {why}"
    if a.parallel.grad_reduce_in_bf16 and not b.parallel.grad_reduce_in_bf16:
        yield "gradients reduced in bf16 by gradients reduced in fp64"
    if state_dtypes(a.optimizer, a.precision).is_narrow and not state_dtypes(b.optimizer, b.precision).is_narrow:
        yield f"{_narrow_text(a)} by fp64 ones"
    scales = a.precision.initial_loss_scale, b.precision.initial_loss_scale
    if b.precision.dtype == "fp16" and scales[0] != scales[1]:
        yield f"initial loss scale {scales[0]:g} by {scales[1]:g}, which needs no search"
    yield "data by random tokens; initial weights by random ones everywhere, norms and biases too"
    before, after = a.optimizer, b.optimizer
    epsilon = ""
    if after.optimizer == "adam" and before.adam_eps != after.adam_eps:
        why = "since the small one multiplies rounding errors"
        epsilon = f"; Adam's epsilon {before.adam_eps:g} by {after.adam_eps:g}, {why}"
    yield f"learning rates by a constant {after.lr:g}{epsilon}"


def found_text(small: Shrunk, steps: Sequence[ParityStep]) -> str:
    """Return the table of steps and the verdict."""
    lines = [
        f"  {'step':<6}{'loss grid':>18}{'loss plain':>18}{'difference':>12}{'norm diff.':>12}  "
        f"{'worst gradient':<57}  worst weight"
    ]
    lines += [_row(step) for step in steps]
    failed = next((step for step in steps if not step.passes), None)
    if failed is None:
        count, ranks = len(small.plan.specs), small.plan.topology.world_size
        trained = sum(spec.trainable for spec in small.plan.specs)
        layers = len(expert_layers(small.plan.config.model))
        experts = f", the experts of every token in {layers} layer(s)" if layers else ""
        lines.append(
            f"  same: loss, gradient norm, {trained} gradients and {count} weights{experts} on {ranks} rank(s)"
        )
    else:
        lines.append("")
        for text in _failure(small, failed):
            lines += _wrapped(text, LINE_WIDTH + MARGIN, MARGIN)
    return "\n".join(lines)


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    """Return the lines of a text, those after the first indented; a flag stays on one line."""
    return textwrap.wrap(text, width, subsequent_indent=" " * indent, break_on_hyphens=False)


def _row(step: ParityStep) -> str:
    """Return the line of one step, with the rank that differs most in each column."""
    rank = max(step.ranks, key=lambda rank: abs(rank.loss - step.loss))
    norm = max(step.ranks, key=lambda rank: abs(rank.grad_norm - step.grad_norm))
    gradient = worst(d for r in step.ranks if (d := r.gradients.worst) is not None)
    weight = worst(d for r in step.ranks if (d := r.weights.worst) is not None)
    mark = "" if step.passes else "  DIFFERS"
    repeats = f"  (after {step.num_repeats} overflows that lowered the loss scale)" if step.num_repeats else ""
    return (
        f"  {step.step + 1:<6}{rank.loss:>18.12f}{step.loss:>18.12f}{abs(rank.loss - step.loss):>12.1e}"
        f"{abs(norm.grad_norm - step.grad_norm):>12.1e}  {_measure(gradient):<57}  {_measure(weight)}{mark}{repeats}"
    )


def _measure(found: Difference | None) -> str:
    return "none" if found is None else f"{found.ratio:.1e} {_short(found.name)}"


def _short(name: str) -> str:
    return name.removeprefix("decoder.").replace("layers.", "layer ", 1).replace("self_attention.", "")


def _failure(small: Shrunk, step: ParityStep) -> Iterator[str]:
    choice = step.first_other_choice()
    if choice is not None:
        yield from _other_choice(small, step, choice)
    kind, culprits = step.first_wrong()
    if not culprits:
        name = "the loss" if not step.loss_passes else "the gradient norm"
        if step.loss_passes and not step.ahead_passes:
            name = "a loss of multi-token prediction"
        same = "though all gradients and weights are the same: the average or the sum over ranks is wrong"
        yield f"DIFFERENT in step {step.step + 1}: {name}, {same}"
        return
    rank, found = max(culprits, key=lambda pair: pair[1].difference)
    place = small.plan.topology.coordinates(rank.global_rank)
    coordinates = f"tp_rank {place.tp_rank}, pp_rank {place.pp_rank}, dp_rank {place.dp_rank}"
    part = f" ({found.part})" if found.part else ""
    index = ", ".join(map(str, found.index))
    piece = ", ".join(f"{start}:{start + size}" for start, size in zip(found.box.offset, found.box.shape, strict=True))
    rows = "" if found.rows is None else f"{found.rows[0]} to {found.rows[1]}, "
    if not step.loss_passes:
        loss = "differs too: check the forward, which microbatches run, and how the loss is averaged"
    elif kind == "weight":
        loss = "the same, and so is every gradient: check the update, weight decay, clipping and the parameter gather"
    else:
        loss = (
            "the same, so the forwards are right: check the backward, the sums over tp, dp and the embedding group, "
            "and the divisor"
        )
    order = "gradients before weights, in model order"
    yield f"DIFFERENT in step {step.step + 1}, first of all in the {kind} of {found.name} ({order})"
    yield (
        f"  by how much  max|grid - plain| = {found.difference:.3e}, allowed {found.bound:.1e}; the largest element is "
        f"{found.scale:.3e}"
    )
    yield f"  where        rank {rank.global_rank} ({coordinates}), stage {found.stage}"
    yield f"  worst        [{index}]{part}: grid {found.grid:.12g}, plain {found.plain:.12g}; in the piece [{piece}]"
    yield f"  which rows   {rows}{found.num_wrong:,} of the {found.num_held:,} elements held there"
    yield f"  which ranks  {_ranks(small.plan, [r for r, _ in culprits])}"
    if found.factor is not None:
        cause = "a sum too many or too few, or a wrong divisor"
        yield f"  pattern      the grid's values are {found.factor:.6g} times the plain ones: {cause}"
    yield f"  loss         {loss}"
    gradients = _names(
        name for r in step.ranks for name in r.gradients.wrong if (name, kind) != (found.name, "gradient")
    )
    weights = _names(name for r in step.ranks for name in r.weights.wrong if (name, kind) != (found.name, "weight"))
    yield f"  also         in this step wrong gradients: {gradients}; wrong weights: {weights}"
    yield f"  declared     {_declared(small.plan.specs[found.place], small.plan)}"


def _other_choice(small: Shrunk, step: ParityStep, choice: OtherChoice) -> Iterator[str]:
    """Yield which token chose other experts first, and on which ranks tokens did."""
    wrong = [rank for rank in step.ranks if rank.routing.num_other]
    count, whole = (sum(getattr(r.routing, name) for r in step.ranks) for name in ("num_other", "num_choices"))
    yield (
        f"DIFFERENT in step {step.step + 1}, first of all in the choice of experts of layer {choice.layer}: all that "
        "differs below may follow from it"
    )
    yield (
        f"  where        token {choice.token} of sequence {choice.sequence} of microbatch {choice.microbatch}: grid "
        f"{' '.join(map(str, choice.grid))}, plain {' '.join(map(str, choice.plain))}"
    )
    yield f"  how many     {count:,} of {whole:,} choices (tokens x layers)"
    yield f"  which ranks  {_ranks(small.plan, wrong)}"
    why = "the router's input or weight differs (look at the layers before it), or how it scores, groups or breaks ties"
    yield f"  cause        {why}"


def _ranks(plan: RunPlan, wrong: Sequence[RankStep]) -> str:
    """Return the ranks that are wrong and, for each axis, if all of its ranks are or which."""
    numbers = [rank.global_rank for rank in wrong]
    shown = " ".join(map(str, numbers[:MAX_RANKS])) + (" ..." if len(numbers) > MAX_RANKS else "")
    places = [plan.topology.coordinates(number) for number in numbers]
    axes = []
    for axis in ("tp", "pp", "dp"):
        members = sorted({getattr(place, f"{axis}_rank") for place in places})
        size = plan.topology.size(axis)
        if size > 1:
            some = f"{axis}_rank {' '.join(map(str, members))} of {size}"
            axes.append(f"every {axis}_rank" if len(members) == size else some)
    return f"{shown} ({', '.join(axes)})" if axes else shown


def _names(wrong: Iterable[str]) -> str:
    names = list(dict.fromkeys(wrong))
    if not names:
        return "no others"
    more = ", ..." if len(names) > MAX_NAMES else ""
    return f"{len(names)} ({', '.join(_short(name) for name in names[:MAX_NAMES])}{more})"


def _declared(spec: ParamSpec, plan: RunPlan) -> str:
    """Return how ParamSpec says the tensor is sliced and its gradient summed: the first place to look at."""
    tp, dim = plan.topology.tp, spec.slicing.dim
    cut = "whole on every tp_rank" if dim is None else f"cut over tp along dim {dim}"
    summed = {len(i.replicas) for rank in range(tp) for i in spec.summed_over_replicas(rank, tp)}
    sums = (
        f"gradient summed over the {max(summed)} tp_ranks that hold a row" if summed else "gradient not summed over tp"
    )
    tied = ", summed over the embedding group" if spec.tied and plan.tied_across_ranks else ""
    return f"{spec.name} {list(spec.shape)}, {cut}, {sums}{tied}"
