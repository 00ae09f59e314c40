"""megapipe migrate: its ways to be called, exit codes and JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from megapipe.errors import DataError
from megapipe.extras.cli.migrate import main
from megapipe.extras.cli.plan import main as plan
from megapipe.extras.cli.pretrain import main as run
from tests.extras.migrate.test_judge import MODEL


def test_a_script_that_runs_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.sh"
    lines = ["TP=${TP:-1}", f"ARGS='{MODEL} --use-mcore-models'"]
    lines.append("torchrun --nproc_per_node 4 pretrain_gpt.py $ARGS --tensor-model-parallel-size $TP")
    script.write_text("\n".join(lines))
    assert main([str(script)]) == 0
    printed = capsys.readouterr().out
    assert "--use-mcore-models" in printed and "no effect here" in printed
    assert "4 by the launcher: tp 1 x pp 1 x dp 4" in printed
    assert "the script runs as it is" in printed
    assert main(["--set", "TP=2", str(script)]) == 0
    assert "tp 2 x pp 1 x dp 2" in capsys.readouterr().out
    assert main(["--set", "TP=3", str(script)]) == 1


def test_arguments_alone_and_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--", *MODEL.split()]) == 0
    assert main([*MODEL.split(), "--mtp-hybrid-override-pattern", "M"]) == 1
    assert "--mtp-hybrid-override-pattern M" in capsys.readouterr().out
    mtp = "--position-embedding-type rope --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3"
    assert main([*MODEL.split(), *mtp.split()]) == 0
    assert "--mtp-num-layers 1" in capsys.readouterr().out
    assert main(["torchrun", "--nproc_per_node", "2", "x/pretrain_gpt.py", *MODEL.split()]) == 0  # as echo prints it
    assert "2 by the launcher" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO(f"N=$1\ntorchrun --nproc_per_node $N pretrain_gpt.py {MODEL}"))
    assert main(["-", "8"]) == 0
    assert "8 by the launcher" in capsys.readouterr().out


def test_json_has_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", *MODEL.split(), "--mtp-hybrid-override-pattern", "M"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["runs"] is False
    outcomes = {row["flag"]: row["outcome"] for row in report["flags"]}
    assert outcomes["--mtp-hybrid-override-pattern"] == "refused"
    assert outcomes["--bf16"] == "the same here"
    assert any(line.startswith("--mtp-hybrid-override-pattern M") for line in report["to_change"])
    assert "--mtp-hybrid-override-pattern" not in report["command"]


def test_a_script_without_a_call_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.sh"
    script.write_text("source common.sh\necho pretrain_gpt.py\n")
    assert main([str(script)]) == 2
    error = capsys.readouterr().err
    assert "has no call of pretrain_gpt.py" in error and "common.sh" in error


NODES = f"""
GPUS=4
NNODES=${{SLURM_NNODES:-"1"}}
torchrun --nproc_per_node $GPUS --nnodes $NNODES pretrain_gpt.py {MODEL} --pipeline-model-parallel-size $PP
"""


def test_a_variable_that_the_script_sets_or_does_not_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.sh"
    script.write_text(NODES)
    given = ["--set", "GPUS=2", "--set", "PP=1", "--set", "PQ=2", "--set", "SLURM_NNODES=2"]
    assert main(["--json", *given, str(script)]) == 0
    notes = json.loads(capsys.readouterr().out)["not_followed"]
    assert len(notes) == 2
    assert "GPUS=2" in notes[0] and "line 2" in notes[0] and "PQ=2" in notes[1]


def test_the_written_configuration_plans_without_the_files_that_it_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, written = tmp_path / "train.sh", tmp_path / "run.yaml"
    files = "--data-path $1 --vocab-file vocab.json --merge-file $2"
    script.write_text(f"torchrun --nproc_per_node 2 pretrain_gpt.py {MODEL.replace('--mock-data', files)}")
    assert main(["--write", str(written), str(script)]) == 0
    base = ["--config", str(written), "--world-size", "2"]
    assert plan(base) == 0
    assert run(["--dry-run", *base]) == 0
    printed = capsys.readouterr().out
    assert "not read: --vocab-file vocab.json" in printed and "--data-path $1.bin" in printed
    assert plan([*base, "--vocab-size", "none"]) == DataError.exit_code
    assert "vocab.json" in capsys.readouterr().err
