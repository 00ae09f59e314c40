"""The compilers that torch.compile needs on this machine."""

from __future__ import annotations

from importlib.util import find_spec


def missing_compiler(device_type: str) -> str | None:
    """Return what torch.compile lacks on this machine: Triton for CUDA, a C++ compiler for CPUs; None if nothing."""
    if device_type == "cuda":
        return None if find_spec("triton") is not None else "torch.compile needs the package triton, not installed here"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "torch.compile needs a C++ compiler, and found none (g++, or the one named by CXX)"
    return None
