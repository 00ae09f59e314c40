"""Configurations of most kinds take two steps on the fake device: right devices and dtypes, no waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.extras.dry_run.test_planned import BASES, CASES, ranks_at_ends
from tests.fake_cuda.mistakes import PLANTED, PLANTED_IN_DISPATCH

pytestmark = pytest.mark.timeout(300)
Run = Callable[..., Any]
# a case for each piece of code that allocates, copies or reads; schedules and recompute, which add none, are checked
# for races (test_streams.py, test_recipes.py)
NAMES = """
    one_rank bf16 probabilities_dropped logits_capped documents_bf16 cp2_sinks_window
    experts_dp2_zero1_bf16 experts_padded_dp2_bf16 experts_pp2_zb_h1 experts_once_to_a_node_added_there
    predictions_sp2_pp2_zb_h1 predictions_experts_pp2 cp2_p2p cp2_a2a_zb_h1_bf16 cp4_all_gather_sp2_bf16
    zero2_pp2_bf16 zero3_units_tied_bf16 dp2_reduce_in_bf16 sp2_in_chunks_bf16 pp2_tied dualpipe_v
    offload_sp2_pp2 narrow_state_dp2_zero1 update_in_chunks update_by_sgd slices_zb_v_full_bf16
    fp8_zb_h1_sp2 fp8_blocks_experts_sp2_pp2 mxfp8_zb_h1_sp2 full_but_attention_sp2 pipedream fp8_2bw_pp2
""".split()
# what the host reads in a step, once its row is launched: the loss, and the norm with the health of all ranks
HOST_READS = {"train/step.py:wait", "optimizer/gradients.py:wait"}
NUMBERS_OF_ROWS = "model/dispatch.py:to_host"  # once in a layer whose experts take any number of rows


@pytest.mark.parametrize(
    ("name", "base"),
    [(name, ("gpt2", "llama")[index % 2]) for index, name in enumerate(CASES) if name in NAMES],
)
def test_two_steps_keep_to_the_device(name: str, base: str, run: Run) -> None:
    world_size, changes = CASES[name]
    pp, tp = (changes.get(f"{axis}_model_parallel_size", 1) for axis in ("pipeline", "tensor"))
    num_microbatches = 2 * pp if pp > 1 else 1
    num_layers = 8 if pp == 4 or ("moe_layer_freq" in changes and "[" in (changes["moe_layer_freq"] or "")) else 4
    few = {"global_batch_size": 2 * num_microbatches * world_size // (pp * tp), "num_layers": num_layers}
    seen = run(world_size, ranks_at_ends(pp, world_size)[-1], few | changes, BASES[base])
    assert not seen.error, seen.error
    assert not seen.mixed_devices and not seen.pageable_copies
    takes_any = "num_experts" in changes and "moe_pad_expert_input_to_capacity" not in changes
    assert set(seen.host_reads) <= HOST_READS | ({NUMBERS_OF_ROWS} if takes_any else set())
    if changes.get("dtype") == "bf16" and "fp8_format" not in changes:
        assert set(seen.product_dtypes) == {"bfloat16 bfloat16"}


def is_of_two_devices(error: str) -> bool:
    """Return True if an error of tensors without values is about two devices, in the words of torch 2.13 or 2.11."""
    return "same device" in error or "two different devices" in error


TINY = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "ffn_hidden_size": 64, "global_batch_size": 2}


@pytest.mark.parametrize("name", PLANTED_IN_DISPATCH)
def test_a_planted_mistake_in_dispatch_is_found(name: str, run: Run) -> None:
    changes = TINY | {"dtype": "bf16", "num_experts": 4}
    right, wrong = (run(1, 0, changes, BASES["llama"], plant) for plant in ("", name))
    assert not right.error and set(right.host_reads) <= {*HOST_READS, NUMBERS_OF_ROWS} and not right.mixed_devices
    found = {
        "host_reads_a_load": not set(wrong.host_reads) <= {*HOST_READS, NUMBERS_OF_ROWS},
        "index_on_the_host": wrong.mixed_devices or is_of_two_devices(wrong.error),
        "rows_counted_by_values": "DynamicOutputShapeException" in wrong.error,
    }
    assert found[name], wrong


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found(name: str, run: Run) -> None:
    changes = TINY | {"dtype": "bf16"}
    right, wrong = (run(1, 0, changes, BASES["llama"], plant) for plant in ("", name))
    assert not right.error and set(right.host_reads) <= HOST_READS and not right.pageable_copies
    found = {
        "wrong_device": is_of_two_devices(wrong.error),
        "host_read": not set(wrong.host_reads) <= HOST_READS,
        "extra_kernel": sum(wrong.kernels.values()) > sum(right.kernels.values()) and not wrong.error,
        "pageable_copy": bool(wrong.pageable_copies),
        "mixed_dtype": set(wrong.product_dtypes) > {"bfloat16 bfloat16"},
    }
    assert found[name], wrong
