"""The kernels that torch.compile generates for an H100: how many, bytes moved, and widest accesses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megapipe.extras.streams.device import missing

# name -> bytes for each element, widest load and widest store of each kernel; then those for any number of rows, if
# they differ. Scalar kernels would load and store 1 to 4 bytes at a time: the data's own loads and stores take 8 or 16,
# except in reductions over blocks of 32 or 128, of which a thread has few elements
EXPECTED: dict[str, list[tuple[float, list[int], list[int]]]] = {
    "adamw": [(32.0, [16], [16])],
    "sum of exponentials": [(2.0, [8], [4])],  # stores a number for each row
    "gradient of logits": [(4.0, [16], [16])],
    "swiglu": [(3.0, [16], [16])],
    "gradient of swiglu": [(10.0, [16], [16])],
    "merged parts": [(8.09, [16, 16], [16, 16])],
    "experts' swiglu": [(3.0, [16], [16])],
    "tensor": [(3.0, [16], [8])],
    "tensor, transpose": [(4.0, [16], [8])],
    # maxima of blocks, and the cast
    "blocks": [(5.09, [4, 16], [4, 8])],
    "blocks, transpose": [(8.19, [4, 4, 16], [4, 4, 8])],
    "micro blocks, transpose": [(8.56, [2, 2, 16], [4, 4, 8])],
    "squares": [(6.0, [8, 16], [4, 8])],
}


def why_not() -> str | None:
    """Return why no code for GPUs can be generated here."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is no build for CUDA"
    return "triton is not installed" if find_spec("triton") is None else missing()


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.timeout(600)
def test_kernels_for_an_h100_move_the_expected_bytes_in_wide_accesses() -> None:
    """Another version of torch may generate better code: then the table is to be changed."""
    command = [sys.executable, "-m", "tests.gpu.generated_code", *EXPECTED]
    found = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    graphs = json.loads(found.stdout.splitlines()[-1])
    for name, expected in EXPECTED.items():
        codes = [tuple(code) for code in graphs[name]]
        assert codes == [expected[0], expected[-1]][: len(codes)], name
