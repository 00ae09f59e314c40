"""Compare predicted steps of mixtures of experts with published ones.

python -m tools.expert_accuracy

Prints every row of tests/extras/search/published_experts.py: published and predicted tokens per second and GPU, the
share of all-to-alls in the predicted step, and how much rows of parts, in which they overlap with computation, take off
the simulated schedule. Nothing is fitted to these rows. Rows in fp8 are predicted in bf16, and have no error.
"""

from __future__ import annotations

import math

from megapipe.formatting import text_table
from megapipe.plan.expert_overlap import measure_overlap
from megapipe.plan.step_time import predict_step
from tests.extras.search.published_experts import ROWS, published_expert_runs


def main() -> None:
    table = [("source", "run", "published", "predicted", "predicted / published time", "ep", "overlap saves")]
    errors = []
    for row, run in zip(ROWS, published_expert_runs(), strict=True):
        plan = run.plan()
        time = predict_step(plan, run.hardware)
        measures = measure_overlap(plan, run.hardware)
        saved = "-" if measures is None else f"{1 - measures.step_seconds / measures.serial_seconds:.0%}"
        ratio = f"{time.seconds / run.seconds:.2f}"
        if row.dtype == "bf16":
            errors.append(math.log(time.seconds / run.seconds))
        else:
            ratio = f"({ratio}: bf16 to {row.dtype})"
        tokens = f"{row.tokens:,.0f}", f"{time.tokens_per_second / row.gpus:,.0f}"
        table.append((row.source, run.name, *tokens, ratio, f"{time.parts['ep'] / time.seconds:.0%}", saved))
    print("\n".join(text_table(table, left=(0, 1))))
    bias, rms = sum(errors) / len(errors), math.sqrt(sum(error**2 for error in errors) / len(errors))
    print(f"bf16: {len(errors)} rows, bias {math.exp(bias) - 1:+.1%}, rms {rms:.1%} of log(predicted / published)")


if __name__ == "__main__":
    main()
