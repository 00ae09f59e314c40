"""`megapipe launch --dry-run`: the command of each node, the placement of ranks, and the traffic between nodes.

It does not import torch.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from megapipe.extras.cli.launch import main
from megapipe.extras.launch.flags import BARE_FLAGS, VALUE_FLAGS, expand_hosts, read_launch
from megapipe.extras.launch.preview import preview
from tests.launch.scripts import REPOSITORY

SCRIPT = str(REPOSITORY / "pretrain_gpt.py")
TINY = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128 --lr 1 "
    "--micro-batch-size 1 --global-batch-size 64 --train-iters 2 --mock-data --eval-iters 0"
).split()


def test_the_flags_are_torchruns() -> None:
    from torch.distributed.run import get_args_parser

    spellings = {
        spelling
        for action in get_args_parser()._actions
        for spelling in action.option_strings
        if spelling.startswith("--")
    }
    assert spellings - {"--help"} <= {
        flag for known in (*VALUE_FLAGS, *BARE_FLAGS) for flag in (known, "--" + known[2:].replace("-", "_"))
    }
    takes_value = {flag for action in get_args_parser()._actions if action.nargs != 0 for flag in action.option_strings}
    assert set(VALUE_FLAGS) & spellings <= takes_value and not set(BARE_FLAGS) & takes_value


def test_each_node_gets_its_command_with_the_first_node_as_master() -> None:
    lines = preview(
        ["--dry-run", "--hosts", "a[1-2]", "--nproc-per-node", "2", SCRIPT, *TINY, "--save", "run with a space"]
    ).splitlines()
    assert lines[0] == "dry run: 4 ranks on 2 nodes, 2 on each; nothing is started"
    commands = [shlex.split(line) for line in lines[3:5]]
    for node, words in enumerate(commands):
        assert words[:3] == [f"a{node + 1}", "megapipe", "launch"]
        flags = dict(zip(words[3 : -len(TINY) - 3 : 2], words[4 : -len(TINY) - 3 : 2], strict=True))
        assert flags == {
            "--nnodes": "2",
            "--node-rank": str(node),
            "--master-addr": "a1",
            "--master-port": "29500",
            "--nproc-per-node": "2",
        }
        assert words[-len(TINY) - 3 :] == [SCRIPT, *TINY, "--save", "run with a space"]


def test_ranks_that_share_gpus_are_shown_on_them_and_launched_so(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--nproc-per-node", "4", SCRIPT, *TINY, "--pipeline-model-parallel-size", "2"]
    text = preview(["--ranks-per-gpu", "2", *words])
    command, *_ = (shlex.split(line) for line in text.splitlines() if "megapipe launch" in line)
    assert command[command.index("--ranks-per-gpu") + 1] == "2" and "2 share each GPU" in text
    rows = [line.split()[2] for line in text.splitlines() if line.split()[:1] in (["0"], ["1"], ["2"], ["3"])]
    assert rows == ["0", "0", "1", "1"]
    assert {"--gpus-per-node=2", "--export=ALL,MEGAPIPE_RANKS_PER_GPU=2"} <= set(
        shlex.split(preview(["--slurm", "--ranks-per-gpu", "2", *words]).splitlines()[3])
    )
    monkeypatch.setenv("MEGAPIPE_RANKS_PER_GPU", "4")
    assert "4 share each GPU" in preview(words) and "share" not in preview(["--ranks-per-gpu", "1", *words])


def test_a_job_is_submitted_once_its_configuration_is_known_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "sbatch").write_text('#!/bin/sh\necho "$MEGAPIPE_ROOT" "$@"; exit 3\n')
    (tmp_path / "sbatch").chmod(0o755)
    words = ["--slurm", "--nnodes", "2", "--nproc-per-node", "2", SCRIPT, *TINY]
    assert main(words) == 3
    root, *submitted = capfd.readouterr().out.split()
    at = submitted.index(str(REPOSITORY / "megapipe" / "extras" / "launch" / "slurm" / "pretrain.sbatch"))
    assert root == str(REPOSITORY) and submitted[at + 1 :] == list(TINY)
    assert {"--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2"} == set(submitted[:at])
    for refused in (
        [*words, "--tensor-model-parallel-size", "3"],
        ["--max-restarts", "1", *words],
        ["--slurm", "--nnodes", "2", "evaluate"],
    ):
        assert main(refused) == 2
    assert capfd.readouterr().out == ""
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert main(words) == 2


def test_torchrun_parses_the_printed_commands() -> None:
    from megapipe.extras.launch.torchrun import parse

    for node in range(3):
        words = read_launch(["--nnodes", "3", "--master_addr", "h", "--nproc_per_node=2", SCRIPT, "--lr", "1"]).on_node(
            node
        )
        parsed = parse(words[2:])
        assert (parsed.nnodes, parsed.node_rank, parsed.master_addr, parsed.nproc_per_node) == ("3", node, "h", "2")
        assert (parsed.training_script, parsed.training_script_args) == (SCRIPT, ["--lr", "1"])


def test_the_full_text_of_two_nodes() -> None:
    text = preview(
        ["--hosts", "left,right", "--nproc-per-node", "2", SCRIPT, *TINY, "--pipeline-model-parallel-size", "2"]
    )
    _, rest = text.split("\n\ngrid: ")
    assert rest.splitlines() == [
        "tp 1 x pp 2 x dp 2, rank order tp-cp-dp-pp",
        "  rank   host  GPU  pp  dp  tp",
        "     0   left    0   0   0   0",
        "     1   left    1   0   1   0",
        "     2  right    0   1   0   0",
        "     3  right    1   1   1   0",
        "",
        "traffic of a step, the most of any rank and of any node, where rings follow the order of ranks",
        "      group  ranks  groups  a rank sends  groups on several nodes  leaves a node",
        "         pp      2       2       256 KiB                      all        512 KiB",
        "         dp      2       2       430 KiB                     none              -",
        "  embedding      2       2      32.0 KiB                      all       64.0 KiB",
        "  over the network: pp, embedding",
    ]


def test_many_nodes_are_summarized() -> None:
    lines = preview(
        ["--hosts", "n[01-16]", "--nproc-per-node", "8", SCRIPT, *TINY, "--pipeline-model-parallel-size", "2"]
    ).splitlines()
    assert len(lines) < 25
    assert "  ...  the same, --node-rank 2 to 14" in lines
    assert "  64-127  n09 to n16 (8)   0-7   1  0-63   0" in lines


def test_dry_run_after_the_script_is_a_flag_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_launch([SCRIPT, "--dry-run"]).dry_run is False
    assert main(["--dry-run", "--nproc-per-node", "1", SCRIPT, *TINY]) == 0
    assert "nothing is started" in capsys.readouterr().out


def test_torch_is_imported_only_for_layers_that_are_new(tmp_path: Path) -> None:
    words = ["--dry-run", "--nproc-per-node", "8", SCRIPT, *TINY, "--tensor-model-parallel-size", "2"]
    code = (
        f"import sys; from megapipe.extras.cli.launch import main; code = main({words!r}); "
        "sys.exit(code or 10 * ('torch' in sys.modules))"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    run = partial(subprocess.run, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=200)
    ended = [run([sys.executable, "-c", code]) for _ in range(2)]
    assert [each.returncode for each in ended] == [10, 0], ended


NAMES = st.from_regex(r"[a-z]{1,3}", fullmatch=True)


@given(NAMES, st.integers(0, 20), st.integers(0, 20), st.integers(1, 4))
def test_a_range_of_hosts_is_each_of_them_with_its_zeros(name: str, first: int, more: int, width: int) -> None:
    expected = tuple(f"{name}{number:0{width}d}" for number in range(first, first + more + 1))
    assert expand_hosts(f"{name}[{first:0{width}d}-{first + more:0{width}d}]") == expected
    assert expand_hosts(",".join(expected)) == expand_hosts(" ".join(expected)) == expected


def test_hosts_with_two_ranges() -> None:
    assert expand_hosts("a[1-2]b[07,9],login") == ("a1b07", "a1b9", "a2b07", "a2b9", "login")
