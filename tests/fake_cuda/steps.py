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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megapipe.assembly.compose import parameter_dtype
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import fake_process_groups
from megapipe.extras.dry_run.rank import count_step, empty_slices, random_reader, run_steps
from megapipe.extras.streams import count
from megapipe.extras.streams.launches import COLLECTIVE, COMPUTE, HOST_WAIT, MESSAGE, Launch, Work
from megapipe.extras.streams.ranks import on_device, prepare
from megapipe.extras.streams.recorder import NcclBackend, where
from megapipe.extras.streams.shapes import DEVICE, tensors
from megapipe.plan.memory import rank_memory
from megapipe.tensor_parallel.gradients import gemm_adds_to_fp32
from megapipe.trace.meta import LiveBytes
from tests.extras.dry_run.grids import make_plan
from tests.fake_cuda.mistakes import mistake


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
    # of the last microbatch: layer ('' outside) -> part -> Row, and the bytes of GEMMs and attention, too
    parts: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    counted_bytes: dict[str, int] = field(default_factory=dict)  # at the peak of a step; see dry_run's RankCount.items
    planned_bytes: dict[str, int] = field(default_factory=dict)
    # of --compile-blocks: function -> how often each of its graphs calls each operation; what was said of the choice
    graphs: dict[str, list[dict[str, int]]] = field(default_factory=dict)
    said: str = ""
    error: str = ""

    def take(self, log: list[Any]) -> None:
        """Add up the launches of a log."""
        launches = [entry for entry in log if isinstance(entry, Launch)]
        last = max((launch.microbatch for launch in launches), default=-1)
        parts: dict[str, dict[str, dict[str, float]]] = {}
        for launch in launches:
            key = f"{launch.file} {launch.name}"
            if launch.kind == HOST_WAIT:
                self.host_reads[launch.file] += 1
            elif launch.kind == COLLECTIVE:
                self.collectives[f"{launch.group} {launch.name}"] += 1
            elif launch.kind != MESSAGE:
                self.kernels[key] += 1
                self.bytes_moved[key] += int(launch.num_bytes)
            if launch.op in COMPUTE and launch.microbatch == last:
                of_layer = parts.setdefault("" if launch.layer is None else str(launch.layer), {})
                row = of_layer.setdefault(
                    f"{launch.group} messages" if launch.group else launch.part, {"all_bytes": 0.0}
                )
                row["all_bytes"] += launch.num_bytes
                work = Work()
                work.add(launch, 0.0)
                (added,) = work.rows.values()
                row |= {name: value + row.get(name, 0.0) for name, value in vars(added).items()}
        self.parts = parts


class Checks(count.Counter):
    """Counts, and looks at devices and dtypes.

    live: of a step whose memory is counted, too; what stays inside a kernel is none.
    """

    live: LiveBytes | None = None

    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen()

    def as_kernel(self, name: str, function: Callable[..., Any], *args: Any, where: str | None = None) -> Any:
        results = super().as_kernel(name, function, *args, where=where)
        if self.live is not None:
            for result in tensors(results):
                self.live._see(result)
        return results

    @contextmanager
    def inside_kernel(self) -> Iterator[list[bool]]:
        live = self.live
        paused = live is not None and live._is_paused
        if live is not None:
            live._is_paused = True
        with super().inside_kernel() as reductions:
            yield reductions
        if live is not None:
            live._is_paused = paused

    def copied_to_device(self) -> None:
        self.seen.pageable_copies[where()] += 1

    def see(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        super().see(func, args, kwargs, outputs)
        if self._reductions is not None:
            return
        seen, inputs, name = self.seen, tensors((args, kwargs)), count.name_of(func)
        both = [*inputs, *outputs]
        if not any(tensor.is_cuda for tensor in both):
            return
        on_host = [tensor for tensor in both if not tensor.is_cuda and tensor.dim()]
        if name in ("_to_copy", "copy_"):
            if on_host and not any(self.answers.is_pinned(tensor) for tensor in on_host):
                seen.pageable_copies[where()] += 1
        elif on_host:
            seen.mixed_devices[f"{name} in {where()}"] += 1
        if name in count.PRODUCTS:
            operands = inputs[count.PRODUCTS[name] :][:2]
            seen.carveouts[f"{where()} {torch._C._get_sm_carveout_experimental() or 0}"] += 1
            seen.product_dtypes[" ".join(str(tensor.dtype).removeprefix("torch.") for tensor in operands)] += 1


class DeviceBytes(LiveBytes):
    """Counts the storages on the device only."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def _see(self, tensor: Tensor) -> bool:
        return tensor.is_cuda and super()._see(tensor)


def seen_of(world_size: int, rank: int, changes: dict[str, Any], base: dict[str, Any], plant: str = "") -> Seen:
    """Run two steps: the first counts bytes, the second operations. plant: a name in `mistakes`."""
    checks, live, started = Checks(), DeviceBytes(), time.perf_counter()
    checks.live = live
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in (base | changes).items()}
    try:
        plan = make_plan(world_size, given | {"device": "cuda"})
        groups, read = fake_process_groups(plan.topology, rank, NcclBackend(checks)), random_reader(plan)
        built: list[TrainingRuntime] = []

        def build(*arguments: Any) -> TrainingRuntime:
            built.append(TrainingRuntime(*arguments, marks=checks.marks))
            checks.take(built[-1])
            gc.collect()  # what compiling leaves in circles is no memory of the step
            return built[-1]

        with on_device(checks), mistake(plant):
            gemm_adds_to_fp32(DEVICE, parameter_dtype(plan.config.precision.dtype))  # as at the start of a run
            with live:
                counted, _ = count_step(plan, groups, DEVICE, live, read, empty_slices(DEVICE), build=build)
            checks.live, checks.seen = None, Seen(graphs=checks.graphs, said=checks.said)
            checks.log.clear()
            (runtime,) = built
            with checks.watching():
                run_steps(runtime, read)
        checks.seen.take(checks.log)
        checks.seen.counted_bytes = dict(counted.items)
        checks.seen.planned_bytes = dict(rank_memory(plan, runtime.coordinates.pp_rank).items)
    except Exception as error:
        checks.seen.error = "".join(traceback.format_exception(error))
    checks.seen.seconds = time.perf_counter() - started
    return checks.seen


if __name__ == "__main__":
    prepare(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(vars(seen_of(*json.loads(line)))), flush=True)
