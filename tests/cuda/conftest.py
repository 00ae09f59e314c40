"""The marks of tests on a GPU.

Many may run at once on one GPU: `pytest --gpu -m gpu -n 12 -p no:cacheprovider tests/cuda`. With TORCHDYNAMO_DISABLE=1
nothing is compiled, which takes most of the time; those marked `compiles` are left out then. Those marked `timing` are
left out where tests run at once, and run by themselves afterwards: `pytest --gpu -m timing tests/cuda`.
"""

from __future__ import annotations

import os

import pytest

LEFT_OUT = {
    "compiles": (os.environ.get("TORCHDYNAMO_DISABLE") == "1", "TORCHDYNAMO_DISABLE=1 is set: nothing is compiled"),
    "timing": (
        int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1,
        "measures times: run without other tests on the GPU (-m timing, without -n)",
    ),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark, (is_left_out, reason) in LEFT_OUT.items():
            if is_left_out and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))
