"""`build` compiles the fake device; `load` makes it part of this process, which must not have imported torch yet."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from megapipe.errors import MegapipeError

SOURCE = Path(__file__).with_name("guard.cpp")
COMPILER = "g++"


def missing() -> str | None:
    """Return why the device cannot be built here, or None."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed (pip install torch)"
    if shutil.which(COMPILER) is None:
        return f"{COMPILER} is not installed (on Debian and Ubuntu: apt-get install g++; elsewhere the package of GCC)"
    if not (_torch() / "include" / "ATen").is_dir():
        return "the installed torch has no headers (torch/include); install torch's own wheel"
    return None


def build() -> Path:
    """Return the device as a shared library; compiled once for each version of torch and of the source."""
    torch = _torch()
    key = hashlib.sha256(SOURCE.read_bytes() + version("torch").encode() + str(torch).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"megapipe-fake-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():  # it would be loaded
        raise MegapipeError(f"{folder} belongs to another user; remove it")
    library = folder / f"{key}.so"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        # calls into torch stay unresolved until the library is loaded into a process that has libc10 and libtorch_cpu
        flags = ["-std=c++20", "-O0", "-fPIC", "-shared", "-w"]
        command = [COMPILER, *flags, *include, str(SOURCE), "-o", str(made)]
        compiled = subprocess.run(command, capture_output=True, text=True)
        if compiled.returncode:
            lines = compiled.stderr.strip().splitlines()
            first = next((line for line in lines if "error" in line), *lines[:1])
            raise MegapipeError(f"{COMPILER} cannot compile the fake device against torch {version('torch')}: {first}")
        made.replace(library)
    return library


def load(library: Path) -> None:
    """Load torch's libraries with global symbols, the device, then torch. Call before `import torch`."""
    if "torch" in sys.modules:
        raise RuntimeError(
            "torch is imported already: it has found that there is no accelerator and does not ask again"
        )
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    device = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import torch

    device.fake_cuda_register()  # again: a build of torch for CUDA has registered its own guard
    torch.backends.cudnn.version = lambda: None  # type: ignore[assignment]  # what such a build would ask of its hooks


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
