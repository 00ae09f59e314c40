"""`TextStream`: tokens to text as they come, never half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Decodes a growing list of tokens and hands on what is new. A character whose bytes have not all come is held back until `close`.

    decode: tokens -> text. prompt: the tokens before the first new one: some tokenizers decode a token otherwise at the start of a text.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], write: Callable[[str], None]
    ) -> None:
        self._decode, self._write = decode, write
        self._tokens = list(prompt)
        self._written = len(decode(self._tokens))

    def add(self, token: int) -> None:
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if not text.endswith(UNFINISHED):
            self._hand_on(text)

    def close(self) -> None:
        """Hand on what was held back."""
        self._hand_on(self._decode(self._tokens))

    def _hand_on(self, text: str) -> None:
        if len(text) > self._written:
            self._write(text[self._written :])
            self._written = len(text)
