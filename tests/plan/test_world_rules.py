"""Errors of the schedule and of the number of ranks: all at once, and never in place of what is really wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapipe.config.load import load_config
from megapipe.errors import ConfigError
from megapipe.plan.resolve import resolve
from megapipe.plan.world_rules import world_rules
from tests.config.examples import job as job_flags
from tests.tables import rows
from tests.tiny import small_config
from tests.train.jobs import job

CASES = rows(Path(__file__).with_name("broken_rules.tsv"))


@pytest.mark.parametrize(("world_size", "flags", "named"), CASES, ids=[f"{case[1]} on {case[0]}" for case in CASES])
def test_a_broken_rule_is_named(world_size: str, flags: str, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(load_config(job_flags(flags)).config, int(world_size))
    assert any(all(word in line for word in named.split(" & ")) for line in str(error.value).splitlines())


def lines(flags: str, world_size: int) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config(job_flags(flags), more=lambda _: world_rules(world_size, 8))
    return str(error.value).splitlines()


def test_errors_of_the_schedule_and_of_the_ranks_are_among_all_others() -> None:
    found = lines(
        "--seed -1 --no-such-flag --min-lr 7 --pipeline-model-parallel-size 3 --pipeline-schedule gpipe "
        "--num-virtual-stages-per-pipeline-rank 2 --pipeline-rank-memory 1 2",
        8,
    )
    starts = (
        "--seed -1: expected",
        "unknown flag --no-such-flag",
        "--min-lr 7 is above --lr",
        "--pipeline-schedule gpipe runs one chunk per rank, but 2",
        "--pipeline-rank-memory names 2 ranks",
        "a world of 8 ranks cannot hold tensor 1 x context 1 x pipeline 3",
    )
    assert len(found) == len(starts), found
    for line, start in zip(found, starts, strict=True):
        assert line.startswith(start), (line, start)


def test_ranks_are_not_judged_by_values_that_could_not_be_read() -> None:
    assert len(lines("--pipeline-model-parallel-size two", 3)) == 1


def test_what_resolve_refuses_is_told_at_once_too() -> None:
    changes = {"tensor_model_parallel_size": 3, "pipeline_model_parallel_size": 16}
    with pytest.raises(ConfigError) as error:
        resolve(small_config(**changes), 8)
    found = str(error.value)
    for part in ("--num-attention-heads 8", "--num-layers 8 is fewer than 16 pipeline ranks", "a world of 8 ranks"):
        assert part in found


def test_layers_placed_in_two_ways_are_told_once() -> None:
    flags = "--decoder-first-pipeline-num-layers 1 --account-for-loss-in-pipeline-split"
    (found,) = lines(f"--pipeline-model-parallel-size 2 {flags}", 8)
    assert found.startswith("--decoder-first-pipeline-num-layers and --account-for-loss-in-pipeline-split both")


def test_another_model_than_the_checkpoints_is_not_hidden_by_what_follows_from_it(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert job(f"--train-iters 1 --save {root}")[0] == 0
    code, said = job(f"--num-layers 3 --pipeline-balance even --load {root} --train-iters 2 --plan --world-size 3")
    assert code == 2
    assert "a world of 3" not in said  # dp 3 with 8 sequences is what is refused
    assert "--global-batch-size 8" in said
    assert "--num-layers: 4 in the checkpoint, 3 here" in said
    code, said = job(f"--num-layers 3 --load {root} --train-iters 2 --seed -1")
    assert "--num-layers: 4 in the checkpoint, 3 here" in said
    code, said = job(f"--load {root} --train-iters 2 --plan --world-size 3")
    assert code == 2
    assert "in the checkpoint" not in said
