"""The parent process that a rank takes for its launcher. Ranks end with it: see the fault table in tests/faults."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from megapipe.environment import read_environment
from megapipe.extras.cli.frame import end_with_launcher, is_ancestor


def test_only_an_ancestors_process_id_counts() -> None:
    assert is_ancestor(os.getppid())
    assert not is_ancestor(os.getpid())


@pytest.mark.parametrize("run_id", ["none", None], ids=["torchrun", "by hand"])
def test_only_a_launchers_end_ends_a_rank(run_id: str | None) -> None:
    own = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    found = read_environment(own | ({"TORCHELASTIC_RUN_ID": run_id} if run_id else {}))
    with mock.patch("threading.Thread") as thread:
        end_with_launcher(found)
    assert thread.called == (run_id is not None), "a rank started by hand outlives its shell"


pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
