"""Conversations without a tokenizer: random tokens of given lengths, and an encoder of bytes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from megapipe.data.chat import NOTES, ChatFile
from megapipe.data.dataset import Array
from megapipe.tokenizers.chat import Message


def random_chats(lengths: Sequence[int], vocab_size: int = 50, seed: int = 0) -> ChatFile:
    """Return a file of random conversations, of whose tokens about half are trained, and the last always."""
    random = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    trained = random.random(starts[-1]) < 0.5
    trained[starts[1:] - 1] = True
    trained[starts[:-1]] = False
    first = [int(np.flatnonzero(trained[a:b])[0]) for a, b in itertools.pairwise(starts)]
    tokens = random.integers(0, vocab_size, starts[-1]).astype(np.uint16)
    return ChatFile("chats.jsonl", tokens, trained, starts, np.array(first, dtype=np.int64), (0,) * len(NOTES))


@dataclass
class Rendered:
    text: str
    trained: list[bool]


@dataclass
class Tokens:
    tokens: Array
    trained: Array
    num_cut: int = 0


class ByteEncoder:
    """A `ChatTokenizer` of bytes: 'u' + content of each message of the user, 'a' + content of each answer, which is
    trained.
    """

    vocab_size, pad, eod = 257, 256, None

    def __init__(self, key: str = "bytes") -> None:
        self.key = key
        self.num_rendered = 0

    def render(self, messages: Sequence[Message], untrained: Collection[int] = ()) -> Rendered:
        self.num_rendered += 1
        text, trained = "", []
        for number, message in enumerate(messages):
            piece = message["role"][0] + message["content"]
            text += piece
            is_trained = message["role"] == "assistant" and number not in untrained
            trained += [is_trained and i > 0 for i in range(len(piece))]
        return Rendered(text, trained)

    def tokenize(self, chats: Sequence[Rendered]) -> list[Tokens]:
        return [Tokens(np.frombuffer(c.text.encode(), np.uint8).astype(np.int64), np.array(c.trained)) for c in chats]
