#!/usr/bin/env python3
"""Print the facts of a machine that decide what runs: GPU, tools, libraries, limits. Changes no setting.

Exits with 1 if what a run on this machine needs is missing. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from megapipe.environment import prefixed

TOOLS = ("cc", "gcc", "g++", "nvcc", "git", "nvidia-smi", "nvidia-cuda-mps-control", "ncu", "compute-sanitizer")
NEEDED = ("torch", "numpy", "safetensors", "sentencepiece", "pyyaml", "pytest")
OTHERS = ("triton", "tokenizers", "transformers", "pytest-xdist", "pytest-timeout", "hypothesis", "transformer_engine")
QUERIES = (
    ("nvidia-smi",),
    ("nvidia-smi", "topo", "-m"),
    ("nvidia-smi", "-q", "-d", "CLOCK,POWER,ECC,COMPUTE"),
    ("lscpu",),
    ("free", "-g"),
    ("df", "-h", "/tmp", "/dev/shm"),
    ("ip", "-br", "link"),
)
SECONDS = 20


def version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def answer(words: tuple[str, ...]) -> str:
    try:
        asked = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{error}\n"
    return asked.stdout + asked.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="what a run is to use")
    device = parser.parse_args().device
    print(platform.platform(), "Python", sys.version)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    compiler = shutil.which("cc") or shutil.which("gcc")
    for tool in TOOLS:
        print(f"{tool}: {shutil.which(tool) or 'missing'}")
    for name in (*NEEDED, *OTHERS):
        print(f"{name}: {version_of(name)}")
    print(f"Python.h: {header.exists()}; cores: {len(os.sched_getaffinity(0))} of {os.cpu_count()}")
    for limit in ("RLIMIT_NOFILE", "RLIMIT_MEMLOCK", "RLIMIT_NPROC", "RLIMIT_AS"):
        print(f"{limit}: {resource.getrlimit(getattr(resource, limit))}")
    for prefix in ("CUDA", "NVIDIA_", "NCCL", "TORCH", "LD_"):
        for name, value in sorted(prefixed(prefix).items()):
            print(f"{prefix}{name}={value}")
    for words in QUERIES:
        print(f"\n$ {' '.join(words)}\n{answer(words)}", end="")
    lacks = [name for name in NEEDED if version_of(name) == "missing"]
    if device == "cuda":  # compiled kernels need both
        lacks += [] if compiler else ["a C compiler (gcc)"]
        lacks += [] if header.exists() else [f"{header} (Debian: python3-dev)"]
    if lacks:
        print(f"\nmissing here: {', '.join(lacks)}")
    return 1 if lacks else 0


if __name__ == "__main__":
    sys.exit(main())
