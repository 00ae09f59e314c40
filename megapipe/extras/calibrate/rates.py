"""The rates that the ranks of a world reach, all measuring at the same time.

On each rank's device: GEMMs in each precision and by their smallest size, fused attention, and kernels limited by
memory. Between ranks: the links inside a node and between nodes.
Of a configuration: seconds of embedding, layers and head at the shapes of the run, forward, backward and its halves.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megapipe.assembly.runtime import InferenceRuntime
from megapipe.comm.bootstrap import start
from megapipe.comm.collectives import barrier, broadcast_object, gather_objects
from megapipe.comm.groups import ProcessGroups, build_process_groups
from megapipe.comm.meeting import Facts
from megapipe.config.config import Config
from megapipe.config.layers import LAYER_OPTIONS, MARKS, LayerConfig
from megapipe.config.parallel import OffloadConfig, ParallelConfig, RecomputeConfig, strategy_of
from megapipe.dtypes import FP8, TENSOR_DTYPES
from megapipe.environment import Environment
from megapipe.extras.doctor.examination import SEND, Sample, Trial, measure_rounds, rounds_of
from megapipe.extras.doctor.examination import SIZES as LINK_SIZES
from megapipe.gpu.device_clock import DeviceClock, device_clock
from megapipe.model.attention import fused_attention
from megapipe.model.microbatch import Microbatch
from megapipe.monitor.process import host
from megapipe.plan.attention_rates import FUSED_BACKWARD
from megapipe.plan.hardware import Link
from megapipe.plan.layer_costs import PartCost
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.families import default_schedule
from megapipe.schedule.partition import from_counts
from megapipe.schedule.placement import loop
from megapipe.tensor_parallel.fp8 import fp8_unsupported_reason
from megapipe.tensor_parallel.fp8_matrix import E4M3, fp8_matmul
from megapipe.tensor_parallel.fp8_scales import tensorwise
from megapipe.tensor_parallel.random import DropoutKey
from megapipe.topology import Topology

Key = TypeVar("Key")
TORCH_DTYPES = {dtype.name: getattr(torch, dtype.torch_name) for dtype in TENSOR_DTYPES.values()}
DEFAULT_DTYPES = {"cpu": "fp32", "cuda": "bf16"}
GEMM_SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
WIDENING = 4  # outputs / inputs of the measured linear, as in linear_fc1
NODE, NETWORK = "node", "network"  # the links of a hardware file
LEGS = 2  # latencies in a small trial: an all-reduce has two passes, a message a receipt
WARM_UPS = {"cpu": 1, "cuda": 3}
MIN_REPEATS, MAX_REPEATS = 3, 25
MIN_SECONDS = 1e-3  # of a repeat: shorter calls are made several times, since clocks and launches have a granularity
CALLS_ON_CPU = MIN_REPEATS + 2  # at least this many calls are made on a CPU: warm-up, first look, repeats


class Stopwatch:
    """Times calls of a kernel by the clock of this rank's device; events on a GPU have not run on a real one so far."""

    def __init__(self, device: torch.device, clock: DeviceClock | None = None) -> None:
        self.device, self._clock = device, clock or device_clock(device)

    def seconds(self, call: Callable[[], object], budget_seconds: float) -> float:
        """Return the seconds of one call, the median of repeats after warm-ups. budget_seconds: for the repeats."""
        for _ in range(WARM_UPS[self.device.type]):
            call()
        once = max(self._repeat(call, 1), 1e-9)
        calls = max(1, math.ceil(MIN_SECONDS / once))
        repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(budget_seconds / (once * calls))))
        return median(self._repeat(call, calls) for _ in range(repeats))

    def _repeat(self, call: Callable[[], object], calls: int) -> float:
        """Make `calls` calls in sequence and return the seconds of one."""
        began = self._clock.mark()
        for _ in range(calls):
            call()
        return self._clock.seconds(began, self._clock.mark()) / calls


@dataclass(frozen=True)
class Sizes:
    """The sizes that are measured on one kind of device."""

    first_gemm: int  # of the square GEMMs, each twice the size of the one before
    tokens: int  # the fewest of a linear
    attention: tuple[int, int, int, int]  # seq, batch, heads, head_dim
    moved_bytes: int  # of each tensor that is copied and added
    pointwise: tuple[int, int]  # tokens, width


SIZES = {
    "cpu": Sizes(256, 1024, (512, 2, 4, 64), 1 << 26, (1024, 1024)),
    "cuda": Sizes(1024, 4096, (4096, 1, 16, 128), 1 << 30, (8192, 8192)),
}
LINKS_SHARE = 0.15  # of the seconds, with several ranks
# shares of the remaining seconds for each measurement
PEAKS, SHARES, ATTENTION, MEMORY, POINTWISE = 0.35, 0.40, 0.07, 0.09, 0.09


@dataclass(frozen=True)
class MeasuredRates:
    """The measured rates; all but `flops` in one dtype."""

    flops: Mapping[str, float]  # of the fastest GEMM by configuration dtype, and of "fp8" where a GPU has it
    gemms: Mapping[int, float]  # smallest size -> FLOP/s of a linear's forward and both halves of its backward
    attention: float  # FLOP/s of forward and backward, causal attention counted half
    memory: float  # bytes/s, read and written
    pointwise: float  # bytes/s, read and written


def measure_rates(dtype: str, stopwatch: Stopwatch, seconds: float) -> MeasuredRates:
    """Measure this rank's device in about so many seconds; slow devices measure fewer sizes. dtype: of training."""
    bench = _Bench(SIZES[stopwatch.device.type], TORCH_DTYPES[dtype], stopwatch)
    gemms = bench.linears(SHARES * seconds)
    each = PEAKS * seconds / len(TORCH_DTYPES)
    names = [*TORCH_DTYPES]
    if stopwatch.device.type == "cuda" and fp8_unsupported_reason(stopwatch.device) is None:
        names.append(FP8)
    flops = {}
    for name in names:
        try:
            flops[name] = square_gemms(name, stopwatch, each)
        except RuntimeError as error:
            if "not implemented" not in str(error):  # else the device has no GEMM in this dtype
                raise
    flops[dtype] = max(flops[dtype], *gemms.values())  # shares are relative to the fastest GEMM of all
    return MeasuredRates(
        flops,
        gemms,
        attention=bench.attention(ATTENTION * seconds),
        memory=bench.memory(MEMORY * seconds),
        pointwise=bench.pointwise(POINTWISE * seconds),
    )


def slowest(found: Sequence[MeasuredRates]) -> MeasuredRates:
    """Return the smallest of each rate over several ranks, since a step waits for the slowest; sizes and dtypes that
    some rank lacks are left out.
    """
    flops, gemms = _least([rates.flops for rates in found]), _least([rates.gemms for rates in found])
    others = (min(getattr(rates, name) for rates in found) for name in ("attention", "memory", "pointwise"))
    return MeasuredRates(flops, gemms, *others)


def _least(found: Sequence[Mapping[Key, float]]) -> dict[Key, float]:
    return {key: min(rates[key] for rates in found) for key in found[0] if all(key in rates for rates in found)}


def square_gemms(dtype: str, stopwatch: Stopwatch, budget_seconds: float) -> float:
    """Return the FLOP/s of the fastest square GEMM, with sizes doubled while time allows.

    dtype: of a configuration, or FP8: e4m3 operands with one scale a tensor, as linears multiply.
    """
    size, best, deadline = SIZES[stopwatch.device.type].first_gemm, 0.0, time.perf_counter() + budget_seconds
    while True:
        a, b = (torch.randn(size, size, device=stopwatch.device) for _ in range(2))
        if dtype == FP8:
            multiply = partial(fp8_matmul, tensorwise(a, E4M3), tensorwise(b, E4M3), torch.bfloat16, fast=True)
        else:
            multiply = partial(torch.mm, a.to(TORCH_DTYPES[dtype]), b.to(TORCH_DTYPES[dtype]))
        seconds = stopwatch.seconds(multiply, budget_seconds / 8)
        best = max(best, 2.0 * size**3 / seconds)
        size *= 2
        if size > GEMM_SIZES[-1] or time.perf_counter() + 8 * seconds * CALLS_ON_CPU > deadline:
            return best


class _Bench:
    """Measures the kernels of a layer in one dtype."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, stopwatch: Stopwatch) -> None:
        self._sizes, self._dtype, self._stopwatch = sizes, dtype, stopwatch

    def linears(self, budget_seconds: float) -> dict[int, float]:
        """Return FLOP/s by smallest size, for ascending sizes while time allows; at least for two."""
        found: dict[int, float] = {}
        deadline = time.perf_counter() + budget_seconds
        for size in GEMM_SIZES:
            flops = 2.0 * max(size, self._sizes.tokens) * size * WIDENING * size * 3
            if len(found) > 1 and time.perf_counter() + CALLS_ON_CPU * flops / max(found.values()) > deadline:
                break
            # forward, input gradient and weight gradient, in the memory layouts of a linear
            tokens, wide = max(size, self._sizes.tokens), WIDENING * size
            x, weight, grad = self._random(tokens, size), self._random(wide, size), self._random(tokens, wide)
            calls = (partial(F.linear, x, weight), partial(torch.mm, grad, weight), partial(torch.mm, grad.t(), x))
            each = budget_seconds / len(GEMM_SIZES) / len(calls)
            found[size] = flops / sum(self._stopwatch.seconds(call, each) for call in calls)
        return found

    def attention(self, budget_seconds: float) -> float:
        """Return the FLOP/s of training's fused attention, forward and backward; masked scores are not counted."""
        seq, batch, heads, head_dim = self._sizes.attention
        q = self._random(seq, batch, heads, 1, head_dim).requires_grad_()
        k, v = (self._random(seq, batch, heads, 1, head_dim).requires_grad_() for _ in range(2))
        grad = self._random(seq, batch, heads * head_dim)

        def run() -> None:
            torch.autograd.grad(fused_attention(q, k, v, None, head_dim**-0.5), (q, k, v), grad)

        forward = 4.0 * seq * batch * (seq / 2) * heads * head_dim
        return (1 + FUSED_BACKWARD) * forward / self._stopwatch.seconds(run, budget_seconds)

    def memory(self, budget_seconds: float) -> float:
        """Return the bytes/s, read and written, of a copy and an addition of large tensors."""
        count = self._sizes.moved_bytes // 4
        a, b, c = (torch.ones(count, device=self._stopwatch.device) for _ in range(3))
        copy = self._stopwatch.seconds(lambda: c.copy_(a), budget_seconds / 2)
        add = self._stopwatch.seconds(lambda: torch.add(a, b, out=c), budget_seconds / 2)
        return (2 + 3) * self._sizes.moved_bytes / (copy + add)

    def pointwise(self, budget_seconds: float) -> float:
        """Return the bytes/s that norm, activation and residual addition read and write, forward and backward."""
        shape = self._sizes.pointwise
        x, grad = self._random(*shape).requires_grad_(), self._random(*shape)
        weight, bias = (self._random(shape[1]).requires_grad_() for _ in range(2))

        def norm() -> None:
            torch.autograd.grad(F.layer_norm(x, shape[1:], weight, bias), (x, weight, bias), grad)

        def activation() -> None:
            torch.autograd.grad(F.gelu(x, approximate="tanh"), x, grad)

        each = budget_seconds / 3
        with torch.no_grad():
            seconds = self._stopwatch.seconds(partial(torch.add, x, grad), each)
        seconds += self._stopwatch.seconds(norm, each) + self._stopwatch.seconds(activation, each)
        passes = 3 + 2 * (2 + 3)  # addition; forward: in, out; backward: input, gradient, gradient of the input
        return passes * x.numel() * x.element_size() / seconds

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self._stopwatch.device).to(self._dtype)


@dataclass(frozen=True)
class MeasuredLink:
    """A link of the hardware file as measured."""

    name: str  # NODE or NETWORK
    ranks: int  # of a group
    all_reduce: Link  # the one in the file
    message: Link  # between two ranks


@dataclass(frozen=True)
class Found:
    """The result of a measurement; the same on all ranks."""

    device: torch.device
    dtype: str
    rates: MeasuredRates  # of the slowest rank
    links: tuple[MeasuredLink, ...]
    hosts: tuple[str, ...]  # by global rank
    seconds: float  # that the measurement took


def measure(
    environment: Environment, device: str, dtype: str | None, seconds: float, timeout_seconds: float, facts: Facts
) -> Found:
    """Measure on all ranks at the same time, and all nodes' links too, as in training.

    device: 'auto', 'cpu' or 'cuda'. dtype: None for the device's default. seconds: about how long it takes. facts:
    what ranks compare. Raises ConfigError, CommunicationError. It has not run on GPUs so far.
    """
    world = start(environment, "auto", timeout_seconds, device, facts_of=lambda _: facts)
    if world.device.type == "cpu":
        torch.set_num_threads(environment.num_threads or 1)
    began = time.perf_counter()
    dtype = dtype or DEFAULT_DTYPES[world.device.type]
    topology = Topology(dp=world.world_size)
    everyone = build_process_groups(topology, world.global_rank, world.backend, timeout_seconds).world
    barrier(everyone)
    share = 1 - LINKS_SHARE if environment.is_distributed else 1.0
    rates = slowest(gather_objects(measure_rates(dtype, Stopwatch(world.device), share * seconds), everyone))
    links = []
    if environment.is_distributed:
        per_node = environment.local_world_size
        topology = Topology(tp=per_node, dp=world.world_size // per_node, ranks_per_node=per_node)
        groups = build_process_groups(topology, world.global_rank, world.backend, world.timeout_seconds)
        rounds = rounds_of(list(link_trials(topology)), alone=False)
        budget = LINKS_SHARE * seconds / max(1, len(rounds) * len(LINK_SIZES[world.device.type]))
        samples = measure_rounds(rounds, groups, world.device, budget)
        for name in (NODE, NETWORK):
            reduced = [s for s in samples if s.trial.kind == name and not s.trial.is_message]
            sent = [s for s in samples if s.trial.kind == name and s.trial.is_message]
            if reduced:
                ranks = len(reduced[0].trial.ranks)
                links.append(MeasuredLink(name, ranks, _median_link(reduced), _median_link(sent)))
    hosts = tuple(gather_objects(host(), everyone))
    return Found(world.device, dtype, rates, tuple(links), hosts, time.perf_counter() - began)


def link_trials(topology: Topology) -> Iterator[Trial]:
    """Yield an all-reduce over the ranks of each node and over the ranks with one local rank on all nodes, and for each
    of these groups a message between its first two ranks."""
    for name, group in ((NODE, "tp"), (NETWORK, "replicas")):
        for ranks in topology.groups(group):
            if len(ranks) > 1:
                yield Trial(name, group, "all_reduce", ranks)
                yield Trial(name, group, SEND, ranks[:2])


def _median_link(samples: Sequence[Sample]) -> Link:
    links = [fitted(sample) for sample in samples]
    return Link(median(link.bytes_per_second for link in links), median(link.latency_seconds for link in links))


def fitted(sample: Sample) -> Link:
    """Return the link: latency of a hop from the smallest size, rate from the extra time of the largest."""
    seconds = {num_bytes: median(times) for num_bytes, times in sample.times.items()}
    small, large = min(seconds), max(seconds)
    longer = seconds[large] - seconds[small]
    if longer <= 0:  # noise is larger than the cost of the size
        longer = seconds[large]
    return Link(sample.trial.sent_bytes(large) / longer, seconds[small] / LEGS / (len(sample.trial.ranks) - 1))


# ---------------------------------------------------------------------------------------------------- parts of a model

NUM_LAYERS = 2  # timed together: a single layer's weights would stay in the caches
EMBEDDING, LAYERS, HEAD = range(3)  # stages of the measured plan
LEAST_TIMES, MOST_TIMES = 3, 200  # after a warm-up


def one_pipeline_rank(config: Config, world_size: int, layer: LayerConfig | None = None) -> Config:
    """Return the configuration without a pipeline and sharded weights on `world_size` ranks.

    layer: with NUM_LAYERS layers, all of this kind, whose parts are measured.
    """
    defaults: dict[str, Any] = {
        option.name: option.default
        for option in dataclasses.fields(ParallelConfig)
        if "pipeline" in option.name or option.name.startswith("data_parallel_sharding")
    }
    model = config.model
    if layer is not None:
        values: dict[str, Any] = {name: getattr(layer, name) for name in LAYER_OPTIONS} | dict.fromkeys(MARKS)
        missing = [f"{part}=none" for part in layer.missing_parts]
        pattern = (f"{NUM_LAYERS} {' '.join(missing)}",) if missing else ()
        model = replace(model, **values, num_layers=NUM_LAYERS, layer_pattern=pattern)
    defaults["use_distributed_optimizer"] = strategy_of(config.parallel) != "no_shard"
    sequences = config.training.micro_batch_size * max(1, world_size // config.parallel.tensor_model_parallel_size)
    return replace(
        config,
        model=model,
        parallel=replace(config.parallel, **defaults),
        training=config.training.with_batch(sequences),
        offload=OffloadConfig(),  # its copies overlap with other layers
    )


def profile_parts(
    plan: RunPlan, groups: ProcessGroups, device: torch.device, seconds: float
) -> tuple[PartCost, PartCost, PartCost]:
    """Return the costs of embedding, one layer and head on the slowest rank of the world. Called by all ranks.

    plan: of `one_pipeline_rank`. seconds: for each of about ten figures. With full recompute a layer is timed without
    and with it; the difference is the time of the recomputation.
    """
    full = plan.config.recompute.recompute_granularity == "full"
    has_budget = plan.config.recompute.recompute_memory_budget is not None  # recompute follows from FLOPs then
    plain = RecomputeConfig() if full or has_budget else plan.config.recompute
    parts = _Parts(plan, plain, groups, device, seconds)
    embedding, layers, head = parts.cost(EMBEDDING), parts.cost(LAYERS), parts.cost(HEAD)
    if full:
        recomputed = _Parts(plan, plan.config.recompute, groups, device, seconds).cost(LAYERS)
        layers = replace(layers, replay=max(0.0, recomputed.backward - layers.backward))
    layer = PartCost(*(value * (1.0 / NUM_LAYERS) for value in dataclasses.astuple(layers)))
    return embedding, layer, head


class _Parts:
    """Embedding, layers and head as three stages of one rank, with their parameters and inputs."""

    def __init__(
        self, plan: RunPlan, recompute: RecomputeConfig, groups: ProcessGroups, device: torch.device, seconds: float
    ) -> None:
        config, cut = replace(plan.config, recompute=recompute), from_counts([0, NUM_LAYERS, 0], NUM_LAYERS)
        plan = replace(plan, config=config, placement=loop(1, 3), partition=cut, schedule_name=default_schedule(3))
        self._runtime = InferenceRuntime(plan, groups, device, trains=True)
        self._world, self._clock, self._seconds = groups.world, device_clock(device), seconds
        model, training = plan.config.model, plan.config.training
        shape = training.micro_batch_size, model.seq_length
        generator = torch.Generator().manual_seed(training.seed)
        tokens, labels = (torch.randint(model.vocab_size, shape, generator=generator).to(device) for _ in range(2))
        self._microbatch = Microbatch(tokens, labels, dropout_key=DropoutKey(training.seed, 0, 0))
        (message,) = self._runtime.message(0)
        self._hidden = torch.randn(message.shape, generator=generator).to(device, message.dtype)

    def cost(self, stage: int) -> PartCost:
        """Return the median times of a stage on the slowest rank."""
        whole = self._medians((lambda: self._forward(stage), lambda: self._backward(stage, "backward")))
        halves = self._medians(
            (
                lambda: self._forward(stage),
                lambda: self._backward(stage, "backward_input"),
                lambda: self._runtime.runners[stage].backward_weight(0),
            )
        )
        return PartCost(forward=whole[0], backward=whole[1], inputs=halves[1], weights=halves[2])

    def _forward(self, stage: int) -> None:
        inputs = () if stage == EMBEDDING else (self._hidden,)
        self._runtime.runners[stage].forward(0, inputs, self._microbatch, _objective if stage == HEAD else None)

    def _backward(self, stage: int, how: str) -> None:
        gradients: tuple[Tensor | None, ...] = (None,) if stage == HEAD else (self._hidden,)
        getattr(self._runtime.runners[stage], how)(0, gradients)

    def _medians(self, steps: tuple[Callable[[], None], ...]) -> list[float]:
        """Return the median time of each step, with all steps run in turn.

        All ranks repeat equally often, since the steps contain collectives of tensor parallelism.
        """
        timed(self._clock, steps, 1)
        once = sum(timed(self._clock, steps, 1)[0])
        times = max(LEAST_TIMES, min(MOST_TIMES, int(self._seconds / max(once, 1e-9))))
        times = broadcast_object(times, self._world)
        barrier(self._world)
        own = [median(column) for column in zip(*timed(self._clock, steps, times), strict=True)]
        return [max(column) for column in zip(*gather_objects(own, self._world), strict=True)]


def timed(clock: DeviceClock, steps: tuple[Callable[[], None], ...], times: int) -> list[list[float]]:
    """Run the steps in turn, `times` times, and return the seconds of each: [times][steps].

    A GPU is synchronized only after all launches, so that its queue stays full, as in training.
    """
    moments = [clock.mark()]
    for _ in range(times):
        for step in steps:
            step()
            moments.append(clock.mark())
    seconds = [clock.seconds(begin, end) for begin, end in pairwise(moments)]
    return [seconds[first : first + len(steps)] for first in range(0, len(seconds), len(steps))]


def _objective(output: Any, _: Any) -> tuple[Tensor, Tensor]:
    return output.loss_sum, output.loss_sum.detach()
