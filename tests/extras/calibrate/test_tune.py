"""`megapipe calibrate --tune` keeps what is faster, varies only what is free, and writes a file that --tuned reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from megapipe.assembly.datasets import planned
from megapipe.config.load import load_config
from megapipe.config.tuned import read_tuned
from megapipe.errors import MegapipeError
from megapipe.extras.calibrate import tune
from megapipe.extras.calibrate.tune import (
    CARVEOUT,
    CHUNKS,
    DEPTH,
    NCCL,
    OVERLAP,
    Settings,
    choices,
    flags_of,
    search,
)
from megapipe.extras.cli.calibrate import calibrate
from tests.tiny import TINY_FLAGS

RUN = [*TINY_FLAGS, "--global-batch-size", "4", "--train-iters", "9", "--mock-data"]


def decisions(flags: Sequence[str], num_ranks: int, is_gpu: bool) -> list[tuple[Settings, ...]]:
    loaded = load_config([*RUN, *flags])
    return list(choices(planned(loaded, num_ranks, None), loaded, is_gpu))


def test_only_what_the_grid_has_and_the_user_left_open_is_varied() -> None:
    pp, tp = ["--pipeline-model-parallel-size", "2"], ["--tensor-model-parallel-size", "2"]
    assert decisions([], 1, True) == []
    assert decisions(pp, 2, False) == [tuple({DEPTH: depth} for depth in (1, 2, 3, 4))]
    assert decisions([*pp, "--pipeline-receive-depth", "2"], 2, False) == []
    found = decisions(tp, 2, False)
    assert found == [({OVERLAP: False}, {OVERLAP: True, CHUNKS: 2}, {OVERLAP: True, CHUNKS: 4})]
    keys = [{key for each in decision for key in each} for decision in decisions([*tp, *pp], 4, True)]
    assert keys == [{DEPTH}, {OVERLAP, CHUNKS}, {NCCL}, {CARVEOUT}]


def test_the_fastest_is_kept_and_noise_changes_nothing() -> None:
    asked: list[Settings] = []

    def measure(settings: Settings) -> list[float]:
        asked.append(settings)
        faster = {1: 1.0, 2: 0.5, 3: 0.7}[settings.get(DEPTH, 1)]
        return [faster * (0.99 if settings.get(OVERLAP) else 1.0)] * 3

    both: list[tuple[Settings, ...]] = [({DEPTH: 2}, {DEPTH: 3}), ({OVERLAP: True},)]
    chosen, figures = search(iter(both), measure)
    assert chosen == {DEPTH: 2}, "1 % is not more than noise"
    both_ways = {DEPTH: 2, OVERLAP: True}
    assert [figure.settings for figure in figures] == [{}, {DEPTH: 2}, {DEPTH: 3}, {DEPTH: 2}, both_ways]
    assert asked[:6] == [{}, {DEPTH: 2}, {DEPTH: 3}, {DEPTH: 3}, {DEPTH: 2}, {}], "in order, then in reverse"
    assert all(len(figure.step_seconds) == 6 for figure in figures)


def test_flags_of_settings() -> None:
    settings = {DEPTH: 2, OVERLAP: False, NCCL: ["NCCL_A=1", "NCCL_B=2"]}
    assert flags_of(settings) == (
        ["--pipeline-receive-depth", "2", "--no-tp-comm-overlap", "--nccl-settings", "NCCL_A=1", "NCCL_B=2"]
    )


def test_a_run_that_fails_is_shown() -> None:
    with pytest.raises(MegapipeError, match=r"the run with --pipeline-receive-depth 3 failed:\n[^~]*--num-layers"):
        tune.measured_run(["--num-layers", "none"], 1, 1)({DEPTH: 3})


def test_the_file_is_read_by_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tune, "measured_run", lambda *_: lambda settings: [0.5 if settings.get(DEPTH) == 3 else 1.0] * 2
    )
    file, pp = tmp_path / "tuned.yaml", ["--pipeline-model-parallel-size", "2"]
    words = ["--tune", "--nproc-per-node", "2", "--output", str(file)]
    assert calibrate([*words, *RUN, *pp]) == 0
    tuned = read_tuned(str(file))
    assert tuned.device == "cpu" and tuned.settings == {DEPTH: 3}
    assert len(tuned.measured["steps"]) == 5 and tuned.measured["versions"]["torch"]
    loaded = load_config([*RUN, *pp, "--tuned", str(file)])
    assert planned(loaded, 2, None).config.parallel.pipeline_receive_depth == 3
    assert calibrate([*words, *RUN, *pp]) == 2, "never overwritten"
    assert calibrate(["--tune", "--nproc-per-node", "1", "--output", str(tmp_path / "x"), *RUN]) == 2, "nothing to tune"


@pytest.mark.timeout(600)
def test_receive_depth_is_measured_in_real_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "choices", lambda *_: iter([({DEPTH: 1},)]))
    file = tmp_path / "tuned.yaml"
    words = ["--tune", "--nproc-per-node", "2", "--steps", "2", "--output", str(file)]
    assert calibrate([*words, *RUN, "--pipeline-model-parallel-size", "2"]) == 0
    steps = read_tuned(str(file)).measured["steps"]
    assert [len(each["step_seconds"]) for each in steps] == [4, 4]
    assert all(seconds > 0 for each in steps for seconds in each["step_seconds"])
