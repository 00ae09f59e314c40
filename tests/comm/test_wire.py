"""Objects sent between ranks arrive unchanged, unexpected data is refused, and no received data is executed."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapipe.checkpoint.save import SaveReport
from megapipe.comm.wire import pack, unpack
from megapipe.errors import CheckpointError, CommunicationError
from megapipe.monitor.heartbeat import Wait
from megapipe.monitor.roster import Member
from megapipe.topology import Coordinates

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
OBJECTS = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner), max_leaves=20
)


@given(OBJECTS)
def test_what_is_packed_comes_back_with_its_types(value: Any) -> None:
    assert repr(unpack(pack(value))) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        SaveReport(Path("/a/step_1"), 7, 0.5, (Path("b"),), "done", None),
        Member(3, "höst", 17, None, "", "pp 1, dp 0", (1, 2)),
        {("a", 1): [Coordinates(0, 1, 2, 3), Wait.SEND]},
        [math.inf, -0.0],
    ],
    ids=["dataclasses", "texts", "names", "floats"],
)
def test_megapipes_own_records_can_be_sent(value: object) -> None:
    assert repr(unpack(pack(value))) == repr(value)


def test_an_error_arrives_with_its_text() -> None:
    found = unpack(pack(CheckpointError("no such folder")))
    assert isinstance(found, CheckpointError)
    assert str(found) == "no such folder"


@pytest.mark.parametrize(
    "value", [{1, 2}, torch.zeros(1), print, object()], ids=["set", "tensor", "function", "object"]
)
def test_a_type_that_cannot_be_sent_is_named_by_the_sender(value: object) -> None:
    with pytest.raises(TypeError, match=rf"cannot send .*{type(value).__name__} between ranks"):
        pack(value)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(pickle.dumps({"a": 1}), id="a pickle"),
        pytest.param(b'{"~":["frozen","subprocess","Popen",{"args":["true"]}]}', id="a class of Python"),
        pytest.param(b'{"~":["frozen","megapipe.checkpoint.disk","Disk",{}]}', id="a machine of ours"),
        pytest.param(b'{"~":["frozen","megapipe.comm.wire","Path",{}]}', id="a class that only stands there"),
        pytest.param(b'{"~":["frozen","megapipe.monitor.roster","Member",{"rank":1}]}', id="fields missing"),
        pytest.param(b'{"~":["named","megapipe.comm.wire","unpack",[]]}', id="a function"),
        pytest.param(b'{"~":["call","os","system","true"]}', id="an unknown kind"),
        pytest.param(b'{"a":1}', id="a plain object"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_invalid_messages_are_refused_and_create_nothing(data: bytes) -> None:
    with pytest.raises(CommunicationError, match="invalid message between ranks"):
        unpack(data)
