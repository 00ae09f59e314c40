"""`megapipe chat`: talk to a trained model in the terminal."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from megapipe.environment import Environment
from megapipe.errors import ConfigError, DataError
from megapipe.extras.cli.frame import command, option
from megapipe.extras.cli.inference import CHECKPOINT_OPTIONS, SAMPLING_OPTIONS, SavedModel, open_model
from megapipe.tokenizers.chat import ChatTokenizer
from megapipe.tokenizers.tokenizer import end_tokens

if TYPE_CHECKING:
    from megapipe.extras.inference.generate import Sampling

RUN_OPTIONS = (option("load", "folder of a run, or one of its checkpoints", metavar="RUN"), *CHECKPOINT_OPTIONS)
CHAT_OPTIONS = (
    *RUN_OPTIONS,
    option("--system", "the system message of the conversation", metavar="TEXT"),
    option("--max-new-tokens", "of an answer (default: what the context holds)", type=int, at_least=1),
    *SAMPLING_OPTIONS,
)
KEPT_SHARE = 4  # 1 / KEPT_SHARE of the context is kept free for an answer
write_now = partial(print, end="", flush=True)
HELP = "/new begins another conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


@command("megapipe chat", CHAT_OPTIONS, on_ranks=True)
def chat(own: argparse.Namespace, environment: Environment) -> None:
    """Talk to a trained model in the terminal.

        megapipe chat runs/chat
        megapipe chat runs/chat/step_00000150 --system "Be brief." --temperature 0.7

    The conversation is written with the chat template that the model was finetuned with; a model without one continues
    the text of each line. Answers appear as they are generated. Once the conversation fills the context, its oldest
    messages are left out, which is said. /new begins another conversation, /quit or Ctrl-D leaves, Ctrl-C stops an
    answer.
    """
    if environment.world_size > 1:
        raise ConfigError(
            f"megapipe chat runs on one process, not on {environment.world_size}; start it without a launcher"
        )
    model = open_model(own, environment, micro_batch_size=1)
    chats, reason = model.chat_tokenizer()
    if chats is None and own.system is not None:
        raise ConfigError(f"--system needs a chat template, but {model.folder} has none: {reason}")
    from megapipe.extras.inference.generate import Sampling

    sampling = Sampling(own.temperature, own.top_k, own.top_p, own.seed)
    dialog = Dialog(model, chats, sampling, own.max_new_tokens, own.system)
    how = f"it continues each line of text: {reason}" if chats is None else "it answers by its chat template"
    print(f"{model.folder}: {how}\n{HELP}", flush=True)
    converse(dialog, input)


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
            dialog.begin()
        elif line:
            try:
                dialog.answer(line)
            except (ConfigError, DataError) as error:
                print(f"error: {error}")


class Dialog:
    """A conversation with a model in this process. chats: None to continue each line. system: its system message."""

    def __init__(
        self,
        model: SavedModel,
        chats: ChatTokenizer | None,
        sampling: Sampling,
        max_new_tokens: int | None = None,
        system: str | None = None,
    ) -> None:
        from megapipe.extras.inference.session import Session

        self._chats, self._tokenizer, self._sampling = chats, chats or model.required_tokenizer(), sampling
        self._positions = model.plan.config.model.max_position_embeddings
        self._max_new_tokens = max_new_tokens or self._positions
        self._system = [{"role": "system", "content": system}] if system is not None else []
        self._session, self._numbers = Session(model.runtime()), itertools.count()
        self.begin()

    def begin(self) -> None:
        """Forget the conversation."""
        self._messages = list(self._system)

    def answer(self, line: str, write: Callable[[str], object] = write_now) -> str:
        """Write the answer to a line as it is generated, and return it. Ctrl-C ends it there.

        Raises ConfigError, DataError for a line that cannot be answered, which is not kept.
        """
        from megapipe.extras.inference.generate import TextStream
        from megapipe.extras.inference.session import Request

        message = {"role": "user", "content": line}
        prompt = self._tokenizer.encode(line) if self._chats is None else self._fitting(self._chats, message)
        # another draw for each answer
        sampling = dataclasses.replace(self._sampling, seed=self._sampling.seed + next(self._numbers))
        request = Request(tuple(prompt), self._max_new_tokens, end_tokens(self._tokenizer), sampling)
        pieces: list[str] = []
        stream = TextStream(self._tokenizer.decode, prompt, lambda text: (pieces.append(text), write(text)))
        with suppress(KeyboardInterrupt):
            self._session.answer(request, stream.add)
        stream.close()
        write("\n")
        text = "".join(pieces)
        if self._chats is not None and text.strip():
            self._messages += [message, {"role": "assistant", "content": text}]
        return text

    def _fitting(self, chats: ChatTokenizer, message: dict[str, str]) -> list[int]:
        """Return the prompt of the conversation with a new message; drop the oldest messages until it fits."""
        oldest, dropped = len(self._system), 0
        while True:
            prompt = chats.prompt([*self._messages, message])
            most = self._positions - min(self._max_new_tokens, self._positions // KEPT_SHARE)
            if len(prompt) <= most or len(self._messages) <= oldest:
                break
            del self._messages[oldest : oldest + 2]
            dropped += 2
        if dropped:
            print(f"(the context of {self._positions:,} tokens is full: the oldest {dropped} messages are left out)")
        return prompt
