"""A pipeline schedule of your own: 1F1B with extra forwards before its first backward.

megapipe schedule draw eager-1f1b --extension examples/extend_schedule.py -p 4 -m 8
megapipe launch --nproc-per-node 4 pretrain --extension examples/extend_schedule.py --pipeline-schedule eager-1f1b \
    --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank none \
    --config configs/quickstart.yaml --mock-data --vocab-size 1000 --verify-grid

Each rank runs up to twice as many forwards ahead as 1F1B does, so that messages have more time to arrive, for about
twice the memory (Eager-1F1B of Zhuang et al. 2022, arXiv:2211.05322).
"""

from megapipe.extend import Action, Op, Row, Shape, register_schedule


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
