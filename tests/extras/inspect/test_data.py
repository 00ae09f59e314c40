"""`megapipe inspect data` prints what the loader returns: every token of every microbatch.

Covers blends, batch-size ramp-up and skipped windows.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapipe.assembly.datasets import build_data
from megapipe.checkpoint.save import Extras, save_checkpoint
from megapipe.data.dataset import SkippedSamples
from megapipe.data.indexed_file import IndexedFile
from megapipe.extras.cli.inspect import data as main
from megapipe.extras.inspect.data import read_run
from tests.checkpoint.layouts import WORLD
from tests.token_files import IndexedWriter

SEQ = 16
FLAGS = (
    f"--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length {SEQ} --vocab-size 4000 "
    "--micro-batch-size 2 "
    "--world-size 2 "
    "--rampup-batch-size 4 4 12 --global-batch-size 12 --train-samples 100 --lr 1e-3 --eval-iters 0 "
    "--num-workers 0 --split 100,0,0"
)
WINDOWS = [[10, 20], [41, 47]]


def files(folder: Path) -> list[Path]:
    """Write two files of documents of one to three sequences, some of them empty; every token occurs once."""
    random, token, prefixes = np.random.default_rng(0), 0, []
    for name, count in (("a", 60), ("b", 25)):
        with IndexedWriter(folder / name, "<u2") as writer:
            for _ in range(count):
                lengths = random.integers(0, 30, random.integers(1, 4)).tolist()
                writer.add_document(np.arange(token, token + sum(lengths)), lengths)
                token += sum(lengths)
        prefixes.append(folder / name)
    return prefixes


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    first, second = files(folder)
    state = {
        "training": {"step": 2, "consumed_samples": 8, "consumed_tokens": 8 * SEQ, "skipped_steps": 0},
        "account": {"skipped_samples": WINDOWS, "rollbacks": 0, "discarded_samples": 0, "discarded_tokens": 0},
    }
    save_checkpoint(folder / "run", 2, [], Extras(state, ""), WORLD)
    return [*FLAGS.split(), "--data-path", "0.7", str(first), "0.3", str(second), "--save", str(folder / "run")]


def inspected(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def tokens(pieces: list[dict[str, Any]]) -> list[int]:
    """Read the tokens from the files, document by document."""
    found: list[int] = []
    for piece in pieces:
        file = IndexedFile(piece["prefix"])
        whole = np.concatenate(
            [file.read(s) for s in range(file.documents[piece["document"]], file.documents[piece["document"] + 1])]
        )
        assert piece["position"] == len(found)
        found += whole[piece["first_token"] : piece["past_token"]].tolist()
    return found


def test_every_token_of_every_step_and_every_step_of_every_document(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = read_run(flags).plan
    loader = build_data(plan).train
    assert loader is not None
    loader.skip(SkippedSamples.of(WINDOWS), 100)
    seen: dict[tuple[str, int], set[int]] = {}
    consumed, taken, sizes = 0, [], []
    assert plan.config.training.train_iters is not None
    for step in range(1, plan.config.training.train_iters + 1):
        found = inspected(capsys, "--step", str(step), *flags)
        assert found["consumed_samples"] == consumed
        sizes.append(plan.batch.size_at(consumed))
        assert len(found["microbatches"]) == 2 * plan.batch.num_microbatches_at(consumed)
        for part in found["microbatches"]:
            batch = loader.microbatch(consumed, part["microbatch"], part["dp_rank"], 2, 2)
            assert [one["sample"] for one in part["samples"]] == list(batch.sample_ids)
            for row, one in enumerate(part["samples"]):
                assert tokens(one["pieces"]) == [*batch.tokens[row].tolist(), batch.labels[row, -1]]
                taken.append(one["sample"])
                for piece in one["pieces"]:
                    seen.setdefault((piece["prefix"], piece["document"]), set()).add(step)
        consumed += plan.batch.size_at(consumed)
    assert len(set(sizes)) == 3, "the ramp is missing"
    assert sorted(taken) == [i for i in range(len(taken) + 16) if not (10 <= i < 20 or 41 <= i < 47)]
    for prefix, document in [*list(seen)[::7], (flags[flags.index("0.3") + 1], 3)]:
        found = inspected(capsys, "--document", str(document), "--in", prefix, *flags)
        steps = {one["step"] for one in found["samples"] if "step" in one}
        assert steps == seen.get((prefix, document), set())


def test_a_sample_names_its_step_and_rank_or_that_it_is_skipped(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspected(capsys, "--sample", "15", *flags)["skipped"]
    found = inspected(capsys, "--sample", "20", *flags)
    # number 10: steps of 4, 4, then 8 samples
    assert (found["step"], found["microbatch"], found["dp_rank"]) == (3, 0, 1)
    # all its epoch, no checkpoint
    alone = [*flags[: flags.index("--data-path")], "--data-path", flags[flags.index("0.3") - 1]]
    assert inspected(capsys, "--sample", "110", *alone)["not_reached"]
    assert main(["--step", "3", "--text", "2", *flags]) == 0
    shown = capsys.readouterr().out
    assert "microbatch 0 of dp rank 1\n  sample 20\n" in shown


def test_unanswerable_questions_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in {
        ("--step", "99"): "the steps of this run are 1 to",
        ("--sample", "100000"): "the training data has",
        ("--document", "3"): "belongs to several files: give --in PREFIX",
        ("--step", "1", "--dataloader-type", "cyclic"): "only the samples of --dataloader-type single",
        ("--document", "99999", "--in", flags[flags.index("0.3") + 1]): "has 25",
    }.items():
        assert main([*words, *flags]) == 2
        assert message in capsys.readouterr().err


def test_it_does_not_import_torch(flags: list[str]) -> None:
    code = (
        "import sys; from megapipe.extras.cli.inspect import data; "
        f"data({['--step', '1', *flags]!r}); sys.exit('torch' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[3],
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("step 1, after 0 samples")
