"""Tensors of `cuda:0` that have shapes, dtypes and a device, but no values, in the code of a training step.

ShapesOnly   torch's mode of such tensors
Answers      the mode of such tensors in code that reads values or asks the driver
pretend      replaces those parts of torch.cuda that ask the driver, but for streams
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, disable_fake_tensor_cache
from torch.nn.attention import SDPBackend

from megapipe.trace.meta import WithoutValues

INSIDE = f"{Path(__file__).parents[2]}/"  # megapipe's folder, and those within it that run without a device only
WITHOUT_DEVICE = tuple(f"{INSIDE}{folder}/" for folder in ("trace", "extras/dry_run", "extras/streams"))
DEVICE = torch.device("cuda", 0)
KERNELS = torch.library.Library("aten", "IMPL")
# products into a given tensor that torch lacks for tensors without values, or (the second, before 2.13) has wrong:
# the function that returns such a product, and where its arguments begin
WITHOUT_OUT = {
    torch.ops.aten._scaled_mm.out: (torch.ops.aten._scaled_mm.default, 0),
    torch.ops.aten.addmm.dtype_out: (torch.ops.aten.mm.dtype, 1),
}


def is_ours(path: str) -> bool:
    """Return True for a file of megapipe that runs on a real device, too."""
    return path.startswith(INSIDE) and not path.startswith(WITHOUT_DEVICE)


class ShapesOnly(FakeTensorMode):
    """Tensors without values. Nothing is cached for set_: the key would keep the storage, and be found only by it."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_mm_v2.default and args[3] != [F.ScalingType.BlockWise1x32.value]:
            return product_of_blocks(*args, **kwargs or {})
        if func is torch.ops.aten._scaled_grouped_mm_v2.default:
            return grouped_product_of_blocks(*args, **kwargs or {})
        if func in WITHOUT_OUT:
            result: Tensor = kwargs.pop("out")
            function, first = WITHOUT_OUT[func]
            product: Any = super().dispatch(function, types, args[first:], kwargs)
            assert (product.shape, product.dtype) == (result.shape, result.dtype)
            return result
        with disable_fake_tensor_cache(self) if func.overloadpacket is torch.ops.aten.set_ else nullcontext():
            return super().dispatch(func, types, args, kwargs or {})


def product_of_blocks(a: Tensor, b: Tensor, *others: Any) -> Tensor:
    """Return a [m, k] times b [k, n] by CUDA's rules for scales of blocks (ATen/native/cuda/ScaledBlas.cpp): blocks may
    be partial there, while torch's function for tensors without values refuses them. others: of _scaled_mm_v2.
    """
    scale_a, recipe_a, _, scale_b, recipe_b, _, _, dtype, *_ = others
    blocks = -(-a.shape[1] // 128)
    aligned = blocks + -blocks % 4
    for (scale,), (recipe,), count in ((scale_a, recipe_a, a.shape[0]), (scale_b, recipe_b, b.shape[1])):
        is_square = recipe == F.ScalingType.BlockWise128x128.value
        shape = (aligned, -(-count // 128)) if is_square else (count, blocks)
        strides = (1, aligned if is_square else count)
        assert scale.shape == shape and scale.dtype == torch.float32, (scale.shape, shape)
        assert scale.stride() == strides or (shape[1] == 1 and scale.stride() == (1, 1)), (scale.stride(), strides)
    # one of them may be a gradient in e5m2
    assert {a.dtype, b.dtype} <= {torch.float8_e4m3fn, torch.float8_e5m2} and torch.float8_e4m3fn in (a.dtype, b.dtype)
    assert a.is_contiguous() and b.t().is_contiguous() and a.shape[1] % 16 == b.shape[1] % 16 == 0
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


def grouped_product_of_blocks(a: Tensor, b: Tensor, *others: Any) -> Tensor:
    """Return a [m, k] times b [groups, k, n] in blocks of 32 by CUDA's rules (ATen/native/cuda/GroupedBlas.cpp; the
    scales of each group of rows start at a tile, which torch cannot check). others: of _scaled_grouped_mm_v2.
    """
    scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, offs, bias, dtype, *_ = others
    (rows, size), (groups, inner, width) = a.shape, b.shape
    tiles = -(-size // 128) * 4
    assert recipe_a == recipe_b == [F.ScalingType.BlockWise1x32.value], (recipe_a, recipe_b)
    assert swizzle_a == swizzle_b == [F.SwizzleType.SWIZZLE_32_4_4.value], (swizzle_a, swizzle_b)
    assert a.dtype == b.dtype == torch.float8_e4m3fn and dtype == torch.bfloat16 and bias is None
    assert inner == size and size % 16 == width % 16 == 0 and a.is_contiguous() and b.mT.is_contiguous()
    shapes = (scale_a[0].shape[0], tiles), (groups, tiles * (-(-width // 128) * 128))
    for (scale,), shape in zip((scale_a, scale_b), shapes, strict=True):
        assert scale.dtype == torch.float8_e8m0fnu and scale.is_contiguous() and scale.shape == shape, scale.shape
    assert scale_a[0].shape[0] >= rows and scale_a[0].shape[0] % 128 == 0
    assert offs.shape == (groups,) and offs.dtype == torch.int32
    return a.new_empty(rows, width, dtype=dtype)


class Answers(WithoutValues):
    """Answers what needs a driver, too: pinned memory is host memory that is remembered.

    recorder: what is told of the host's reads and copies (`recorder.Recorder`).
    """

    def __init__(self, recorder: Any) -> None:
        super().__init__("cuda", SDPBackend.CUDNN_ATTENTION)  # of Hopper
        self.pinned: weakref.WeakSet[Any] = weakref.WeakSet()
        self.knows_given = False  # read are the values that torch.tensor was given
        self._recorder = recorder

    def read(self, func: Any, tensor: Tensor) -> Any:
        self._recorder.read_by_host(tensor, func.__name__)
        if self.knows_given and hasattr(tensor, "given"):
            return tensor.given if func is Tensor.tolist else tensor.given[0]
        return super().read(func, tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            self._recorder.copied_to_device()
            device, made = kwargs.pop("device"), func(*args, **kwargs)
            result: Any = torch.empty(made.shape, dtype=made.dtype, device=device)
            result.given = args[0]
            return result
        if func is Tensor.random_:
            kwargs.pop("generator", None)
        if func is Tensor.pin_memory:
            return self._pin(args[0].clone())
        if kwargs.pop("pin_memory", False):
            return self._pin(func(*args, **kwargs))
        return super().__torch_function__(func, types, args, kwargs)

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in self.pinned

    def _pin(self, tensor: Tensor) -> Tensor:
        self.pinned.add(tensor.untyped_storage())
        return tensor


def tensors(value: Any) -> list[Tensor]:
    """Return all tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [found for each in value for found in tensors(each)] if isinstance(value, list | tuple) else []


class Generator(torch.Generator):
    """A generator of the CPU in place of one of the device."""

    def __new__(cls, _: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


def pretend() -> None:
    """Replace those parts of torch.cuda that ask the driver; `recorder.pretend_streams` replaces the streams."""
    stand_ins = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: "fake",
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: SimpleNamespace(gcnArchName="", total_memory=80 * 2**30, major=9, minor=0),
        "get_rng_state": lambda *_: torch.empty(0, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
    }
    for name, value in stand_ins.items():
        setattr(torch.cuda, name, value)
    # before torch 2.13 it allocates on the device for real if torch.cuda says that there is one
    fake_tensor.init_gpu_context = lambda device: None  # type: ignore[assignment]
    # its own one asks for each number
    FakeTensor.tolist = lambda self: Tensor.tolist(self)  # type: ignore[method-assign]
    torch.Generator = Generator  # type: ignore[misc, assignment]
    # a CPU build composes this one of other operations on CUDA tensors
    KERNELS.impl("silu_backward", lambda grad, x: torch.empty_like(x), "CUDA")
