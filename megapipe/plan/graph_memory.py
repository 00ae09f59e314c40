"""Bytes that CUDA graphs hold (--cuda-graph-impl local): a pool for each slot, for the whole run, which nothing else can use.

A slot's pool is as large as one microbatch ever is: what its stage keeps, and what the backward makes and frees on top. Beside it lie the
slot's fixed messages: its input is counted with what the stage keeps; here are its output, and the gradients that come and go.
"""

from __future__ import annotations

from collections.abc import Mapping

from megapipe.schedule.action import Op


def graph_bytes(
    num_slots: Mapping[int, int],
    last_stage: int,
    kept: Mapping[int, int],  # of a stage from F to B or I
    waiting: Mapping[int, int],  # from I to W
    inside: Mapping[tuple[int, Op], int],  # what an op of a stage makes and frees again
    message_bytes: int,
    splits: bool,  # backwards are recorded as I and W
) -> int:
    """Of all stages of a rank."""
    total = 0
    for stage, slots in num_slots.items():
        halves = kept[stage] + inside[stage, Op.I], waiting[stage] + inside[stage, Op.W]
        pool = max(halves) if splits else kept[stage] + inside[stage, Op.B]
        messages = 2 * (stage < last_stage) + (stage > 0)
        total += slots * (pool + messages * message_bytes)
    return total
