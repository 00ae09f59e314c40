"""The order of streams, on logs written by hand: what is ordered, and one race for each way to lose the order."""

from __future__ import annotations

import pytest

from megapipe.extras.streams.order import HOST, Entry, Free, Mark, Operation, Wait, find_races

WHOLE = ((1, 0, 100),)
WRITE = Operation("a", "write", writes=WHOLE)
READ = Operation("b", "read", reads=WHOLE)
B_AFTER_A: list[Entry] = [Mark("e", "a"), Wait("b", "e")]
HOST_AFTER_A: list[Entry] = [Mark("e", "a"), Wait(HOST, "e")]
ON_HOST = Operation(HOST, "host", writes=WHOLE)
FREE = Free(1, "a", "free")
FREE_AFTER_B: list[Entry] = [Mark("f", "b"), FREE._replace(after=("f",))]


ORDERED: dict[str, list[Entry]] = {
    "one stream": [WRITE, WRITE._replace(place="again")],
    "two reads": [READ, READ._replace(queue="a")],
    "an event": [WRITE, *B_AFTER_A, READ],
    "an event of a third stream": [WRITE, Mark("e", "a"), Wait("c", "e"), Mark("f", "c"), Wait("b", "f"), READ],
    "a host that waits": [WRITE, *HOST_AFTER_A, READ],
    "a host that waits and writes": [WRITE, *HOST_AFTER_A, ON_HOST],
    "a launch after the host's write": [ON_HOST, READ],
    "other bytes": [WRITE, READ._replace(reads=((1, 100, 200),))],
    "record_stream": [WRITE, *B_AFTER_A, READ, *FREE_AFTER_B],
    "record_stream of a stream that waits for the other": [
        WRITE._replace(queue="c"),
        Mark("e", "c"),
        Wait("b", "e"),
        READ,
        *FREE_AFTER_B,
    ],
    "a free after an event back": [WRITE, *B_AFTER_A, READ, Mark("f", "b"), Wait("a", "f"), FREE],
}
UNORDERED: dict[str, tuple[list[Entry], tuple[str, str]]] = {
    "no event": ([WRITE, READ], ("write", "read")),
    "an event before the write": ([*B_AFTER_A, WRITE, READ], ("write", "read")),
    "an event that was recorded again too late": ([Mark("e", "a"), WRITE, Wait("b", "e"), READ], ("write", "read")),
    "a write after the read": ([WRITE, *B_AFTER_A, READ, WRITE._replace(place="next")], ("read", "next")),
    "a host that does not wait": ([WRITE, ON_HOST], ("write", "host")),
    "the first of two readers": (
        [READ, READ._replace(queue="c"), Mark("e", "c"), Wait("a", "e"), WRITE],
        ("read", "write"),
    ),
    "a part of the bytes": ([WRITE, READ._replace(reads=((1, 99, 200),))], ("write", "read")),
    "a write that a read followed": (
        [WRITE, *B_AFTER_A, READ, READ._replace(queue="c", place="other")],
        ("write", "other"),
    ),
    "a free without record_stream": ([WRITE, *B_AFTER_A, READ, FREE], ("read", "free")),
    "record_stream of another stream": (
        [WRITE, *B_AFTER_A, Wait("c", "e"), READ._replace(queue="c"), *FREE_AFTER_B],
        ("read", "free"),
    ),
    "record_stream, which orders nothing else": (
        [READ, READ._replace(reads=((2, 0, 1),)), *FREE_AFTER_B, WRITE._replace(writes=((2, 0, 1),))],
        ("read", "write"),
    ),
}


@pytest.mark.parametrize("name", ORDERED)
def test_ordered_accesses_are_no_race(name: str) -> None:
    assert find_races([ORDERED[name]]) == []


@pytest.mark.parametrize("name", UNORDERED)
def test_unordered_accesses_are_a_race_with_both_places(name: str) -> None:
    log, (earlier, later) = UNORDERED[name]
    (race,) = find_races([log])
    assert race.earlier.endswith(earlier) and race.later.endswith(later)


def test_a_receive_is_ordered_after_the_work_before_its_send() -> None:
    """Rank 0's buffer, sent on stream n, may be written again once an answer to the message has arrived."""
    there, back = "there", "back"
    first: list[Entry] = [
        Operation("n", "send", reads=WHOLE, sends=there),
        Operation("m", "receive", writes=((2, 0, 1),), receives=back),
        Mark("e", "m"),
        Wait("a", "e"),
        WRITE,
    ]
    arrives = Operation("n", "receive", writes=WHOLE, receives=there)
    answer = Operation("m", "answer", reads=((2, 0, 1),), sends=back)
    assert find_races([first, [arrives, Mark("e", "n"), Wait("m", "e"), answer]]) == []
    (race,) = find_races([first, [arrives, answer]])  # the answer does not wait for the message
    assert race.earlier.endswith("send") and race.later.endswith("write")


def test_a_receive_that_no_rank_sends_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"never begins: rank 0 .*receives='it'"):
        find_races([[Operation("n", "receive", writes=WHOLE, receives="it")], []])


def test_a_receive_may_be_posted_before_what_its_peer_waits_for() -> None:
    """Both ranks post their receive first and send then."""
    logs: list[list[Entry]] = [
        [
            Operation("in", "receive", writes=WHOLE, receives=received),
            Mark("e", "in"),
            Operation("out", "send", reads=((2, 0, 1),), sends=sent),
            Wait("a", "e"),
            Operation("a", "read", reads=WHOLE),
        ]
        for received, sent in (("x", "y"), ("y", "x"))
    ]
    assert find_races(logs) == []


def test_the_host_waits_for_a_message_before_its_later_work() -> None:
    first: list[Entry] = [
        Operation("n", "receive", writes=WHOLE, receives="x"),
        Mark("e", "n"),
        Wait(HOST, "e"),
        Operation("a", "read", reads=WHOLE),
    ]
    assert find_races([first, [Operation("n", "send", reads=WHOLE, sends="x")]]) == []
