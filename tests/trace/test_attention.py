"""The core attention of a trace: kernels with the keys that queries see, and what is written out, counted by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megapipe.plan.traces import layer_trace
from megapipe.schedule.action import Op
from megapipe.trace.traced import AttentionWork
from tests.tiny import plan_for

HEADS, SIZE, SEQ, BATCH = 4, 64, 512, 2
ROWS = BATCH * SEQ * HEADS  # queries of all heads
FLAGS = (
    f"--num-layers 2 --hidden-size {HEADS * SIZE} --num-attention-heads {HEADS} --seq-length {SEQ} --vocab-size 64 "
    f"--micro-batch-size {BATCH} --global-batch-size 8 --bf16 --hidden-dropout 0 --attention-dropout 0 "
    "--position-embedding-type rope"
)
CP = "--context-parallel-size 2"
WINDOW = 100
IN_WINDOW = (WINDOW * WINDOW / 2 + (SEQ - WINDOW) * WINDOW) / SEQ  # keys of a query in the mean
SEEN = SEQ / 2
LATENT = "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 48 --qk-pos-emb-head-dim 16 --v-head-dim 32"
# flags -> the kernel, keys that a query of the sequence sees, ranks of the ring
FUSED: dict[str, tuple[str, float, int]] = {
    "": ("cudnn", SEEN, 1),
    f"--window-size {WINDOW}": ("efficient", IN_WINDOW, 1),
    f"--attention-impl flash --window-size {WINDOW}": ("flash2", IN_WINDOW, 1),
    "--attention-impl te": ("cudnn", SEEN, 1),
    "--attention-impl flash --attn-logit-softcapping 30": ("flash2", SEEN, 1),
    "--reset-attention-mask": ("flash2", SEEN, 1),
    CP: ("cudnn", SEEN, 2),
    f"{CP} --cp-comm-type a2a": ("cudnn", SEEN, 1),
    f"{CP} --window-size {WINDOW}": ("efficient", IN_WINDOW, 2),
    "--softmax-type learnable": ("cudnn", SEEN, 1),
    LATENT: ("cudnn", SEEN, 1),  # torch's kernel takes values as wide as keys
    "--device cpu": ("cpu", SEEN, 1),
}
CASTS = 2 * (2 + 4)  # bytes an element: logits to fp32, and probabilities back
# flags -> bytes that a forward and a backward move for each query and key
WRITTEN: dict[str, tuple[int, int]] = {
    "--attention-softmax-in-fp32": (CASTS + 4 * 4, CASTS + 3 * 4),  # mask and softmax
    "--attn-logit-softcapping 30": (CASTS + 10 * 4, CASTS + 6 * 4),  # division, tanh and product too
    # words are drawn and compared; the mask multiplies, and the scale
    "--attention-dropout 0.1": (CASTS + 4 * 4 + 4 + 5 + 9, CASTS + 3 * 4 + 9),
}


def works_of(flags: str, num_ranks: int = 1) -> dict[tuple[Op, bool], AttentionWork]:
    """Return the attention of a layer, by op and whether a backward computes it again."""
    plan = plan_for([*FLAGS.split(), *flags.split()], num_ranks)
    works = layer_trace(plan.model.layers[0], plan.shape).attention
    assert len({(each.op, each.again) for each in works}) == len(works)
    return {(each.op, each.again): each for each in works}


@pytest.mark.parametrize("flags", FUSED)
def test_a_fused_kernel_has_the_flops_of_the_keys_that_are_seen(flags: str) -> None:
    kernel, seen, ranks = FUSED[flags]
    ((place, work),) = works_of(flags, 2 if CP in flags else 1).items()
    queries = ROWS // 2 if CP in flags else ROWS
    assert place == (Op.F, False) and (work.kernel, work.head_size, work.moved_bytes) == (kernel, SIZE, 0)
    assert work.keys == seen / ranks and work.flops == pytest.approx(4 * queries * seen * SIZE, rel=1e-12)


@pytest.mark.parametrize("flags", WRITTEN)
def test_written_out_attention_multiplies_and_moves_whole_matrices(flags: str) -> None:
    works, (there, back) = works_of(flags), WRITTEN[flags]
    forward, backward = works.pop((Op.F, False)), works.pop((Op.I, False))
    assert not works and forward.kernel == backward.kernel == "" and forward.keys == SEQ
    assert (forward.flops, backward.flops) == (4 * ROWS * SEQ * SIZE, 8 * ROWS * SEQ * SIZE)
    assert (forward.moved_bytes, backward.moved_bytes) == (there * ROWS * SEQ, back * ROWS * SEQ)


def test_blocks_of_a_ring_are_written_out_whole() -> None:
    works = works_of(f"{CP} --attn-logit-softcapping 30", 2)
    # of four blocks of half a sequence on half a rank's queries, a rank computes three, and the causal one in full
    assert works[Op.F, False].flops == 4 * (ROWS // 2) * SEQ * SIZE * 3 / 4
    assert works[Op.I, False].flops == works[Op.F, False].flops * 5 / 2  # it computes the probabilities again


@pytest.mark.parametrize(("flags", "times"), [("", 1), ("--recompute-keep-attention", 0)])
def test_a_backward_repeats_the_attention_of_its_recompute(flags: str, times: int) -> None:
    full = f"--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 {flags}"
    works = works_of(full)
    again = [work.flops for (_, again), work in works.items() if again]
    assert again == [works[Op.F, False].flops] * times


def test_the_messages_of_a_recompute_are_of_the_element_that_runs_again() -> None:
    words = f"{FLAGS} {CP} --cp-comm-type a2a --recompute-granularity selective --recompute-modules core_attn"
    plan = plan_for(words.split(), 2)
    again = [each for each in layer_trace(plan.model.layers[0], plan.shape).messages if each.again]
    assert {(each.name, each.group) for each in again} == {("core_attention", "cp")}


def test_the_backward_of_an_extension_multiplies_its_forward_again() -> None:
    file = Path(__file__).parents[2] / "examples" / "extend_layer.py"
    works = works_of(f"--extension {file} --attention-kind sigmoid")
    sys.modules.pop("extend_layer", None)
    assert works[Op.I, False].flops == 3 * works[Op.F, False].flops == 12 * ROWS * SEQ * SIZE
