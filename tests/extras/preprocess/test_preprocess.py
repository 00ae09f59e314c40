from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing

from megapipe.data.indexed_file import IndexedFile
from megapipe.errors import ConfigError, DataError
from megapipe.extras.preprocess import preprocess as module
from megapipe.extras.preprocess.partial_output import PartialOutput
from megapipe.extras.preprocess.preprocess import Counts, Progress, preprocess
from megapipe.extras.preprocess.text_source import Position, Record, read_records
from megapipe.tokenizers.tokenizer import FROM_MODEL, ByteTokenizer, NullTokenizer, build_tokenizer
from tests.tokenizers.sentencepiece_models import train_sentencepiece

REPOSITORY = Path(__file__).resolve().parents[3]
TOOL = [sys.executable, str(REPOSITORY / "tools" / "preprocess_data.py")]
MERGE_TOOL = [sys.executable, str(REPOSITORY / "tools" / "merge_datasets.py")]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def json_record(number: int, **value: str) -> Record:
    return Record("c.jsonl", number, json.dumps(value).encode(), True)


def documents(prefix: Path) -> list[list[int]]:
    file = IndexedFile(prefix)
    return [file.read(s).tolist() for s in range(len(file))]


def fresh(path: Path, *keys: str) -> PartialOutput:
    return PartialOutput(str(path / "c"), keys or ("text",), np.dtype("<u2"))


class Batched(ByteTokenizer):
    """A tokenizer whose library has threads."""

    def encode_batch(self, texts, num_threads):
        return [self.encode(text) for text in texts]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), Batched()], ids=["texts", "batches"])
def test_two_workers_keep_the_order_of_documents_and_each_key_its_file(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCH_BYTES", 100)  # many batches
    records = [json_record(i, text="x" * (i % 7), title=str(i)) for i in range(200)]
    output = fresh(tmp_path, "text", "title")
    counts = preprocess(iter(records), output, tokenizer, append_eod=True, num_workers=2)
    assert documents(tmp_path / "c_title_document") == [[*str(i).encode(), 256] for i in range(200)]
    assert documents(tmp_path / "c_text_document") == [[*b"x" * (i % 7), 256] for i in range(200) if i % 7]
    assert IndexedFile(tmp_path / "c_text_document").dtype == "u2"
    assert (counts.documents, counts.empty) == (200, 29)
    assert counts.tokens == {key: IndexedFile(tmp_path / f"c_{key}_document").num_tokens for key in ("text", "title")}
    assert counts.text_bytes == sum(len(record.content) for record in records)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), Batched()], ids=["texts", "batches"])
def test_reader_is_never_far_ahead_of_the_workers(tokenizer, monkeypatch):
    monkeypatch.setattr(module, "BATCH_BYTES", 1)
    read = []

    def records():
        for i in range(100):
            read.append(i)
            yield json_record(i, text="abc")

    encoded = module._encode_all(records(), tokenizer, (("text",), False), 2)
    for written in range(10):
        next(encoded)  # a record in each batch
        assert len(read) <= written + module.BATCHES_IN_FLIGHT + 1
    encoded.close()


def test_bad_record_stops_with_its_place_and_leaves_no_file(tmp_path):
    records = [*(json_record(i, text="abc") for i in range(1, 5)), Record("c.jsonl", 5, b'{"text"', True, byte=60)]
    with pytest.raises(DataError, match=r"c\.jsonl line 5, byte 67: not JSON"):
        preprocess(records, fresh(tmp_path), ByteTokenizer())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), Batched()], ids=["texts", "batches"])
def test_an_unreadable_file_is_an_error_after_the_documents_before_it(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCH_BYTES", 1)
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n' * 9)
    (tmp_path / "b.jsonl").mkdir()
    output = PartialOutput(str(tmp_path / "c"), ["text"], np.dtype("<u2"), {})
    with pytest.raises(DataError, match=r"b\.jsonl: Is a directory"):
        preprocess(read_records([tmp_path / "a.jsonl", tmp_path / "b.jsonl"]), output, tokenizer)
    progress = json.loads((tmp_path / "c.partial" / "progress.json").read_text())
    assert (progress["position"], progress["counts"]["documents"]) == ([0, 9 * 15, 9], 9)


@pytest.mark.parametrize(("text", "token"), [("z", 122), ("b", -52)])
def test_a_token_outside_of_the_vocabulary_keeps_only_what_was_before_it(text, token, tmp_path, monkeypatch):
    class Wrong(Batched):
        vocab_size = 120

        def encode(self, text):
            return [token - (150 if text == "b" else 0) for token in super().encode(text)]

    monkeypatch.setattr(module, "BATCH_BYTES", 1)
    records = [json_record(i, text=text if i == 3 else "a")._replace(end=Position(0, 0, i)) for i in range(1, 9)]
    output = PartialOutput(str(tmp_path / "c"), ["text"], np.dtype("<u2"), {})
    with pytest.raises(DataError, match=f"line 3, byte 0: token {token} is outside of the vocabulary of 120"):
        preprocess(records, output, Wrong())
    assert json.loads((tmp_path / "c.partial" / "progress.json").read_text())["position"] == [0, 0, 2]


TEXTS = ["", "def main() -> None:\n    return\n", "é 漢字 \U0001f600", " ", "<|endoftext|> inside", "x" * 3000]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Write a model of every kind and return the arguments of `build_tokenizer` by type."""
    folder = tmp_path_factory.mktemp("models")
    train_sentencepiece([Path(module.__file__).read_text()], folder / "tokenizer.model", vocab_size=400, num_threads=1)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(TEXTS * 3, vocab_size=300, special_tokens=["<|endoftext|>", "<s>"], show_progress=False)
    bpe.save_model(str(folder))
    bpe.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])  # as Llama 3's
    bpe.save(str(folder / "tokenizer.json"))
    pieces = (str(folder / "tokenizer.model"),)
    return {
        "HuggingFaceTokenizer": (str(folder / "tokenizer.json"),),
        "GPT2BPETokenizer": (str(folder),),
        "SentencePieceTokenizer": pieces,
        "GPTSentencePieceTokenizer": pieces,
        "Llama2Tokenizer": pieces,
    }


@pytest.mark.parametrize("kind", sorted(FROM_MODEL.keys() | {"GPT2BPETokenizer"}))
def test_a_batch_in_the_threads_of_the_library_gives_the_tokens_of_each_text(kind, models):
    tokenizer = build_tokenizer(kind, *models[kind])
    records = [json_record(i, text=text) for i, text in enumerate(TEXTS)]
    encoded = module.encode_records(records, tokenizer, ("text",), True, 2)
    each = [[*tokenizer.encode(text), tokenizer.eod] if text else [] for text in TEXTS]
    assert encoded.lengths["text"].tolist() == [len(ids) for ids in each]
    assert encoded.tokens["text"].tolist() == [token for ids in each for token in ids]


def test_input_without_text_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no document with text in it"):
        preprocess([], fresh(tmp_path), ByteTokenizer())


def test_text_that_the_tokenizer_refuses_is_a_bad_record():
    encoded = module.encode_records([json_record(3, text="1 11")], NullTokenizer(10), ("text",), False)
    rule = "c.jsonl line 3, byte 0: the NullTokenizer reads numbers from 0 to 10, not '11'"
    assert [problem.text for problem in encoded.problems] == [rule]
    assert encoded.num_documents == 0


def test_end_of_document_needs_such_a_token(tmp_path):
    class Without(ByteTokenizer):
        eod = None  # type: ignore[assignment]

    with pytest.raises(ConfigError, match="--append-eod"):
        preprocess([], fresh(tmp_path), Without(), append_eod=True)


def test_progress_is_a_line_on_a_terminal_and_quiet_elsewhere():
    counts = Counts(documents=2000, tokens={"text": 5000}, text_bytes=3_000_000, seconds=2.0)

    def shown(is_terminal: bool, log_interval: int | None) -> str:
        stream = io.StringIO()
        stream.isatty = lambda: is_terminal  # type: ignore[method-assign]
        progress = Progress(stream, log_interval)
        progress.show(counts)
        progress.show(counts)
        return stream.getvalue()

    line = "2,000 documents, 5,000 tokens, 3.0 MB, 1.5 MB/s, 2 s"
    assert shown(True, None) == f"\r\x1b[K{line}"
    assert shown(False, None) == ""
    assert shown(False, 1000) == f"{line}\n"


def run_tool(*words: str, tool: list[str] = TOOL) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*tool, *words], capture_output=True, text=True, env=ENVIRONMENT, timeout=200)


def test_preprocess_and_merge_tools_write_what_they_print(tmp_path):
    (tmp_path / "src").mkdir()
    for name in ("a.py", "b.py", "c.txt"):
        (tmp_path / "src" / name).write_text(f"# {name}\n")
    done = run_tool(
        *("--input", str(tmp_path / "src"), "--suffixes", ".py", "--output_prefix", str(tmp_path / "out")),
        *("--tokenizer-type", "ByteTokenizer", "--append-eod", "--workers", "2"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "2 documents, 16 tokens" in done.stdout
    assert "16 tokens as uint16, vocabulary 257" in done.stdout
    assert documents(tmp_path / "out_text_document") == [[*b"# a.py\n", 256], [*b"# b.py\n", 256]]
    prefix = str(tmp_path / "out_text_document")
    done = run_tool("--input", prefix, prefix, "--output-prefix", str(tmp_path / "all"), tool=MERGE_TOOL)
    assert (done.returncode, "4 documents, 32 tokens as uint16" in done.stdout) == (0, True), done.stderr


WRONG = {
    "misspelt-flag": (
        ["--apend-eod"],
        2,
        "--apend-eod is not a flag of megapipe preprocess; did you mean --append-eod?",
    ),
    "refused-flag": (["--split-sentences"], 2, "--split-sentences: documents are stored whole"),
    "bad-number": (["--workers", "two"], 2, "--workers two: expected a whole number"),
    "missing-input": (["--input", "nowhere.jsonl"], 2, "--input nowhere.jsonl: no such file"),
    "keys-of-text": (["--json-keys", "title"], 2, "is plain text, which has the key 'text' only"),
    "unknown-tokenizer": (["--tokenizer-type", "Bytetokeniser"], 2, "did you mean ByteTokenizer?"),
}


@pytest.mark.parametrize(("words", "code", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_flags_end_with_one_message_and_no_traceback(words, code, message, tmp_path, capsys):
    sys.path.insert(0, str(REPOSITORY / "tools"))
    try:
        import preprocess_data
    finally:
        sys.path.pop(0)
    (tmp_path / "x.txt").write_text("text")
    base = [
        "--input",
        str(tmp_path / "x.txt"),
        "--output-prefix",
        str(tmp_path / "out"),
        "--tokenizer-type",
        "ByteTokenizer",
    ]
    assert preprocess_data.main([*base, *words]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["x.txt"]


def test_ctrl_c_in_the_middle_leaves_no_file(tmp_path):
    os.mkfifo(tmp_path / "c.jsonl")  # an endless input, so that the signal always arrives during processing
    words = [
        "--input",
        str(tmp_path / "c.jsonl"),
        "--output-prefix",
        str(tmp_path / "out"),
        "--tokenizer-type",
        "ByteTokenizer",
    ]
    tool = subprocess.Popen(
        [*TOOL, *words],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with open(tmp_path / "c.jsonl", "w") as pipe:
        pipe.write((json.dumps({"text": "x" * 1000}) + "\n") * 2000)
        pipe.flush()
        limit = time.monotonic() + 30
        while not (begun := list(tmp_path.glob("*.partial/text.bin"))) and time.monotonic() < limit:
            time.sleep(0.02)
        assert begun
        os.killpg(tool.pid, signal.SIGINT)
        stdout, stderr = tool.communicate(timeout=30)
    assert tool.returncode == 130
    assert "c.jsonl can be read only once" in stderr
    assert stderr.strip().splitlines()[-1].startswith("interrupted; the same command continues")
    assert stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]
