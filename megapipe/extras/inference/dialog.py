"""`Dialog`: a conversation with a model in a terminal (`megapipe chat`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from megapipe.errors import ConfigError, DataError
from megapipe.extras.inference.generate import Generator, Limits, Sampling, TextStream
from megapipe.extras.inference.saved_model import SavedModel
from megapipe.tokenizers.chat import ChatTokenizer
from megapipe.tokenizers.tokenizer import end_tokens

ANSWER_SHARE = 0.25  # of the context that is kept free for an answer
HELP = "/new begins another conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


class Dialog:
    """A conversation with a model in this process. max_new_tokens: of an answer, None for what the context holds."""

    def __init__(self, model: SavedModel, sampling: Sampling, max_new_tokens: int | None = None) -> None:
        self._chats, self._sampling = model.chat_tokenizer()[0], sampling
        self._tokenizer = self._chats or model.required_tokenizer()
        self._positions = model.plan.config.model.max_position_embeddings
        self._max_new_tokens = max_new_tokens or self._positions
        self._runtime, self._numbers = model.runtime(), itertools.count()
        self.messages: list[dict[str, str]] = []

    def answer(self, line: str) -> tuple[str, bool]:
        """Print the answer to a line as it is generated. Return it, and whether it ended before its limit.

        Ctrl-C ends it, too. Raises ConfigError, DataError for a line that cannot be answered, which is not kept.
        """
        message = {"role": "user", "content": line}
        prompt = self._tokenizer.encode(line) if self._chats is None else self._fitting(self._chats, message)
        seed = (self._sampling.seed + next(self._numbers)) % (1 << 63)  # other tokens for each line
        generator = Generator(self._runtime, replace(self._sampling, seed=seed), batch_size=1)
        limits = Limits(self._max_new_tokens, frozenset(end_tokens(self._tokenizer)))
        stream = TextStream(self._tokenizer.decode, prompt, partial(print, end="", flush=True))
        tokens: list[int] = []

        def take(_: int, token: int) -> None:
            tokens.append(token)
            stream.add(token)

        with suppress(KeyboardInterrupt):
            generator.continue_prompts([prompt], limits, take)
        stream.close()
        print(flush=True)
        text = self._tokenizer.decode([*prompt, *tokens])[len(self._tokenizer.decode(prompt)) :]
        if self._chats is not None and text.strip():
            self.messages += [message, {"role": "assistant", "content": text}]
        return text, len(tokens) < min(self._max_new_tokens, self._positions - len(prompt))

    def _fitting(self, chats: ChatTokenizer, message: dict[str, str]) -> list[int]:
        """Return the prompt of the conversation with a new message; drop the oldest messages until it fits."""
        while True:
            prompt = chats.prompt([*self.messages, message])
            if len(prompt) <= self._positions * (1.0 - ANSWER_SHARE) or not self.messages:
                return prompt
            del self.messages[:2]
            print(f"(the context of {self._positions:,} tokens is full: the oldest two messages are left out)")


def converse(dialog: Dialog, read: Callable[[str], str]) -> None:
    """Answer each line that `read` returns, until /quit or EOFError."""
    while True:
        try:
            line = read("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n{HELP}")
            continue
        if line == "/quit":
            return
        if line == "/new":
            dialog.messages.clear()
        elif line:
            try:
                dialog.answer(line)
            except (ConfigError, DataError) as error:
                print(f"error: {error}")
