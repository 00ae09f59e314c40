"""The outcome reported for each flag is what the real command line does with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megapipe.config.load import load_config
from megapipe.errors import ConfigError
from megapipe.extras.cli.migrate import main
from megapipe.extras.migrate.judge import Row, World, judge, text_report, world_of
from megapipe.extras.migrate.script_report import reported
from megapipe.extras.migrate.shell_script import read_script

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 5 --lr 1e-3 --bf16 --mock-data --vocab-size 96"
)


def row(flag: str) -> Row:
    """Return the row of one flag with its values."""
    (found,) = judge(flag.split()).rows
    return found


def test_query_groups_alone_are_something_to_change() -> None:
    judgement = judge(f"{MODEL} --num-query-groups 4".split())
    assert not judgement.runs and "without --group-query-attention" in judgement.problems[0]
    assert judge(f"{MODEL} --num-query-groups 4 --group-query-attention".split()).runs


@pytest.mark.parametrize(
    ("flag", "outcome", "note"),
    [
        ("--num_layers 4", "the same here", ""),
        ("--bf16", "the same here", ""),
        ("--lr=1e-3", "the same here", ""),
        ("--use-mcore-models", "no effect here", "only implementation"),
        ("--bert-embedder-type megatron", "no effect here", "Megatron's default"),
        ("--moe-input-jitter-eps 0.1", "refused", "the result differs without it"),
        ("--adlr-autoresume", "refused", "drop it, no result changes"),
        ("--moe-permute-fusion", "no effect here", "a choice of kernel"),
        ("--moe-token-dispatcher-type alltoall_seq", "taken as", "alltoall"),
        ("--num-layers 0", "refused", "expected a value at least 1"),
        ("--num-layers 4 5", "refused", "expected one value, got 2"),
        ("--nonsense 3", "unknown", "unknown flag --nonsense"),
    ],
)
def test_a_flag_has_its_outcome(flag: str, outcome: str, note: str) -> None:
    found = row(flag)
    assert found.outcome == outcome
    assert note in found.note


@pytest.mark.parametrize("extra", ["", "--manual-gc", "--num-experts 8", "--swiglu --add-qkv-bias", "--hidden-size 60"])
def test_it_runs_exactly_if_the_real_command_line_accepts_it(extra: str) -> None:
    words = f"{MODEL} {extra}".split()
    message = ""
    try:
        load_config(words)
    except ConfigError as error:
        message = str(error)
    judgement = judge(words)
    assert judgement.runs == (not message)
    told = [row.note for row in judgement.rows if row.note] + list(judgement.problems)
    assert all(line in told for line in message.splitlines())


def test_open_values_are_named_and_only_texts_are_checked_further() -> None:
    script = (
        f"torchrun pretrain_gpt.py {MODEL} --save $CKPT/a --save-interval 5 --log-interval $N $EXTRA --swiglu $MORE"
    )
    (call,) = read_script(script).calls
    judgement = judge(call.arguments)
    outcomes = {row.flag: row.outcome for row in judgement.rows}
    assert outcomes["--save"] == "the same here"
    assert outcomes["--log-interval"] == "set outside the script"
    assert judgement.unchecked == ("--log-interval",)
    assert judgement.more == ("$EXTRA", "$MORE")
    assert judgement.runs


@pytest.mark.parametrize(
    ("launcher", "variables", "size", "per_node"),
    [
        ("torchrun --nproc_per_node 8 --nnodes=4", {}, 32, 8),
        ("python -m torch.distributed.run --nproc-per-node=4", {}, 4, 4),
        ("torchrun --nnodes 2", {}, None, None),
        ("mpirun -np 16 --npernode 8 python", {}, 16, 8),
        ("srun python", {"SLURM_NTASKS": "32", "SLURM_NTASKS_PER_NODE": "4"}, 32, 4),
        ("srun --ntasks=6 python", {}, 6, None),
        ("python", {}, None, None),
    ],
    ids=["torchrun", "one node", "unknown", "mpirun", "SLURM", "srun", "none"],
)
def test_ranks_are_read_from_the_launcher(
    launcher: str, variables: dict[str, object], size: int | None, per_node: int | None
) -> None:
    assert world_of(launcher.split(), variables) == World(size, per_node)


def test_the_grid_is_checked_on_the_ranks_of_the_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    grid = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    fits = reported(f"torchrun --nproc_per_node 8 pretrain_gpt.py {MODEL} {grid}", "run.sh")
    assert fits.runs
    assert fits.world == "8 by the launcher: tp 2 x pp 2 x dp 2"
    does_not = reported(f"torchrun --nproc_per_node 6 pretrain_gpt.py {MODEL} {grid}", "run.sh")
    assert not does_not.runs
    assert "6" in does_not.to_change[0]
    assert main(["--json", "--", *f"{MODEL} {grid}".split()]) == 0
    world = json.loads(capsys.readouterr().out)["ranks"]
    assert world == "not stated by the launcher; checked on 4, the least: tp 2 x pp 2 x dp 1"


def test_missing_files_are_named_and_are_no_error(tmp_path: Path) -> None:
    model = MODEL.replace("--mock-data", "")
    data = f"--data-path 0.3 {tmp_path}/a 0.7 $D/b --tokenizer-type GPT2BPETokenizer --vocab-file v.json --merge-file m"
    migration = reported(f"torchrun pretrain_gpt.py {model} {data}", "run.sh")
    assert migration.missing == (
        ("--vocab-file", "v.json"),
        ("--merge-file", "m"),
        ("--data-path", f"{tmp_path}/a.bin"),
    )
    assert migration.runs


def test_the_printed_command_is_one_that_the_real_command_line_accepts() -> None:
    flags = "--moe-input-jitter-eps 0.1 --nonsense --data-cache-path 'a b'"
    script = f"torchrun --nproc_per_node 2 x/pretrain_gpt.py {MODEL} {flags}"
    migration = reported(script, "run.sh")
    assert not migration.runs
    (call,) = read_script(migration.command()).calls
    assert call.launcher == ("torchrun", "--nproc_per_node", "2")
    loaded = load_config(list(call.arguments))
    assert loaded.config.data.data_cache_path == "a b"
    text = "\n".join(text_report(migration))
    assert "to change:" in text and "--moe-input-jitter-eps 0.1" in text and "unknown flag --nonsense" in text
