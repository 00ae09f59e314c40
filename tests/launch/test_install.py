"""launch/install.sh installs a build of torch that the NVIDIA driver can run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.launch.scripts import REPOSITORY

# replaces the Python of the environment: torch is not installed, pip offers some builds and notes what it installs
PYTHON = """#!/bin/sh
case "$*" in
    *--dry-run*) for build in OFFERED; do case "$*" in *+$build\\ *) exit 0 ;; esac; done; exit 1 ;;
    *"pip install"*) printf '%s\\n' "$*" >>"$(dirname "$0")/installed" ;;
    -c*) exit 1 ;;
    *) echo state ;;
esac
"""


@pytest.mark.parametrize(
    ("says", "offered", "build"),
    [
        pytest.param("CUDA Version: 12.4 ", "cu130 cu128 cu126", "cu128", id="a driver for an older CUDA"),
        pytest.param("CUDA UMD Version: 13.1 ", "cu130 cu128", "cu130", id="a new driver"),
        pytest.param("CUDA Version: 11.4 ", "cu130 cu126", None, id="too old"),
    ],
)
def test_the_build_of_torch_is_one_for_the_driver(says: str, offered: str, build: str | None, tmp_path: Path) -> None:
    programs = {
        "bin/nvidia-smi": f"#!/bin/sh\necho '| NVIDIA-SMI 550.1   Driver Version: 550.1   {says} |'\n",
        "venv/bin/python": PYTHON.replace("OFFERED", offered),
    }
    for name, text in programs.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    environment = {**os.environ, "VENV": str(tmp_path / "venv"), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    environment.pop("TORCH_CUDA", None)
    done = subprocess.run(
        [REPOSITORY / "launch" / "install.sh"], env=environment, capture_output=True, text=True, timeout=200
    )
    installed = tmp_path / "venv" / "bin" / "installed"
    if build is None:
        assert done.returncode == 1 and not installed.exists()
        assert "no build of torch" in done.stderr and "which is for CUDA 11.4" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        first = installed.read_text().splitlines()[0]
        assert f"download.pytorch.org/whl/{build} torch==" in first and first.endswith(f"+{build}")
