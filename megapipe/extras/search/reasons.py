"""Explanations made from the predicted numbers: why a layout wins, and which settings of another one are doubtful."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from megapipe.config.config import Config, convert
from megapipe.config.parallel import RecomputeConfig
from megapipe.config.training import OptimizerConfig, TrainingConfig
from megapipe.errors import ConfigError
from megapipe.extras.search.layout import recompute_text
from megapipe.extras.search.search import Candidate, Found, predict_plan
from megapipe.plan.hardware import GIB, Hardware
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.families import default_schedule

REPORTED_BUBBLE = 0.10  # share of the step
REPORTED_MESSAGES = 0.10  # share of the step
BUBBLE_WANTED = 0.05
REPORTED_RANK_RATIO = 2  # ranks in a copy of the model, relative to the winner's


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def reasons(found: Found, hardware: Hardware) -> tuple[str, ...]:
    """Return why the winner wins; () if nothing fits."""
    if not found.best:
        return ()
    winner = found.best[0]
    return (
        *_pipeline(found, hardware),
        *_recompute(winner, hardware),
        *fill_the_pipeline(winner),
        *_messages(winner, hardware),
    )


def _pipeline(found: Found, hardware: Hardware) -> Iterator[str]:
    winner = found.best[0]
    layout = winner.layout
    if layout.pp == 1:
        alone = f"tp {layout.tp} alone" if layout.tp > 1 else "data parallelism alone"
        place = "one node" if layout.tp > 1 else "one device"
        rival = next((each for each in found.best if each.layout.pp > 1), found.rival)
        costs = ""
        if rival is not None:
            costs = (
                f"; the best layout with a pipeline, {rival.layout.grid}, {rival.layout.schedule}, has a bubble of "
                f"{rival.time.bubble_share:.1%} and takes {rival.time.seconds / winner.time.seconds - 1:.1%} longer"
            )
        yield f"a copy of the model fits {place}: {alone}{costs}"
        return
    shorter = [pp for pp in found.least_bytes if pp < layout.pp]
    if not shorter:
        return
    most = max(shorter)
    least = found.least_bytes[most]
    rival = next((each for each in found.best if each.layout.pp < layout.pp), None)
    if min(found.least_bytes[pp] for pp in shorter) > hardware.usable_bytes:
        best_of_them = min(found.least_bytes[pp] for pp in shorter)
        yield (
            f"pp {layout.pp} is the shortest pipeline that fits: with a shorter one a rank needs {gib(best_of_them)} "
            "or more"
        )
    elif rival is not None:
        yield (
            f"pp {layout.pp}: the best layout with a shorter pipeline, {rival.layout.grid}, {rival.layout.schedule}, "
            f"takes {rival.time.seconds / winner.time.seconds - 1:.1%} longer"
        )
    else:
        yield (
            f"pp {layout.pp}: with pp {most} a rank needs {gib(least)} or more, and the layouts that fit are slower "
            "than the ten best"
        )


def _recompute(winner: Candidate, hardware: Hardware) -> Iterator[str]:
    """Yield the time and memory of the winner without recompute, if that does not fit."""
    layout = winner.layout
    if layout.recompute.recompute_granularity is None:
        return
    bare = dataclasses.replace(layout, recompute=RecomputeConfig())
    plan = winner.plan
    try:
        without = predict_plan(
            bare, dataclasses.replace(plan, config=dataclasses.replace(plan.config, recompute=bare.recompute)), hardware
        )
    except ConfigError:
        return
    rank = max(without.memory, key=lambda each: each.total)
    if rank.total > hardware.usable_bytes:
        yield (
            f"{recompute_text(layout.recompute)}: without it a step would take {without.time.seconds:.3g} s, but "
            f"pp_rank {rank.pp_rank} needs {gib(rank.total)} of {gib(hardware.usable_bytes)}"
        )


def fill_the_pipeline(candidate: Candidate) -> Iterator[str]:
    """Yield how to reduce a large bubble: more microbatches, or more chunks if they divide the layers."""
    layout, bubble = candidate.layout, candidate.time.bubble_share
    if layout.pp == 1 or bubble <= REPORTED_BUBBLE:
        return
    batch, model = candidate.plan.batch, candidate.plan.config.model
    count = batch.num_microbatches
    wanted = math.ceil(count * (bubble / (1 - bubble)) / (BUBBLE_WANTED / (1 - BUBBLE_WANTED)) / layout.pp) * layout.pp
    chunked = next((n for n in range(layout.chunks + 1, 9) if model.num_layers % (layout.pp * n) == 0), None)
    chunks = f", or use {chunked} chunks" if chunked and layout.schedule == default_schedule(layout.chunks) else ""
    yield (
        f"{bubble:.1%} of the step is bubble: {count} microbatches feed {layout.pp} pipeline ranks; raise the "
        f"microbatches to {wanted} (--global-batch-size {wanted * batch.samples_per_microbatch}){chunks}"
    )


def _messages(candidate: Candidate, hardware: Hardware) -> Iterator[str]:
    share = candidate.time.parts["tp"] / candidate.time.seconds
    if share > REPORTED_MESSAGES:
        yield (
            f"{share:.1%} of the step is tensor-parallel communication that does not overlap with computation; a "
            "smaller tp is slower or does not fit"
        )
    for part, what in (("reduce", "reductions of gradients"), ("gather", "gathers of parameters")):
        share = candidate.time.parts[part] / candidate.time.seconds
        if share > REPORTED_MESSAGES:
            yield (
                f"{share:.1%} of the step is {what} between replicas that do not overlap with computation; raise "
                "--global-batch-size to hide them"
            )


def oddities(configured: Candidate, winner: Candidate | None, hardware: Hardware) -> tuple[str, ...]:
    """Return warnings about the layout of a configuration: inverted axes, too few microbatches, missing options."""
    return (
        *_inverted(configured, hardware),
        *_fed(configured),
        *_copies(configured, winner),
        *_switched_off(configured, hardware),
    )


def _inverted(configured: Candidate, hardware: Hardware) -> Iterator[str]:
    t = configured.plan.topology
    if t.tp > 1 and t.crosses_nodes("tp"):
        share = configured.time.parts["tp"] / configured.time.seconds
        inside = [name for name in ("pp", "dp") if t.size(name) > 1 and not t.crosses_nodes(name)]
        turned = f" while {' and '.join(inside)} stay inside a node: the axes are inverted" if inside else ""
        yield (
            f"tp {t.tp} crosses nodes of {hardware.ranks_per_node}{turned}; every layer waits for its messages "
            f"({share:.0%} of the step): put tp first in --rank-order and keep it at {hardware.ranks_per_node} or less"
        )
    elif t.pp > 1 and t.dp > 1 and t.crosses_nodes("replicas") and not t.crosses_nodes("pp"):
        yield (
            f"pp {t.pp} stays inside a node while gradients cross nodes (--rank-order {t.order}): a pipeline sends "
            "less, so the pipeline should cross nodes; use --rank-order tp-cp-dp-pp"
        )


def _fed(configured: Candidate) -> Iterator[str]:
    batch, pp = configured.plan.batch, configured.plan.topology.pp
    count = batch.num_microbatches
    if count < pp:
        yield (
            f"{count} microbatches cannot fill a pipeline of {pp} ranks: some ranks are always idle; raise "
            "--global-batch-size or lower pp"
        )
    else:
        yield from fill_the_pipeline(configured)


def _copies(configured: Candidate, winner: Candidate | None) -> Iterator[str]:
    """Yield a warning if each copy of the model takes more ranks than it needs."""
    if winner is None:
        return
    mine, theirs = configured.layout, winner.layout
    if mine.tp * mine.pp >= REPORTED_RANK_RATIO * theirs.tp * theirs.pp:
        t = configured.plan.topology
        yield (
            f"a copy of the model takes {mine.tp * mine.pp} ranks where {theirs.tp * theirs.pp} are enough "
            f"({theirs.grid}): dp could be {t.world_size // theirs.tp // theirs.pp} instead of {t.dp}"
        )


def _switched_off(configured: Candidate, hardware: Hardware) -> Iterator[str]:
    """Yield the options that are off and would predict a better step."""
    plan = configured.plan
    parallel = plan.config.parallel
    kernels, precision = plan.config.kernels, plan.config.precision
    others: list[tuple[str, dict[str, bool]]] = []
    if precision.fp8_format is not None and kernels.transformer_impl == "local" and not kernels.compile_pointwise:
        others.append(("--compile-pointwise", {"compile_pointwise": True}))
    if plan.topology.tp > 1 and not parallel.sequence_parallel:
        others.append(("--sequence-parallel", {"sequence_parallel": True}))
    if plan.topology.dp > 1 and not parallel.use_distributed_optimizer:
        others.append(("--use-distributed-optimizer", {"use_distributed_optimizer": True}))
    if plan.topology.dp > 1 and not parallel.overlap_grad_reduce:
        others.append(("--overlap-grad-reduce", {"overlap_grad_reduce": True}))
    for flag, changes in others:
        try:
            other = predict_plan(configured.layout, _replanned(configured, changes, hardware), hardware)
        except ConfigError:
            continue
        if other.peak_bytes <= configured.peak_bytes and other.time.seconds < configured.time.seconds * 0.995:
            yield (
                f"{flag} is off: with it a step takes {other.time.seconds:.3g} s instead of "
                f"{configured.time.seconds:.3g}, and the fullest rank needs {gib(other.peak_bytes)} "
                f"instead of {gib(configured.peak_bytes)}"
            )
        elif configured.peak_bytes > hardware.usable_bytes >= other.peak_bytes:
            yield f"{flag} is off: with it the fullest rank needs {gib(other.peak_bytes)} and fits"


def _replanned(candidate: Candidate, changes: dict[str, bool], hardware: Hardware) -> RunPlan:
    """Return the plan with other options of the parallel or the kernels section. Raises ConfigError."""
    config, t = candidate.plan.config, candidate.plan.topology
    for name, is_on in changes.items():
        section = "kernels" if hasattr(config.kernels, name) else "parallel"
        changed_section = dataclasses.replace(getattr(config, section), **{name: is_on})
        config = dataclasses.replace(config, **{section: changed_section})
    training = convert(TrainingConfig, config.training, train_iters=None, train_samples=None)
    optimizer = convert(
        OptimizerConfig,
        config.optimizer,
        lr_decay_iters=None,
        lr_decay_samples=config.optimizer.lr_decay_samples or None,
        lr_warmup_samples=0,
        lr_wsd_decay_samples=None,
    )
    changed = convert(Config, config, training=training, optimizer=optimizer)
    return resolve(changed, t.world_size, hardware.ranks_per_node)
