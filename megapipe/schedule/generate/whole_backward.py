"""Schedules whose backward is one action: naive, GPipe, 1F1B, interleaved 1F1B, breadth-first, Hanayo, Chimera, and the
streams of PipeDream and PACI.
"""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.schedule.action import Action, Op
from megapipe.schedule.costs import Shape
from megapipe.schedule.placement import Placement, two_directions, v_shape
from megapipe.schedule.schedule import Row


def naive(shape: Shape) -> tuple[Row, ...]:
    """One microbatch at a time through all stages, forward and back: the baseline that all others improve on."""
    return tuple(
        tuple(Action(stage, op, microbatch) for microbatch in range(shape.num_microbatches) for op in (Op.F, Op.B))
        for stage in range(shape.num_ranks)
    )


def one_f_one_b(shape: Shape) -> tuple[Row, ...]:
    """1F1B, PipeDream-Flush (Narayanan et al. 2021, arXiv:2104.04473): warm-up, then forward and backward in turn.

    GPipe's bubble, but rank r keeps at most min(num_ranks - r, num_microbatches) microbatches. With k slices (Seq1F1B,
    Sun et al. 2024, arXiv:2406.03488) the bubble is divided by k where slices have equal costs, and the rank keeps
    min(num_ranks - r + k - 1, k num_microbatches) slices: the first backward is that of slice k - 1.
    """
    rows = []
    for stage in range(shape.num_ranks):
        forwards = [Action(stage, Op.F, m) for m in shape.forward_order]
        backwards = [Action(stage, Op.B, m) for m in shape.backward_order]
        rows.append(_alternate(forwards, backwards, warm_up=shape.num_ranks - 1 - stage + shape.num_slices - 1))
    return tuple(rows)


def interleaved(shape: Shape) -> tuple[Row, ...]:
    """Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473): the bubble divided by the chunks per rank.

    Microbatches go in groups: all of a group through one chunk, then through the next; backwards take the chunks in
    reverse. Rank r runs min(2 (p - r - 1) + lead, v m) warm-up forwards, then F and B in turn, then the rest; lead is
    the least with which each B of the last rank follows its F: (v - 1) x largest group, and with k slices more, since
    the first backward is that of slice k - 1.
    """
    p, chunks = shape.num_ranks, range(shape.num_chunks)
    groups = microbatch_groups(len(shape.forward_order), shape.group_size, p)

    def order(microbatches: Sequence[int], chunks: Sequence[int]) -> list[tuple[int, int]]:
        return [(chunk, m) for group in groups for chunk in chunks for m in microbatches[group.start : group.stop]]

    forwards, backwards = order(shape.forward_order, chunks), order(shape.backward_order, chunks[::-1])
    done_at = {each: number for number, each in enumerate(forwards)}
    lead = max(done_at[each] - number for number, each in enumerate(backwards))
    return tuple(
        _alternate(
            [Action(chunk * p + rank, Op.F, m) for chunk, m in forwards],
            [Action(chunk * p + rank, Op.B, m) for chunk, m in backwards],
            warm_up=2 * (p - rank - 1) + lead,
        )
        for rank in range(p)
    )


def microbatch_groups(num_microbatches: int, group_size: int, num_ranks: int) -> list[range]:
    """Cut 0 .. num_microbatches - 1 into groups of group_size.

    A remainder smaller than num_ranks joins the last full group: a group of its size would starve the pipeline. The
    warm-up counts the largest group, so that any number of microbatches runs without deadlock.
    """
    full, remainder = divmod(num_microbatches, group_size)
    starts = [group_size * index for index in range(full)]
    if remainder >= num_ranks or (remainder and not full):
        starts.append(group_size * full)
    return [range(start, end) for start, end in zip(starts, [*starts[1:], num_microbatches], strict=True)]


def breadth_first(shape: Shape) -> tuple[Row, ...]:
    """Breadth-first, looped BFS (Lamy-Poirier 2022, arXiv:2211.05953): all microbatches chunk by chunk, then reversed.

    With one chunk per rank it is GPipe (Huang et al. 2018, arXiv:1811.06965): all forwards, then all backwards; every
    microbatch is live at once. With several it has the bubble of interleaved 1F1B at the memory of GPipe. In return a
    chunk's parameters are needed in one stretch and its gradients are complete early, so that their communication
    overlaps with the other chunks.
    """
    p, chunks, microbatches = shape.num_ranks, range(shape.num_chunks), range(shape.num_microbatches)
    return tuple(
        tuple(Action(chunk * p + rank, Op.F, m) for chunk in chunks for m in microbatches)
        + tuple(Action(chunk * p + rank, Op.B, m) for chunk in reversed(chunks) for m in microbatches)
        for rank in range(p)
    )


def hanayo(shape: Shape) -> tuple[Row, ...]:
    """Hanayo (Liu et al. 2023, arXiv:2308.15762): a microbatch runs down the ranks and up again, num_chunks / 2 times.

    Where F = B, num_microbatches a multiple of num_ranks, the bubble is that of interleaved 1F1B with as many chunks,
    while a rank keeps at most num_ranks microbatches.
    """
    return _in_turns(shape, v_shape(shape.num_ranks, shape.num_chunks))


def chimera(shape: Shape) -> tuple[Row, ...]:
    """Chimera (Li and Hoefler 2021, arXiv:2107.06925): half of the microbatches enter at either end of the pipeline.

    Where F = B, a step takes 2 num_microbatches + num_ranks - 2 forwards of time, num_microbatches a multiple of
    num_ranks.
    """
    return _in_turns(shape, two_directions(shape.num_ranks))


def _in_turns(shape: Shape, placement: Placement) -> tuple[Row, ...]:
    """Groups of num_ranks microbatches, each of which enters two slots after the one before it.

    With S stages and one slot for every F and B, a microbatch that enters in slot t runs forward on stage s in slot
    t + s and back in t + 2 S - 1 - s. Since a rank's stages alternate between odd and even, no two actions meet: the
    forwards of one direction, or of the ways down, fill the slots between those of the other. After 2 S slots, in which
    a rank has run a group, the next one follows without a gap.
    """
    size, num_stages = shape.num_ranks, placement.num_stages
    timed: list[list[tuple[int, Action]]] = [[] for _ in range(size)]
    for microbatch in range(shape.num_microbatches):
        group, number = divmod(microbatch, size)
        start = 2 * num_stages * group + 2 * (number // len(placement.directions))
        for stage in range(num_stages):
            row = timed[placement.rank_of(stage, microbatch)]
            row.append((start + stage, Action(stage, Op.F, microbatch)))
            row.append((start + 2 * num_stages - 1 - stage, Action(stage, Op.B, microbatch)))
    return tuple(tuple(action for _, action in sorted(row)) for row in timed)


def pipedream(shape: Shape) -> tuple[Row, ...]:
    """PipeDream (Harlap et al. 2018, arXiv:1806.03377): 1F1B without a flush, an optimizer step after every backward.

    NOT synchronous: weights change while microbatches are in flight (see weight_versions), so training differs from a
    single process.
    """
    return _with_updates(shape, every=1)


def paci(shape: Shape) -> tuple[Row, ...]:
    """PACI (Elam et al. 2026, arXiv:2606.07881): 1F1B without a flush, in which each stage updates once a step.

    NOT synchronous: right after its last backward of a step a stage updates its only version of the weights, so that
    microbatches in flight meet other weights in their backward than in their forward. Rank r runs p - 1 - r forwards
    ahead, so that at most ceil((p - 1 - r) / microbatches of a step) updates come between the two.
    """
    return _with_updates(shape, every=shape.step_size)


def _with_updates(shape: Shape, every: int) -> tuple[Row, ...]:
    """1F1B with an UPDATE after every `every`-th backward and after the last."""
    rows = []
    for row in one_f_one_b(shape):
        actions: list[Action] = []
        for action in row:
            actions.append(action)
            number = (action.microbatch or 0) + 1
            if action.op is Op.B and (number % every == 0 or number == shape.num_microbatches):
                actions.append(action._replace(op=Op.UPDATE))
        rows.append(tuple(actions))
    return tuple(rows)


def pipedream_2bw(shape: Shape) -> tuple[Row, ...]:
    """PipeDream-2BW (Narayanan et al. 2021, arXiv:2006.09503): 1F1B without a flush, two versions of the weights.

    NOT synchronous: the microbatches of step t use version t - 1 of the weights on every stage,
    W(t + 1) = W(t) - lr x gradient at W(t - 1). The update with the gradients of step t is needed only before the first
    forward of step t + 2, and comes there: until then the norm of the whole gradient is summed over the stages. It also
    comes before the last backward of step t + 1, after which the sum of the next gradients starts.
    """
    size, rows = shape.step_size, []
    for rank, row in enumerate(one_f_one_b(shape)):
        ahead = shape.num_ranks - 1 - rank  # forwards of the next step before the last backward of a step
        actions: list[Action] = []
        for action in row:
            step, number = divmod(action.microbatch or 0, size)
            update = Action(rank, Op.UPDATE, step * size - 1)  # of the step before
            is_backward = action.op is Op.B and step > 0
            if is_backward and not ahead and number == size - 1:
                actions += (update, action)
            elif is_backward and ahead and number == size - 1 - ahead:
                actions += (action, update)
            else:
                actions.append(action)
        rows.append((*actions, Action(rank, Op.UPDATE, shape.num_microbatches - 1)))
    return tuple(rows)


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> Row:
    """Run `warm_up` forwards (at most all), then forward and backward in turn, then the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    row = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        row += (forward, backward)
    row += backwards[len(forwards) - warm_up :]
    return tuple(row)
