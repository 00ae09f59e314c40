"""Two training steps of one rank on the fake device, for each line of the standard input.

    python -m tests.fake_cuda.steps LIBRARY < LINES

LIBRARY: what `device.build` returned. A line is the JSON of `seen_of`'s arguments. For each, prints the JSON of a
`Seen`. The runtime is that of training, over fake process groups. Tensors have shapes, dtypes and a device, but no
values: a number read from one is 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    from tests.fake_cuda.device import load

    load(Path(sys.argv[1]))

import json
import time
import traceback
import warnings
import weakref
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, disable_fake_tensor_cache
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megapipe.assembly.microbatches import Keys, Microbatches
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.channels import Channel
from megapipe.comm.fake_backend import Traffic
from megapipe.comm.groups import fake_process_groups
from megapipe.extras.dry_run.meta import LiveBytes, RMSNormOfCuda, attention_on
from megapipe.extras.dry_run.rank import count_step
from megapipe.optimizer.schedule import Rates
from megapipe.plan.memory import rank_memory
from megapipe.sharding.spec import ParamSpec
from megapipe.train.step import train_step
from tests.extras.dry_run.grids import make_plan, read_for

PACKAGE = Path(__file__).parents[2] / "megapipe"
DEVICE = torch.device("cuda", 0)
KERNELS = torch.library.Library("aten", "IMPL")
PRODUCTS = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1}  # position of the first operand


@dataclass
class Seen:
    """What one step asked of the device. Places are 'file:function' of the innermost frame of megapipe."""

    seconds: float = 0.0  # of both steps and of building the runtime, on the host
    kernels: Counter[str] = field(default_factory=Counter)  # operations with a result in new memory, or in place
    bytes_moved: Counter[str] = field(default_factory=Counter)  # of the tensors that they read and write
    host_reads: Counter[str] = field(default_factory=Counter)
    pageable_copies: Counter[str] = field(default_factory=Counter)  # between the device and memory that is not pinned
    mixed_devices: Counter[str] = field(
        default_factory=Counter
    )  # operations on tensors of both, 0-dimensional ones aside
    product_dtypes: Counter[str] = field(default_factory=Counter)  # of the operands of matrix products
    counted_bytes: dict[str, int] = field(default_factory=dict)  # at the peak of a step; see dry_run's RankCount.items
    planned_bytes: dict[str, int] = field(default_factory=dict)
    error: str = ""


def place() -> str:
    """Return where in megapipe the current operation was called."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents:
            return f"{path.relative_to(PACKAGE)}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "outside"


class ShapesOnly(FakeTensorMode):
    """Tensors without values. Nothing is cached for set_: the key would keep the storage, and be found only by it."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with disable_fake_tensor_cache(self) if func.overloadpacket is torch.ops.aten.set_ else nullcontext():
            return super().dispatch(func, types, args, kwargs or {})


class Answers(TorchFunctionMode):
    """Answers what needs values or a driver: numbers read are 1, pinned memory is host memory that is remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen()
        self.pinned: weakref.WeakSet[Any] = weakref.WeakSet()
        self._numbers = {Tensor.item: 1.0, Tensor.__float__: 1.0, Tensor.__int__: 1, Tensor.__bool__: True}
        # a CPU build of torch does not choose CUDA's kernels of attention and RMSNorm
        self._kernels = {
            F.scaled_dot_product_attention: partial(attention_on, "cuda"),
            F.rms_norm: lambda x, normalized_shape, weight, eps: RMSNormOfCuda.apply(x, weight),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._numbers or func is Tensor.tolist:
            if args[0].is_cuda:
                self.seen.host_reads[place()] += 1
            return np.ones(tuple(args[0].shape)).tolist() if func is Tensor.tolist else self._numbers[func]
        if func is Tensor.random_:
            kwargs.pop("generator", None)
        if func is Tensor.pin_memory:
            return self._pin(args[0].clone())
        if kwargs.pop("pin_memory", False):
            return self._pin(func(*args, **kwargs))
        return self._kernels.get(func, func)(*args, **kwargs)

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in self.pinned

    def _pin(self, tensor: Tensor) -> Tensor:
        self.pinned.add(tensor.untyped_storage())
        return tensor


class Operations(TorchDispatchMode):
    """Records every operation that reaches the device."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self._answers = answers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs, outputs = list(tensors((args, kwargs))), list(tensors(result))
        self._record(str(func.overloadpacket).removeprefix("aten."), func, inputs, outputs)
        return result

    def _record(self, name: str, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        seen, both = self._answers.seen, [*inputs, *outputs]
        if not any(tensor.is_cuda for tensor in both):
            return
        on_host = [tensor for tensor in both if not tensor.is_cuda and tensor.dim()]
        if name in ("_to_copy", "copy_"):
            if on_host and not any(self._answers.is_pinned(tensor) for tensor in on_host):
                seen.pageable_copies[place()] += 1
        elif on_host:
            seen.mixed_devices[f"{name} in {place()}"] += 1
        if name in PRODUCTS:
            operands = inputs[PRODUCTS[name] :][:2]
            seen.product_dtypes[" ".join(str(tensor.dtype).removeprefix("torch.") for tensor in operands)] += 1
        storages = {id(tensor.untyped_storage()) for tensor in inputs}
        is_view = not func._schema.is_mutable and all(id(t.untyped_storage()) in storages for t in outputs)
        if not is_view and name not in ("empty", "empty_strided", "empty_like", "new_empty", "detach", "record_stream"):
            seen.kernels[name] += 1
            seen.bytes_moved[name] += sum(tensor.nbytes for tensor in both if tensor.is_cuda)


def tensors(value: Any) -> list[Tensor]:
    """Return all tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [found for each in value for found in tensors(each)] if isinstance(value, list | tuple) else []


class DeviceBytes(LiveBytes):
    """Counts the storages on the device only."""

    def _see(self, tensor: Tensor) -> None:
        if tensor.is_cuda:
            super()._see(tensor)


class Stream:
    """A stream, or an event, on which everything has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return {"query": lambda: True, "record_event": lambda *_: Stream(), "cuda_stream": 0}.get(name, lambda *_: None)


class Generator(torch.Generator):
    """A generator of the CPU in place of one of the device."""

    def __new__(cls, _: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu")


def pretend() -> None:
    """Replace those parts of torch.cuda that ask the driver."""
    stand_ins = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: "fake",
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: SimpleNamespace(gcnArchName="", total_memory=80 * 2**30),
        "is_current_stream_capturing": lambda: False,
        "Stream": Stream,
        "Event": Stream,
        "current_stream": lambda *_: Stream(),
        "stream": lambda *_: nullcontext(),
        "synchronize": lambda *_: None,
    }
    for name, value in stand_ins.items():
        setattr(torch.cuda, name, value)
    torch.Generator = Generator  # type: ignore[misc]
    # a CPU build composes this one of other operations on CUDA tensors
    KERNELS.impl("silu_backward", lambda grad, x: torch.empty_like(x), "CUDA")
    # fake groups transfer no declaration of what is sent
    Channel.compare = lambda self, header, *_: setattr(header, "compared", True)  # type: ignore[method-assign]


def seen_of(world_size: int, rank: int, changes: dict[str, Any], base: dict[str, Any]) -> Seen:
    """Run two steps and return what was seen of the second; then count the bytes of one, with a second runtime."""
    answers, started = Answers(), time.perf_counter()
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in (base | changes).items()}
    try:
        plan = make_plan(world_size, given | {"device": "cuda"})
        groups, read = fake_process_groups(plan.topology, rank, Traffic()), read_for(plan)

        def empty(spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
            return torch.empty(spec.local_shape(tp_rank, tp), device=DEVICE)

        with ShapesOnly(), Operations(answers), answers:
            runtime = TrainingRuntime(plan, groups, DEVICE, empty)
            step, place = train_step(runtime), runtime.coordinates.dp_rank
            for number in range(2):
                answers.seen = Seen()
                keys = Keys(1, number, place, plan.topology.dp)
                count = plan.batch.num_microbatches
                step.run(Microbatches(count, partial(read, place), keys, DEVICE), Rates(1e-3, 0.1))
            runtime.finish_parameters()
        seen, live = answers.seen, DeviceBytes()
        with ShapesOnly(), Answers(), live:
            counted, _ = count_step(plan, groups, DEVICE, live, read, empty)
        seen.counted_bytes = dict(counted.items)
        seen.planned_bytes = dict(rank_memory(plan, runtime.coordinates.pp_rank).items)
    except Exception as error:
        answers.seen.error = "".join(traceback.format_exception(error))
    answers.seen.seconds = time.perf_counter() - started
    return answers.seen


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # our buffers align their start
    pretend()
    for line in sys.stdin:
        print(json.dumps(vars(seen_of(*json.loads(line)))), flush=True)
