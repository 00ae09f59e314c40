"""Configurations of most kinds take two steps on the fake device: right devices and dtypes, no waits, planned bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.extras.dry_run.test_planned import BASES, CASES, STATE, ranks_at_ends
from tests.fake_cuda import device

pytestmark = pytest.mark.timeout(300)
Run = Callable[..., Any]
CLOSE = 0.06  # of models of four layers; what is planned roughly weighs more than in the eight of test_planned
# what the host reads in a step, once its row is launched: the loss, and the norm with the health of all ranks
# torch has no fused fp64 attention on CUDA; torch.compile needs values; torch.tensor (of scales) needs a driver
NOT_HERE = ("fp64", "fp8_casts_compiled", *(name for name in CASES if name.startswith(("narrow", "update"))))
HOST_READS = {"train/step.py:wait", "optimizer/gradient_norm.py:wait"}


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs steps in one process that has the fake device: (world_size, rank, changes, base) -> `steps.Seen`."""
    why = device.missing()
    if why is not None:
        pytest.skip(f"no fake CUDA device: {why}")
    command = [sys.executable, "-m", "tests.fake_cuda.steps", str(device.build())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        asked, answers = process.stdin, process.stdout
        assert asked is not None and answers is not None

        def ask(*arguments: Any) -> Any:
            print(json.dumps(arguments), file=asked, flush=True)
            line = answers.readline()
            assert line, "the process with the fake device has died"
            return SimpleNamespace(**json.loads(line))

        yield ask
        asked.close()


@pytest.mark.parametrize("base", ["gpt2", "llama"])
@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_HERE])
def test_two_steps_keep_to_the_device(name: str, base: str, run: Run) -> None:
    world_size, changes = CASES[name]
    pp, tp = (changes.get(f"{axis}_model_parallel_size", 1) for axis in ("pipeline", "tensor"))
    num_microbatches = 2 * pp if pp > 1 else 1
    few = {"global_batch_size": 2 * num_microbatches * world_size // (pp * tp), "num_layers": 8 if pp == 4 else 4}
    seen = run(world_size, ranks_at_ends(pp, world_size)[-1], few | changes, BASES[base])
    assert not seen.error, seen.error
    assert not seen.mixed_devices and not seen.pageable_copies
    assert set(seen.host_reads) <= HOST_READS
    assert {item: seen.counted_bytes[item] for item in STATE} == {item: seen.planned_bytes[item] for item in STATE}
    assert sum(seen.counted_bytes.values()) == pytest.approx(sum(seen.planned_bytes.values()), rel=CLOSE)
    if changes.get("dtype") == "bf16" and "fp8_format" not in changes:
        assert set(seen.product_dtypes) == {"bfloat16 bfloat16"}
