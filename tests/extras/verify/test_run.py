"""`--verify-grid` from the command line: exit codes, printed text and refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megapipe.environment import Environment
from megapipe.extras.cli.pretrain import main
from megapipe.extras.verify import parity
from megapipe.plan.resolve import resolve
from tests.extras.verify import planted
from tests.harness import RankPool
from tests.tiny import tiny_config

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 10 --lr 1e-3 --vocab-size 100 --mock-data --device cpu"
).split()


def exit_code(rank: int, world_size: int, plant: planted.Plant | None) -> int:
    """Return the exit code of verify() on this rank, without ending the harness's process."""
    environment = Environment(rank, world_size, rank, world_size, 1, 0, "127.0.0.1", 0, "torchrun")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "shutdown", lambda code: None)
        if plant is not None:
            plant(patch, rank)
        return parity.verify(resolve(tiny_config(), world_size), environment, "fp64")


@pytest.mark.parametrize(("plant", "code"), [(None, 0), (planted.one_rank_differs, 1)], ids=["same", "different"])
def test_every_rank_returns_the_exit_code(
    plant: planted.Plant | None, code: int, rank_pools: Callable[[int], RankPool]
) -> None:
    assert rank_pools(2).run(exit_code, plant) == [code, code]


@pytest.mark.parametrize("flag", [["--verify-grid"], ["--verify-grid", "native"]], ids=["fp64", "native"])
def test_one_rank_is_compared_too(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, *flag]) == 0
    printed = capsys.readouterr().out
    for words in (
        "kept",
        "shrunk   --hidden-size 64 -> 32",
        "replaced",
        "allowed",
        "loss plain",
        "same: loss, gradient norm",
    ):
        assert words in printed


def test_a_grid_that_does_not_fit_the_world_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--tensor-model-parallel-size", "2", "--verify-grid"]) == 2
    assert "a world of 1 ranks cannot hold tensor 2" in capsys.readouterr().err


def test_an_unknown_mode_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--verify-grid", "fp8"]) == 2
    assert "fp64" in capsys.readouterr().err
