"""The published H100 rows: their shapes give the TFLOP/s that the sources print with the tokens per second."""

import math

import pytest

from megapipe.config.config import resolve_model
from megapipe.plan.hardware import TERA
from megapipe.plan.layer_costs import step_flops
from tests.extras.search.published_h100 import ROWS, mosaicml_attention_share, published_h100_runs

# (model, tokens/s and GPU) -> model TFLOP/s and GPU as printed with them
PRINTED = {
    ("GPT3-5B", 22521): 736,
    ("GPT3-20B", 5851): 750,
    ("GPT3-175B", 726): 782,
    ("GPT3-175B", 782): 842,
    ("LLAMA2-7B", 16847): 776,
    ("LLAMA2-13B", 8646): 754,
    ("LLAMA2-70B", 1707): 759,
    ("Nemotron-8B", 12701): 653,
    ("Nemotron-22B", 4256): 554,
    ("Nemotron-340B", 322): 678,
    ("LLAMA3-70B", 1602): 719,
    ("MPT-13b", 4717): 411.6,
    ("MPT-7b", 10643): 459.5,
    ("MPT-3b", 27046): 457.1,
    ("MPT-1b", 45455): 413.8,
    ("MPT-760m", 63147): 345.3,
}
CAUSAL = ("LLAMA3-70B",)  # Megatron Bridge counts attention causal, the others in full


@pytest.mark.parametrize(("model", "tokens"), PRINTED, ids=str)
def test_a_rows_shape_gives_the_printed_tflops(model: str, tokens: int) -> None:
    runs = zip(ROWS, published_h100_runs(), strict=True)
    row, run = next(pair for pair in runs if (pair[0].model, pair[0].tokens) == (model, tokens))
    flops = step_flops(resolve_model(run.config.model, row.tp), row.batch, causal=model in CAUSAL)
    assert flops / row.gpus / run.seconds / TERA == pytest.approx(PRINTED[model, tokens], rel=0.005)


def test_an_unseen_source_is_predicted_within_10_percent() -> None:
    """Check two sources in bf16 and fp8 with one row each of the cheapest to plan; the tool prints all rows."""
    runs = [run for run in published_h100_runs() if run.name.startswith("LLAMA") and run.num_gpus <= 8]
    assert {run.source for run in runs} == {"nvidia", "titan"}
    errors = [math.log(run.predicted_seconds() / run.seconds) for run in runs]
    assert math.sqrt(sum(error * error for error in errors) / len(errors)) < 0.1


def test_the_attention_of_mosaicml_is_slower_than_flash_attention_2() -> None:
    assert mosaicml_attention_share() == pytest.approx(0.175, abs=0.003)
