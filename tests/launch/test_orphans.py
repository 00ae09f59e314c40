"""The parent process that a rank takes for its launcher. Ranks end with it: see the fault table in tests/faults."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megapipe.extras.cli.frame import is_ancestor


def test_only_an_ancestors_process_id_counts() -> None:
    assert is_ancestor(os.getppid())
    assert not is_ancestor(os.getpid())


pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
