"""Chat data: JSON lines with conversations, checked, and their tokens kept in the index cache.

A line is {"messages": [{"role": "user", "content": "..."}, ...]} or {"prompt": "...", "completion": "..."}, which is a
message of the user and the answer; all lines of a run have one of the two forms. Other keys of a line are not read.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any, Protocol, cast

import numpy as np

from megapipe.data.dataset import Array
from megapipe.data.index_cache import Arrays, IndexCache, file_stamp
from megapipe.data.indexed_file import token_dtype
from megapipe.data.text_source import MOST_DOCUMENT_BYTES, bounded_lines
from megapipe.errors import DataError

ROLES = ("system", "user", "assistant", "tool")
MAY_BE_EMPTY = ("system", "tool")
MESSAGES, PROMPT = "messages", "prompt and completion"
# keys of other forms -> the way to convert them
OTHER_FORMS = {
    "conversations": "rename it to messages, with from -> role (human -> user, gpt -> assistant) and value -> content",
    "instruction": "join instruction and input to the prompt, and rename output to completion",
    "text": "this is text for pretraining; megapipe preprocess reads it",
}
UNREAD_KEYS = ("tools", "functions", "documents")  # a template would write them: not to be left out in silence
SAID_BYTES = 1 << 24  # a larger file takes long enough to say that it is tokenized
BATCH = 512  # conversations that are tokenized at once

Message = dict[str, str]


class Rendered(Protocol):
    """A conversation as text."""

    @property
    def text(self) -> str: ...


class ChatTokens(Protocol):
    """The tokens of a conversation and whether each is trained, both [n]. num_cut: see `ChatFile`."""

    @property
    def tokens(self) -> Array: ...
    @property
    def trained(self) -> Array: ...
    @property
    def num_cut(self) -> int: ...


class ChatEncoder(Protocol):
    """The part of a tokenizer with a chat template that is used here."""

    vocab_size: int
    pad: int | None
    eod: int | None

    @property
    def key(self) -> str:
        """A checksum of everything that the tokens depend on."""
        ...

    def render(self, messages: Sequence[Message]) -> Any: ...

    def tokenize(self, chats: Sequence[Any]) -> Sequence[ChatTokens]: ...


@dataclass(frozen=True)
class ChatFile:
    """The tokens of all conversations of a file, one after the other."""

    path: str
    form: str  # MESSAGES or PROMPT
    tokens: Array  # [total]
    trained: Array  # [total] bool: the loss counts where the token is the label
    starts: Array  # [num_chats + 1] int64: first token of each conversation, and the end of the last
    first_trained: Array  # [num_chats] int64: place of the first trained token in each conversation; its length if none
    num_cut: int  # tokens that begin in a prompt and end in the answer; they are not trained

    def __len__(self) -> int:
        return len(self.starts) - 1


def open_chats(path: str, encoder: ChatEncoder, cache: IndexCache) -> ChatFile:
    """Read a file, from the cache if it holds the tokens of this file by this tokenizer and template.

    Raises DataError with file and line of the first invalid conversation.
    """
    try:
        source = file_stamp(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; --sft takes files of JSON lines") from None
    arrays = cache.arrays("chats", {"source": source, "encoder": encoder.key}, lambda: _encode(path, encoder))
    form, num_cut = (int(number) for number in arrays["facts"])
    flat = {name: arrays[name] for name in ("tokens", "trained", "starts", "first_trained")}
    return ChatFile(path, (MESSAGES, PROMPT)[form], **flat, num_cut=num_cut)


def _encode(path: str, encoder: ChatEncoder) -> Arrays:
    """Tokenize a file."""
    tokens: list[Array] = []
    trained: list[Array] = []
    first: list[int] = []
    num_cut, form = 0, ""
    if os.path.getsize(path) > SAID_BYTES:
        print(f"tokenizing {path}: its tokens are kept in the index cache", flush=True)
    chats = read_chats(path)
    while batch := list(islice(chats, BATCH)):
        rendered = []
        for origin, found, messages in batch:
            if form and found != form:
                raise DataError(f"{origin} has {found}, but the lines before have {form}; use one form in all files")
            form = found
            try:
                rendered.append(encoder.render(messages))
            except DataError as error:
                raise DataError(f"{origin}: {error}") from None
        for chat in encoder.tokenize(rendered):
            chat.trained[:1] = False  # the first token is no label
            places = np.flatnonzero(chat.trained)
            tokens.append(chat.tokens.astype(token_dtype(encoder.vocab_size)))
            trained.append(chat.trained)
            first.append(int(places[0]) if len(places) else len(chat.trained))
            num_cut += chat.num_cut
    if not tokens:
        raise DataError(f"{path} holds no conversation")
    ends = np.cumsum([len(chat) for chat in tokens], dtype=np.int64)
    return {
        "tokens": np.concatenate(tokens),
        "trained": np.concatenate(trained),
        "starts": np.concatenate([np.zeros(1, dtype=np.int64), ends]),
        "first_trained": np.array(first, dtype=np.int64),
        "facts": np.array([form == PROMPT, num_cut], dtype=np.int64),
    }


def read_chats(path: str) -> Iterator[tuple[str, str, list[Message]]]:
    """Yield 'FILE line N', the form, and the messages of each line that is not blank. Raises DataError."""
    try:
        with cast(IO[bytes], gzip.open(path, "rb")) if path.endswith(".gz") else open(path, "rb") as file:
            for number, (line, size) in enumerate(bounded_lines(file), 1):
                origin = f"{path} line {number}"
                if size > MOST_DOCUMENT_BYTES:
                    raise DataError(f"{origin} has {size:,} bytes; a conversation has at most {MOST_DOCUMENT_BYTES:,}")
                if line.strip():
                    yield origin, *_messages(line, origin)
    except (OSError, EOFError) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _messages(line: bytes, origin: str) -> tuple[str, list[Message]]:
    """Return the form and the messages of one line."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        hint = "; --sft takes JSON lines, one object per line" if line.lstrip()[:1] != b"{" else ""
        raise DataError(f"{origin} is not JSON: {error}{hint}") from None
    if not isinstance(content, dict):
        raise DataError(f"{origin} is not a JSON object with messages")
    unread = next((key for key in UNREAD_KEYS if content.get(key)), None)
    if unread is not None:
        raise DataError(f"{origin} has {unread}, which --sft does not support; write them into the system message")
    if "messages" in content:
        return MESSAGES, _checked(content["messages"], origin)
    if "prompt" in content and "completion" in content:
        pair = [("user", content["prompt"]), ("assistant", content["completion"])]
        return PROMPT, _checked([{"role": role, "content": text} for role, text in pair], origin)
    way = next((f"{key}: {text}" for key, text in OTHER_FORMS.items() if key in content), "see docs/conversations.md")
    keys = ", ".join(map(str, list(content)[:4])) or "nothing"
    raise DataError(f"{origin} holds {keys}; expected messages, or prompt and completion ({way})")


def _checked(messages: Any, origin: str) -> list[Message]:
    """Return the messages if each has a known role and a text, and at least one is an answer. Raises DataError."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{origin}: messages is not a list of at least one message")
    for number, message in enumerate(messages, 1):
        where = f"{origin}, message {number}"
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise DataError(f'{where}: expected {{"role": ..., "content": ...}}')
        role, text = message["role"], message["content"]
        if role not in ROLES:
            raise DataError(f"{where}: unknown role {str(role)[:40]!r}; expected {', '.join(ROLES)}")
        more = next((key for key, value in message.items() if key not in ("role", "content") and value), None)
        if more is not None:
            raise DataError(f"{where} has {more}, which --sft does not read; a message is a role and a content")
        if not isinstance(text, str):
            raise DataError(f"{where}: content is not text; --sft does not support images or tool calls")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise DataError(f"{where}: content holds half of a surrogate pair (\\ud800 to \\udfff), which is no text")
        if not text.strip() and role not in MAY_BE_EMPTY:
            raise DataError(f"{where}: the content of the {role} is empty; leave the conversation out")
    if all(message["role"] != "assistant" for message in messages):
        raise DataError(f"{origin} has no message of the assistant, so nothing can be learned from it")
    return [{"role": message["role"], "content": message["content"]} for message in messages]
