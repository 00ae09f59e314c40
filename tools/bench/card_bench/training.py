"""Whole training of Qwen2.5's 0.5B and 1.5B by pretrain, beside llmq's published tokens per second.

llmq: github.com/IST-DASLab/llmq, commit 7f895bd, benchmarks/H100x1.md, read on 28 November 2026; steps 3 to 5 in bf16
on one H100. It is C++ for one card and trains the same models with the same sequences and tokens a step, moments in
bf16, with CUDA graphs. The heading of that page names an RTX PRO 6000, whose own page (Pro6000x1.md) has 86k and 32k.
"""

from __future__ import annotations

import statistics

from card_bench.jobs import LLAMA, QWEN_05B, QWEN_15B, STEPS, TINY, plan_of, predicted, predicted_ms
from card_bench.processes import LOGGED, MEGAPIPE, steps_of
from card_bench.report import Report
from megapipe.plan.memory import rank_memory

LLMQ = {"train-0.5b": 149_000.0, "train-1.5b": 59_100.0}  # tokens a second
MODELS = {"train-0.5b": QWEN_05B, "train-1.5b": QWEN_15B}
STEP_SEQUENCES = 512  # of 1,024 tokens
MICRO_BATCHES = (32, 16, 8, 4, 2)  # llmq has 32
WARM_UPS, COUNTED = 1, 3
GIB = 1 << 30


def train_05b(report: Report) -> None:
    """Train Qwen2.5 0.5B for some steps of 524,288 tokens."""
    _train(report, "train-0.5b")


def train_15b(report: Report) -> None:
    """Train Qwen2.5 1.5B for some steps of 524,288 tokens."""
    _train(report, "train-1.5b")


def flags_of(report: Report, name: str) -> str:
    """Return the flags of the model and its batch: the largest microbatch that the plan fits into the card."""
    if not report.on_gpu:
        return f"{TINY} --add-qkv-bias --micro-batch-size 2 --global-batch-size 8"
    room = report.total_memory * 0.9
    for micro in MICRO_BATCHES:
        flags = f"{MODELS[name]} --micro-batch-size {micro} --global-batch-size {STEP_SEQUENCES}"
        if rank_memory(plan_of(report, flags), 0).total < room:
            return flags
    raise RuntimeError(f"the model does not fit into {room / GIB:.0f} GiB by its plan")


def _train(report: Report, name: str) -> None:
    flags = flags_of(report, name)
    plan = plan_of(report, flags)
    run = f"{LLAMA} --bf16 {STEPS} {flags} --device {report.device.type} --train-iters {WARM_UPS + COUNTED} {LOGGED}"
    words = [*MEGAPIPE, "pretrain", *run.split()]
    steps = steps_of(words)
    seconds = statistics.median(step["step_seconds"] for step in steps[WARM_UPS:])
    tokens = plan.batch.full * plan.config.model.seq_length
    estimate, peer = predicted(report, plan), LLMQ[name]
    expected = None if estimate is None else estimate.tokens_per_second
    report.figure("tokens a second", tokens / seconds, "", expected, ("llmq on one H100", peer))
    report.figure("micro batch size", plan.config.training.micro_batch_size, "sequences")
    report.figure("step", 1e3 * seconds, "ms", predicted_ms(report, plan))
    report.bar("tokens a second of llmq's", tokens / seconds, peer)
    held = max(step["memory_bytes"] or 0 for step in steps)
    if held:
        report.figure("memory", held / GIB, "GiB", rank_memory(plan, 0).total / GIB)
    report.say(f"{COUNTED} steps of {tokens:,} tokens after {WARM_UPS}; llmq keeps its moments in bf16")
