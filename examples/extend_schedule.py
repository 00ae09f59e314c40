"""Pipeline schedules of your own: 1F1B with extra forwards before its first backward, and stages in waves.

megapipe schedule draw eager-1f1b --extension examples/extend_schedule.py -p 4 -m 8
megapipe launch --nproc-per-node 4 pretrain --extension examples/extend_schedule.py --pipeline-schedule eager-1f1b \
    --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank none \
    --config configs/quickstart.yaml --mock-data --vocab-size 1000 --verify-grid

Each rank runs up to twice as many forwards ahead as 1F1B does, so that messages have more time to arrive, for about
twice the memory (Eager-1F1B of Zhuang et al. 2022, arXiv:2211.05322). Waves are megapipe's own schedule hanayo.
"""

from megapipe.extend import Action, Op, Row, Shape, register_schedule, v_shape


@register_schedule("eager-1f1b", "1F1B with twice the warm-up: hides slow messages, for twice the memory")
def eager_1f1b(shape: Shape) -> tuple[Row, ...]:
    """One stage per rank. Rank r runs 2 (p - 1 - r) forwards, then forward and backward in turn, then the rest."""
    rows = []
    for stage in range(shape.num_ranks):
        forwards = [Action(stage, Op.F, m) for m in range(shape.num_microbatches)]
        backwards = [Action(stage, Op.B, m) for m in range(shape.num_microbatches)]
        ahead = min(2 * (shape.num_ranks - 1 - stage), shape.num_microbatches)
        row = forwards[:ahead]
        for m, backward in enumerate(backwards):
            row += [*forwards[ahead + m : ahead + m + 1], backward]
        rows.append(tuple(row))
    return tuple(rows)


@register_schedule("waves", "down the ranks and up again", placement=v_shape, takes_chunks=True, has_waves=True)
def waves(shape: Shape) -> tuple[Row, ...]:
    """The forward of a microbatch on stage s is s slots behind its entry, and the backward s slots before its exit."""
    placement = v_shape(shape.num_ranks, shape.num_chunks)
    slots: list[list[tuple[int, Action]]] = [[] for _ in range(shape.num_ranks)]
    for m in range(shape.num_microbatches):
        group, number = divmod(m, shape.num_ranks)
        entry = 2 * placement.num_stages * group + 2 * number
        for stage, rank in enumerate(placement.rank_of_stage):
            slots[rank].append((entry + stage, Action(stage, Op.F, m)))
            slots[rank].append((entry + 2 * placement.num_stages - 1 - stage, Action(stage, Op.B, m)))
    return tuple(tuple(action for _, action in sorted(row)) for row in slots)
