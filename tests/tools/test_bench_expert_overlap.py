"""The benchmark of overlapped all-to-alls runs every schedule. Times are not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_every_schedule_is_measured_beside_its_simulation(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += [str(REPOSITORY / "tools" / "bench" / "bench_expert_overlap.py"), "--json", str(figures)]
    command += "--layers 4 --microbatches 4 --steps 1 --attention 2 2 2 --mlp 2 2 2 --head 1 1 1 --a2a 2 2".split()
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert list(found) == ["1f1b", "interleaved", "dualpipe", "dualpipe-v"]
    for name, each in found.items():
        assert f"| {name} |" in done.stdout
        assert each["simulated overlapped"] < each["simulated serial"]
        for kind in ("serial", "overlapped"):  # sleeps last at least their time
            assert each[kind][0] >= 0.98 * each[f"simulated {kind}"]
