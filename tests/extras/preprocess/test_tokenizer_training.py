"""A trained tokenizer is lossless, the same each time, the same in transformers, and ready for conversations."""

from __future__ import annotations

import json
import re
import sysconfig
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megapipe.errors import ConfigError
from megapipe.extras.preprocess.tokenizer_training import SPECIAL_TOKENS, train_tokenizer
from megapipe.tokenizers.chat import FORMATS, ChatTokenizer
from megapipe.tokenizers.hugging_face import HuggingFaceTokenizer

STDLIB = Path(sysconfig.get_path("stdlib"))
CODE = [(STDLIB / name).read_text("utf-8") for name in ("argparse.py", "dataclasses.py", "ast.py", "typing.py")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "tokenizer"
    train_tokenizer(CODE, path, 1000)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(folder)


@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@example(text="\t\tif x:\r\n\n\n   \x0b\x0c\x00y\u2028\ufeff\u00a0 \u2581 ")
def test_any_text_round_trips(text: str, tokenizer: HuggingFaceTokenizer) -> None:
    assume(not any(special in text for special in SPECIAL_TOKENS))  # they are read as one token, which isn't shown
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and all(0 <= token < tokenizer.vocab_size for token in ids)


def test_code_round_trips_and_becomes_shorter(tokenizer: HuggingFaceTokenizer) -> None:
    assert tokenizer.vocab_size == 1000
    for text in CODE:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and len(ids) < len(text) / 2
    assert len(tokenizer.encode("        ")) == 1  # an indentation
    words = re.findall(r"\w+", "def return self import class None if for in")
    assert sum(len(tokenizer.encode(" " + word)) == 1 for word in words) >= 6


def test_transformers_reads_the_folder_as_it_was_trained(folder: Path, tokenizer: HuggingFaceTokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert (theirs.eos_token_id, tokenizer.eod, len(theirs)) == (0, 0, 1000)
    every = sorted(STDLIB.glob("*.py"))[::4]
    assert len(every) > 30
    for path in every:
        text = path.read_text("utf-8", errors="replace")
        ids = theirs(text)["input_ids"]
        assert ids == tokenizer.encode(text), path
    assert theirs.decode(tokenizer.encode(CODE[0])) == CODE[0]
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    assert theirs.apply_chat_template(chat, tokenize=False) == ChatTokenizer(tokenizer).render(chat).text
    prompt = theirs.apply_chat_template(chat[:1], add_generation_prompt=True)["input_ids"]
    assert prompt == ChatTokenizer(tokenizer).prompt(chat[:1])


def test_an_answer_ends_with_a_token_that_ends_a_text(tokenizer: HuggingFaceTokenizer) -> None:
    chats = ChatTokenizer(tokenizer)
    assert chats.template == FORMATS["chatml"] and chats.ends == (2, 0)
    (tokens,) = chats.tokenize(
        [chats.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])]
    )
    assert tokens.tokens[tokens.trained].tolist() == [*tokenizer.encode("b"), 2]


@pytest.mark.parametrize(
    ("vocab_size", "message"),
    [
        (300, "--vocab-size 300 hardly holds all bytes; use 320 or more"),
        (500_000, r"--vocab-size 500000: the text supports at most \d+; give more"),
    ],
    ids=["too-small", "too-large"],
)
def test_impossible_vocabulary_size_is_refused(vocab_size: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        train_tokenizer(CODE[:1], tmp_path / "x", vocab_size)
    assert list(tmp_path.iterdir()) == []


def test_training_twice_gives_the_same_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train_tokenizer(CODE, tmp_path / name, 500)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)
    vocabulary = json.loads((tmp_path / "a" / "tokenizer.json").read_text())["model"]["vocab"]
    assert [vocabulary[token] for token in SPECIAL_TOKENS] == [0, 1, 2]
