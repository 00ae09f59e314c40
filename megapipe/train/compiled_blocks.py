"""The choice of --compile-blocks: one block of each kind is compared with the eager one, and its time measured.

All ranks take the same decision: the results must agree on every rank, and the seconds are summed over them.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.collectives import all_reduce
from megapipe.config.layers import LayerConfig
from megapipe.errors import ConfigError
from megapipe.gpu.kernels import missing_compiler
from megapipe.gpu.packed_attention import DocumentBorders
from megapipe.model.block import Block
from megapipe.model.microbatch import Microbatch
from megapipe.model.routing import KeptRouting
from megapipe.model.segments import Compile, Compiler
from megapipe.model.stage import GPTStage
from megapipe.tensor_parallel.gradients import GradientSlot
from megapipe.tensor_parallel.random import DropoutKey

FLAG = "--compile-blocks"
# largest difference of a tensor, relative to its largest element: both round, at other places
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
NUM_PAIRS = 5


def choose_blocks(
    runtime: TrainingRuntime,
    before: bool | None,
    say: Callable[[str], None],
    compile: Compile | None = None,
) -> bool | None:
    """Compile the blocks of all stages if --compile-blocks asks for it, or finds it right. A collective.

    before: the choice of the run that is resumed, which auto keeps. compile: torch.compile with other options. Returns
    the choice of auto, None without one. Raises ConfigError on all ranks if it is `on` and impossible or not equal.
    """
    config, device = runtime.plan.config, runtime.device
    wanted = config.kernels.compile_blocks
    if wanted == "off" or (wanted == "auto" and not chooses(device)) or config.training.skip_train:
        return before
    reason = missing_compiler(device.type) if compile is None else None
    anywhere = torch.tensor([float(reason is not None)], device=device)
    all_reduce(anywhere, runtime.groups.world, "max")
    if anywhere.item():
        reason = reason or "another rank has no compiler"
        if wanted == "on":
            raise ConfigError(f"{FLAG} on: {reason}; use {FLAG} auto or off")
        say(f"blocks are not compiled: {reason} ({FLAG} auto)")
        return before
    compiler = compiler_of(runtime, compile)
    if wanted == "auto" and before is not None:
        if before:
            use(runtime, compiler)
        say(f"blocks are {'compiled' if before else 'not compiled'}, as in the run before ({FLAG} auto)")
        return before
    trial = agreed_trial(runtime, compiler)
    words = f"{trial.describe()} ({FLAG} {wanted})"
    if not trial.is_equal and wanted == "on":
        raise ConfigError(f"{FLAG} on: a compiled block is not the eager one: {trial.describe()}; use {FLAG} off")
    chosen = trial.is_equal and (wanted == "on" or trial.compiled_seconds < trial.eager_seconds)
    if chosen:
        use(runtime, compiler)
    say(f"blocks are {'compiled' if chosen else 'not compiled'}: {words}")
    return chosen if wanted == "auto" else before


def chooses(device: torch.device) -> bool:
    """Return True where auto compares and chooses: on GPUs, not on CPUs."""
    return device.type == "cuda"


@dataclass(frozen=True)
class Trial:
    """The comparison of compiled blocks with eager ones. difference: as a share of the tolerance; infinite: failed."""

    difference: float
    eager_seconds: float  # forward and backward of one block of each kind, the sum over ranks
    compiled_seconds: float
    compile_seconds: float
    error: str = ""

    @property
    def is_equal(self) -> bool:
        return self.difference <= 1.0

    def describe(self) -> str:
        """Return one line."""
        if self.difference == float("inf"):
            return self.error or "they could not be compiled or are not finite on another rank"
        ratio = self.eager_seconds / max(self.compiled_seconds, 1e-9)
        return (
            f"forward and backward take {1e3 * self.compiled_seconds:.3g} ms, eager {1e3 * self.eager_seconds:.3g} ms "
            f"({ratio:.2f} of its speed); results differ by {self.difference:.2g} of the tolerance; compiled in "
            f"{self.compile_seconds:.1f} s"
        )


class LayerKind(NamedTuple):
    """The properties of layers that are alike. recompute: modules that each recomputes."""

    config: LayerConfig
    recompute: frozenset[str]


def layer_kinds(module: GPTStage) -> dict[int, LayerKind]:
    """Return the kind of each layer of a stage, by its global number."""
    return {number: LayerKind(factory.config, factory.recompute) for number, factory in module.factories.items()}


def use(runtime: TrainingRuntime, compiler: Compiler) -> None:
    """Let all blocks run compiled from now on, those of multi-token prediction too."""
    for stage in runtime.stages.values():
        for block in stage.modules():
            if isinstance(block, Block):
                block.compiler = compiler


def compiler_of(runtime: TrainingRuntime, compile: Compile | None = None) -> Compiler:
    """Return what compiles the segments of this rank; nothing is compiled before its first use."""
    lengths = [None] if runtime.plan.num_slices == 1 else [each.length for each in runtime.plan.slices]
    return Compiler([tuple(spec.shape) for length in lengths for spec in runtime.message(0, length)], compile)


def agreed_trial(runtime: TrainingRuntime, compiler: Compiler) -> Trial:
    """Try the first block of each kind on every rank; return the sums and the largest difference. A collective."""
    error, worst, seconds, began = "", 0.0, [0.0, 0.0], time.perf_counter()
    tried: set[LayerKind] = set()
    for module in runtime.stages.values():
        for number, kind in layer_kinds(module).items():
            if kind in tried or error:
                continue
            tried.add(kind)
            try:
                difference, *pair = try_block(runtime, module, number, compiler)
            except torch.OutOfMemoryError:
                raise
            except Exception as failure:  # of any kind: a compiler's, or of a block that is not made for compiling
                lines = str(failure).strip().splitlines() or [type(failure).__name__]
                error, worst = f"compiling failed: {lines[0]}", float("inf")
            else:
                worst = max(worst, difference)
                seconds = [a + b for a, b in zip(seconds, pair, strict=True)]
    compile_seconds = time.perf_counter() - began
    gc.collect()  # a block and its elements are a cycle, which would keep the trial's tensors
    world = runtime.groups.world
    most, sums = (
        torch.tensor(values, dtype=torch.float64, device=runtime.device)
        for values in ([worst, compile_seconds], seconds)
    )
    all_reduce(most, world, "max")
    all_reduce(sums, world)
    worst, compile_seconds = most.tolist()
    eager, compiled_seconds = sums.tolist()
    return Trial(worst, eager, compiled_seconds, compile_seconds, error)


def try_block(
    runtime: TrainingRuntime, module: GPTStage, number: int, compiler: Compiler
) -> tuple[float, float, float]:
    """Run one block eager and compiled, with gradients, on random hidden states of a microbatch.

    Returns the largest difference as a share of the tolerance (infinite if not finite), and the seconds of both. The
    block has random weights of its own, since those of the layer may be on other ranks. Experts get the same rows in
    both: near a tie a rounded score would send a token to another one.
    """
    device, dtype, factory = runtime.device, runtime.parameter_dtype, module.factories[number]
    block = Block(number, replace(factory, recompute=factory.recompute - {"moe"}))
    generator = torch.Generator().manual_seed(runtime.plan.config.training.seed)

    def random(shape: Iterable[int]) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    for owner in block.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            values = random(parameter.shape) * (0.02 if parameter.dim() > 1 else 0.1)
            owner._parameters[name] = nn.Parameter(values if parameter.dim() > 1 else values + 1)
        for name, buffer in owner.named_buffers(recurse=False):
            owner._buffers[name] = buffer.to(device)
    holders: list[Any] = [owner for owner in block.modules() if hasattr(owner, "slots")]
    shape, routing = next(iter(compiler.shapes)), KeptRouting()
    context = module.make_context(example(runtime, shape), dtype)[number]
    context = replace(context, kept_routing=routing)
    hidden, grad = random(shape), random(shape)

    def run(compiles: bool) -> tuple[Tensor, Tensor]:
        block.compiler, leaf = compiler if compiles else None, hidden.detach().requires_grad_()
        output = block(leaf, context)
        routing.is_reused = routing.routing is not None
        output.backward(grad)
        assert leaf.grad is not None
        return output.detach(), leaf.grad

    def results(compiles: bool) -> list[Tensor]:
        for owner in holders:
            owner.slots = {
                name: GradientSlot(torch.zeros_like(parameter, dtype=runtime.main_dtype))
                for name, parameter in owner.named_parameters(recurse=False)
            }
        block.zero_grad()
        found = run(compiles)
        slots = [slot.main_grad for owner in holders for slot in owner.slots.values()]
        return [*found, *slots, *(p.grad for p in block.parameters() if p.grad is not None)]

    eager, other = results(False), results(True)
    worst = max(_difference(a, b) for a, b in zip(other, eager, strict=True)) / TOLERANCES[dtype]
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(NUM_PAIRS):
        for compiles, taken in seconds.items():
            began = _now(device)
            run(compiles)
            taken.append(_now(device) - began)
    return worst, *(statistics.median(taken) for taken in seconds.values())  # type: ignore[return-value]


def example(runtime: TrainingRuntime, shape: tuple[int, ...]) -> Microbatch:
    """Return a microbatch like those of the run, of one document a sequence. shape: of the hidden states."""
    config, device, topology = runtime.plan.config, runtime.device, runtime.plan.topology
    length, batch = shape[0] * (topology.tp if config.parallel.sequence_parallel else 1), shape[1]
    tokens = torch.zeros(batch, length, dtype=torch.int64, device=device)
    has_documents, packs = config.data.reset_attention_mask or config.data.sft, runtime.packs_documents
    positions = torch.arange(length, device=device).expand_as(tokens).contiguous()
    ids = np.zeros((batch, length), dtype=np.int64)
    return Microbatch(
        tokens,
        position_ids=positions if config.data.reset_position_ids or config.data.sft else None,
        document_ids=tokens.repeat(1, topology.cp) if has_documents and not packs else None,
        dropout_key=DropoutKey(config.training.seed, 0, 0),
        borders=DocumentBorders.of(ids, lambda starts: torch.from_numpy(starts).to(device)) if packs else None,
    )


def _difference(a: Tensor, b: Tensor) -> float:
    """Return max|a - b| / max|b|; infinity if one is not finite."""
    found = float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30))
    return found if found == found else float("inf")


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
