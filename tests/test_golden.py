"""Golden files of every kind that a user may have on disk.

They were written by an earlier version (golden/make.sh) and are still read correctly.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megapipe.config.config import Config
from megapipe.config.yaml_file import to_yaml

REPOSITORY = Path(__file__).resolve().parents[1]
GOLDEN = REPOSITORY / "tests" / "golden"
MODEL = (
    "--num-layers 4 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --group-query-attention "
    "--num-query-groups 1 --seq-length 16 --normalization RMSNorm --swiglu --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0.1"
).split()
DATA = "--data-path corpus_text_document --split 8,2,0 --data-cache-path cache --tokenizer-type ByteTokenizer".split()
TRAINING = (
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --lr-warmup-iters 2 --lr-decay-style cosine --eval-iters 1 "
    "--eval-interval 6 --log-interval 1 --seed 7 --device cpu"
).split()
SCHEDULES = {"1f1b": [], "interleaved": ["-v", "2"], "zb-v": ["-v", "2"], "dualpipe": []}


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """Copy the golden files to a folder that a test may write to."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "golden"))


def run(folder: Path, *words: str, code: int = 0) -> str:
    """Run `python WORDS` in `folder` and return its standard output."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == code, ended.stderr
    return ended.stdout


def megapipe(folder: Path, *words: str) -> str:
    return run(folder, "-m", "megapipe", *words)


def pretrain(folder: Path, *words: str) -> str:
    return run(folder, str(REPOSITORY / "pretrain_gpt.py"), *MODEL, *DATA, *TRAINING, *words)


REMOVED_KEYS, ADDED_KEYS = {"rolled_back_steps"}, {"norm_before"}  # of features that are gone, and of new ones


def steps(file: Path) -> dict[int, dict[str, Any]]:
    """Return the last row of each step in a metrics file."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["step"]: row for row in rows if row["kind"] == "step"}


def test_a_sharded_checkpoint_continues_as_it_did(golden: Path) -> None:
    words = "--train-iters 6 --bf16 --use-distributed-optimizer --load sharded --save again".split()
    pretrain(golden, *words)
    before, after = steps(golden / "continued" / "metrics.jsonl"), steps(golden / "again" / "metrics.jsonl")
    assert sorted(after) == [4, 5, 6]
    for step, row in after.items():
        assert set(row) == set(before[step]) - REMOVED_KEYS | ADDED_KEYS, "the keys of metrics.jsonl are frozen"
        # one process instead of two ranks: bf16 gradients are summed in another order
        assert row["loss"] == pytest.approx(before[step]["loss"], rel=5e-3)
        assert row["lr"] == before[step]["lr"]


def test_a_run_resumes_after_its_rollback_with_its_saved_configuration(golden: Path) -> None:
    starts = json.loads((golden / "run" / "starts.json").read_text())
    config = str(golden / "run" / "step_00000003" / "config.yaml")
    words = ["--config", config, "--save", "again", "--load", "run", "--pipeline-model-parallel-size", "1"]
    words += ["--train-iters", "24", "--exit-interval", "5", "--no-profile-pipeline"]
    out = run(golden, str(REPOSITORY / "pretrain_gpt.py"), *words, "--num-virtual-stages-per-pipeline-rank", "1")
    state = json.loads((golden / "again" / "step_00000005" / "manifest.json").read_text())
    assert "written by another version" not in out, "options that it lacks have their defaults here"
    assert "changed since" not in out
    assert "run/step_00000003 does not say what data it was trained on, so the data were not compared\n" in out
    assert starts["rollbacks"] == 0
    assert "step" in out and "account" in json.dumps(state)
    rollback = json.loads((golden / "run" / "rollbacks.json").read_text())[0]
    assert list(rollback["account"]["skipped_samples"][0]) == [rollback["first_sample"], rollback["past_sample"]]
    # only rollbacks.json records the rollback, not the checkpoint that the run went back to
    assert '"rollbacks": 1' in json.dumps(state) and '"skipped_samples": [[12, 20]]' in json.dumps(state)


def test_the_starts_of_a_killed_run_are_counted(golden: Path) -> None:
    """A third restart of the same job without progress ends with exit code 3."""
    words = [*MODEL, *DATA, *TRAINING, "--train-iters", "5", "--save", "killed"]
    path = golden / "killed" / "starts.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | {"job": "7", "times": [1.0, 2.0]}))
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
    command = [sys.executable, str(REPOSITORY / "pretrain_gpt.py"), *words]
    ended = subprocess.run(command, cwd=golden, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 3, ended.stderr


def test_token_files_are_read_and_old_index_caches_are_left_alone(golden: Path) -> None:
    """Caches of another format are built again next to the old ones.

    Entries are named by a hash of path and mtime of the source, so both are set to those of the copy.
    """
    for entry in list((golden / "cache").iterdir()):
        content = json.loads((entry / "description.json").read_text())
        description = json.loads(content["description"])
        description["source"]["prefix"] = os.path.realpath(golden / "corpus_text_document")
        description["source"]["mtime_ns"] = [
            (golden / f"corpus_text_document.{suffix}").stat().st_mtime_ns for suffix in ("bin", "idx")
        ]
        content["description"] = json.dumps(description, sort_keys=True)
        (entry / "description.json").write_text(json.dumps(content))
        entry.rename(entry.with_name(f"samples-{hashlib.sha256(content['description'].encode()).hexdigest()[:24]}"))
    before = sorted(path.name for path in (golden / "cache").iterdir())
    pretrain(golden, "--train-iters", "24", "--exit-interval", "1", "--hidden-dropout", "0")
    assert set(before) < {path.name for path in (golden / "cache").iterdir() if not path.name.startswith(".")}


def test_a_profile_and_a_journal_make_a_report(golden: Path) -> None:
    megapipe(golden, "report", "run")
    text = (golden / "run" / "report.html").read_text()
    assert "<svg" in text and "5.44" in text


def test_calibration_and_layer_times_are_read(golden: Path) -> None:
    grid = ["--world-size", "2", "--pipeline-model-parallel-size", "2", "--train-iters", "24"]
    assert "layers 0" in megapipe(
        golden, "plan", *MODEL, *DATA, *TRAINING, *grid, "--pipeline-layer-times", "layer_times.json"
    )
    found = megapipe(
        golden, "plan", "--gpus", "2", "--hardware", "hardware.yaml", *MODEL, *TRAINING, "--vocab-size", "257", "--json"
    )
    assert json.loads(found)


def test_a_printed_configuration_is_a_configuration(golden: Path) -> None:
    again = run(golden, str(REPOSITORY / "pretrain_gpt.py"), "--config", "printed_config.yaml", "--print-config")
    values = [
        {section: dict(fields) for section, fields in yaml.load(text, yaml.BaseLoader).items()}
        for text in (again, (golden / "printed_config.yaml").read_text(), to_yaml(Config()))
    ]
    # fields that it lacks, because they came later, have their defaults; those that have gone asked for nothing
    assert values[0] == {
        section: {key: values[1][section].get(key, default) for key, default in fields.items()}
        for section, fields in values[2].items()
    }


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_files_are_what_the_generator_makes(name: str, golden: Path) -> None:
    shape = ["-p", "4", "-m", "8", *SCHEDULES[name]]
    for lowered in ([], ["--lowered"]):
        megapipe(golden, "schedule", "draw", name, *shape, *lowered, "--csv-out", "again.csv")
        stored = golden / (f"{name}.lowered.csv" if lowered else f"{name}.csv")
        assert (golden / "again.csv").read_text() == stored.read_text()
    placement = ["--placement", "two-directions"] if name == "dualpipe" else []
    megapipe(golden, "schedule", "check", "--csv", f"{name}.csv", *placement, *shape)
    simulated = json.loads(megapipe(golden, "schedule", "simulate", name, *shape, "--json"))
    assert simulated == json.loads((golden / "json" / f"simulate_{name}.json").read_text())


JSON_OUTPUTS = {
    "check": "-m megapipe schedule check 1f1b -p 4 -m 8 --json",
    "draw": "-m megapipe schedule draw 1f1b -p 4 -m 8 --json",
    "compare": "-m megapipe schedule compare -p 4 -m 8 --json",
    "plan": f"-m megapipe plan --gpus 16 --gpu h100 --config {REPOSITORY}/configs/llama3_8b.yaml --json",
    "doctor": "-m megapipe doctor --json",
    "status": "-m megapipe status run --json",
    "evaluate": "-m megapipe evaluate --load run --data make.sh --json",
    "inspect_checkpoint": f"{REPOSITORY}/tools/inspect_checkpoint.py run --tensors --verify --json",
    "inspect_data": f"{REPOSITORY}/tools/inspect_data.py --step 3 --world-size 1 --json",
    "calibrate": "-m megapipe calibrate --output again.yaml --seconds 2 --name here --json",
}
# of these every number is compared; write plan.json again (golden/make.sh) where predictions change on purpose
SAME_VALUES = ("check", "draw", "compare", "inspect_checkpoint", "inspect_data", "plan")
# these schedules have been improved, or do not drain any more
SHORTER_SINCE = ("v-half", "v-min", "pipedream", "pipedream-vertical-sync", "pipedream-2bw", "paci")
NEW_SINCE = {"hanayo", "chimera"}


def unchanged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows on schedules that were there then and have not been improved since."""
    return [row for row in rows if row["schedule"] not in (*SHORTER_SINCE, *NEW_SINCE)]


def without_sentences(value: Any) -> Any:
    """Replace every string of several words: wording may change, keys and numbers must not."""
    if isinstance(value, dict):
        return {key: without_sentences(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_sentences(inner) for inner in value]
    return "a sentence" if isinstance(value, str) and " " in value else value


def keys(value: Any) -> Any:
    """Return the keys of nested objects; for a list, those of its first element."""
    if isinstance(value, dict):
        return {key: keys(inner) for key, inner in sorted(value.items())}
    return (
        [keys(value[0])]
        if isinstance(value, list) and value
        else type(value)
        if isinstance(value, bool | str)
        else "number or null"
    )


@pytest.mark.parametrize("name", JSON_OUTPUTS)
def test_json_output_has_the_keys_that_it_had(name: str, golden: Path) -> None:
    words = JSON_OUTPUTS[name].split()
    if name == "inspect_data":
        words = [*words, *MODEL, *DATA, *TRAINING, "--train-iters", "24"]
    found, stored = json.loads(run(golden, *words)), json.loads((golden / "json" / f"{name}.json").read_text())
    if name == "compare":
        found, stored = map(unchanged, (found, stored))
    if name == "status":  # another process may have the number of the one that has ended
        for rank in (*found["ranks"], *stored["ranks"]):
            assert "process" in rank
            rank["process"] = ""
    if name in SAME_VALUES:
        assert without_sentences(found) == without_sentences(stored)
    elif name == "doctor":  # these differ between hosts
        assert set(found) == set(stored) and [set(host) for host in found["hosts"]] == [set(stored["hosts"][0])]
    else:
        assert keys(found) == keys(stored)
