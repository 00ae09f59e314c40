"""Whether a plan fits, and that what is said to fit does."""

from __future__ import annotations

import json
import shlex

import pytest

from megapipe.assembly.datasets import with_vocabulary
from megapipe.config.load import load_config
from megapipe.extras.cli.plan import main as plan_command
from megapipe.extras.search.fit import Fit, with_remedies
from megapipe.plan.hardware import hardware_named
from megapipe.plan.resolve import resolve
from tests.extras.migrate.public_scripts import public_scripts

MODEL = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --seq-length 8192 "
    "--max-position-embeddings 8192 --vocab-size 128256 --swiglu --bf16 --global-batch-size 128 --micro-batch-size 1 "
    "--hidden-dropout 0 --attention-dropout 0 --untie-embeddings-and-output-weights --device cuda"
)
LLAMA = next(script for script in public_scripts() if script.name == "nvidia_llama3_8b_fp8")


def planned(flags: str, ranks: int, gpu: str = "h100") -> Fit:
    config = with_vocabulary(load_config(shlex.split(flags), is_job=False).config)
    hardware = hardware_named(gpu)
    return with_remedies(config, resolve(config, ranks, min(ranks, hardware.ranks_per_node)), hardware)


@pytest.mark.parametrize(
    ("flags", "ranks", "gpu"),
    [
        (" ".join(LLAMA.flags), 8, "h100"),
        (MODEL, 8, "h100"),
        (f"{MODEL} --use-distributed-optimizer --micro-batch-size 4", 8, "a100-80"),
        (f"{MODEL} --tensor-model-parallel-size 8 --sequence-parallel", 8, "rtx-4090"),
    ],
    ids=["nvidia_llama3_8b_fp8", "no_optimizer_shards", "large_microbatch", "small_gpu"],
)
def test_every_remedy_fits_where_it_is_planned(flags: str, ranks: int, gpu: str) -> None:
    fit = planned(flags, ranks, gpu)
    assert not fit.fits and fit.remedies
    for more, remedy, seconds in fit.remedies:
        again = planned(f"{flags} {more}", remedy.world_size, gpu)
        assert again.fits and again.needed_bytes == remedy.needed_bytes and seconds > 0
    sizes = [remedy.world_size for _, remedy, _ in fit.remedies]
    assert sizes == sorted(sizes)


def test_more_ranks_are_a_remedy_where_no_change_on_as_many_fits() -> None:
    fit = planned(f"{MODEL} --use-distributed-optimizer", 1)
    assert {remedy.world_size for _, remedy, _ in fit.remedies} == {8}


def test_a_plan_that_fits_has_what_is_left() -> None:
    fit = planned(MODEL, 8, "b300")
    assert fit.fits and fit.remedies == ()
    (line,) = fit.lines()
    assert line.startswith("fits") and "left" in line


def test_the_command_says_whether_it_fits_and_its_exit_code_too(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*shlex.split(" ".join(LLAMA.flags)), "--world-size", "8"]
    assert plan_command(["--gpu", "h100", *flags]) == 1
    out = capsys.readouterr().out
    assert "DOES NOT FIT" in out and "fits with --tensor-model-parallel-size 2" in out
    assert plan_command(["--gpu", "b200", *flags]) == 0
    assert "fits: pp_rank 0" in capsys.readouterr().out
    assert plan_command(["--gpu", "h100", "--json", *flags]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["fits"] is False and data["needed_bytes"] > data["usable_bytes"] and data["step_seconds"] > 0
    assert all(remedy["needed_bytes"] <= data["usable_bytes"] for remedy in data["would_fit"])


SHARING = f"{MODEL} --num-layers 2 --world-size 8 --pipeline-model-parallel-size 2 --use-distributed-optimizer".split()


def test_ranks_that_share_a_gpu_fit_into_their_part_of_it_and_no_times_are_predicted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    alone = plan_command(["--gpu", "h100", *SHARING])
    assert alone == 0 and "predicted" in (own := capsys.readouterr().out)
    codes = {ranks: plan_command(["--gpu", "h100", "--ranks-per-gpu", str(ranks), *SHARING]) for ranks in (1, 8)}
    out = capsys.readouterr().out
    assert codes == {1: 0, 8: 1} and "1/8 of h100" in out
    assert "predicted" not in out and "DOES NOT FIT" in out and "step" in own
