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
    from megapipe.extras.streams.device import load

    load(Path(sys.argv[1]))

import gc
import json
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megapipe.assembly.compose import parameter_dtype
from megapipe.assembly.microbatches import Keys, Microbatches
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import Traffic, fake_process_groups
from megapipe.extras.dry_run import rank as dry_run
from megapipe.extras.dry_run.meta import LiveBytes, RMSNormOfCuda
from megapipe.extras.streams.rows import rows_of_experts
from megapipe.extras.streams.shapes import ACTIVE, DEVICE, PACKAGE, Answers, ShapesOnly, is_ours, pretend, tensors
from megapipe.optimizer.schedule import Rates
from megapipe.plan.memory import rank_memory
from megapipe.sharding.spec import ParamSpec
from megapipe.tensor_parallel.gradients import gemm_adds_to_fp32
from megapipe.train.step import train_step
from tests.extras.dry_run.grids import make_plan, read_for
from tests.fake_cuda.compiled import compile_blocks
from tests.fake_cuda.mistakes import mistake

# position of the first operand
PRODUCTS = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "_scaled_mm_v2": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1}
OVERWRITES = ("copy_", "zero_", "fill_")
SPARSE = ("gather", "scatter_add_", "index_put_", "embedding")
NOT_KERNELS = ("empty", "empty_strided", "empty_like", "new_empty", "detach", "record_stream")


@dataclass
class Seen:
    """The requests of one step to the device. Places are 'file:function' of the innermost frame of megapipe."""

    seconds: float = 0.0  # of both steps and of building the runtime, on the host
    # operations with a result in new memory, or in place, and the bytes of the tensors that they read and write, both
    # by 'place name'
    kernels: Counter[str] = field(default_factory=Counter)
    bytes_moved: Counter[str] = field(default_factory=Counter)
    host_reads: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)  # by 'group operation'
    pageable_copies: Counter[str] = field(default_factory=Counter)  # between the device and memory that is not pinned
    mixed_devices: Counter[str] = field(
        default_factory=Counter
    )  # operations on tensors of both, 0-dimensional ones aside
    product_dtypes: Counter[str] = field(default_factory=Counter)  # of the operands of matrix products
    carveouts: Counter[str] = field(default_factory=Counter)  # products by 'place SMs left free'
    counted_bytes: dict[str, int] = field(default_factory=dict)  # at the peak of a step; see dry_run's RankCount.items
    planned_bytes: dict[str, int] = field(default_factory=dict)
    # of --compile-blocks: function -> how often each of its graphs calls each operation; what was said of the choice
    graphs: dict[str, list[dict[str, int]]] = field(default_factory=dict)
    said: str = ""
    error: str = ""

    def add(self, name: str, used: list[Tensor], where: str | None = None) -> None:
        """Count one kernel. used: what it reads and writes. where: its place, if not the current one."""
        key = f"{where or place()} {name}"
        self.kernels[key] += 1
        self.bytes_moved[key] += sum(tensor.nbytes for tensor in used if tensor.is_cuda)


def place() -> str:
    """Return where in megapipe the current operation was called."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if is_ours(path):
            return f"{Path(path).relative_to(PACKAGE)}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "outside"


class CountingAnswers(Answers):
    """Answers, and counts what is asked and launched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen()
        self.live: DeviceBytes | None = None
        self.is_inside_kernel = False
        self._kernels |= {
            F.rms_norm: lambda x, normalized_shape, weight, eps: RMSNormCounted.apply(x, weight, self),
            torch._fused_sgd_: lambda *lists, **options: self.seen.add("_fused_sgd_", tensors(lists)),
        }

    def read_by_host(self, tensor: Tensor, function: str) -> None:
        if tensor.is_cuda:
            self.seen.host_reads[place()] += 1

    def copied_to_device(self) -> None:
        self.seen.pageable_copies[place()] += 1

    @contextmanager
    def inside_kernel(self) -> Iterator[None]:
        """Count neither operations nor memory: both stay inside one compiled kernel."""
        self.is_inside_kernel, outer = True, self.is_inside_kernel
        paused = self.live is not None and self.live._is_paused
        if self.live is not None:
            self.live._is_paused = True
        try:
            yield
        finally:
            self.is_inside_kernel = outer
            if self.live is not None:
                self.live._is_paused = paused

    def as_kernel(self, name: str, function: Callable[..., Any], *args: Any, where: str | None = None) -> Any:
        """Return function(*args), counted as one kernel that reads its arguments and writes its results."""
        with self.inside_kernel():
            results = function(*args)
        self.seen.add(name, [*tensors(args), *tensors(results)], where)
        if self.live is not None:
            for result in tensors(results):
                self.live._see(result)
        return results


class Operations(TorchDispatchMode):
    """Records every operation that reaches the device."""

    def __init__(self, answers: CountingAnswers) -> None:
        super().__init__()
        self._answers = answers

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._answers.is_inside_kernel:
            name = str(func.overloadpacket).removeprefix("aten.")
            self._record(name, func, tensors((args, kwargs)), tensors(result))
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
            seen.carveouts[f"{place()} {torch._C._get_sm_carveout_experimental() or 0}"] += 1
            seen.product_dtypes[" ".join(str(tensor.dtype).removeprefix("torch.") for tensor in operands)] += 1
        storages = {id(tensor.untyped_storage()) for tensor in inputs}
        is_view = not func._schema.is_mutable and all(id(t.untyped_storage()) in storages for t in outputs)
        if not is_view and name not in NOT_KERNELS:
            seen.add(name, moved(name, func, inputs, outputs))


def moved(name: str, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
    """Return the tensors that a kernel reads and those that it writes, one that it does both with twice."""
    if name in SPARSE:  # reads or writes few rows of the first, as many as there are indices
        return [tensor for tensor in (*inputs[1:], *outputs) if tensor.shape != inputs[0].shape]
    if name in OVERWRITES or func._overloadname == "out":  # the result is among the inputs and not read
        inputs = [tensor for tensor in inputs if all(tensor is not result for result in outputs)]
    if not outputs:  # kernels over lists of tensors; only AdamW's gradients and states are large
        outputs = inputs
    return [*inputs, *outputs]


class RMSNormCounted(RMSNormOfCuda):
    """CUDA's fused RMSNorm: one kernel forward, and two backward, of which one sums the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, answers: CountingAnswers) -> Tensor:  # type: ignore[override]
        result = RMSNormOfCuda.forward(ctx, x, weight)
        ctx.answers = answers
        answers.seen.add("rms_norm", [x, weight, result])
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = RMSNormOfCuda.backward(ctx, grad)
        ctx.answers.seen.add("rms_norm_backward", [grad, ctx.saved_tensors[0], dx])
        ctx.answers.seen.add("rms_norm_backward", [grad, ctx.saved_tensors[0]])
        return dx, dw, None


class Collectives(Traffic):
    """Counts the collectives of a rank."""

    def record(self, kind: str, operation: str, num_bytes: int) -> None:
        super().record(kind, operation, num_bytes)
        ACTIVE[-1].seen.collectives[f"{kind} {operation}"] += 1  # type: ignore[attr-defined]


class DeviceBytes(LiveBytes):
    """Counts the storages on the device only."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def _see(self, tensor: Tensor) -> None:
        if tensor.is_cuda:
            super()._see(tensor)


def seen_of(world_size: int, rank: int, changes: dict[str, Any], base: dict[str, Any], plant: str = "") -> Seen:
    """Run two steps: the first counts bytes, the second operations. plant: a name in `mistakes`."""
    answers, live, started = CountingAnswers(), DeviceBytes(), time.perf_counter()
    answers.live = live
    ACTIVE.append(answers)
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in (base | changes).items()}
    try:
        plan = make_plan(world_size, given | {"device": "cuda"})
        groups, read = fake_process_groups(plan.topology, rank, Collectives()), read_for(plan)

        def empty(spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
            return torch.empty(spec.local_shape(tp_rank, tp), device=DEVICE)

        built: list[TrainingRuntime] = []

        graphs, said = answers.seen.graphs, ""

        def build(*arguments: Any) -> TrainingRuntime:
            nonlocal said
            built.append(TrainingRuntime(*arguments))
            if plan.config.kernels.compile_blocks == "on":
                said = compile_blocks(built[-1], answers, graphs)
                gc.collect()  # what compiling leaves in circles is no memory of the step
            return built[-1]

        dry_run.TrainingRuntime = build  # type: ignore[misc, assignment]
        with ShapesOnly(), rows_of_experts(), Operations(answers), answers, mistake(plant):
            gemm_adds_to_fp32(DEVICE, parameter_dtype(plan.config.precision.dtype))  # as at the start of a run
            with live:
                counted, _ = dry_run.count_step(plan, groups, DEVICE, live, read, empty)
            answers.live, answers.seen = None, Seen(graphs=graphs, said=said)
            (runtime,) = built
            dp_rank = runtime.coordinates.dp_rank
            keys, count = Keys(1, 1, dp_rank, plan.topology.dp), plan.batch.num_microbatches
            parts = runtime.sequence_part, runtime.packs_documents, runtime.num_ahead
            microbatches = Microbatches(count, partial(read, dp_rank), keys, DEVICE, *parts)
            train_step(runtime).run(microbatches, Rates(1e-3, 0.1))
            runtime.finish_parameters()
        answers.seen.counted_bytes = dict(counted.items)
        answers.seen.planned_bytes = dict(rank_memory(plan, runtime.coordinates.pp_rank).items)
    except Exception as error:
        answers.seen.error = "".join(traceback.format_exception(error))
    ACTIVE.clear()
    answers.seen.seconds = time.perf_counter() - started
    return answers.seen


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # our buffers align their start
    pretend()
    for line in sys.stdin:
        print(json.dumps(vars(seen_of(*json.loads(line)))), flush=True)
