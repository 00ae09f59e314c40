"""Chat templates: a conversation -> its text, its tokens, and which of them the assistant wrote.

A template is Jinja, of the tokenizer itself or one of FORMATS, and runs in a sandbox (`rendering`). The answer of an
assistant begins where the text would end if the template were asked for one (`add_generation_prompt`), which is what
the model gets in use, and ends with the text of the conversation up to this message. So each of these texts must begin
the next one; a template that writes earlier messages differently once later ones follow is refused.

The tokens are those of the whole text. A token is trained if its first character is in an answer: one that begins in
the prompt and reaches into the answer is not. Blanks and line breaks that a template writes after the last special
token of an answer, the end of the turn, are not trained.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapipe.errors import ConfigError, DataError
from megapipe.tokenizers.hugging_face import GENERATION_FILE, TEMPLATE_FILE, HuggingFaceTokenizer
from megapipe.tokenizers.rendering import Template

Message = Mapping[str, str]  # role and content
DEFAULT_FORMAT = "default"
FLAG = "--sft-tokenizer-prompt-format"
SPECIAL = re.compile(r"<\|[^|<>{}\s]+\|>|<SPECIAL_\d+>")
# what each named format writes; "default" is the tokenizer's own template
FORMATS = {
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "<|begin_of_text|>{% for message in messages %}<|start_header_id|>"
        "{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>\n\n{{ message.content | trim }}"
        "<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "nemotron-h-aligned": (
        "{% for message in messages %}{% set text = message.content | trim %}{% if message.role == 'system' %}"
        "<SPECIAL_10>System\n{{ text }}\n{% elif message.role == 'user' %}<SPECIAL_11>User\n{{ text }}\n"
        "<SPECIAL_11>Assistant\n{% elif message.role == 'assistant' %}{{ text }}\n{% else %}"
        "{{ raise_exception('this format has no role ' ~ message.role) }}{% endif %}{% endfor %}"
    ),
    "plain": (
        "{{ bos_token }}{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}"
        "{{ eos_token if message.role == 'assistant' }}\n{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
}


@dataclass(frozen=True)
class Rendered:
    """The text of a conversation, and the answers in it as [start, end) of its characters."""

    text: str
    answers: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ChatTokens:
    """The tokens of a conversation and whether each is trained, both [n]. num_cut: tokens across an answer's start."""

    tokens: NDArray[np.int64]
    trained: NDArray[np.bool_]
    num_cut: int


class ChatTokenizer:
    """A tokenizer with the chat template that a run trains; `save` writes the template too.

    prompt_format: "default" or a key of FORMATS. Raises ConfigError if the tokenizer has no template, or lacks the
    special tokens that the template writes.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer, prompt_format: str = DEFAULT_FORMAT) -> None:
        self._base = tokenizer
        self.name, self.vocab_size = tokenizer.name, tokenizer.vocab_size
        self.eod, self.bos, self.pad = tokenizer.eod, tokenizer.bos, tokenizer.pad
        self._library_tokenizer = tokenizer.for_chats()
        self.prompt_format = prompt_format
        self.template = FORMATS.get(prompt_format) or tokenizer.chat_template()
        if self.template is None:
            raise ConfigError(
                f"{tokenizer.origin} has no chat template (chat_template.jinja, or chat_template in "
                f"tokenizer_config.json); choose one with {FLAG}: {', '.join(FORMATS)}"
            )
        self._where = f"{FLAG} {prompt_format}" if prompt_format in FORMATS else f"the template of {tokenizer.origin}"
        self._specials = {name: text for name, text in tokenizer.special.items() if self._id(text) is not None}
        self._written = Template(self.template, {"bos_token": "", "eos_token": ""} | self._specials, self._where)
        added = self._library_tokenizer.get_added_tokens_decoder().values()
        texts = sorted((token.content for token in added if token.special), key=len, reverse=True)
        self._forbidden = re.compile("|".join(map(re.escape, texts))) if texts else None
        if prompt_format == "plain" and "eos_token" not in self._specials:
            raise ConfigError(f"{FLAG} plain ends an answer with the eos_token, which {tokenizer.origin} does not have")
        try:
            text = self._text([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        except DataError:
            text = ""  # a template that asks for a system message, say; the data will show whether it works
        missing = [token for token in dict.fromkeys(SPECIAL.findall(text)) if self._id(token) is None]
        if missing:
            raise ConfigError(
                f"{self._where} writes the special token {missing[0]}, which {tokenizer.origin} does not have; choose "
                f"another format ({FLAG} {', '.join(FORMATS)}), or a tokenizer with this token"
            )

    @cached_property
    def key(self) -> str:
        """A checksum of everything that the tokens of a conversation depend on."""
        content = json.dumps([self._library_tokenizer.to_str(), self.template, self._specials], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._base.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._base.decode(ids)

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files, the template, and the ends of texts with that of an answer, so that a model is
        prompted as it was trained and stops as it was trained.
        """
        self._base.save(folder)
        if set(self.ends) - set(self._base.ends):
            path = folder / GENERATION_FILE
            content = json.loads(path.read_text("utf-8")) if path.exists() else {}
            path.write_text(json.dumps(content | {"eos_token_id": list(self.ends)}, indent=2) + "\n", encoding="utf-8")
        if self.prompt_format in FORMATS:
            (folder / TEMPLATE_FILE).write_text(self.template or "", encoding="utf-8")

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a text: that at the end of an answer, the tokenizer's own, and those that its files name.

        Templates end an answer with a special token, or with none. A short conversation shows it, with a system message
        if the template demands one.
        """
        asked, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        found: list[int] = []
        for messages in ([asked, answer], [{"role": "system", "content": "c"}, asked, answer]):
            try:
                (chat,) = self.tokenize([self.render(messages)])
            except DataError:
                continue
            last = int(chat.tokens[chat.trained][-1])
            added = self._library_tokenizer.get_added_tokens_decoder()
            if last in added and added[last].special:
                found.append(last)
            break
        own = () if self.eod is None else (self.eod,)
        return tuple(dict.fromkeys((*found, *own, *self._base.ends)))

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation up to the beginning of the next answer. Raises DataError as `render`."""
        self._check_contents(messages)
        text = self._text(messages, prompt=True)
        return list(self._library_tokenizer.encode(text, add_special_tokens=False).ids)

    def _check_contents(self, messages: Sequence[Message]) -> None:
        for number, message in enumerate(messages, 1):
            # the text of a special token would become that token
            if self._forbidden is not None and (found := self._forbidden.search(message["content"])):
                rule = f"the special token {found[0]}, which must come from the template alone"
                raise DataError(f"the content of message {number} holds {rule}; remove it from the text")

    def render(self, messages: Sequence[Message], untrained: Collection[int] = ()) -> Rendered:
        """Write a conversation. untrained: numbers of messages that are no answers to be trained.

        Raises DataError if its text is ambiguous, or the template cannot write it.
        """
        self._check_contents(messages)
        whole = self._text(messages)
        answers = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number in untrained:
                continue
            before = self._text(messages[:number], prompt=True)
            after = whole if number + 1 == len(messages) else self._text(messages[: number + 1])
            if not (whole.startswith(after) and after.startswith(before)):
                raise DataError(
                    f"{self._where} writes message {number + 1} differently when others follow or precede it, so the "
                    f"tokens of the answer cannot be told; use a fixed format ({FLAG} {', '.join(FORMATS)})"
                )
            if message["content"].strip() not in after[len(before) :]:
                raise DataError(
                    f"{self._where} does not write the content of message {number + 1} as it is; change the content, "
                    f"or use a fixed format ({FLAG} {', '.join(FORMATS)})"
                )
            answers.append((len(before), len(after)))
        return Rendered(whole, tuple(answers))

    def tokenize(self, chats: Sequence[Rendered]) -> list[ChatTokens]:
        """Tokenize texts, on all cores."""
        encodings = self._library_tokenizer.encode_batch([chat.text for chat in chats], add_special_tokens=False)
        added = self._library_tokenizer.get_added_tokens_decoder()
        special = frozenset(number for number, token in added.items() if token.special)
        return [_tokens(chat, encoding, special) for chat, encoding in zip(chats, encodings, strict=True)]

    def _id(self, text: str) -> int | None:
        found: int | None = self._library_tokenizer.token_to_id(text)
        return found

    def _text(self, messages: Sequence[Message], prompt: bool = False) -> str:
        if not messages and prompt and self.prompt_format not in FORMATS:
            # many templates look at the first message; a conversation that begins with an answer has no prompt there
            raise DataError("the conversation begins with an answer; begin it with a message of the user")
        return self._written.text(messages, prompt)


def chat_tokenizer(tokenizer: object, prompt_format: str = DEFAULT_FORMAT) -> ChatTokenizer:
    """Return a tokenizer with its chat template. Raises ConfigError if it has no tokenizer.json."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        kind = getattr(tokenizer, "name", "no tokenizer")
        raise ConfigError(
            f"--sft needs a HuggingFaceTokenizer with a tokenizer.json, not {kind}: see docs/finetuning.md"
        )
    return ChatTokenizer(tokenizer, prompt_format)


def _tokens(chat: Rendered, encoding: Any, special: frozenset[int]) -> ChatTokens:
    """Return the tokens of a text with those that are trained."""
    ids = np.array(encoding.ids, dtype=np.int64)
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    trained = np.zeros(len(ids), dtype=np.bool_)
    is_special = np.isin(ids, list(special))
    num_cut = 0
    for start, end in chat.answers:
        first, past = np.searchsorted(offsets[:, 0], [start, end])
        num_cut += int(((offsets[:first, 0] < start) & (offsets[:first, 1] > start)).sum())
        specials = first + np.flatnonzero(is_special[first:past])
        if len(specials) and not chat.text[int(offsets[specials[-1], 1]) : end].strip():
            past = int(specials[-1]) + 1
        trained[first:past] = True
    return ChatTokens(ids, trained, num_cut)
