"""The choice of --compile-blocks: one block of each kind is compared with the eager one, and its time measured.

All ranks take the same decision: the results must agree on every rank, and the seconds are summed over them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.collectives import all_reduce
from megapipe.config.layers import LayerConfig
from megapipe.config.model import ATTENTIONS
from megapipe.config.rules.pairs import why_not_compiled
from megapipe.errors import ConfigError
from megapipe.gpu.compile import missing_compiler
from megapipe.gpu.packed_attention import DocumentBorders
from megapipe.model.block import Block
from megapipe.model.compiled import BlockFormulas, Compile, CompiledBlock
from megapipe.model.microbatch import Microbatch
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
    compiler: Compile | None = None,
) -> bool | None:
    """Compile the blocks of all stages if --compile-blocks asks for it, or finds it right. A collective.

    before: the choice of the run that is resumed, which auto keeps. compiler: torch.compile with other options. Returns
    the choice of auto, None without one. Raises ConfigError on all ranks if it is `on` and impossible or not equal.
    """
    config, device = runtime.plan.config, runtime.device
    wanted = config.kernels.compile_blocks
    if wanted == "off" or (wanted == "auto" and not chooses(device)) or config.training.skip_train:
        return before
    reason = why_not_compiled(config)
    if reason is None and compiler is None:
        reason = missing_compiler(device.type)
    anywhere = torch.tensor([float(reason is not None)], device=device)
    all_reduce(anywhere, runtime.groups.world, "max")
    if anywhere.item():
        reason = reason or "another rank has no compiler"
        if wanted == "on":
            raise ConfigError(f"{FLAG} on: {reason}; use {FLAG} auto or off")
        say(f"blocks are not compiled: {reason} ({FLAG} auto)")
        return before
    runtime.finish_parameters()
    compiled = compiled_forms(runtime, compiler)
    if wanted == "auto" and before is not None:
        if before:
            use(runtime, compiled)
        say(f"blocks are {'compiled' if before else 'not compiled'}, as in the run before ({FLAG} auto)")
        return before
    trial = agreed_trial(runtime, compiled)
    words = f"{trial.describe()} ({FLAG} {wanted})"
    if not trial.is_equal and wanted == "on":
        raise ConfigError(f"{FLAG} on: a compiled block is not the eager one: {trial.describe()}; use {FLAG} off")
    chosen = trial.is_equal and (wanted == "on" or trial.compiled_seconds < trial.eager_seconds)
    if chosen:
        use(runtime, compiled)
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
    """The properties that layers with one compiled form share. recompute: modules that each recomputes."""

    config: LayerConfig
    recompute: frozenset[str]
    keeps_attention: bool


def layer_kinds(module: GPTStage) -> dict[int, LayerKind]:
    """Return the kind of each layer of a stage, by its global number."""
    return {
        number: LayerKind(factory.config, factory.recompute, number in module.keep_attention)
        for number, factory in module.factories.items()
    }


def compiled_forms(runtime: TrainingRuntime, compiler: Compile | None = None) -> dict[LayerKind, CompiledBlock]:
    """Return a compiled form for each kind of layer on this rank; nothing is compiled before its first use."""
    (spec,) = runtime.message(0)
    tp = runtime.groups.tp.size
    found: dict[LayerKind, CompiledBlock] = {}
    for module in runtime.stages.values():
        for kind in layer_kinds(module).values():
            if kind in found:
                continue
            config = kind.config
            is_whole = (
                tp == 1
                and not kind.recompute
                and not kind.keeps_attention
                and runtime.kernels.attention is None
                and not runtime.packs_documents
                and ATTENTIONS[config.attention_kind].function is None
            )
            found[kind] = CompiledBlock(BlockFormulas(config, tp), tuple(spec.shape), is_whole, compiler)
    return found


def use(runtime: TrainingRuntime, compiled: dict[LayerKind, CompiledBlock]) -> None:
    """Let all blocks run in their compiled form from now on."""
    for module in runtime.stages.values():
        for number, kind in layer_kinds(module).items():
            block = module.decoder.layers[str(number)]
            assert isinstance(block, Block)
            block.compiled = compiled[kind]


def agreed_trial(runtime: TrainingRuntime, compiled: dict[LayerKind, CompiledBlock]) -> Trial:
    """Try the first block of each kind on every rank; return the sums and the largest difference. A collective."""
    error, worst, seconds, began = "", 0.0, [0.0, 0.0], time.perf_counter()
    tried: set[LayerKind] = set()
    for module in runtime.stages.values():
        for number, kind in layer_kinds(module).items():
            if kind in tried or error:
                continue
            tried.add(kind)
            try:
                difference, *pair = try_block(runtime, module, number, compiled[kind])
            except torch.OutOfMemoryError:
                raise
            except Exception as failure:  # of any kind: a compiler's, or of a block that is not made for compiling
                lines = str(failure).strip().splitlines() or [type(failure).__name__]
                error, worst = f"compiling failed: {lines[0]}", float("inf")
            else:
                worst = max(worst, difference)
                seconds = [a + b for a, b in zip(seconds, pair, strict=True)]
    compile_seconds = time.perf_counter() - began
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
    runtime: TrainingRuntime, module: GPTStage, number: int, compiled: CompiledBlock
) -> tuple[float, float, float]:
    """Run one block eager and compiled, with gradients, on random hidden states of a microbatch.

    Returns the largest difference as a share of the tolerance (infinite if not finite), and the seconds of both. The
    block shares the weights of the layer, not its gradients.
    """
    real, device, dtype = module.decoder.layers[str(number)], runtime.device, runtime.parameter_dtype
    block = Block(number, module.factories[number])
    for name, parameter in real.named_parameters():
        owner, _, attribute = name.rpartition(".")
        block.get_submodule(owner)._parameters[attribute] = nn.Parameter(parameter.detach())
    context = module.make_context(example(runtime), dtype)[number]
    generator = torch.Generator().manual_seed(runtime.plan.config.training.seed)
    hidden, grad = (torch.randn(compiled.shape, generator=generator).to(device, dtype) for _ in range(2))

    def run(form: CompiledBlock | None) -> tuple[Tensor, Tensor]:
        block.compiled, leaf = form, hidden.detach().requires_grad_()
        output = block(leaf, context)
        output.backward(grad)
        assert leaf.grad is not None
        return output.detach(), leaf.grad

    def results(form: CompiledBlock | None) -> list[Tensor]:
        for linear in block.parts.linears:
            linear.slots = {
                name: GradientSlot(torch.zeros_like(parameter, dtype=runtime.main_dtype))
                for name, parameter in linear.named_parameters()
            }
        block.zero_grad()
        found = run(form)
        slots = [slot.main_grad for linear in block.parts.linears for slot in linear.slots.values()]
        return [*found, *slots, *(p.grad for p in block.parameters() if p.grad is not None)]

    eager, other = results(None), results(compiled)
    worst = max(_difference(a, b) for a, b in zip(other, eager, strict=True)) / TOLERANCES[dtype]
    seconds: dict[CompiledBlock | None, list[float]] = {None: [], compiled: []}
    for _ in range(NUM_PAIRS):
        for form, taken in seconds.items():
            began = _now(device)
            run(form)
            taken.append(_now(device) - began)
    return worst, *(statistics.median(taken) for taken in seconds.values())  # type: ignore[return-value]


def example(runtime: TrainingRuntime) -> Microbatch:
    """Return a microbatch like those of the run, of one document a sequence."""
    config, device = runtime.plan.config, runtime.device
    tokens = torch.zeros(config.training.micro_batch_size, config.model.seq_length, dtype=torch.int64, device=device)
    has_documents, packs = config.data.reset_attention_mask or config.data.sft, runtime.packs_documents
    ids = np.zeros(tuple(tokens.shape), dtype=np.int64)
    positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens).contiguous()
    return Microbatch(
        tokens,
        position_ids=positions if config.data.reset_position_ids or config.data.sft else None,
        document_ids=tokens if has_documents and not packs else None,
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
