"""`megapipe chat`: what it says, how it ends, what it keeps."""

from __future__ import annotations

import builtins
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megapipe.extras.cli.command import main
from megapipe.extras.inference.dialog import HELP
from megapipe.extras.inference.generate import Generator
from tests.extras.inference.chat_run import ANSWERS, MODEL, nan_run, train_chat_run, write_tokenizer
from tests.launch.scripts import environment
from tests.train.jobs import job

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_chat_run(tmp_path_factory.mktemp("runs") / "chat")


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """Let `input` return these lines, raise these exceptions, then EOFError."""
    left: Iterator[str | type[BaseException]] = iter([*lines, EOFError])

    def read(prompt: str) -> str:
        line = next(left)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(builtins, "input", read)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["chat", *words, "--temperature", "0", "--device", "cpu"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("place", ["checkpoints", "run", "one checkpoint", "runs"])
def test_a_run_is_found_and_answers_what_it_was_taught_and_stops(
    place: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"checkpoints": run, "run": run.parent, "one checkpoint": next(run.glob("step_*"))}
    given["runs"] = run.parents[1]  # of which another one is older
    older = run.parents[1] / "older" / "checkpoints" / "latest"
    older.parent.mkdir(parents=True, exist_ok=True)
    older.write_text("step_00000001")
    os.utime(older, (1, 1))
    typed(monkeypatch, *ANSWERS, "/new", "", "/quit", "never read")
    shown = said(capsys, str(given[place]))
    assert shown.startswith(f"{run}/step_00000060: it answers by its chat template\n{HELP}\n")
    first = next(iter(ANSWERS.values()))
    assert f"{HELP}\n{first}\n" in shown and "never read" not in shown


def test_each_question_after_new_is_the_first_one(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, *(line for asked in ANSWERS for line in (asked, "/new")))
    assert said(capsys, str(run)).endswith(f"{HELP}\n" + "".join(f"{text}\n" for text in ANSWERS.values()) + "\n")


def test_the_oldest_messages_are_left_out_when_the_context_is_full(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, *(["Who are you?"] * 5))
    assert "(the context of 96 tokens is full: the oldest two messages are left out)" in said(capsys, str(run))


def test_a_line_that_cannot_be_answered_is_reported_and_forgotten(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "x " * 500, "<|im_end|>", next(iter(ANSWERS)))
    shown = said(capsys, str(run))
    assert "error: prompt 0 has" in shown and "holds the special token <|im_end|>" in shown
    assert shown.endswith(f"{next(iter(ANSWERS.values()))}\n\n")


def test_an_interrupt_stops_the_answer_and_then_only_shows_the_way_out(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer, asked = Generator.continue_prompts, next(iter(ANSWERS))

    def interrupted(*arguments: object) -> list[list[int]]:
        monkeypatch.setattr(Generator, "continue_prompts", answer)
        raise KeyboardInterrupt

    monkeypatch.setattr(Generator, "continue_prompts", interrupted)
    typed(monkeypatch, asked, KeyboardInterrupt, asked)
    assert said(capsys, str(run)).endswith(f"{HELP}\n\n\n{HELP}\n{ANSWERS[asked]}\n\n")


def test_a_real_terminal_streams_and_survives_control_c(run: Path) -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "megapipe", "chat", str(run), "--temperature", "0", "--device", "cpu"]
    process = subprocess.Popen(
        words,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(),
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    os.close(theirs)

    def read_until(text: str, seconds: float = 60.0) -> str:
        found, end = "", time.monotonic() + seconds
        while text not in found and (left := end - time.monotonic()) > 0:
            if select.select([ours], [], [], left)[0]:
                found += os.read(ours, 4096).decode().replace("\r", "")
        return found

    read_until("> ")
    shown = ""
    for _ in range(20):  # a signal between the prompt and the system call that reads is only seen with the next key
        os.kill(process.pid, signal.SIGINT)
        shown += read_until(HELP, 1.0)
        if HELP in shown:
            break
    assert HELP in shown
    read_until("> ")
    asked, answer = next(iter(ANSWERS.items()))
    os.write(ours, f"{asked}\n".encode())
    assert answer in read_until(f"{answer}\n")
    os.write(ours, b"\x04")  # Ctrl-D
    assert process.wait(60) == 0
    os.close(ours)


def test_a_model_of_text_says_so_and_continues_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, text = write_tokenizer(tmp_path / "tokenizer"), tmp_path / "text.jsonl"
    text.write_text('{"text": "one two three one two three one two three one two three"}\n' * 30)
    words = ["--input", str(text), "--output-prefix", str(tmp_path / "d"), "--append-eod"]
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    assert main(["preprocess", *words, *kind]) == 0
    code, output = job(
        f"--tokenizer-model {tokenizer} --data-path {tmp_path}/d_text_document --split 1,0,0 --lr 5e-3 "
        f"--train-iters 30 --save {tmp_path}/run",
        MODEL,
    )
    assert code == 0, output
    capsys.readouterr()
    typed(monkeypatch, "one two three one")
    shown = said(capsys, str(tmp_path / "run"), "--max-new-tokens", "6")
    assert "it continues each line of text: it was trained on text, not yet on conversations (--sft)" in shown
    assert f"{HELP}\n two" in shown


def test_a_folder_without_a_checkpoint_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, what in ((tmp_path, "holds no checkpoint"), (tmp_path / "nothing", "does not exist")):
        assert main(["chat", str(given)]) == 1
        assert f"checkpoint error: {given} {what}; give the folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main(["chat", str(tmp_path)]) == 1
    assert f"is a Hugging Face folder; first megapipe convert {tmp_path} NEW_FOLDER" in capsys.readouterr().err


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    words = ["launch", "--nproc-per-node", "2", "-m", "megapipe", "chat", str(run)]
    ended = subprocess.run(
        [sys.executable, "-m", "megapipe", *words], env=environment(), capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 2 and "runs on one process, not on 2; use megapipe generate" in ended.stderr


def test_a_model_of_nan_is_a_message_of_chat_and_generate(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "x", "never read")
    broken = str(nan_run(run, tmp_path / "nan"))
    words = ["generate", "--load", broken, "--prompt", "x"]
    for command in (["chat", broken], words, [*words, "--prompt", "y", "--temperature", "0"]):
        assert main([*command, "--device", "cpu"]) == 1
        shown = capsys.readouterr()
        assert "error" in shown.err and "NaN" in shown.err and "Traceback" not in shown.err
    for temperature in ("nan", "inf", "-1"):
        assert main([*words, "--device", "cpu", "--temperature", temperature]) == 2
        assert f"--temperature {float(temperature)}" in capsys.readouterr().err


def test_the_highest_seed_has_a_second_answer(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "Who are you?", "Who are you?")
    assert "error" not in said(capsys, str(run), "--seed", str(2**63 - 1))
