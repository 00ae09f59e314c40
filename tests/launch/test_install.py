"""launch/install.sh installs a build of torch for the NVIDIA driver and the GPU, and keeps one that is there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.launch.scripts import REPOSITORY

# replaces the Python of the environment: torch is not installed (or is KEPT), pip offers a default build and some
# others, and notes what it installs
PYTHON = """#!/bin/sh
case "$*" in
    *--dry-run*torch==*+*) for build in OFFERED; do case "$*" in *+$build\\ *) exit 0 ;; esac; done; exit 1 ;;
    *--dry-run*) echo "Would install filelock-4.2 DEFAULT torch-2.13.0" ;;
    *"pip install"*) printf '%s\\n' "$*" >>"$(dirname "$0")/installed" ;;
    *"-m venv"*) printf '%s\\n' "$*" >>"$(dirname "$0")/made"; exit 1 ;;
    *"print('torch'"*) [ -z "KEPT" ] || echo "torch KEPT" ;;
    *version_info*) exit 0 ;;
    -c*) exit 1 ;;
    *pyproject.toml*) exec python3 "$@" ;;
    *) echo state ;;
esac
"""
SMI = """#!/bin/sh
case "$*" in
    *compute_cap*) echo CAPABILITY ;;
    *) echo '| NVIDIA-SMI 550.1   Driver Version: 550.1   SAYS |' ;;
esac
"""
CUDA_13, CUDA_12 = "nvidia-cuda-runtime-13.0.96", "nvidia-cuda-runtime-cu12-12.8.90"


def install(folder: Path, says: str = "CUDA Version: 13.0 ", capability: str = "9.0", **words: str) -> tuple[int, str]:
    """Run the installer beside stand-ins; return its exit code and what it said."""
    python = PYTHON
    for name, value in ({"OFFERED": "", "DEFAULT": "", "KEPT": ""} | words).items():
        python = python.replace(name, value)
    smi = SMI.replace("SAYS", says).replace("CAPABILITY", capability)
    for name, text in {"bin/nvidia-smi": smi, "venv/bin/python": python}.items():
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    environment = {**os.environ, "VENV": str(folder / "venv"), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    environment.pop("TORCH_CUDA", None)
    script = REPOSITORY / "launch" / "install.sh"
    done = subprocess.run([script], env=environment, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout + done.stderr


def installed(folder: Path) -> list[str]:
    file = folder / "venv" / "bin" / "installed"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize(
    ("says", "capability", "offered", "default", "build"),
    [
        pytest.param("CUDA Version: 12.4 ", "9.0", "cu130 cu128 cu126", CUDA_13, "cu128", id="a driver for CUDA 12"),
        pytest.param("CUDA UMD Version: 13.1 ", "9.0", "cu130 cu128", CUDA_13, "", id="the default build runs"),
        pytest.param("CUDA Version: 13.0 ", "9.0", "", CUDA_13, "", id="only a mirror of PyPI"),
        pytest.param("CUDA Version: 12.4 ", "8.0", "", CUDA_12, "", id="a default build for CUDA 12"),
        pytest.param("CUDA Version: 13.0 ", "9.0", "cu130", "", "cu130", id="a default build for CPUs"),
        pytest.param("CUDA Version: 13.0 ", "7.0", "cu130 cu126", CUDA_13, "cu126", id="Volta"),
        pytest.param("CUDA Version: 12.8 ", "10.0", "cu129 cu126", CUDA_13, "cu129", id="Blackwell, CUDA 12"),
        pytest.param("CUDA Version: 13.0 ", "not supported", "", CUDA_13, "", id="an nvidia-smi without capabilities"),
        pytest.param("CUDA Version: 12.4 ", "9.0", "", CUDA_13, None, id="an old driver and only a mirror"),
        pytest.param("CUDA Version: 12.8 ", "10.0", "cu126", CUDA_13, None, id="Blackwell, no build"),
        pytest.param("CUDA Version: 11.4 ", "8.0", "cu130 cu126", CUDA_13, None, id="too old"),
    ],
)
def test_the_build_of_torch_runs_on_driver_and_gpu(
    says: str, capability: str, offered: str, default: str, build: str | None, tmp_path: Path
) -> None:
    code, said = install(tmp_path, says, capability, OFFERED=offered, DEFAULT=default)
    if build is None:
        assert code == 1 and not installed(tmp_path)
        assert (
            f"no build of torch 2.13.0 for GPUs of compute capability {capability} runs on this NVIDIA driver" in said
        )
        assert "update the driver, or set TORCH_CUDA" in said
        return
    assert code == 0, said
    first = installed(tmp_path)[0]
    if build:
        assert f"download.pytorch.org/whl/{build} torch==" in first and first.endswith(f"+{build}")
    else:
        assert first.endswith(" torch==2.13.0") and "the default build of this index, for CUDA 1" in said


def test_a_torch_for_gpus_that_is_there_is_kept(tmp_path: Path) -> None:
    code, said = install(tmp_path, KEPT="2.13.0a0+1a2b3c.nv26.05", DEFAULT=CUDA_13)
    assert code == 0, said
    assert "torch 2.13.0a0+1a2b3c.nv26.05, which is there already, is kept" in said
    (only,) = installed(tmp_path)
    assert " -e " in only and f"-c {tmp_path}/venv/kept-torch.txt" in only
    assert (tmp_path / "venv" / "kept-torch.txt").read_text() == "torch==2.13.0a0+1a2b3c.nv26.05\n"


@pytest.mark.parametrize("kept", ["2.13.0a0+1a2b3c.nv26.05", ""], ids=["a container's torch", "none"])
def test_a_new_environment_sees_a_torch_that_is_there(kept: str, tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text(PYTHON.replace("KEPT", kept))
    python.chmod(0o755)
    environment = {**os.environ, "VENV": str(tmp_path / "venv"), "PYTHON": str(python)}
    environment.pop("TORCH_CUDA", None)
    subprocess.run([REPOSITORY / "launch" / "install.sh"], env=environment, capture_output=True, timeout=200)
    shares = "--system-site-packages " if kept else ""
    assert (tmp_path / "made").read_text() == f"-m venv {shares}{tmp_path / 'venv'}\n"


def test_a_torch_that_is_too_old_is_said_and_not_replaced(tmp_path: Path) -> None:
    code, said = install(tmp_path, KEPT="2.6.0a0+1a2b3c.nv25.01", DEFAULT=CUDA_13)
    assert code == 1 and not installed(tmp_path)
    assert "torch 2.6.0a0+1a2b3c.nv25.01 that is there already is not one that megapipe works with" in said
