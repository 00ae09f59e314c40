"""Which fast kernels are there, and which torch takes on this device. Asked by trying, with tensors of a few numbers."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping

import torch
from torch.nn.attention import SDPBackend

FAST_BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
EXTENSIONS = ("transformer-engine", "flash-attn", "apex")


def fast_paths(device: torch.device, packages: Mapping[str, str | None]) -> dict[str, str]:
    """Name -> what is there; begins with "active", "installed" or "not"."""
    found = {name: _tried(ask, device) for name, ask in _QUESTIONS.items()}
    for name in EXTENSIONS:
        version = packages.get(name)
        found[name] = f"installed {version}, used where a flag asks for it" if version else "not installed"
    return found


def _tried(ask: Callable[[torch.device], str], device: torch.device) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ask(device)
    except (RuntimeError, TypeError, AttributeError, NotImplementedError, OSError) as error:
        return f"not active: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


def _fused_adamw(device: torch.device) -> str:
    weight, gradient, mean, square = (torch.ones(16, device=device) for _ in range(4))
    steps = [torch.ones((), device=device)]
    # the kernel itself: making a torch.optim.AdamW imports torch._dynamo, which takes seconds
    torch._fused_adamw_(
        [weight],
        [gradient],
        [mean],
        [square],
        [],
        steps,
        lr=0.1,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.1,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )
    return "active" if float(weight[0]) < 1 else "not active: the kernel leaves the weight as it was"


def _attention(device: torch.device) -> str:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.zeros(1, 2, 64, 64, device=device, dtype=dtype)
    chosen = SDPBackend(torch._fused_sdp_choice(q, q, q, None, 0.0, True))
    kind = str(dtype).removeprefix("torch.")
    name = chosen.name.removesuffix("_ATTENTION").lower()
    return (
        f"active: {name} for {kind}"
        if chosen in FAST_BACKENDS
        else f"not active: torch takes its {name} kernel for {kind}"
    )


def _bf16(device: torch.device) -> str:
    if device.type == "cuda":
        major = torch.cuda.get_device_capability(device)[0]
        return "active" if major >= 8 else f"not active: the GPU's compute capability {major} has no bf16 matrix units"
    has_units = any(
        getattr(torch.cpu, name, bool)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )
    level = torch.backends.cpu.get_cpu_capability()
    return f"active ({level})" if has_units else f"not active: this CPU ({level}) has no bf16 units"


def _compiler(device: torch.device) -> str:
    if device.type == "cuda":
        from importlib.util import find_spec

        return (
            "installed: triton"
            if find_spec("triton")
            else "not installed: triton is missing, torch.compile cannot work"
        )
    compiler = next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)
    return f"installed: {compiler}" if compiler else "not installed: no C++ compiler, torch.compile cannot work"


_QUESTIONS: dict[str, Callable[[torch.device], str]] = {
    "fused AdamW": _fused_adamw,
    "fused attention": _attention,
    "bf16 matrix units": _bf16,
    "compiler of torch.compile": _compiler,
}
