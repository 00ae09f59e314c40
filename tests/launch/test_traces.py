"""Files that a run leaves: they contain no secret from the environment and have the modes of the user's umask."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

from tests.launch.scripts import LIMIT_SECONDS, REPOSITORY, environment
from tests.tiny import TINY_FLAGS

SECRET = "do-not-tell-7d1e"
KEYS = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "NCCL_AUTH_TOKEN", "TORCH_PASSWORD")
RUN = ("--mock-data", "--global-batch-size", "2", "--train-iters", "2", "--save", "run", "--hang-timeout-seconds", "60")


def test_a_run_writes_no_keys_and_follows_the_umask(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "pretrain_gpt.py"), *TINY_FLAGS, *RUN],
        env={**environment(), **dict.fromkeys(KEYS, SECRET)},
        cwd=tmp_path,
        umask=0o027,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout + done.stderr
    written = sorted((tmp_path / "run").rglob("*"))
    assert {"run.jsonl", "metrics.jsonl", "manifest.json", "roster.json"} <= {path.name for path in written}
    for path in written:
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.is_dir():
            assert mode == 0o750, path
        else:
            assert mode == 0o640, f"{path}: {mode:o}"
            assert SECRET.encode() not in path.read_bytes(), path
