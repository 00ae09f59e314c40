"""Streamed text adds up to the whole text, and no piece ends inside a multi-byte character."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megapipe.extras.inference.generate import INCOMPLETE_CHARACTER, TextStream
from megapipe.tokenizers.tokenizer import ByteTokenizer


@given(text=st.text(max_size=20), cut=st.integers(0, 80))
def test_pieces_add_up_to_the_text(text: str, cut: int) -> None:
    tokenizer, pieces = ByteTokenizer(), list[str]()
    tokens = tokenizer.encode(text)[: len(tokenizer.encode(text)) - cut or None] if cut else tokenizer.encode(text)
    stream = TextStream(tokenizer.decode, [], pieces.append)
    for token in tokens:
        stream.add(token)
    assert INCOMPLETE_CHARACTER in text or not any(piece.endswith(INCOMPLETE_CHARACTER) for piece in pieces)
    stream.close()
    assert "".join(pieces) == tokenizer.decode(tokens)


def test_the_prompt_is_not_repeated() -> None:
    tokenizer, pieces = ByteTokenizer(), list[str]()
    stream = TextStream(tokenizer.decode, tokenizer.encode("naïv"), pieces.append)
    for token in tokenizer.encode("eté"):
        stream.add(token)
    assert pieces == ["e", "t", "é"]
