"""Chat files: what is read and kept, and a message with file and line for everything else."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapipe.data.chat import NOTES, REPEATED, WEIGHTLESS, open_chats
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
    "weight 2": (turn("assistant", "a", weight=2), "message 1: weight 2"),
    "weight true": (turn("assistant", "a", weight=True), "message 1: weight True"),
    "weight half": (turn("assistant", "a", weight=0.5), "message 1: weight 0.5"),
    "weight of a user": (turn("user", "a", weight=1), "message 1: weight 1"),
    "train as text": (turn("assistant", "a", train="no"), "message 1: train 'no'"),
    "train as number": (turn("assistant", "a", train=0), "message 1: train 0"),
    "weight against train": (turn("assistant", "a", train=True, weight=0), "message 1: .*train.*weight"),
    "no weight": ({"messages": [{"role": "assistant", "content": "a", "weight": 0}]}, "no message of the assistant"),
    "weight of a line": (GOOD | {"weight": 0}, "has weight"),
    "loss of a message": (turn("user", "a", loss=False), "message 1 has loss"),
    "key twice": ('{"messages": [{"role": "user", "role": "assistant", "content": "a"}]}', "'role' occurs twice"),
    "surrogate": (turn("user", "\ud800"), "message 1: content holds half of a surrogate pair"),
    "no answer": ({"messages": [{"role": "user", "content": "a"}]}, "has no message of the assistant"),
    "empty completion": ({"prompt": "a", "completion": ""}, "message 2: the content of the assistant is empty"),
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


def test_a_file_may_mix_the_two_forms(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    lines = [GOOD, {"prompt": "hi", "completion": "yes"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = open_chats(str(path), ByteEncoder(), IndexCache.at(None, str(path)))
    assert bytes(found.tokens.astype("u1")) == b"uhiayes" * 2


def opened(path: Path, *messages: dict[str, Any]) -> Any:
    path.write_text(json.dumps({"messages": messages}) + "\n")
    return open_chats(str(path), ByteEncoder(), IndexCache.at(None, str(path)))


@pytest.mark.parametrize("no_loss", [{"weight": 0}, {"train": False}, {"weight": 0, "train": False}], ids=str)
def test_an_answer_without_weight_is_read_and_not_trained(tmp_path: Path, no_loss: dict[str, Any]) -> None:
    asked = {"role": "user", "content": "hi", **no_loss}
    answers = [{"role": "assistant", "content": "no", **no_loss}, {"role": "assistant", "content": "y", "weight": 1}]
    found = opened(tmp_path / "chat.jsonl", asked, answers[0], asked, answers[1])
    assert bytes(found.tokens.astype("u1")) == b"uhianouhiay"
    assert np.flatnonzero(found.trained).tolist() == [10]
    assert dict(zip(NOTES, found.counts, strict=True))[WEIGHTLESS] == 1


def test_null_and_empty_values_of_other_keys_say_nothing(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "y", "weight": None, "tool_calls": [], "name": "", "refusal": None}
    assert opened(tmp_path / "chat.jsonl", {"role": "user", "content": "hi"}, answer).trained.sum() == 1


@pytest.mark.parametrize(("roles", "count"), [("ua", 0), ("uaua", 0), ("uuaaua", 1), ("suttaa", 1), ("stta", 0)])
def test_conversations_with_two_turns_of_one_side_are_counted(tmp_path: Path, roles: str, count: int) -> None:
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    found = opened(tmp_path / "chat.jsonl", *({"role": names[role], "content": role} for role in roles))
    assert dict(zip(NOTES, found.counts, strict=True))[REPEATED] == count


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
