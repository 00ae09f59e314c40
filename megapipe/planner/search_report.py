"""What a search found, in words: the best layouts, the winner's time and memory, why others fell out; for a terminal or as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from megapipe.planner.flops import step_flops
from megapipe.planner.hardware import GIB, TERA, Hardware
from megapipe.planner.layout import recompute_text
from megapipe.planner.report import text_table
from megapipe.planner.search import Candidate, Found

BAR_WIDTH = 40
MOST_BARS = 16
BUBBLE_WORTH_A_WORD = 0.10  # of the step


def search_text(found: Found, hardware: Hardware, configured: Candidate | str) -> str:
    """configured: the layout of the configuration itself, or why it cannot run."""
    return "\n".join(
        [*_headline(found, hardware), *_table(found, hardware, configured), *_winner(found, hardware), *_misses(found, hardware)]
    )


def search_json(found: Found, hardware: Hardware, configured: Candidate | str) -> dict[str, Any]:
    """The same as data: seconds, bytes, shares."""
    return {
        "hardware": {"name": hardware.name, "usable_bytes": hardware.usable_bytes},
        "num_layouts": found.num_tried,
        "num_predicted": found.num_predicted,
        "best": [_data(candidate) for candidate in found.best],
        "misses": [_data(candidate) for candidate in found.misses],
        "as_configured": {"refused": configured} if isinstance(configured, str) else _data(configured),
    }


def _data(candidate: Candidate) -> dict[str, Any]:
    layout, time = candidate.layout, candidate.time
    return {
        "tp": layout.tp,
        "pp": layout.pp,
        "chunks": layout.chunks,
        "schedule": layout.schedule,
        "dp": candidate.plan.topology.dp,
        "micro_batch_size": layout.micro_batch_size,
        "recompute": dataclasses.asdict(layout.recompute),
        "step_seconds": time.seconds,
        "tokens_per_second": time.tokens_per_second,
        "mfu_causal": time.mfu,
        "mfu_full_attention": _full_mfu(candidate),
        "seconds_by_part": dict(time.parts),
        "memory": [{"pp_rank": rank.pp_rank, "total_bytes": rank.total, **rank.items} for rank in candidate.memory],
    }


def _full_mfu(candidate: Candidate) -> float:
    config, time = candidate.plan.config, candidate.time
    assert config.training.global_batch_size
    return step_flops(config.model, config.training.global_batch_size, causal=False) / time.seconds / time.world_size / time.peak_flops


def _headline(found: Found, hardware: Hardware) -> Iterator[str]:
    yield (
        f"{found.num_tried:,} layouts on {hardware.name}, {found.num_predicted:,} simulated; "
        f"{gib(hardware.usable_bytes)} of each can be used"
    )
    yield "predicted, with efficiencies of kernels that are estimates (docs/planner.md); MFU of the model's own FLOPs, causal attention"
    yield "counted half | counted in full"


def _table(found: Found, hardware: Hardware, configured: Candidate | str) -> Iterator[str]:
    rows = [_row(str(place), candidate) for place, candidate in enumerate(found.best, 1)]
    if not isinstance(configured, str):
        fits = "as configured" if configured.peak_bytes <= hardware.usable_bytes else "as configured (does not fit)"
        rows.append(_row(fits, configured))
    heads = ("", "tp", "pp", "chunks", "schedule", "dp", "microbatch", "step", "tokens/s", "MFU", "memory", "recompute")
    yield from text_table([heads, *rows], last_left=True)
    if isinstance(configured, str):
        yield f"  as configured: {configured}"


def _row(name: str, candidate: Candidate) -> tuple[str, ...]:
    layout, time = candidate.layout, candidate.time
    return (
        name,
        str(layout.tp),
        str(layout.pp),
        str(layout.chunks),
        layout.schedule,
        str(candidate.plan.topology.dp),
        str(layout.micro_batch_size),
        f"{time.seconds:.3g} s",
        f"{time.tokens_per_second:,.0f}",
        f"{time.mfu:.1%} | {_full_mfu(candidate):.1%}",
        gib(candidate.peak_bytes),
        recompute_text(layout.recompute),
    )


def _winner(found: Found, hardware: Hardware) -> Iterator[str]:
    if not found.best:
        yield "nothing fits; the nearest misses:"
        return
    winner, time = found.best[0], found.best[0].time
    parts = ", ".join(f"{part} {seconds / time.seconds:.1%}" for part, seconds in time.parts.items())
    yield f"the best: {winner.layout}, {time.flops_per_second / TERA:.0f} TFLOP/s a GPU"
    yield f"  time     of the rank that computes longest: {parts}"
    yield "  memory   of a rank on each pp_rank:"
    ranks = winner.memory if len(winner.memory) <= MOST_BARS else sorted(winner.memory, key=lambda rank: -rank.total)[:MOST_BARS]
    for rank in sorted(ranks, key=lambda rank: rank.pp_rank):
        filled = round(BAR_WIDTH * rank.total / hardware.usable_bytes)
        yield f"           pp {rank.pp_rank:<4} {'#' * filled}{'.' * (BAR_WIDTH - filled)} {gib(rank.total)}"
    if len(ranks) < len(winner.memory):
        yield f"           {len(winner.memory) - len(ranks)} smaller ones are not shown"
    yield from (f"  why      {reason}" for reason in _reasons(found.best))


def _reasons(best: Sequence[Candidate]) -> Iterator[str]:
    winner = best[0]
    count = winner.plan.batch.full // winner.plan.batch.samples_per_microbatch
    bubble = winner.time.parts["bubble"] / winner.time.seconds
    if winner.layout.pp == 1:
        piped = next((each for each in best if each.layout.pp > 1), None)
        cost = ""
        if piped is not None:
            share = piped.time.parts["bubble"] / piped.time.seconds
            cost = f": the best one with a pipeline is {piped.layout}, with {share:.1%} of bubble and waits"
        yield f"the model fits without a pipeline{cost}"
    elif bubble > BUBBLE_WORTH_A_WORD:
        yield (
            f"{bubble:.1%} of the step is bubble: {count} microbatches feed a pipeline of {winner.layout.pp} ranks; a larger "
            "--global-batch-size, or more chunks where the layers divide, would lower it"
        )
    tp = winner.time.parts["tp"] / winner.time.seconds
    if tp > BUBBLE_WORTH_A_WORD:
        yield f"{tp:.1%} of the step is tensor-parallel messages, in the computation's way; smaller tp is slower or does not fit"


def _misses(found: Found, hardware: Hardware) -> Iterator[str]:
    for miss in found.misses:
        largest = max(miss.memory, key=lambda rank: rank.total)
        yield (
            f"  miss     {miss.layout}, {miss.time.seconds:.3g} s: pp_rank {largest.pp_rank} needs {gib(largest.total)} of "
            f"{gib(hardware.usable_bytes)}"
        )


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
