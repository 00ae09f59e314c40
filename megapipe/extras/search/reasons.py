"""Explanations made from the predicted numbers: why a layout wins, and which settings of another one are doubtful."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from megapipe.config.config import Config, convert
from megapipe.config.parallel import RecomputeConfig
from megapipe.config.training import OptimizerConfig, TrainingConfig
from megapipe.errors import ConfigError
from megapipe.extras.search.candidate import Candidate, Found, predict_plan
from megapipe.formatting import bytes_text
from megapipe.plan.hardware import Hardware
from megapipe.plan.recompute_choice import recompute_text
from megapipe.plan.resolve import resolve
from megapipe.plan.sharded import row_bytes
from megapipe.schedule.families import default_schedule

REPORTED_BUBBLE = 0.10  # share of the step
REPORTED_MESSAGES = 0.10  # share of the step
BUBBLE_WANTED = 0.05
REPORTED_RANK_RATIO = 2  # ranks in a copy of the model, relative to the winner's
# part of the step time -> messages that do not overlap with computation, and a way out
MESSAGES = {
    "tp": ("tensor-parallel communication", "a smaller tp is slower or does not fit"),
    "cp": ("messages of context parallelism", "a smaller cp is slower or does not fit"),
    "ep": ("all-to-alls of experts", "a smaller ep is slower or does not fit"),
    "reduce": ("the reduction of gradients between replicas", "raise --global-batch-size to hide it"),
    "gather": ("the gather of parameters between replicas", "raise --global-batch-size to hide it"),
}


def reasons(found: Found, hardware: Hardware) -> Iterator[str]:
    """Yield why the winner wins; nothing if no layout fits."""
    if not found.best:
        return
    winner = found.best[0]
    yield from _pipeline(found, hardware)
    yield from _context(found, hardware)
    yield from _recompute(winner, hardware)
    yield from _sharding(winner, hardware)
    yield from _slices(winner, hardware)
    yield from fill_the_pipeline(winner)
    for part, (messages, remedy) in MESSAGES.items():
        share = winner.time.parts.get(part, 0.0) / winner.time.seconds
        if share > REPORTED_MESSAGES:
            yield f"{share:.1%} of the step is {messages} that does not overlap with computation; {remedy}"


def _pipeline(found: Found, hardware: Hardware) -> Iterator[str]:
    layout, seconds = found.best[0].layout, found.best[0].time.seconds
    if layout.pp == 1:
        axes = [f"{name} {size}" for name, size in (("tp", layout.tp), ("cp", layout.context.ranks)) if size > 1]
        alone = f"{' x '.join(axes) or 'data parallelism'} alone"
        copy = "with sharded weights a copy of the model fits" if layout.sharding else "a copy of the model fits"
        place = "one node" if layout.tp > 1 else "one device"
        rival = next((each for each in found.best if each.layout.pp > 1), found.rival)
        costs = ""
        if rival is not None:
            costs = (
                f"; the best layout with a pipeline, {rival.layout.grid}, {rival.layout.schedule}, has a bubble of "
                f"{rival.time.bubble_share:.1%} and takes {rival.time.seconds / seconds - 1:.1%} longer"
            )
        yield f"{copy} {place}: {alone}{costs}"
        return
    shorter = {pp: least for pp, least in found.least_bytes.items() if pp < layout.pp}
    if not shorter:
        return
    least, most = min(shorter.values()), max(shorter)
    rival = next((each for each in found.best if each.layout.pp < layout.pp), None)
    if least > hardware.usable_bytes:
        need = bytes_text(least)
        yield f"pp {layout.pp} is the shortest pipeline that fits: with a shorter one a rank needs {need} or more"
    elif rival is not None:
        yield (
            f"pp {layout.pp}: the best layout with a shorter pipeline, {rival.layout.grid}, {rival.layout.schedule}, "
            f"takes {rival.time.seconds / seconds - 1:.1%} longer"
        )
    else:
        yield (
            f"pp {layout.pp}: with pp {most} a rank needs {bytes_text(shorter[most])} or more, and the layouts that "
            "fit are slower than the ten best"
        )


def _context(found: Found, hardware: Hardware) -> Iterator[str]:
    """Yield why the winner shares sequences between ranks, or why not where that was tried."""
    layout, seconds = found.best[0].layout, found.best[0].time.seconds
    smaller = {cp: least for cp, least in found.least_bytes_of_cp.items() if cp < layout.context.ranks}
    other = next(
        (
            each
            for each in found.best
            if (each.layout.context.ranks < layout.context.ranks) == bool(smaller)
            and each.layout.context.ranks != layout.context.ranks
        ),
        None,
    )
    if other is not None:
        yield f"{layout.context}: with {other.layout.grid} a step takes {other.time.seconds / seconds - 1:.1%} longer"
    elif smaller and min(smaller.values()) > hardware.usable_bytes:
        yield f"{layout.context}: with a smaller cp a rank needs {bytes_text(min(smaller.values()))} or more"
    elif smaller:
        yield f"{layout.context}: layouts with a smaller cp that fit are slower than the ten best"
    elif len(found.least_bytes_of_cp) > 1:
        yield "cp 1: layouts with context parallelism are slower than the ten best, or do not fit"


def _recompute(winner: Candidate, hardware: Hardware) -> Iterator[str]:
    """Yield the time and memory of the winner without recompute, if that does not fit."""
    layout, plan = winner.layout, winner.plan
    if layout.recompute == RecomputeConfig():
        return
    bare = dataclasses.replace(plan, config=dataclasses.replace(plan.config, recompute=RecomputeConfig()))
    try:
        without = predict_plan(layout, bare, hardware)
    except ConfigError:
        return
    if without.peak_bytes > hardware.usable_bytes:
        yield (
            f"{recompute_text(layout.recompute)}: without it a step would take {without.time.seconds:.3g} s, but "
            + lack_of_memory(without, hardware)
        )


def _sharding(winner: Candidate, hardware: Hardware) -> Iterator[str]:
    """Yield what sharded weights cost the winner, beside the same layout with only the optimizer sharded."""
    plan = winner.plan
    if not winner.layout.sharding:
        return
    rows = plan.schedule(plan.batch.num_microbatches).rows
    moved = max((row_bytes(plan, rank, row) for rank, row in enumerate(rows)), key=lambda each: each.gathered)
    exposed = winner.time.parts["gather"] + winner.time.parts["reduce"]
    text = (
        f"weights sharded: a rank gathers {bytes_text(moved.gathered * plan.shape.element)} and reduces "
        f"{bytes_text(moved.reduced * plan.shape.gradient)} a step, under computation but for {exposed:.3g} s"
    )
    changes = {"data_parallel_sharding_strategy": "optim", "data_parallel_sharding_units": 1}
    without = _instead(winner, hardware, changes)
    if without is not None:
        text += f"; with the optimizer sharded alone a step would take {without.time.seconds:.3g} s"
        text += _but_lacks_memory(without, hardware)
    yield text


def _slices(winner: Candidate, hardware: Hardware) -> Iterator[str]:
    """Yield the time and memory of the winner with whole sequences in the pipeline."""
    whole = _instead(winner, hardware, {"pipe_sp_splits": 1}) if winner.layout.slices > 1 else None
    if whole is not None:
        yield (
            f"slices {winner.layout.slices}: with whole sequences in the pipeline a step would take "
            f"{whole.time.seconds:.3g} s instead of {winner.time.seconds:.3g}{_but_lacks_memory(whole, hardware)}"
        )


def _but_lacks_memory(candidate: Candidate, hardware: Hardware) -> str:
    fits = candidate.peak_bytes <= hardware.usable_bytes
    return "" if fits else f", but {lack_of_memory(candidate, hardware)}"


def lack_of_memory(candidate: Candidate, hardware: Hardware) -> str:
    """Return the bytes that the fullest rank needs of those that it can use."""
    rank = candidate.fullest
    return f"pp_rank {rank.pp_rank} needs {bytes_text(rank.total)} of {bytes_text(hardware.usable_bytes)}"


def fill_the_pipeline(candidate: Candidate) -> Iterator[str]:
    """Yield how to reduce a large bubble: more microbatches, or more chunks if they divide the layers."""
    layout, bubble = candidate.layout, candidate.time.bubble_share
    if layout.pp == 1 or bubble <= REPORTED_BUBBLE:
        return
    batch, model = candidate.plan.batch, candidate.plan.config.model
    count = batch.num_microbatches
    wanted = math.ceil(count * (bubble / (1 - bubble)) / (BUBBLE_WANTED / (1 - BUBBLE_WANTED)) / layout.pp) * layout.pp
    chunked = next((n for n in range(layout.chunks + 1, 9) if model.num_layers % (layout.pp * n) == 0), None)
    of_slices = f" of {layout.slices} slices" if layout.slices > 1 else ""
    chunks = f", or use {chunked} chunks" if chunked and layout.schedule == default_schedule(layout.chunks) else ""
    yield (
        f"{bubble:.1%} of the step is bubble: {count} microbatches{of_slices} feed {layout.pp} pipeline ranks; raise "
        f"the microbatches to {wanted} (--global-batch-size {wanted * batch.samples_per_microbatch}){chunks}"
    )


def oddities(configured: Candidate, winner: Candidate | None, hardware: Hardware) -> Iterator[str]:
    """Yield warnings about the layout of a configuration: inverted axes, too few microbatches, missing options."""
    t, count = configured.plan.topology, configured.plan.batch.num_microbatches
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
    yield from _experts(configured, winner)
    if count * (slices := configured.plan.num_slices) < t.pp:
        of_slices = f" of {slices} slices" if slices > 1 else ""
        yield (
            f"{count} microbatches{of_slices} cannot fill a pipeline of {t.pp} ranks: some ranks are always idle; "
            "raise --global-batch-size or lower pp"
        )
    else:
        yield from fill_the_pipeline(configured)
    if winner is not None:
        enough = winner.layout.tp * winner.layout.pp
        if t.tp * t.pp >= REPORTED_RANK_RATIO * enough:
            yield (
                f"a copy of the model takes {t.tp * t.pp} ranks where {enough} are enough ({winner.layout.grid}): dp "
                f"could be {t.world_size // enough} instead of {t.dp}"
            )
    yield from _switched_off(configured, hardware)


def _experts(configured: Candidate, winner: Candidate | None) -> Iterator[str]:
    """Yield a warning about all-to-alls over the network where a smaller ep is found to be faster."""
    t, time = configured.plan.topology, configured.time
    share = time.parts.get("ep", 0.0) / time.seconds
    if winner is None or t.ep == 1 or not t.crosses_nodes("ep") or share <= REPORTED_MESSAGES:
        return
    if winner.layout.ep < t.ep:
        yield (
            f"ep {t.ep} crosses nodes of {t.ranks_per_node}, {t.least_on_a_node('ep')} ranks of a group on each: "
            f"{share:.0%} of the step is all-to-alls; the best layout has ep {winner.layout.ep}"
        )


def _switched_off(configured: Candidate, hardware: Hardware) -> Iterator[str]:
    """Yield the options that are off and would predict a better step."""
    t, need = configured.plan.topology, configured.peak_bytes
    for name, has_effect in (
        ("sequence_parallel", t.tp > 1),
        ("use_distributed_optimizer", t.num_replicas > 1),
        ("overlap_grad_reduce", t.num_replicas > 1),
    ):
        if not has_effect or getattr(configured.plan.config.parallel, name):
            continue
        other, flag = _instead(configured, hardware, {name: True}), "--" + name.replace("_", "-")
        if other is None:
            continue
        if other.peak_bytes <= need and other.time.seconds < configured.time.seconds * 0.995:
            yield (
                f"{flag} is off: with it a step takes {other.time.seconds:.3g} s instead of "
                f"{configured.time.seconds:.3g}, and the fullest rank needs {bytes_text(other.peak_bytes)} "
                f"instead of {bytes_text(need)}"
            )
        elif need > hardware.usable_bytes >= other.peak_bytes:
            yield f"{flag} is off: with it the fullest rank needs {bytes_text(other.peak_bytes)} and fits"


def _instead(candidate: Candidate, hardware: Hardware, changes: dict[str, Any]) -> Candidate | None:
    """Predict a candidate with other values of the section 'parallel'; return None if it cannot run with them."""
    config = candidate.plan.config
    try:
        training = convert(TrainingConfig, config.training, train_iters=None, train_samples=None)
        optimizer = convert(
            OptimizerConfig,
            config.optimizer,
            lr_decay_iters=None,
            lr_decay_samples=config.optimizer.lr_decay_samples or None,
            lr_warmup_samples=0,
            lr_wsd_decay_samples=None,
            decoupled_min_lr=None if config.optimizer.decoupled_lr is None else config.optimizer.decoupled_min_lr,
        )
        parallel = dataclasses.replace(config.parallel, **changes)
        changed = convert(Config, config, training=training, optimizer=optimizer, parallel=parallel)
        plan = resolve(changed, candidate.plan.topology.world_size, hardware.ranks_per_node)
        return predict_plan(candidate.layout, plan, hardware)
    except ConfigError:
        return None
