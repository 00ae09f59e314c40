"""Jobs with multi-token prediction: what they report, and that their checkpoints continue on any grid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megapipe.data.batch import Batch, DocumentRules
from tests.train.jobs import job

ROPE = "--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --train-iters 4"
MTP = f"{ROPE} --mtp-num-layers 2"
EOD = 9


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run(folder: Path, flags: str) -> list[dict[str, Any]]:
    code, said = job(f"{flags} --metrics-file {folder}/metrics.jsonl")
    assert code == 0, said
    return records(folder)


def test_losses_of_modules_are_reported_apart_from_the_loss(tmp_path: Path) -> None:
    """With factor 0 the model trains as it does without modules."""
    found = {}
    for name, flags in {"without": ROPE, "with": MTP, "zero": f"{MTP} --mtp-loss-scaling-factor 0"}.items():
        (tmp_path / name).mkdir()
        code, said = job(f"{flags} --eval-iters 1 --metrics-file {tmp_path / name}/metrics.jsonl")
        assert code == 0, said
        assert ("| mtp loss " in said) is (name != "without")
        found[name] = records(tmp_path / name)
    losses = {name: [record["loss"] for record in lines] for name, lines in found.items()}
    assert losses["with"][0] == losses["without"][0] and losses["with"][1:] != losses["without"][1:]
    assert losses["zero"] == losses["without"]
    for record in found["with"]:  # steps and evaluations
        assert len(record["mtp_losses"]) == 2 and all(3 < loss < 5 for loss in record["mtp_losses"])
    assert all("mtp_losses" not in record for record in found["without"])


def test_another_number_of_modules_is_refused_and_another_factor_is_not(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run(tmp_path / "run", f"{MTP} --save {tmp_path / 'saved'}")
    load = f"--load {tmp_path / 'saved'} --train-iters 5 --override-opt-param-scheduler"
    code, said = job(
        f"{MTP.replace('--train-iters 4', '')} {load} --mtp-num-layers 1".replace("--mtp-num-layers 2", "")
    )
    assert code != 0 and "--mtp-num-layers" in said and "2" in said
    code, said = job(f"{MTP.replace('--train-iters 4', '')} {load} --mtp-loss-scaling-factor 0.3")
    assert code == 0, said


@given(st.integers(1, 5), st.integers(2, 9), st.booleans(), st.integers(0, 2**32 - 1))
def test_a_module_takes_tokens_and_labels_of_its_position_and_counts_those_of_the_document(
    count: int, seq: int, masks_ends: bool, seed: int
) -> None:
    samples = np.random.default_rng(seed).integers(EOD - 3, EOD + 1, (2, seq + 1))
    batch = Batch.of(samples, (0, 1), DocumentRules(EOD, True, True, masks_ends))
    ahead = batch.ahead(count)
    assert ahead.loss_mask is not None and batch.document_ids is not None
    for row in range(2):
        for place in range(seq):
            is_there = place + count < seq
            same = is_there and EOD not in samples[row, place : place + count]
            trained = same and not (masks_ends and samples[row, place + count] == EOD)
            assert ahead.loss_mask[row, place] == float(trained)
            if is_there:
                assert ahead.tokens[row, place] == samples[row, place + count]
                assert ahead.labels[row, place] == samples[row, place + count + 1]
            else:
                assert ahead.tokens[row, place] == ahead.labels[row, place] == 0
