"""At the end of a step the host waits for the device once: loss and norm arrive in one copy to pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megapipe.gpu.streams import HostCopy
from megapipe.train.step import TrainStep
from tests.extras.dry_run.grids import LLAMA
from tests.train.jobs import job

pytestmark = pytest.mark.timeout(300)


def test_a_step_reads_no_tensor_of_the_device(run: Callable[..., Any]) -> None:
    seen = run(2, 0, {"tensor_model_parallel_size": 2, "dtype": "bf16", "global_batch_size": 2}, LLAMA)
    assert not seen.error, seen.error
    assert not seen.host_reads and not seen.pageable_copies


def test_a_step_waits_for_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    values, step, copies = HostCopy.values, TrainStep.run, [0]

    def waits(self: HostCopy) -> list[float]:
        copies[-1] += 1
        return values(self)

    def runs(self: TrainStep, *arguments: Any) -> Any:
        copies.append(0)
        result = step(self, *arguments)
        copies.append(0)
        return result

    monkeypatch.setattr(HostCopy, "values", waits)
    monkeypatch.setattr(TrainStep, "run", runs)
    code, said = job("--train-iters 3")
    assert code == 0, said
    assert copies[1::2] == [1, 1, 1]
