"""Generate the Triton kernels of a compiled function for an H100, without a GPU: their number, bytes and access widths.

Inductor runs on fake tensors of a fake CUDA device with an H100's properties, and Triton compiles its kernels to the
assembly (PTX) of sm_90. Both come with torch's wheel for CUDA. torch is changed for the whole process, so
`python -m tests.gpu.generated_code CASE...` is a process of its own, which prints a JSON object: case -> its graphs.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

from megapipe.extras.streams import device as fake_device

if __name__ == "__main__":  # before torch is imported
    fake_device.load(fake_device.build())

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from megapipe.config.config import convert
from megapipe.config.layers import LayerConfig
from megapipe.config.model import ModelConfig
from megapipe.gpu.kernels import compiled
from megapipe.model.experts import WeightedActivation
from megapipe.model.mlp import COMPILED, formulas
from megapipe.model.partial_results import merge_
from megapipe.model.segments import Compiler, Segment
from megapipe.optimizer.update_rule import adamw_pass
from megapipe.sharding.buffers import ALIGNMENT
from megapipe.tensor_parallel.cross_entropy import sum_of_exponentials, write_gradient
from megapipe.tensor_parallel.fp8_matrix import E4M3
from megapipe.tensor_parallel.fp8_scales import cast_blocks, cast_micro, cast_squares, cast_tensor

ROWS, OTHER_ROWS, HIDDEN, FFN, WORDS = 8192, 4096, 4096, 14336, 32768
ONCE = ("blocks, transpose", "micro blocks, transpose", "squares")  # others with another number of rows, too
EXACT = (cast_tensor, cast_blocks, cast_micro, cast_squares)  # as in `Kernels.cast`
Call = tuple[Callable[..., Any], tuple[Any, ...]]
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "major": 9,
    "minor": 0,
    "total_memory": 80 * 2**30,
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "gcnArchName": "",
    "L2_cache_size": 50 * 2**20,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472,
}
ACCESS = re.compile(r"\b(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)\b")


class Code(NamedTuple):
    """The kernels of one graph."""

    moved: float  # bytes for each element of the first argument, each buffer of a kernel read or written once
    loads: list[int]  # bytes of the widest load of a thread in each kernel
    stores: list[int]


class _Generated(Exception):
    """Ends a compilation: the code is not run."""


def pretend() -> None:
    """Let torch and Triton find an H100."""
    import torch._dynamo.device_interface as interface
    import torch._inductor.fx_passes.joint_graph as joint
    import torch._inductor.fx_passes.post_grad as post
    import torch._inductor.runtime.triton_helpers as helpers
    import torch._subclasses.fake_tensor as fake
    import torch.utils._triton as found
    import triton
    from triton.backends.compiler import GPUTarget

    properties = SimpleNamespace(**H100)
    of_torch: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: H100["name"],
        "synchronize": lambda *_: None,
        "is_initialized": lambda: False,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
        "_lazy_init": lambda: None,
    }
    for name, value in of_torch.items():
        setattr(torch.cuda, name, value)
    torch.accelerator.is_available = lambda: False
    if hasattr(fake, "init_gpu_context"):
        fake.init_gpu_context = lambda *_: None  # it would allocate
    for name in ("get_device_properties", "current_device", "is_available", "device_count", "synchronize"):
        setattr(interface.CudaInterface, name, staticmethod(of_torch[name]))
    for name in ("get_device_properties", "current_device"):
        setattr(interface.CudaInterface.Worker, name, staticmethod(of_torch[name]))
    interface.CudaInterface.get_compute_capability = staticmethod(lambda *_: 90)
    interface.CudaInterface.get_raw_stream = staticmethod(lambda _: 0)
    found.has_triton = lambda *_: True
    helpers.set_driver_to_gpu = lambda: None
    # patterns of attention and padded products, which are traced on real tensors
    joint.lazy_init = post.lazy_init = lambda *_, **__: None
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    triton.runtime.driver.set_active(driver)


@contextmanager
def generating(found: list[Code], elements: int) -> Iterator[None]:
    """Collect the code of each graph that is compiled inside, and raise `_Generated` in place of running it."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    generate = GraphLowering.codegen

    def codegen(graph: Any) -> Any:
        source = generate(graph)[0].value
        found.append(_code(source, graph.count_bytes()[0] / elements))
        raise _Generated

    settings = {
        "fx_graph_cache": False,
        "joint_graph_constant_folding": False,
        "compile_threads": 1,
        "use_static_cuda_launcher": False,
    }
    with patch.object(GraphLowering, "codegen", codegen), config.patch(settings):
        yield


def _code(source: str, moved: float) -> Code:
    from torch._inductor.codecache import PyCodeCache

    loads, stores = [], []
    kernels = re.findall(r"(\w+) = async_compile\.triton\('\w+', '''\n(.*?)''', device_str='cuda'\)", source, re.S)
    for name, text in kernels:
        kernel = getattr(PyCodeCache.load(text), name)
        compiled = kernel._precompile_config(kernel.configs[0]).kernel
        widths: dict[str, set[int]] = {"ld": set(), "st": set()}
        for kind, vector, bits in ACCESS.findall(compiled.asm["ptx"]):
            widths[kind].add(int(vector or 1) * int(bits) // 8)
        loads.append(max(widths["ld"]))
        stores.append(max(widths["st"]))
    return Code(round(moved, 2), loads, stores)


def of_rows(rows: int) -> dict[str, Call]:
    """Return the calls of all compiled functions with so many rows, by name."""
    half, wide = torch.bfloat16, torch.float32
    x, logits, state = empty(rows, HIDDEN), empty(rows, WORDS), rows * HIDDEN // ALIGNMENT
    both, scale = empty(rows, 1, 2 * FFN), torch.empty((), device="cuda")
    of_rows = [empty(rows, dtype=dtype) for dtype in (wide, wide, torch.int64, wide)]
    scalars = [torch.tensor(value) for value in (1.0, 0.99, 0.1, 1.0)]
    part = [empty(rows, 1, 32, 128), empty(rows, 1, 32, dtype=wide)]
    flat = [empty(state, ALIGNMENT, dtype=dtype) for dtype in (*[wide] * 4, half)]
    forward, backward = COMPILED["swiglu"]
    swiglu = WeightedActivation(*formulas(convert(LayerConfig, ModelConfig(activation="swiglu"))))
    values = empty(rows, dtype=half), empty(rows, 2 * FFN)
    return {
        "adamw": (adamw_pass, (*flat, *scalars, 0.9, 0.95, 1e-8)),
        "sum of exponentials": (sum_of_exponentials, (logits, of_rows[0])),
        "gradient of logits": (write_gradient, (logits, *of_rows[:2], *of_rows[2:], None, WORDS)),
        "swiglu": (forward, (both,)),
        "gradient of swiglu": (backward, (empty(rows, 1, FFN), both)),
        "merged parts": (merge_, (*part, None, *(each for _ in range(2) for each in part[:1]), *part[1:] * 2)),
        "experts' swiglu": (Compiler([]).function((Segment("rows", swiglu, has_rows=True),), values), values),
        "tensor": (cast_tensor, (x, scale, E4M3, True, False)),
        "tensor, transpose": (cast_tensor, (x, scale, E4M3, True, True)),
        "blocks": (cast_blocks, (x, E4M3, True, False, 0)),
        "blocks, transpose": (cast_blocks, (x, E4M3, True, True, 0)),
        "micro blocks, transpose": (cast_micro, (x, E4M3, True, True, 0)),
        "squares": (cast_squares, (empty(1, HIDDEN, FFN), E4M3, 0)),
    }


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def generate(name: str) -> list[Code]:
    """Return the code of the graphs for two numbers of rows."""
    found: list[Code] = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        kernel: Callable[..., Any] | None = None
        for rows in (ROWS,) if name in ONCE else (ROWS, OTHER_ROWS):
            function, args = of_rows(rows)[name]
            if name == "experts' swiglu":
                kernel, args = kernel or function, (None, args, ((),))
                elements = args[1][1].numel()
            else:
                kernel, elements = kernel or compiled(function, function in EXACT), args[0].numel()
            with generating(found, elements):
                try:
                    kernel(*args)
                except Exception as error:
                    if not isinstance(error, _Generated) and "_Generated" not in str(error):
                        raise
    return found


def main() -> None:
    pretend()
    print(json.dumps({name: generate(name) for name in sys.argv[1:] or of_rows(ROWS)}))


if __name__ == "__main__":
    main()
