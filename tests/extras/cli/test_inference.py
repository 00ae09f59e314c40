"""Checks of a checkpoint by `generate` and `evaluate` before a model is built.

They cover the vocabulary size and the tokenizer.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers as library

from megapipe.assembly.runtime import InferenceRuntime
from megapipe.checkpoint.folder import CheckpointFolder
from megapipe.environment import read_environment
from megapipe.errors import ConfigError
from megapipe.extras.cli.frame import Command
from megapipe.extras.cli.inference import MODEL_OPTIONS, evaluate, generate, model_asked
from megapipe.extras.inference import saved_model
from megapipe.extras.inference.saved_model import SavedModel, open_model
from tests.train.jobs import job


def trained(root: Path, flags: str) -> Path:
    code, said = job(f"--train-iters 1 --save {root} {flags}")
    assert code == 0, said
    return root


def opened(root: Path, *flags: str) -> SavedModel:
    command = Command("test", MODEL_OPTIONS, lambda own: None)
    own = command.parse(["--load", str(root), "--device", "cpu", *flags])
    environment = read_environment({})
    return open_model(model_asked(own, environment), environment, micro_batch_size=1)


def test_a_tokenizer_given_by_flags_does_not_change_the_vocabulary(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = trained(tmp_path, "--vocab-size 64")
    model = opened(root, "--tokenizer-type", "NullTokenizer")
    assert model.plan.config.model.vocab_size == 64
    assert model.tokenizer is not None and model.tokenizer.vocab_size == 64
    words = "--device cpu --tokenizer-type NullTokenizer --max-new-tokens 3 --ignore-eod --prompt"
    assert generate(["--load", str(root), *words.split(), "1 2"]) == 0
    assert len(capfd.readouterr().out.split()) == 5


def test_the_null_tokenizer_of_training_keeps_its_end_of_document(tmp_path: Path) -> None:
    model = opened(trained(tmp_path, "--tokenizer-type NullTokenizer"))  # from --vocab-size 32
    assert model.plan.config.model.vocab_size == 33
    assert model.tokenizer is not None and model.tokenizer.eod == 32


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    root = trained(tmp_path, "")
    with pytest.raises(ConfigError, match=r"ByteTokenizer has 257 tokens, the model .*step_00000001 only 32"):
        opened(root, "--tokenizer-type", "ByteTokenizer")


@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "HuggingFaceTokenizer"])
def test_a_checkpoint_needs_no_other_tokenizer_than_its_own(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    bpe = library.ByteLevelBPETokenizer()
    bpe.train_from_iterator(["a text"], vocab_size=260, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.save_model(str(source))
    bpe.save(str(source / "mine.json"))
    files = {
        "GPT2BPETokenizer": f"--vocab-file {source}/vocab.json --merge-file {source}/merges.txt",
        "HuggingFaceTokenizer": f"--tokenizer-model {source}/mine.json",
    }
    root = trained(tmp_path / "root", f"--vocab-size 300 --tokenizer-type {kind} {files[kind]}")
    for path in source.iterdir():
        path.unlink()
    tokenizer = opened(root).tokenizer
    assert tokenizer is not None and tokenizer.decode(tokenizer.encode("a text")) == "a text"


@pytest.mark.parametrize("form", ["", "--json"])
def test_a_loss_that_is_not_finite_is_an_error(
    form: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = trained(tmp_path / "run", "--vocab-size 64")
    (tmp_path / "text.txt").write_text("1 2 3 4 5 6 7 8 9\n")
    load = saved_model.load_weights

    def spoilt(runtime: InferenceRuntime, folder: CheckpointFolder) -> None:
        load(runtime, folder)
        runtime.buffers[0].buffers[0].parameters.fill_(float("nan"))

    monkeypatch.setattr(saved_model, "load_weights", spoilt)
    words = f"--load {root} --device cpu --tokenizer-type NullTokenizer --data {tmp_path}/text.txt {form}"
    assert evaluate(words.split()) == 1
    out, said = capfd.readouterr()
    assert "is nan" in said and str(root) in said and "Traceback" not in said and out.count("loss") == 0
    assert "--ckpt-step" in said
