"""The lifetimes of activations and messages on a rank: the only walk that knows what each action creates and frees.

Peaks, memory curves, CUDA-graph slots, offloading and memory estimates fold over `lifetimes`.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from megapipe.schedule.action import SEND_OPS, Action, Op
from megapipe.schedule.placement import Placement
from megapipe.schedule.schedule import Schedule


class Held(enum.Enum):
    """A kind of thing that a rank holds for a (stage, microbatch), with slices for a (stage, slice)."""

    MICROBATCH = "microbatch"  # in flight: from F until its weight gradient is done by B or W
    ACTIVATIONS = "activations"  # kept by F for B or I
    REPLAYED = "replayed"  # kept by RECOMPUTE for B or I
    OFFLOADED = "offloaded activations"  # the part of ACTIVATIONS that OFFLOAD frees and RELOAD makes again
    DEFERRED = "deferred"  # kept by I for W: the inputs and output gradients of the linears
    RECEIVED_INPUT = "received input"  # from RECV_F, which allocates it, to F, which keeps it among its activations
    RECEIVED_GRADIENT = "received gradient"  # from RECV_B to the end of B or I
    LOCAL_INPUT = "local input"  # of a stage whose predecessor is on the same rank: from the predecessor's F to F
    LOCAL_GRADIENT = "local gradient"  # of a stage whose successor is on the same rank: from its B or I to B or I
    SENT_OUTPUT = "sent output"  # from SEND_F until it is known to have arrived
    SENT_GRADIENT = "sent gradient"  # from SEND_B until it is known to have arrived
    # of all slices of a microbatch together: from the F of the first slice to its B or I
    KEYS = "keys and values"
    KEY_GRADIENTS = "gradients of keys and values"  # from the B or I of the last slice to that of the first
    WEIGHTS = "weights"  # gathered ones of a stage, whatever the microbatch: from UNSHARD to RESHARD

    __hash__ = object.__hash__


OF_SLICES = frozenset({Held.KEYS, Held.KEY_GRADIENTS})
KEPT = frozenset({Held.ACTIVATIONS, Held.OFFLOADED, Held.REPLAYED, Held.DEFERRED})
MESSAGES = frozenset(Held) - KEPT - {Held.MICROBATCH, Held.WEIGHTS} - OF_SLICES
Item = tuple[Held, int]  # (kind, stage); the microbatch is that of the action


class Changes(NamedTuple):
    """The items that one action creates and frees.

    While it runs, the rank holds the items from before, minus `takes`, plus `creates`.
    """

    takes: tuple[Item, ...] = ()  # freed as the action starts
    creates: tuple[Item, ...] = ()  # there from the start of the action
    frees: tuple[Item, ...] = ()  # freed as the action ends
    leaves: tuple[Item, ...] = ()  # there from the end of the action

    def steps(self, weights: Mapping[Held, float]) -> tuple[float, float]:
        """Return the weighted numbers of items that the start and the end of the action add."""
        takes, creates, frees, leaves = (sum(weights.get(kind, 0) for kind, _ in items) for items in self)
        return creates - takes, leaves - frees


def lifetimes(
    row: Iterable[Action],
    placement: Placement | None = None,
    pp_rank: int = 0,
    send_depth: int | None = None,
    num_slices: int = 1,
) -> Iterator[tuple[Action, Changes]]:
    """Yield every action of a training row with what it creates and frees.

    placement, pp_rank: they determine which neighbours of a stage are on the same rank; without them messages are left
    out.
    send_depth: sends of one channel that may be in flight: a send frees the message sent `send_depth` sends before it.
    num_slices: of a microbatch; with several, keys and values of all of them are held too.
    """
    resolved: dict[tuple[int, Op, int], Changes] = {}
    sent: Counter[tuple[int, Op]] = Counter()
    replayed: set[tuple[int, int | None]] = set()  # (stage, microbatch)
    num_directions = 1 if placement is None else len(placement.directions)
    for action in row:
        stage, op, microbatch = action
        direction = 0 if microbatch is None else microbatch % num_directions
        changes = resolved.get((stage, op, direction))
        if changes is None:
            changes = resolved[stage, op, direction] = _changes(stage, op, direction, placement, pp_rank)
        if op is Op.RECOMPUTE:
            replayed.add((stage, microbatch))
        elif replayed and op in (Op.B, Op.I) and (stage, microbatch) in replayed:
            changes = changes._replace(frees=(*changes.frees, (Held.REPLAYED, stage)))
        if num_slices > 1 and op in _COMPUTED_FROM:  # a pipeline of slices has one direction
            changes = _with_keys(changes, action, num_slices)
        if send_depth is not None and op in SEND_OPS:
            sent[stage, op] += 1
            if sent[stage, op] > send_depth:
                changes = Changes(takes=changes.creates, creates=changes.creates)
        yield action, changes


def _changes(stage: int, op: Op, direction: int, placement: Placement | None, pp_rank: int) -> Changes:
    if op is Op.W:
        return Changes(frees=((Held.DEFERRED, stage), (Held.MICROBATCH, stage)))
    if op in _CREATED:
        return Changes(creates=((_CREATED[op], stage),))
    if op in _TAKEN:
        return Changes(takes=((_TAKEN[op], stage),))
    if op in _COMPUTED_FROM:
        takes: tuple[Item, ...] = ()  # of messages
        frees: tuple[Item, ...] = ()
        creates: tuple[Item, ...] = ()
        if placement is not None:
            received, local, step = _COMPUTED_FROM[op]
            ranks, maker, user = placement.directions[direction], stage - step, stage + step
            if 0 <= maker < len(ranks):
                used = ((local if ranks[maker] == pp_rank else received, stage),)
                takes, frees = (used, ()) if op is Op.F else ((), used)
            if 0 <= user < len(ranks) and ranks[user] == pp_rank:
                creates = ((local, user),)
        if op is Op.F:
            return Changes(takes, ((Held.MICROBATCH, stage), (Held.ACTIVATIONS, stage), *creates))
        if op is Op.B:
            return Changes(frees=((Held.ACTIVATIONS, stage), (Held.MICROBATCH, stage), *frees), leaves=creates)
        return Changes(frees=((Held.ACTIVATIONS, stage), *frees), leaves=((Held.DEFERRED, stage), *creates))
    if op in _MESSAGE_OF and placement is not None:
        return Changes(creates=((_MESSAGE_OF[op], stage),))
    return Changes()


def _with_keys(changes: Changes, action: Action, num_slices: int) -> Changes:
    """Return what the F, B or I of a slice creates and frees, with the keys and values of its microbatch."""
    stage, op, number = action
    assert number is not None
    index, keys, gradients = number % num_slices, (Held.KEYS, stage), (Held.KEY_GRADIENTS, stage)
    if op is Op.F:
        return changes._replace(creates=(*changes.creates, keys)) if index == 0 else changes
    if index == num_slices - 1:
        changes = changes._replace(creates=(*changes.creates, gradients))
    return changes._replace(frees=(*changes.frees, keys, gradients)) if index == 0 else changes


_CREATED = {Op.RECOMPUTE: Held.REPLAYED, Op.UNSHARD: Held.WEIGHTS, Op.RELOAD: Held.OFFLOADED}
_TAKEN = {Op.RESHARD: Held.WEIGHTS, Op.OFFLOAD: Held.OFFLOADED}
# op -> its input if it comes from another rank, its input if it comes from this rank, the step from stage to stage
_COMPUTED_FROM = {
    Op.F: (Held.RECEIVED_INPUT, Held.LOCAL_INPUT, +1),
    Op.B: (Held.RECEIVED_GRADIENT, Held.LOCAL_GRADIENT, -1),
    Op.I: (Held.RECEIVED_GRADIENT, Held.LOCAL_GRADIENT, -1),
}
_MESSAGE_OF = {
    Op.RECV_F: Held.RECEIVED_INPUT,
    Op.RECV_B: Held.RECEIVED_GRADIENT,
    Op.SEND_F: Held.SENT_OUTPUT,
    Op.SEND_B: Held.SENT_GRADIENT,
}


def peak_held(row: Iterable[Action], weights: Mapping[Held, float], by_stage: Sequence[int] | None = None) -> float:
    """Return the largest weighted number of items that a training row holds at once.

    weights: of the kinds that count, messages excluded. by_stage: a second factor, for the items of each stage.
    """
    steps = {op: _changes(0, op, 0, None, 0).steps(weights) for op in Op}
    held = peak = 0.0
    for stage, op, _ in row:
        start, end = steps[op]
        factor = 1 if by_stage is None else by_stage[stage]
        if start:
            held += start * factor
            if held > peak:
                peak = held
        if end:
            held += end * factor
    return peak


def peak_live_chunks(schedule: Schedule, until_input_gradient: bool = False) -> tuple[int, ...]:
    """Return for each rank the most (stage, microbatch) pairs live at once, from F to B or W (or only to B or I).

    A forward-only schedule keeps nothing beyond the forward that runs.
    """
    if not schedule.has_backward:
        return tuple(int(any(op is Op.F for _, op, _ in row)) for row in schedule.rows)
    kind = Held.ACTIVATIONS if until_input_gradient else Held.MICROBATCH
    return tuple(int(peak_held(row, {kind: 1})) for row in schedule.rows)


Slots = dict[tuple[int, int], int]  # (stage, microbatch) -> slot


def assign_slots(row: Iterable[Action]) -> Slots:
    """Give every microbatch in flight a slot of its stage: the separate buffers that CUDA graphs need.

    The lowest free slot is taken, so that a stage has no more slots than microbatches in flight, and a row with fewer
    microbatches uses no others.
    """
    free: defaultdict[int, list[int]] = defaultdict(list)
    slots: Slots = {}
    opened: Counter[int] = Counter()
    for (stage, _, microbatch), changes in lifetimes(row):
        if microbatch is None:
            continue
        if (Held.MICROBATCH, stage) in changes.creates:
            if not free[stage]:
                heappush(free[stage], opened[stage])
                opened[stage] += 1
            slots[stage, microbatch] = heappop(free[stage])
        elif (Held.MICROBATCH, stage) in changes.frees:
            heappush(free[stage], slots[stage, microbatch])
    return slots


def num_slots(slots: Slots) -> Counter[int]:
    """Return the number of slots of each stage."""
    counts: Counter[int] = Counter()
    for (stage, _), slot in slots.items():
        counts[stage] = max(counts[stage], slot + 1)
    return counts


def host_pieces(num_bytes: int) -> tuple[int, ...]:
    """Return the sizes of the allocations that make up a host buffer.

    Pinned memory is allocated in powers of two; the sum is at most one 32nd more than num_bytes.
    """
    unit = max(1, (1 << max(num_bytes.bit_length() - 1, 0)) // 32)
    rest = -(-num_bytes // unit) * unit
    return tuple(1 << bit for bit in range(rest.bit_length() - 1, -1, -1) if rest >> bit & 1)
