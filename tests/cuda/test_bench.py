"""The benchmark of layers runs at a tiny size; its figures are not checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megapipe.tensor_parallel.fp8 import fp8_unsupported_reason

pytestmark = [pytest.mark.gpu, pytest.mark.compiles, pytest.mark.timeout(300)]  # a contender is a compiled model
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("part", ["layer-peers", "layer-fp8"])
def test_all_contenders_agree_and_are_timed(part: str, tmp_path: Path) -> None:
    reason = fp8_unsupported_reason(torch.device("cuda")) if part == "layer-fp8" else None
    if reason is not None:
        pytest.skip(reason)
    file = tmp_path / "figures.json"
    words = ["tools/bench/card.py", part, "--shape", "tiny", "--json", str(file)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())["figures"]
    assert figures[f"{part}.2 layers.GEMM"] > 0
    assert {"layer-peers": "layer-peers.megapipe to torch.compile", "layer-fp8": "layer-fp8.fp8 GEMM"}[part] in figures
