"""`megapipe plan --gpus N`: text, JSON and a runnable file, flags that fix options, and errors."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megapipe.assembly.datasets import with_vocabulary
from megapipe.config.load import load_config
from megapipe.extras.cli.plan import main
from megapipe.extras.launch.flags import read_launch
from megapipe.extras.search.layout import PAIRED, Layout, groups
from megapipe.extras.search.spread import SPREAD
from megapipe.plan.hardware import HARDWARE

MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 512 "
    "--max-position-embeddings 128 --bf16"
)
WORDS = ["--gpus", "4", "--gpu", "h100", *MODEL.split(), "--global-batch-size", "8"]


def test_the_file_it_writes_is_accepted_by_pretraining(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megapipe.extras.cli.pretrain import main as pretrain

    path = tmp_path / "best.yaml"
    config = tmp_path / "given.yaml"
    config.write_text("optimizer: {lr: 1.0e-4}\ntraining: {train_iters: 3}\ndata: {mock_data: true}\n")
    assert main([*WORDS, "--config", str(config), "--output", str(path), "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"][0]
    assert pretrain(["--plan", "--world-size", "4", "--ranks-per-node", "8", "--config", str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"tp {best['tp']} x pp {best['pp']}" in printed and f"schedule {best['schedule']}" in printed


def test_a_flag_pins_and_a_file_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "given.yaml"
    config.write_text("parallel: {tensor_model_parallel_size: 4, sequence_parallel: true}\n")
    main([*WORDS, "--json", "--config", str(config)])
    free = json.loads(capsys.readouterr().out)
    assert {row["tp"] for row in free["best"]} != {4} and free["as_configured"]["tp"] == 4
    main([*WORDS, "--json", "--tensor-model-parallel-size", "2"])
    assert {row["tp"] for row in json.loads(capsys.readouterr().out)["best"]} == {2}


def test_slices_given_as_a_flag_are_those_of_all_pipelines(capsys: pytest.CaptureFixture[str]) -> None:
    long = [*WORDS, "--seq-length", "16384", "--max-position-embeddings", "16384", "--hidden-dropout", "0"]
    long += ["--attention-dropout", "0", "--global-batch-size", "1", "--pipeline-model-parallel-size", "4"]
    main([*long, "--json", "--pipe-sp-splits", "3"])
    report = json.loads(capsys.readouterr().out)
    assert {row.get("slices") for row in report["best"]} == {3} and report["as_configured"]["slices"] == 3
    assert any(line.startswith("slices 3: with whole sequences") for line in report["why"])
    main([*long, "--json", "--pipe-sp-splits", "1"])
    assert {row.get("slices") for row in json.loads(capsys.readouterr().out)["best"]} == {None}


def test_the_text_has_the_table_the_time_by_parts_and_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(WORDS) == 0
    printed = capsys.readouterr().out
    for words in (
        "as configured",
        "tokens/s",
        "causal attention",
        "HFU",
        "gemm",
        "pp 0",
        "GiB",
        "the best: tp",
        "why ",
    ):
        assert words in printed


def test_megatrons_estimate_is_printed_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--estimator", "megatron"]) == 0
    assert "by Megatron" in (printed := capsys.readouterr().out) and "megatron " in printed
    assert main(["--world-size", "4", *MODEL.split(), "--global-batch-size", "8", "--estimator=megatron"]) == 0
    assert "by Megatron-LM's estimate: weights and optimizer" in capsys.readouterr().out


def test_objectives_gpus_and_cost_try_fewer_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--objective", "cost", "--price", "2.5"]) == 0
    printed = capsys.readouterr().out
    assert "objective cost: 1 GPUs (lowest cost per token)" in printed and "a billion tokens" in printed
    assert main([*WORDS, "--objective", "gpus", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_gpus"] == 1


def test_a_price_in_a_hardware_file_is_above_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_text("like: h100\nprice_per_hour: 0\n")
    assert main(["--gpus", "4", "--hardware", str(file), *MODEL.split(), "--global-batch-size", "8"]) == 2
    assert "price_per_hour 0 is not what the key holds, with numbers above 0" in capsys.readouterr().err


def test_it_imports_torch_only_for_layers_that_are_new(tmp_path: Path) -> None:
    code = (
        f"import sys; from megapipe.extras.cli.plan import main; code = main({WORDS!r}); "
        "sys.exit(code or 10 * ('torch' in sys.modules))"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    ended = [subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True) for _ in range(2)]
    assert [each.returncode for each in ended] == [10, 0], ended


def test_offloading_is_not_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--cpu-offloading-num-layers", "2"]) == 2
    assert "the search does not vary it" in capsys.readouterr().err


QWEN3_235B = (
    "--num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 4 --kv-channels 128 --vocab-size 151936 --seq-length 4096 --num-experts 128 "
    "--moe-ffn-hidden-size 1536 --moe-router-topk 8 --disable-bias-linear --swiglu --position-embedding-type rope "
    "--bf16 --global-batch-size 2048"
)
EXPERTS = ["--disable-bias-linear", "--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "512"]


def metrics(path: Path, *loads: list[float]) -> Path:
    step = {"kind": "step", "step": 7, "train_iters": 9, "consumed_tokens": 1, "global_batch_size": 8, "phases": {}}
    step |= {"loss": 1.0, "step_seconds": 1.0, "tokens_per_second": 1.0}
    step["expert_load"] = {str(layer): load for layer, load in enumerate(loads)}
    path.write_text(json.dumps(step) + "\n")
    return path


def test_an_imbalance_of_experts_takes_memory_and_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, *EXPERTS, "--micro-batch-size", "1", "--expert-model-parallel-size", "4"]

    def best(*more: str) -> dict[str, object]:
        assert main([*words, "--json", *more]) == 0
        found: dict[str, object] = json.loads(capsys.readouterr().out)["as_configured"]
        return found

    even, uneven = best(), best("--expert-imbalance", "2")
    assert even["expert_imbalance"] == 1.0 and uneven["expert_imbalance"] == 2.0
    assert uneven["step_seconds"] > even["step_seconds"]  # type: ignore[operator]
    assert uneven["memory"][0]["activations"] > even["memory"][0]["activations"]  # type: ignore[index]
    # experts 4 and 5 are those of one rank
    file = metrics(tmp_path / "metrics.jsonl", [0.5, 1, 1, 1, 2, 1.5, 0.5, 0.5], *[[1.0] * 8] * 3)
    for given in (file, tmp_path):
        assert best("--expert-imbalance", str(given))["expert_imbalance"] == 1.75
    shown = ["--world-size", "4", *words[4:], "--gpu", "h100"]
    assert main([*shown, "--expert-imbalance", str(file)]) == 0
    assert "the fullest rank with 1.75 times the mean of rows in the worst layer; groups" in capsys.readouterr().out
    assert main([*words, "--expert-imbalance", "2"]) == 0
    assert "experts, in the best layout: the fullest rank with 2 times the mean of rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("few.jsonl", "it has 4 experts a layer, --num-experts is 8"),
        ("short.jsonl", "it has layers 0 to 1, the model has experts in layers 0 to 3"),
        ("empty.jsonl", "has no expert_load; a run with experts logs it with --moe-per-layer-logging"),
    ],
)
def test_a_load_that_no_run_can_have_is_one_message(
    given: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    metrics(tmp_path / "few.jsonl", *[[1.0] * 4] * 4)
    metrics(tmp_path / "short.jsonl", *[[1.0] * 8] * 2)
    (tmp_path / "empty.jsonl").write_text("")
    words = ["--world-size", "4", "--gpu", "h100", *MODEL.split(), "--global-batch-size", "8", "--micro-batch-size"]
    words += ["1", *EXPERTS, "--expert-model-parallel-size", "4"]
    assert main([*words, "--expert-imbalance", given]) != 0
    printed = capsys.readouterr()
    assert reason in printed.err and not printed.out


@pytest.mark.parametrize(
    ("pinned", "values"),
    [
        (["--pipeline-schedule", "dualpipe"], {"schedule": "dualpipe"}),
        (["--pipeline-schedule", "dualpipe-v", "--delay-wgrad-compute"], {"schedule": "dualpipe-v", "chunks": 2}),
        (["--moe-token-dispatcher-type", "flex"], {}),
    ],
    ids=["dualpipe", "dualpipe-v", "flex"],
)
def test_overlapped_all_to_alls_of_experts_can_be_pinned(
    pinned: list[str], values: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, *EXPERTS, "--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2", *pinned]
    assert main([*words, "--overlap-moe-expert-parallel-comm", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    best, own = report["best"], report["as_configured"]
    slower = [line for line in report["why"] if line.startswith("as configured, tp 1 x pp 2")]
    assert len(slower) == ("refused" not in own and own["step_seconds"] > best[0]["step_seconds"])
    assert best and all(row["pp"] == row["ep"] == 2 and row["schedule"] in PAIRED for row in best)
    assert all(row[key] == value for row in best for key, value in values.items())
    assert main([*words, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert all(row["overlap"] for row in best) == ("--delay-wgrad-compute" in pinned)


def tried(words: list[str], num_gpus: int, gpu: str, **of_group: object) -> Iterator[Layout]:
    """Yield the layouts of a search in the groups whose first layout has these values."""
    config = with_vocabulary(load_config(words, is_job=False).config)
    for group in groups(config, num_gpus, HARDWARE[gpu]):
        if of_group.items() <= vars(group.first).items():
            yield from group.members(*group.variants)


def test_published_layouts_of_experts_are_among_those_tried() -> None:
    words = ["--plan", "--config", "configs/deepseek_v3.yaml"]
    assert any(each.schedule == "dualpipe" for each in tried(words, 2048, "h800", tp=1, pp=16, ep=64, overlap=True))
    found = tried(["--plan", *QWEN3_235B.split()], 256, "h100", tp=2, pp=8, ep=32)
    wanted = [each for each in found if (each.schedule, each.chunks, each.cut) == ("interleaved", 4, "ends")]
    assert {(each.overlap, each.flex) for each in wanted} == {(a, b) for a in (True, False) for b in (True, False)}


def test_the_spread_of_errors_stands_beside_the_next_best(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    best, *others = report["best"]
    assert "behind" not in best
    for row in others:
        assert row["behind"]["slower"] == pytest.approx(row["step_seconds"] / best["step_seconds"] - 1)
        assert row["behind"]["error"] == SPREAD.get(row["behind"]["differs_in"], SPREAD["several"])[0]
    near = sum(row["behind"]["slower"] <= row["behind"]["error"] for row in others)
    assert report["certainty"][-1].startswith(f"{near} of the {len(others)} next best layouts")
    assert main(WORDS) == 0
    printed = capsys.readouterr().out
    assert f"{others[0]['behind']['slower']:.1%} ± " in printed and "rms over published pairs" in printed


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_the_experiments_are_commands_that_run_the_layouts(
    experts: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megapipe.extras.cli.pretrain import main as pretrain

    config = tmp_path / "given.yaml"
    config.write_text("optimizer: {lr: 1.0e-4, lr_warmup_iters: 90}\nparallel: {use_distributed_optimizer: true}\n")
    words = ["--gpus", "16", *WORDS[2:], "--config", str(config), "--pipeline-model-parallel-size", "2"]
    words += [*EXPERTS, "--overlap-moe-expert-parallel-comm", "--disable-bias-linear"] if experts else []
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    calibrates, *runs = (shlex.split(each["command"]) for each in report["experiments"])
    assert len(runs) == 2 and calibrates[-4:] == ["megapipe", "calibrate", "--output", "here.yaml"]
    for run, row in zip(runs, report["best"], strict=False):
        launch = read_launch([{"R": "0", "HOST": "alpha"}.get(word, word) for word in run[2:]])
        flags, num_ranks = launch.script_arguments, launch.num_nodes * launch.ranks_per_node
        assert pretrain(["--plan", "--world-size", str(num_ranks), *flags]) == 0
        printed = capsys.readouterr().out
        assert f"tp {row['tp']} x pp {row['pp']}" in printed and f"schedule {row['schedule']}" in printed
        loaded = load_config(["--plan", *flags]).config
        assert loaded.training.micro_batch_size == row["micro_batch_size"]
        assert loaded.parallel.overlap_moe_expert_parallel_comm == row.get("overlap", False)
