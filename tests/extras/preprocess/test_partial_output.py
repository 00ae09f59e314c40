from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megapipe.data.indexed_file import IndexedFile
from megapipe.errors import ConfigError, DataError
from megapipe.extras.cli.data import merge as merge_command
from megapipe.extras.cli.data import preprocess as preprocess_command
from megapipe.extras.preprocess import preprocess as module
from megapipe.extras.preprocess.partial_output import PartialOutput
from megapipe.extras.preprocess.text_source import read_records
from tests.data.fixtures import write_file
from tests.extras.preprocess.test_preprocess import Batched

NAMES = ("out_text_document.bin", "out_text_document.idx", "out_title_document.bin", "out_title_document.idx")
KEYS = ("text", "title")


def write_inputs(folder: Path, num_files: int = 3) -> list[Path]:
    for name in range(num_files):
        rows = [{"text": "x" * (i % 5), "title": f"{name} {i}"} for i in range(20)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sorted(folder.glob("*.jsonl"))


def run(files: list[Path], prefix: Path, num_workers: int = 1) -> module.Counts:
    output = PartialOutput(str(prefix), KEYS, module.token_dtype(257), {"input": list(map(str, files))})
    records = read_records(files, keys=KEYS, start=output.position)
    return module.preprocess(records, output, Batched(), append_eod=True, num_workers=num_workers)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".jsonl"}


@pytest.fixture
def small_steps(monkeypatch):
    monkeypatch.setattr(module, "BATCH_BYTES", 100)
    monkeypatch.setattr(module, "COMMIT_BYTES", 500)


def killed_run(files: list[Path], prefix: Path, call: int) -> None:
    """Run, and end the process without any cleanup at the given call of a function that changes the disk."""
    count = itertools.count()

    def counted(function):
        def wrapped(*arguments, **settings):
            if next(count) == call:
                os._exit(9)
            return function(*arguments, **settings)

        return wrapped

    for name in ("fsync", "replace", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    run(files, prefix)
    os._exit(0)


STRIDE = 6  # of the points at which a case kills the run


@pytest.mark.parametrize("first", range(STRIDE))
def test_a_run_killed_at_any_point_goes_on_to_the_same_bytes(first, tmp_path, small_steps):
    files = write_inputs(tmp_path, 2)
    whole = tmp_path / "whole"
    counts = run(files, whole / "out")
    assert sorted(contents(whole)) == sorted(NAMES)
    kept = set()
    for call in itertools.count(first, STRIDE):
        folder = tmp_path / "killed"
        child = multiprocessing.get_context("fork").Process(target=killed_run, args=(files, folder / "out", call))
        child.start()
        child.join(60)
        assert child.exitcode in (0, 9)
        if child.exitcode == 0:
            break
        progress = folder / "out.partial" / "progress.json"
        kept.add(json.loads(progress.read_text())["counts"]["documents"] if progress.exists() else 0)
        if progress.exists() or not set(NAMES) <= {path.name for path in folder.iterdir()}:
            again = run(files, folder / "out", num_workers=2)
            assert (again.documents, again.tokens) == (counts.documents, counts.tokens)
            assert not (folder / "out.partial").exists()
        else:  # complete: at most an empty folder was not yet removed
            shutil.rmtree(folder / "out.partial")
        assert contents(folder) == contents(whole)
        shutil.rmtree(folder)
    assert len(kept) >= 4  # killed in the middle, not only at the ends


def test_changed_inputs_or_settings_are_refused_with_both_values(tmp_path):
    (tmp_path / "out.partial").mkdir()

    def opened(description, **settings):
        PartialOutput(str(tmp_path / "out"), ["text"], module.token_dtype(257), description, **settings).close()

    output = PartialOutput(str(tmp_path / "out"), ["text"], module.token_dtype(257), {"input": ["a", "b"], "eod": True})
    output.mark(output.position, {"documents": 3})
    output.commit()
    output.close()
    opened({"input": ["a", "b"], "eod": True})
    for changed, message in (
        ({"input": ["a", "c"], "eod": True}, "input: b then, c now"),
        ({"input": ["a"], "eod": True}, "input: 2 entries then, 1 now"),
        ({"input": ["a", "b"], "eod": False}, "eod: true then, false now"),
        (None, "standard input or a pipe now"),
    ):
        with pytest.raises(ConfigError, match=message):
            opened(changed)
    opened({"input": ["a"]}, overwrite=True)
    opened({"input": ["b"]})  # nothing was committed, so nothing is lost


def test_two_processes_do_not_write_the_same_files(tmp_path):
    output = PartialOutput(str(tmp_path / "out"), ["text"], module.token_dtype(257))
    with pytest.raises(DataError, match="another process is preprocessing to"):
        PartialOutput(str(tmp_path / "out"), ["text"], module.token_dtype(257))
    output.discard()


def test_a_full_disk_keeps_what_was_committed(tmp_path, small_steps, monkeypatch):
    files = write_inputs(tmp_path)
    run(files, tmp_path / "whole" / "out")
    count, fsync = itertools.count(), os.fsync

    def full(handle):
        if next(count) == 30:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        patch.setattr(module, "COMMIT_BYTES", 10**9)
        count = itertools.count(28)  # the first commit fails
        with pytest.raises(DataError, match="No space left on device; no file was written"):
            run(files, tmp_path / "a" / "out")
        assert not contents(tmp_path / "a")
        patch.setattr(module, "COMMIT_BYTES", 500)
        count = itertools.count()
        with pytest.raises(DataError, match="No space left on device"):
            run(files, tmp_path / "a" / "out")
        patch.setattr(os, "fsync", fsync)
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(DataError, match=r"2,244 bytes, .*1,000"):
            run(files, tmp_path / "a" / "out")
    run(files, tmp_path / "a" / "out")
    assert contents(tmp_path / "a") == contents(tmp_path / "whole")


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Return a function that runs `megapipe preprocess` in the folder: (exit code, both outputs)."""
    monkeypatch.chdir(tmp_path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, "<|endoftext|>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save("tokenizer.json")
    base = "--output-prefix out --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json --append-eod"

    def started(*words):
        code = preprocess_command([*base.split(), "--input", *words])
        return code, "".join(capsys.readouterr())

    return started


def num_documents() -> int:
    return IndexedFile("out_text_document").num_documents


def test_bad_records_are_skipped_up_to_n_and_reported(command, tmp_path, small_steps):
    good = [json.dumps({"text": "word " * 10}).encode() for _ in range(40)]
    good[20], good[30] = b'{"text": 1}', b'{"text": "\xff"}'
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(good))
    code, text = command("a.jsonl")
    assert code == 1
    assert "a.jsonl line 21, byte 1260" in text
    assert "out.partial" in text
    code, text = command("a.jsonl", "--skip-bad", "1")
    assert (code, "a.jsonl line 31, byte 1849: not UTF-8" in text) == (1, True)
    assert "after 1 that were skipped" in text
    code, text = command("a.jsonl", "--skip-bad", "2", "--workers", "2")
    assert code == 0
    assert "2 bad records skipped: see out.skipped.jsonl" in text
    report = [json.loads(line) for line in (tmp_path / "out.skipped.jsonl").read_text().splitlines()]
    assert [(row["file"], row["line"], row["byte"]) for row in report] == [("a.jsonl", 21, 1260), ("a.jsonl", 31, 1849)]
    assert num_documents() == 38
    before = contents(tmp_path)
    assert command("a.jsonl", "--skip-bad", "2", "--overwrite")[0] == 0
    assert contents(tmp_path) == before


def test_existing_files_are_replaced_only_with_overwrite(command, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n{"text": "b"}\n')
    assert command("a.jsonl")[0] == 0
    code, text = command("b.jsonl")
    assert (code, "out_text_document.bin exists" in text) == (2, True)
    assert not (tmp_path / "out.partial").exists()
    assert num_documents() == 1
    assert command("b.jsonl", "--overwrite")[0] == 0
    assert num_documents() == 2


def test_a_changed_input_is_not_gone_on_with(command, tmp_path, small_steps):
    (tmp_path / "a.jsonl").write_text('{"text": "a long text of words"}\n' * 20 + "{")
    assert command("a.jsonl")[0] == 1
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    code, text = command("a.jsonl")
    assert code == 2
    assert "is the work of an interrupted run with another input: " in text
    assert "a.jsonl (661 bytes of " in text
    assert "a.jsonl (14 bytes of " in text
    code, text = command("a.jsonl", "--overwrite")
    assert (code, num_documents()) == (0, 1)


def test_the_document_unit_of_one_text_file_is_inferred_and_said(command, tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    code, text = command("a.txt")
    assert "a.txt: --document-unit line" in text
    assert (code, num_documents()) == (0, 3)
    (tmp_path / "a.py").write_text("one\n\ntwo\n")
    code, text = command("a.py", "--overwrite")  # a source file is one document
    assert (code, num_documents(), "is taken" in text) == (0, 1, False)
    os.mkfifo(tmp_path / "pipe")
    code, text = command("pipe", "--input-format", "text", "--overwrite")
    assert (code, "from pipe needs --document-unit" in text) == (2, True)


def test_standard_input_is_json_lines_that_cannot_be_gone_on_with(command, tmp_path, monkeypatch):
    read, write = os.pipe()
    os.write(write, b'{"text": "a"}\n' * 5 + b"{")
    os.close(write)
    monkeypatch.setattr("megapipe.extras.preprocess.text_source.STDIN_PATH", Path(f"/dev/fd/{read}"))
    code, text = command("-", "--skip-bad", "1")
    os.close(read)
    assert (code, num_documents()) == (0, 5)
    assert "can be read only once: an interrupted run begins again" in text
    assert f'"file": "/dev/fd/{read}", "line": 6, "byte": 71' in (tmp_path / "out.skipped.jsonl").read_text()


def test_merging_checks_the_disk_and_replaces_only_with_overwrite(tmp_path, monkeypatch, capsys):
    write_file(tmp_path / "a", [3])
    words = ["--input", str(tmp_path / "a"), "--output-prefix", str(tmp_path / "all")]
    assert merge_command(words) == 0
    assert merge_command(words) == 2
    assert "all.bin exists" in capsys.readouterr().err
    assert merge_command([*words, "--overwrite"]) == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    assert merge_command([*words, "--overwrite"]) == 1
    assert "68 bytes, but the disk has 10" in capsys.readouterr().err
