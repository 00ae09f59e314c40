from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megapipe.errors import ConfigError, DataError
from megapipe.tokenizers.tokenizer import build_tokenizer
from tests.tokenizers.sentencepiece_models import train_sentencepiece

CODE = [
    (Path(sysconfig.get_path("stdlib")) / name).read_text("utf-8")
    for name in ("argparse.py", "dataclasses.py", "ast.py", "typing.py")
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    train_sentencepiece(CODE, path, vocab_size=1000, max_bytes=300_000, num_threads=2)
    return path


@pytest.mark.parametrize("tokenizer_type", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"])
def test_code_round_trips(tokenizer_type, model):
    tokenizer = build_tokenizer(tokenizer_type, str(model))
    for text in CODE:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert max(ids) < tokenizer.vocab_size
        assert len(ids) < len(text) / 2


# SentencePiece encodes a space as U+2581, so this character alone decodes to a space
@settings(max_examples=100)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
@example(text="\t\tif x:\r\n\n\n   \x0b\x0c\x00y\u2028\ufeff\u00a0 ")
@example(text=" <EOD></s><0x41> ")
def test_any_text_round_trips(text, model):
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(model))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_indentation_is_one_token(model):
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(model))
    assert len(tokenizer.encode("        ")) == 1
    assert len(tokenizer.encode("\n\t")) == 2


def test_special_tokens_have_separate_ids_and_are_never_read_from_text(model):
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(model))
    # the model has all special tokens that Megatron looks for, so the tokenizer adds no token
    assert tokenizer.vocab_size == 1000
    assert (tokenizer.eod, tokenizer.bos, tokenizer.pad) == (6, 1, 3)
    assert not {tokenizer.eod, tokenizer.bos, tokenizer.pad, 2} & set(tokenizer.encode("<EOD> <s> </s> <PAD>"))
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.eod, *tokenizer.encode("b")]) == "ab"


@pytest.mark.parametrize(
    ("tokenizer_type", "missing", "message"),
    [("GPTSentencePieceTokenizer", "eos_id", "has no EOS"), ("Llama2Tokenizer", "bos_id", "has no BOS")],
    ids=["eos", "bos"],
)
def test_model_without_the_end_or_beginning_it_needs_is_refused(tokenizer_type, missing, message, tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(CODE[0].splitlines()),
        model_prefix=str(tmp_path / "m"),
        vocab_size=300,
        minloglevel=2,
        **{missing: -1},
    )
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(tokenizer_type, str(tmp_path / "m.model"))


def test_llama_begins_with_bos_and_ends_documents_with_eos(model):
    plain, llama = (build_tokenizer(name, str(model)) for name in ("SentencePieceTokenizer", "Llama2Tokenizer"))
    assert llama.encode("return") == [llama.bos, *plain.encode("return")]
    assert (llama.vocab_size, llama.eod, llama.pad) == (1000, 2, 3)


def test_missing_special_pieces_are_appended_as_in_megatron(tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(CODE[0].splitlines()), model_prefix=str(tmp_path / "m"), vocab_size=300, minloglevel=2
    )
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(tmp_path / "m.model"))
    # <CLS> 300, <SEP> 301, <EOD> 302, <MASK> 303, <PAD> 304; <s> and </s> come from the model
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad, tokenizer.bos) == (305, 302, 304, 1)
    assert tokenizer.decode([*tokenizer.encode("return"), tokenizer.eod]) == "return"


def test_saved_model_is_the_same(model, tmp_path):
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(model))
    tokenizer.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "tokenizer.model").read_bytes() == model.read_bytes()
    assert build_tokenizer("SentencePieceTokenizer", str(tmp_path / "saved")).encode(CODE[0]) == tokenizer.encode(
        CODE[0]
    )


def test_truncated_model_is_named(model, tmp_path):
    (tmp_path / "cut.model").write_bytes(model.read_bytes()[:5000])
    with pytest.raises(DataError, match=r"cut\.model .5000 bytes"):
        build_tokenizer("SentencePieceTokenizer", str(tmp_path / "cut.model"))


def test_common_pieces_of_code_are_learned(model):
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(model))
    words = re.findall(r"\w+", "def return self import class None if for in")
    assert sum(len(tokenizer.encode(" " + word)) == 1 for word in words) >= 6
