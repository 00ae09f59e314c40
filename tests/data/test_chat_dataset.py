"""Packing loses and repeats nothing, an epoch is exact, and samples say what is trained and what belongs together."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config.files import DataConfig
from megapipe.data.batch import Batch, DocumentRules
from megapipe.data.build_datasets import DatasetRequest
from megapipe.data.chat_dataset import OPEN_SEQUENCES, ChatDataset, build_chat_datasets, pack
from megapipe.data.fingerprint import differences, fingerprint, has_another_order
from megapipe.data.loader import Loader
from megapipe.errors import DataError
from tests.data.chats import ByteEncoder, random_chats


def dataset(lengths: list[int], **options: Any) -> ChatDataset:
    options = {"num_samples": 1, "seq_length": 15, "seed": (1, 0)} | options
    chats = options.pop("chats", (0, len(lengths)))
    return ChatDataset(random_chats(lengths), chats, **options)


@given(st.lists(st.integers(1, 20), max_size=60))
def test_packing_holds_every_item_once_and_never_too_much(lengths: list[int]) -> None:
    packed = pack(lengths, 20)
    assert sorted(item for items in packed for item in items) == list(range(len(lengths)))
    assert all(0 < sum(lengths[item] for item in items) <= 20 for items in packed)
    # first sequences are filled: two half-empty ones would have been joined
    assert sum(2 * sum(lengths[item] for item in items) <= 20 for items in packed) <= 1


def test_packing_fills_a_bounded_number_of_sequences_at_a_time() -> None:
    packed = pack([15] * (OPEN_SEQUENCES + 5) + [5] * (OPEN_SEQUENCES + 5), 20)
    assert len(packed) == OPEN_SEQUENCES + 5 + 2  # the five closed ones take no more
    assert len(pack([7, 7, 6] * 300, 20)) <= 301


@given(st.lists(st.integers(2, 16), min_size=1, max_size=30), st.integers(1, 60), st.booleans())
def test_every_epoch_holds_every_conversation_once(lengths: list[int], num_samples: int, packs: bool) -> None:
    found = dataset(lengths, num_samples=num_samples, packs=packs)
    assert len(found) >= num_samples
    read = [number for index in range(len(found)) for number, _ in found.members(index)]
    epochs = np.array(read).reshape(found.num_epochs, len(lengths))
    assert (np.sort(epochs, axis=1) == np.arange(len(lengths))).all()
    short = dataset(lengths, num_samples=1, packs=packs)
    assert [short.members(i) for i in range(len(short))] == [found.members(i) for i in range(len(short))]
    short.grow(num_samples)
    assert [short.members(i) for i in range(len(short))] == [found.members(i) for i in range(len(found))]


def test_order_depends_on_seed_and_epoch() -> None:
    found, other = dataset([5] * 12, num_samples=20), dataset([5] * 12, num_samples=20, seed=(2, 0))
    epochs = np.array([n for i in range(len(found)) for n, _ in found.members(i)]).reshape(-1, 12)
    assert (epochs[0] != epochs[1]).any()
    assert found.members(0) != other.members(0)


def test_a_batch_says_what_is_trained_and_what_belongs_together() -> None:
    found = dataset([4, 6, 3])  # 13 of 16 tokens
    batch = Loader(found, DocumentRules()).microbatch(0, 0, 0, 1, 1)
    members = found.members(0)
    file, sizes = found.file, [length for _, length in members]
    flat = np.concatenate([np.arange(file.starts[n], file.starts[n + 1]) for n, _ in members])
    assert batch.tokens[0].tolist() == [*file.tokens[flat].tolist(), 0, 0]
    assert batch.labels[0].tolist() == [*file.tokens[flat[1:]].tolist(), 0, 0, 0]
    assert batch.document_ids is not None
    assert batch.document_ids[0].tolist() == [0] * sizes[0] + [1] * sizes[1] + [2] * sizes[2] + [-1, -1]
    assert batch.padding is not None
    assert batch.padding[0].tolist() == [False] * 13 + [True] * 2
    # to a module that predicts further ahead, the ends of conversations are padding too
    for count, ends in ((1, [sizes[0] - 1, sum(sizes[:2]) - 1, 12]), (2, [*range(sizes[0] - 2, sizes[0])])):
        ahead = batch.ahead(count).padding
        assert ahead is not None and ahead[0, ends].all() and ahead[0, 13:].all()
        assert int((~ahead[0]).sum()) == sum(size - count for size in sizes)
    assert batch.position_ids is not None
    assert batch.position_ids[0].tolist() == [*range(sizes[0]), *range(sizes[1]), *range(sizes[2]), 0, 1]
    assert batch.loss_mask is not None
    assert batch.loss_mask[0].tolist() == [*map(float, file.trained[flat[1:]]), 0, 0, 0]
    ends = np.cumsum(sizes) - 1
    assert not batch.loss_mask[0][ends].any()  # the label of a last token is the next conversation's first token


def test_other_samples_keep_their_rules() -> None:
    batch = Batch.of(np.zeros((2, 5), dtype=np.int64), (0, 1), DocumentRules())
    assert (batch.loss_mask, batch.position_ids, batch.document_ids, batch.padding) == (None, None, None, None)


@pytest.mark.parametrize(
    ("overlong", "kept", "said"),
    [("drop", [4, 16], "1 of 3 too long: dropped"), ("truncate", [4, 16, 16], "1 of 3 too long: truncated")],
)
def test_long_conversations_are_dropped_or_truncated_as_asked(overlong: str, kept: list[int], said: str) -> None:
    found = dataset([4, 16, 17], overlong=overlong)
    assert sorted(length for i in range(len(found)) for _, length in found.members(i)) == kept
    assert said in found.describe()


def test_long_conversations_are_refused_by_default() -> None:
    with pytest.raises(DataError, match=r"1 of 3 .*--seq-length 15 .*17"):
        dataset([4, 16, 17])


def test_conversations_without_a_trained_token_are_counted_and_refused_if_all_are() -> None:
    file = random_chats([20, 5])
    late = random_chats([20, 5]).first_trained.copy()
    late[0] = 18  # beyond the sequence
    object.__setattr__(file, "first_trained", late)
    options: dict[str, Any] = {"num_samples": 1, "seq_length": 15, "seed": (1, 0), "overlong": "truncate"}
    assert "1 left out: no token of an answer is left" in ChatDataset(file, (0, 2), **options).describe()
    with pytest.raises(DataError, match=r"of 1 .*--seq-length 15"):
        ChatDataset(file, (0, 1), **options)


def write(path: Path, count: int) -> str:
    answers = ({"role": "assistant", "content": f"answer {number}"} for number in range(count))
    lines = [{"messages": [{"role": "user", "content": "ask"}, answer]} for answer in answers]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def request(num_samples: tuple[int, int, int] = (6, 2, 0), **data: Any) -> DatasetRequest:
    return DatasetRequest(DataConfig(sft=True, **data), 40, 1, num_samples)


def read(found: Any) -> Counter[bytes]:
    """Return the texts of the trained tokens of a dataset."""
    texts: Counter[bytes] = Counter()
    for index in range(len(found)):
        tokens, trained, chats = found[index]
        places = [(chats == chat) & (trained > 0) for chat in range(chats.max() + 1)]
        texts.update(bytes(tokens[place].astype("u1")) for place in places if place.any())
    return texts


def test_the_split_divides_the_conversations(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", 10)
    found, lines = build_chat_datasets(request(data_path=(path,), split="80,20,0"), ByteEncoder())
    assert set(read(found.train)) == {f"answer {number}".encode() for number in range(8)}
    assert set(read(found.valid)) == {b"answer 8", b"answer 9"}
    assert found.test is None
    assert [line.split(":")[0] for line in lines] == ["train", "valid"]
    with pytest.raises(DataError, match=r"10 .*--split 99,1,0 .*valid"):
        build_chat_datasets(request(data_path=(path,), split="99,1,0"), ByteEncoder())


def test_files_are_blended_by_weight(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a.jsonl", 4), write(tmp_path / "b.jsonl", 40)
    found, _ = build_chat_datasets(request((40, 0, 0), train_data_path=("3", one, "1", other)), ByteEncoder())
    assert found.train is not None
    assert Counter(found.train.dataset_index[:40].tolist()) == {0: 30, 1: 10}  # type: ignore[attr-defined]
    found, _ = build_chat_datasets(request((40, 0, 0), train_data_path=(one, other)), ByteEncoder())
    assert sum(read(found.train).values()) == 44  # one epoch of each


def test_the_fingerprint_tells_other_data_and_another_order() -> None:
    saved = fingerprint(dataset([5] * 12, num_samples=20))
    assert saved is not None
    for changed, reordered, text in (
        (dataset([5] * 12, num_samples=3), False, None),
        (dataset([5] * 12, seed=(2, 0)), True, None),
        (dataset([5] * 12, packs=False), True, None),
        (dataset([5] * 11 + [6]), False, "chats.jsonl"),
        (dataset([5] * 12, seq_length=20), False, "--seq-length: 15 in the checkpoint, 20 here"),
    ):
        own = fingerprint(changed)
        assert own is not None
        lines = differences(saved, own)
        assert bool(lines) == (text is not None), changed.selection
        assert text is None or text in lines[0]
        assert lines or has_another_order(saved, own) == reordered
    other = random_chats([5] * 12)
    other.tokens[-1] += 1
    own = fingerprint(ChatDataset(other, (0, 12), num_samples=1, seq_length=15, seed=(1, 0)))
    assert own is not None and differences(saved, own)
