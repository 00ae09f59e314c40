"""Choices of the quickstart: grid by hardware, flags that override it, reuse of data, number of steps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from megapipe.comm.bootstrap import choose_backend
from megapipe.config.load import load_config
from megapipe.errors import ConfigError, DataError
from megapipe.extras.cli import quickstart
from megapipe.extras.cli.quickstart import (
    Prepared,
    check_run,
    choose_grid,
    prepare,
    pretrain_arguments,
    unigram_entropy,
)
from megapipe.plan.resolve import resolve
from tests.launch.scripts import REPOSITORY

PREPARED = Prepared(Path("f"), Path("f/tokens"), Path("f/tokenizer"), 5.0, ("def ",))


def grid(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, *flags: str, ranks: int | None = None
) -> tuple[int, int, int, int]:
    """Return (tp, pp, chunks, dp) of the quickstart, resolved as on a rank."""
    monkeypatch.setattr(quickstart, "count_gpus", lambda: num_gpus)
    chosen = choose_grid(flags, ranks)
    loaded = load_config([*chosen.flags, "--vocab-size", "2048", *flags], is_job=False)
    plan = resolve(loaded.config, chosen.num_ranks)
    return plan.topology.tp, plan.topology.pp, plan.num_chunks, plan.topology.dp


@pytest.mark.parametrize(
    ("num_gpus", "expected"),
    [
        (0, (2, 2, 2, 2)),
        (1, (1, 1, 1, 1)),
        (2, (1, 2, 2, 1)),
        (3, (1, 2, 2, 1)),
        (4, (2, 2, 2, 1)),
        (8, (2, 2, 2, 2)),
        (7, (2, 2, 2, 1)),
        (12, (2, 2, 2, 2)),
    ],
    ids=lambda value: f"{value} GPUs" if isinstance(value, int) else "x".join(map(str, value)),
)
def test_the_grid_fits_the_machine(num_gpus: int, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert grid(monkeypatch, num_gpus) == expected


def test_flags_win_over_the_grid_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert grid(monkeypatch, 0, "--pipeline-model-parallel-size", "1") == (2, 1, 1, 4)
    assert grid(monkeypatch, 0, "--tensor-model-parallel-size=1", ranks=4) == (1, 2, 2, 2)
    assert grid(monkeypatch, 8, "--tensor-model-parallel-size", "4") == (4, 2, 2, 1)
    assert grid(monkeypatch, 2, "--device", "cpu") == (2, 2, 2, 2)


def test_more_ranks_than_gpus_are_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="4 ranks need 4 GPUs, but there are 2; add --device cpu"):
        grid(monkeypatch, 2, "--tensor-model-parallel-size", "2")


def test_a_torch_for_gpus_trains_on_the_cpu_where_it_finds_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for flags in ((), ("--device", "cpu")):
        chosen = choose_grid(flags, None)
        config = load_config([*chosen.flags, *flags], is_job=False).config
        assert config.training.device == "cpu" and choose_backend("auto", "cpu", 0)[0] == "gloo"
        check_run(config, 2048, chosen.num_ranks)
    asked = load_config([*choose_grid(("--device", "cuda"), None).flags, "--device", "cuda"], is_job=False).config
    with pytest.raises(ConfigError, match=r"built for CUDA 13\.0.*--device cpu$"):
        check_run(asked, 2048, 8)


def test_every_number_of_gpus_gets_a_grid_that_divides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_gpus in range(1, 17):
        monkeypatch.setattr(quickstart, "count_gpus", lambda gpus=num_gpus: gpus)
        chosen = choose_grid((), None)
        parallel = load_config(chosen.flags, is_job=False).config.parallel
        replica = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
        assert replica <= chosen.num_ranks <= num_gpus and chosen.num_ranks % replica == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--corpus", "/nothing/here", "--device", "cuda"], "use --device cpu"),
        (["--corpus", "/nothing/here", "--distributed-backend", "nccl"], "use gloo"),
        (["--corpus", "/nothing/here", "--hidden-size", str(2**20)], "make the model smaller"),
        (["--corpus", "/nothing/here", "--out", "/dev/null"], "--out /dev/null cannot be written"),
    ],
    ids=["no GPU", "no NCCL", "no memory", "no folder"],
)
def test_what_this_machine_lacks_is_refused_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quickstart, "count_gpus", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert quickstart.main(["--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and "Traceback" not in error


def test_own_options_are_separated_from_training_flags() -> None:
    own = quickstart.main.parse(["--corpus", "text", "--vocab_size", "512", "--lr", "1e-3", "--", "--bf16"])
    assert (own.corpus, own.vocab_size, own.flags) == ("text", 512, ["--lr", "1e-3", "--bf16"])


def corpus_file(path: Path, first_line: str) -> Path:
    sources = [file.read_text() for file in sorted((REPOSITORY / "megapipe" / "config").rglob("*.py"))]
    path.write_text("\n\n".join([first_line, *sources]))
    return path


def test_data_are_reused_only_for_the_same_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = corpus_file(tmp_path / "text.txt", "number")
    first = prepare(str(text), tmp_path / "out", 500, 8.0)
    assert "== tokenizer" in capsys.readouterr().out
    stamp = (first.tokenizer / "tokenizer.json").stat().st_mtime_ns
    assert prepare(str(text), tmp_path / "out", 500, 8.0) == first
    assert "is reused" in capsys.readouterr().out and (first.tokenizer / "tokenizer.json").stat().st_mtime_ns == stamp
    others = [
        prepare(str(text), tmp_path / "out", 510, 8.0),
        prepare(str(corpus_file(text, "changed")), tmp_path / "out", 500, 8.0),
    ]
    assert len({first.folder, *(other.folder for other in others)}) == 3
    assert first.prompts and 1.0 < first.entropy < 6.0


def test_an_incomplete_data_folder_is_rebuilt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = corpus_file(tmp_path / "text.txt", "number")
    first = prepare(str(text), tmp_path / "out", 500, 8.0)
    (first.folder / "prepared.json").unlink()
    (first.tokenizer / "tokenizer.json").write_bytes(b"half")
    assert prepare(str(text), tmp_path / "out", 500, 8.0) == first
    assert "== tokenizer" in capsys.readouterr().out and (first.tokenizer / "tokenizer.json").stat().st_size > 4


def test_a_second_run_continues_for_as_many_steps() -> None:
    words = pretrain_arguments(PREPARED, Path("f/checkpoints"), done=260, steps=100)
    config = load_config([*quickstart.CPU_FLAGS, *words], is_job=True).config
    assert (config.training.train_iters, config.optimizer.lr_wsd_decay_iters) == (360, 35)
    assert (
        config.optimizer.override_opt_param_scheduler
        and config.checkpoint.load == config.checkpoint.save == "f/checkpoints"
    )


@pytest.mark.parametrize("reached", [14, 15], ids=["evaluated", "not evaluated"])
def test_the_summary_takes_the_validation_loss_of_the_last_step(
    reached: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = REPOSITORY / "tests" / "fixtures" / "report" / "interleaved" / "metrics.jsonl"
    records = [json.loads(line) for line in recorded.read_text().splitlines()]
    (loss,) = [r["loss"] for r in records if r.get("split") == "validation" and r["step"] == 14]

    def launch(words: list[str]) -> int:
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / "metrics.jsonl").write_text(recorded.read_text())
        return 0

    steps = iter([0, reached])
    monkeypatch.setattr("megapipe.extras.cli.launch.launch", launch)
    monkeypatch.setattr(quickstart, "count_gpus", lambda: 0)
    monkeypatch.setattr(quickstart, "steps_done", lambda checkpoints: next(steps))
    monkeypatch.setattr(quickstart, "prepare", lambda *_: Prepared(tmp_path, tmp_path, tmp_path, loss + 1.0, ()))
    assert quickstart.main(["--steps", "10"]) == 0
    printed = capsys.readouterr().out
    assert f"== done: {reached} steps" in printed and (tmp_path / "checkpoints" / "report.html").is_file()
    assert (f"validation loss          {loss:.3f} nats a token" in printed) == (reached == 14)
    assert ("learned beyond that      1.000 nats a token" in printed) == (reached == 14)


def test_the_quickstart_starts_the_ranks_of_the_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(quickstart, "count_gpus", lambda: 0)
    monkeypatch.setattr("megapipe.extras.cli.launch.launch", lambda words: started.append(words) or 7)
    text = corpus_file(tmp_path / "text.txt", "number")
    assert (
        quickstart.main(
            ["--corpus", str(text), "--out", str(tmp_path), "--vocab-size", "500", "--steps", "3", "--lr", "1e-3"]
        )
        == 7
    )
    (words,) = started
    assert (
        words[:2] == ["--nproc-per-node", "8"]
        and words[-2:] == ["--lr", "1e-3"]
        and words[words.index("--train-iters") + 1] == "3"
    )


@pytest.mark.parametrize(
    ("done", "steps", "span"), [(0, 350, (20, 22)), (350, 350, (370, 372)), (0, 10, (8, 10)), (5, 1, (5, 6))]
)
def test_two_steps_are_profiled_within_the_run(done: int, steps: int, span: tuple[int, int]) -> None:
    words = pretrain_arguments(PREPARED, Path("f/checkpoints"), done, steps, is_profiled=True)
    config = load_config([*quickstart.CPU_FLAGS, *words]).config
    assert config.logging.profile_pipeline
    assert (config.logging.profile_step_start, config.logging.profile_step_end) == span
    assert done <= span[0] < span[1] <= done + steps


def test_entropy_of_tokens_equals_the_formula():
    assert unigram_entropy(np.arange(8, dtype=np.uint16)) == pytest.approx(math.log(8))
    assert unigram_entropy(np.array([1, 1, 1, 7])) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert unigram_entropy(np.zeros(5, dtype=np.int64)) == 0.0


def test_entropy_of_an_empty_array_is_an_error():
    with pytest.raises(DataError, match="empty array"):
        unigram_entropy(np.zeros(0, dtype=np.int64))
