"""Plans and jobs of one card from flags, and the steps that the planner predicts for them."""

from __future__ import annotations

from card_bench.contenders import Job
from card_bench.report import Report
from megapipe.config.load import load_config
from megapipe.errors import MegapipeError
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import StepTime, predict_step

LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear "
    "--hidden-dropout 0 --attention-dropout 0"
)
EAGER_BLOCKS = "--compile-blocks off"
STEPS = "--lr 1e-4 --train-iters 1000 --mock-data --eval-iters 0"
TINY = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128"
QWEN = "--group-query-attention --num-query-groups 2 --add-qkv-bias --rotary-base 1000000 --vocab-size 151936"
QWEN_05B = (  # of Qwen/Qwen2.5-0.5B and 1.5B, config.json
    f"--num-layers 24 --hidden-size 896 --ffn-hidden-size 4864 --num-attention-heads 14 --seq-length 1024 {QWEN}"
)
QWEN_15B = (
    f"--num-layers 28 --hidden-size 1536 --ffn-hidden-size 8960 --num-attention-heads 12 --seq-length 1024 {QWEN}"
)

OF_8B = (
    "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--vocab-size 32768 --untie-embeddings-and-output-weights"
)
OF_2048 = "--seq-length 2048 --vocab-size 32768 --untie-embeddings-and-output-weights"
SHAPES = {  # of --shape; the layers of 8B that fit one card
    "tiny": f"{TINY} --hidden-size 128 --ffn-hidden-size 256 --group-query-attention --num-query-groups 2 "
    "--untie-embeddings-and-output-weights --micro-batch-size 2 --global-batch-size 4",
    "125m": "--num-layers 12 --hidden-size 768 --ffn-hidden-size 2048 --num-attention-heads 12 "
    f"--micro-batch-size 16 --global-batch-size 32 {OF_2048}",
    "350m": "--num-layers 24 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 "
    f"--micro-batch-size 8 --global-batch-size 16 {OF_2048}",
    "1.3b": "--num-layers 24 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 "
    f"--micro-batch-size 4 --global-batch-size 8 {OF_2048}",
    "8b-4k": f"--num-layers 4 {OF_8B} --seq-length 4096 --micro-batch-size 2 --global-batch-size 8",
    "8b-8k": f"--num-layers 4 {OF_8B} --seq-length 8192 --micro-batch-size 1 --global-batch-size 4",
}


def plan_of(report: Report, flags: str, *more: str) -> RunPlan:
    """Return the plan of one rank in bf16. flags, more: of the model, after `LLAMA` and `STEPS`."""
    words = f"{LLAMA} {STEPS} --device {report.device.type} {flags} {' '.join(more)}".split()
    words += [] if "--dtype" in words else ["--bf16"]
    return resolve(load_config(words).config, 1)


def job_of(report: Report, flags: str, *more: str) -> Job:
    return Job(plan_of(report, flags, *more), report.device)


def predicted(report: Report, plan: RunPlan) -> StepTime | None:
    """Return the planner's step; None without a data sheet of the device, or of its dtype."""
    if report.hardware is None:
        return None
    try:
        return predict_step(plan, report.hardware)
    except MegapipeError:
        return None


def predicted_ms(report: Report, plan: RunPlan, part: str | None = None) -> float | None:
    """Return the milliseconds of the planner's step, or of one of its parts."""
    estimate = predicted(report, plan)
    return None if estimate is None else 1e3 * (estimate.seconds if part is None else estimate.parts[part])
