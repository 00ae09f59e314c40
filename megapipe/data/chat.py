"""Chat data: JSON lines with conversations, checked, and their tokens kept in the index cache.

A line is {"messages": [{"role": "user", "content": "..."}, ...]} or {"prompt": "...", "completion": "..."}, which is a
message of the user and the answer. Other keys of a line are not read.
An answer with "weight": 0 (as in OpenAI's files) or "train": false is read and not trained.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import IO, Any, cast

import numpy as np

from megapipe.data.dataset import Array
from megapipe.data.index_cache import Arrays, IndexCache, file_stamp
from megapipe.data.indexed_file import token_dtype
from megapipe.errors import DataError
from megapipe.input_files import MOST_DOCUMENT_BYTES, bounded_lines, parse_json, regular
from megapipe.tokenizers.chat import ChatTokenizer, Message

ROLES = ("system", "user", "assistant", "tool")
MAY_BE_EMPTY = ("system", "tool")
# keys of other forms -> the way to convert them
OTHER_FORMS = {
    "conversations": "rename it to messages, with from -> role (human -> user, gpt -> assistant) and value -> content",
    "instruction": "join instruction and input to the prompt, and rename output to completion",
    "text": "this is text for pretraining; megapipe preprocess reads it",
}
# keys of a line that are not to be left out in silence
UNREAD_KEYS = ("tools", "functions", "documents", "weight", "train")
WEIGHTS = {"weight": (0, 1), "train": (False, True)}  # keys of a message -> their values for no loss and for loss
SAYS_NOTHING: tuple[Any, ...] = (None, "", [], {})  # values of other keys of a message
CUT = "tokens across the start of an answer get no loss"
WEIGHTLESS = "answers of weight 0 get no loss"
REPEATED = "conversations have two messages of the user or two answers in a row"
NOTES = (CUT, WEIGHTLESS, REPEATED)  # that are counted and said, see `ChatFile.counts`
SAID_BYTES = 1 << 24  # a larger file takes long enough to say that it is tokenized
BATCH = 512  # conversations that are tokenized at once


@dataclass(frozen=True)
class ChatFile:
    """The tokens of all conversations of a file, one after the other."""

    path: str
    tokens: Array  # [total]
    trained: Array  # [total] bool: the loss counts where the token is the label
    starts: Array  # [num_chats + 1] int64: first token of each conversation, and the end of the last
    first_trained: Array  # [num_chats] int64: place of the first trained token in each conversation; its length if none
    counts: tuple[int, ...]  # of each of NOTES

    def __len__(self) -> int:
        return len(self.starts) - 1


def open_chats(path: str, encoder: ChatTokenizer, cache: IndexCache) -> ChatFile:
    """Read a file, from the cache if it holds the tokens of this file by this tokenizer and template.

    Raises DataError with file and line of the first invalid conversation.
    """
    try:
        source = file_stamp(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; --sft takes files of JSON lines") from None
    arrays = cache.arrays("conversations", {"source": source, "encoder": encoder.key}, lambda: _encode(path, encoder))
    flat = {name: arrays[name] for name in ("tokens", "trained", "starts", "first_trained")}
    return ChatFile(path, **flat, counts=tuple(map(int, arrays["counts"])))


def _encode(path: str, encoder: ChatTokenizer) -> Arrays:
    """Tokenize a file."""
    tokens: list[Array] = []
    trained: list[Array] = []
    first: list[int] = []
    counts = dict.fromkeys(NOTES, 0)
    if os.path.getsize(path) > SAID_BYTES:
        print(f"tokenizing {path}: its tokens are kept in the index cache", flush=True)
    chats = read_chats(path)
    while batch := list(islice(chats, BATCH)):
        rendered = []
        for chat in batch:
            counts[WEIGHTLESS] += len(chat.untrained)
            counts[REPEATED] += chat.has_repeated_roles
            try:
                rendered.append(encoder.render(chat.messages, chat.untrained))
            except DataError as error:
                raise DataError(f"{chat.origin}: {error}") from None
        for encoded in encoder.tokenize(rendered):
            encoded.trained[:1] = False  # the first token is no label
            places = np.flatnonzero(encoded.trained)
            tokens.append(encoded.tokens.astype(token_dtype(encoder.vocab_size)))
            trained.append(encoded.trained)
            first.append(int(places[0]) if len(places) else len(encoded.trained))
            counts[CUT] += encoded.num_cut
    if not tokens:
        raise DataError(f"{path} holds no conversation")
    ends = np.cumsum([len(chat) for chat in tokens], dtype=np.int64)
    return {
        "tokens": np.concatenate(tokens),
        "trained": np.concatenate(trained),
        "starts": np.concatenate([np.zeros(1, dtype=np.int64), ends]),
        "first_trained": np.array(first, dtype=np.int64),
        "counts": np.array(list(counts.values()), dtype=np.int64),
    }


@dataclass(frozen=True)
class Chat:
    """One conversation of a file."""

    origin: str  # 'FILE line N'
    messages: list[Message]
    untrained: tuple[int, ...]  # numbers of the answers without loss

    @property
    def has_repeated_roles(self) -> bool:
        """True if the user speaks twice in a row, or the assistant."""
        roles = [message["role"] for message in self.messages]
        return any(one == other and one in ("user", "assistant") for one, other in pairwise(roles))


def read_chats(path: str) -> Iterator[Chat]:
    """Yield the conversation of each line that is not blank. Raises DataError."""
    try:
        with cast(IO[bytes], (gzip.open if path.endswith(".gz") else open)(regular(path), "rb")) as file:
            for number, (line, size) in enumerate(bounded_lines(file), 1):
                origin = f"{path} line {number}"
                if size > MOST_DOCUMENT_BYTES:
                    raise DataError(f"{origin} has {size:,} bytes; a conversation has at most {MOST_DOCUMENT_BYTES:,}")
                if line.strip():
                    yield _chat(line, origin)
    except (OSError, EOFError) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _chat(line: bytes, origin: str) -> Chat:
    """Return the conversation of one line."""
    try:
        content = parse_json(line)
    except ValueError as error:
        hint = "; --sft takes JSON lines, one object per line" if line.lstrip()[:1] != b"{" else ""
        raise DataError(f"{origin} is not JSON that can be read: {error}{hint}") from None
    if not isinstance(content, dict):
        raise DataError(f"{origin} is not a JSON object with messages")
    unread = next((key for key in UNREAD_KEYS if content.get(key) not in SAYS_NOTHING), None)
    if unread is not None:
        rule = "a weight is that of a message, and a template's other inputs belong into the system message"
        raise DataError(f"{origin} has {unread}, which --sft does not support; {rule}")
    if "messages" in content:
        return Chat(origin, *_checked(content["messages"], origin))
    if "prompt" in content and "completion" in content:
        pair = [("user", content["prompt"]), ("assistant", content["completion"])]
        return Chat(origin, *_checked([{"role": role, "content": text} for role, text in pair], origin))
    way = next((f"{key}: {text}" for key, text in OTHER_FORMS.items() if key in content), "see docs/finetuning.md")
    keys = ", ".join(map(str, list(content)[:4])) or "nothing"
    raise DataError(f"{origin} holds {keys}; expected messages, or prompt and completion ({way})")


def _checked(messages: Any, origin: str) -> tuple[list[Message], tuple[int, ...]]:
    """Return the messages if each has a known role and a text, and the numbers of the answers without loss.

    Raises DataError, also if no answer is left to be trained.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{origin}: messages is not a list of at least one message")
    for number, message in enumerate(messages, 1):
        where = f"{origin}, message {number}"
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise DataError(f'{where}: expected {{"role": ..., "content": ...}}')
        role, text = message["role"], message["content"]
        if role not in ROLES:
            raise DataError(f"{where}: unknown role {str(role)[:40]!r}; expected {', '.join(ROLES)}")
        known = ("role", "content", *WEIGHTS)
        more = next((key for key, value in message.items() if key not in known and value not in SAYS_NOTHING), None)
        if more is not None:
            rule = "a message is a role, a content and perhaps a weight"
            raise DataError(f"{where} has {more}, which --sft does not read; {rule}")
        if not isinstance(text, str):
            raise DataError(f"{where}: content is not text; --sft does not support images or tool calls")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise DataError(f"{where}: content holds half of a surrogate pair (\\ud800 to \\udfff), which is no text")
        if not text.strip() and role not in MAY_BE_EMPTY:
            raise DataError(f"{where}: the content of the {role} is empty; leave the conversation out")
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    trained = [
        number for number, message in enumerate(messages) if _is_trained(message, f"{origin}, message {number + 1}")
    ]
    if not trained:
        raise DataError(f"{origin} has no message of the assistant with a weight, so nothing can be learned from it")
    plain: list[Message] = [{"role": message["role"], "content": message["content"]} for message in messages]
    return plain, tuple(number for number in answers if number not in trained)


def _is_trained(message: Mapping[str, Any], where: str) -> bool:
    """Return True for an answer whose weight and train are not 0 and false. Raises DataError for other values."""
    given = {key: message[key] for key in WEIGHTS if message.get(key) is not None}
    for key, value in given.items():
        if isinstance(value, bool) != (key == "train") or value not in WEIGHTS[key]:  # True == 1
            expected = " or ".join(map(json.dumps, WEIGHTS[key]))
            raise DataError(f"{where}: {key} {value!r} cannot be expressed; expected {expected}")
    if len(set(given.values())) > 1:
        raise DataError(f"{where}: train {given['train']} and weight {given['weight']} contradict each other")
    is_answer = message["role"] == "assistant"
    if any(given.values()) and not is_answer:
        named = " and ".join(f"{key} {value!r}" for key, value in given.items())
        raise DataError(f"{where}: {named} of the {message['role']}; only answers are trained, leave it out")
    return is_answer and all(given.values())
