"""Chat files: what is read and kept, and a message with file and line for everything else."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megapipe.data.chat import open_chats
from megapipe.data.index_cache import IndexCache
from megapipe.errors import DataError
from tests.data.chats import ByteEncoder

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content, **more}, {"role": "assistant", "content": "yes"}]}


BAD = {
    "not json": ("{", r"is not JSON"),
    "array": ("[", r"is not JSON.*one object per line"),
    "number": ("1", "is not a JSON object"),
    "not utf-8": (b'{"messages": "\xff"}', "is not JSON"),
    "no messages": ({"messages": []}, "not a list of at least one message"),
    "text of pretraining": ({"text": "a"}, "holds text; expected messages.*megapipe preprocess"),
    "sharegpt": ({"conversations": []}, "holds conversations; expected messages.*rename it to messages"),
    "alpaca": ({"instruction": "a", "output": "b"}, "rename output to completion"),
    "empty object": ({}, "holds nothing"),
    "tools": (GOOD | {"tools": [{}]}, "has tools, which --sft does not support"),
    "no role": ({"messages": [{"content": "a"}]}, 'message 1: expected {"role"'),
    "text as message": ({"messages": ["a"]}, "message 1: expected"),
    "unknown role": (turn("human", "a"), "message 1: unknown role 'human'; expected system, user, assistant, tool"),
    "role of another type": (turn(["user"], "a"), "message 1: unknown role"),  # type: ignore[arg-type]
    "empty content": (turn("user", " \n"), "message 1: the content of the user is empty"),
    "no text": (turn("user", None), "message 1: content is not text"),
    "image": (turn("user", [{"type": "image"}]), "message 1: content is not text"),
    "weight": (turn("user", "a", weight=2), "message 1 has weight"),
    "surrogate": (turn("user", "\ud800"), "message 1: content holds half of a surrogate pair"),
    "no answer": ({"messages": [{"role": "user", "content": "a"}]}, "has no message of the assistant"),
    "empty completion": ({"prompt": "a", "completion": ""}, "message 2: the content of the assistant is empty"),
    "two forms": ({"prompt": "a", "completion": "b"}, "has prompt and completion, but the lines before have messages"),
}


@pytest.mark.parametrize(("line", "message"), BAD.values(), ids=BAD)
def test_a_bad_line_is_refused_with_file_and_line(tmp_path: Path, line: Any, message: str) -> None:
    path = tmp_path / "chat.jsonl"
    raw = line if isinstance(line, bytes) else line.encode() if isinstance(line, str) else json.dumps(line).encode()
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\n" + raw + b"\n")
    with pytest.raises(DataError) as error:
        open_chats(str(path), ByteEncoder(), IndexCache.at(None, str(path)))
    assert str(error.value).startswith(f"{path} line 3")
    assert re.search(message, str(error.value))
    assert "\n" not in str(error.value)


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    for name, message in (("none.jsonl", "cannot read"), ("empty.jsonl", "holds no conversation")):
        (tmp_path / "empty.jsonl").write_text("\n")
        with pytest.raises(DataError, match=message):
            open_chats(str(tmp_path / name), ByteEncoder(), IndexCache.at(None, str(tmp_path / name)))


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("line", [GOOD, {"prompt": "hi", "completion": "yes", "id": 7}], ids=["messages", "prompt"])
def test_tokens_and_the_trained_ones_are_kept(tmp_path: Path, line: dict[str, Any], suffix: str) -> None:
    path = tmp_path / f"chat.jsonl{suffix}"
    raw = (json.dumps(line) + "\n").encode() * 3
    path.write_bytes(gzip.compress(raw) if suffix else raw)
    found = open_chats(str(path), ByteEncoder(), IndexCache.at(None, str(path)))
    assert found.starts.tolist() == [0, 7, 14, 21]
    assert bytes(found.tokens.astype("u1")) == b"uhiayes" * 3
    assert found.trained.tolist() == [False, False, False, False, True, True, True] * 3
    assert found.first_trained.tolist() == [4, 4, 4]


def test_a_file_is_tokenized_once_for_each_content_and_template(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps(GOOD) + "\n")
    cache, counts = IndexCache.at(str(tmp_path / "cache"), str(path)), []
    for key, text in (("a", None), ("a", None), ("b", None), ("a", json.dumps(GOOD) * 1 + "\n" + json.dumps(GOOD))):
        if text is not None:
            path.write_text(text)
        encoder = ByteEncoder(key)
        open_chats(str(path), encoder, cache)
        counts.append(encoder.num_rendered)
    assert counts == [1, 0, 1, 2]
