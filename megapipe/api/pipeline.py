"""`Pipeline`: trains any modules as the stages of a pipeline, with data parallelism, on the ranks that were started."""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from megapipe.api.split_backward import SplitStageRunner
from megapipe.comm.bootstrap import disband, is_joined, leave, start
from megapipe.comm.channels import Channels, MessageSpec
from megapipe.comm.collectives import Work, all_reduce, broadcast, broadcast_object
from megapipe.comm.groups import Group, build_process_groups
from megapipe.comm.meeting import Fact, Facts
from megapipe.environment import Environment, read_environment
from megapipe.errors import ConfigError
from megapipe.pipeline.engine import Engine, Step
from megapipe.schedule.action import Op
from megapipe.schedule.families import build_forward_only, build_lowered, default_schedule, schedule_family
from megapipe.schedule.placement import Placement
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.simulate import unhindered_send_depth
from megapipe.topology import Topology
from megapipe.train.facts import file_fact, process_facts, software_facts

StageModule: TypeAlias = nn.Module | Callable[[], nn.Module]
Specs: TypeAlias = tuple[MessageSpec, ...]
RECEIVE_DEPTH = 1  # on a GPU a posted receive occupies the device


class Microbatch(NamedTuple):
    """A microbatch on one rank. inputs: None without the first stage, target: None without the last."""

    inputs: tuple[Tensor, ...] | None
    target: Any


class Pipeline:
    """A model cut into stages, trained over pipeline ranks and replicas; the same script runs on any number of ranks::

        with Pipeline([Embed(), Block(), Block(), Head()], loss=cross_entropy, microbatches=8) as pipeline:
            optimizer = torch.optim.AdamW(pipeline.model.parameters())
            for tokens, labels in batches:
                loss = pipeline.step(tokens, labels)
                optimizer.step()
                optimizer.zero_grad()

    stages: the modules of the whole model in order. A module takes the output of the one before (a tuple as separate
    arguments) and returns a tensor or a tuple of tensors. A function without arguments in place of a module is called
    only on the ranks that hold the module. The pipeline joins consecutive modules, equally many for each of its
    pipeline ranks x chunks virtual stages.
    loss: (output of the last module, target of a microbatch) -> scalar. microbatches: parts of each replica's batch.
    schedule: a synchronous schedule of `megapipe schedule`, or 'auto': interleaved with several chunks, else 1f1b.
    Zero-bubble schedules work for any module: see `megapipe.api.split_backward`. chunks: virtual stages of a rank, None
    for 1, or 2 on a V. data_parallel: replicas; the pipeline has (number of ranks) / data_parallel ranks.
    group_size: of schedules with groups of microbatches. device: 'auto', 'cpu' or 'cuda'. timeout_seconds: of messages.

    Attributes: `model`, an nn.ModuleDict of this rank's modules by their position in `stages` ('0', '1', ...): for
    optimizers, train() and eval(), state_dict(). `device`. `replica` and `num_replicas`: which part of the data this
    rank takes. `rank` and `num_ranks`: of the world. `holds_first`, `holds_last`: the ends of the model.

    All replicas start with the weights and buffers of replica 0. Afterwards buffers are each rank's own: batch norms
    see one microbatch at a time and keep their own running averages. Dropout draws from torch's default generator of
    each rank, so it is not the same on another number of ranks; give replicas different seeds.

    As a context manager it leaves the other ranks at the end; an exception inside is printed and ends the process, so
    that the launcher ends the others. Every rank creates the pipeline. Raises ConfigError if the stages do not divide
    over the ranks, the schedule cannot run so many microbatches, or ranks would share a parameter.
    """

    def __init__(
        self,
        stages: Sequence[StageModule],
        *,
        loss: Callable[[Any, Any], Tensor],
        microbatches: int,
        schedule: str = "auto",
        chunks: int | None = None,
        data_parallel: int = 1,
        group_size: int | None = None,
        device: str = "auto",
        backend: str = "auto",
        timeout_seconds: float = 600.0,
    ) -> None:
        compared = {name: value for name, value in locals().items() if name not in ("self", "stages", "loss")}
        environment = read_environment()
        self.rank, self.num_ranks = environment.global_rank, environment.world_size
        self.num_replicas, self.num_microbatches, self._loss = data_parallel, microbatches, loss
        if data_parallel < 1 or self.num_ranks % data_parallel:
            divisors = ", ".join(str(n) for n in range(1, self.num_ranks + 1) if self.num_ranks % n == 0)
            raise ConfigError(
                f"data_parallel={data_parallel} does not divide the {self.num_ranks} rank(s); use one of {divisors}"
            )
        num_pipeline_ranks = self.num_ranks // data_parallel
        self._schedule = _schedule(schedule, num_pipeline_ranks, chunks, microbatches, group_size)
        self._placement = self._schedule.placement
        size = _modules_per_stage(stages, self._placement, num_pipeline_ranks)
        self._is_owner = not is_joined()
        facts = _facts(environment, backend, device, compared | {"stages": len(stages)})
        world = start(environment, backend, timeout_seconds, device, facts_of=lambda _: facts)
        topology = Topology(pp=num_pipeline_ranks, dp=data_parallel, mirrored_pipeline=self._placement.is_mirrored)
        self._groups = build_process_groups(topology, world.global_rank, world.backend, timeout_seconds)
        self._generators = [world.device] if world.device.type == "cuda" else []  # drawn from besides the CPU's
        self.device, self.replica = world.device, self._groups.dp.rank
        held = self._placement.stages_of(self._groups.pp.rank)
        self.holds_first, self.holds_last = 0 in held, self._placement.num_stages - 1 in held
        parts: dict[int, list[nn.Module]] = {}
        self.model = nn.ModuleDict()
        for stage in held:
            parts[stage] = []
            for position in range(stage * size, (stage + 1) * size):
                given = stages[position]
                module = given if isinstance(given, nn.Module) else given()
                if not isinstance(module, nn.Module):
                    raise ConfigError(
                        f"stage {position} is of type {type(module).__name__}; give an nn.Module, or a function "
                        "without arguments that returns one"
                    )
                self.model[str(position)] = module
                parts[stage].append(module)
        self.model.to(self.device)
        self._stages = {stage: _StageModule(modules, stage == 0) for stage, modules in parts.items()}
        self._runners = {stage: SplitStageRunner(module) for stage, module in self._stages.items()}
        self._reductions = self._plan_reductions(parts)
        self._channels = Channels.build(self._placement, self._groups.pp, self.device)
        self._messages: list[Specs] | None = None  # that cross each boundary, known after the first step
        self._shapes: dict[str, Specs] = {}  # of the inputs and targets of a microbatch
        self._engines: dict[bool, Engine] = {}

    def step(self, inputs: Tensor | Sequence[Tensor] | None, targets: Any) -> Tensor:
        """Run forward and backward of a batch, and add the gradient of its mean loss to .grad of the parameters.

        inputs: the first module's argument(s), [batch, ...], this replica's own batch; targets: a tensor, or tuples and
        dictionaries of tensors, [batch, ...]. Both are cut into `microbatches` equal parts along dim 0. Only ranks with
        the first stage read inputs and only those with the last stage read targets; others may pass None. Every step
        has the shapes of the first one, which also runs one forward on zeros to find the shapes between stages.

        Returns the mean loss over microbatches and replicas, [] in fp64, the same on every rank. Gradients are those of
        this mean: averaged over replicas while the rest of the backward runs. Raises ConfigError if the batch does not
        divide into microbatches, or a module does not fit the one before.
        """
        return self._run(inputs, targets, is_training=True)

    @torch.no_grad()
    def evaluate(self, inputs: Tensor | Sequence[Tensor] | None, targets: Any) -> Tensor:
        """Return the mean loss of a batch, as `step` does, without gradients. Call model.eval() first for dropout."""
        return self._run(inputs, targets, is_training=False)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over all stages is at most max_norm; return the norm before, [] fp64.

        Called by every rank between `step` and the optimizer's step, in place of the function of torch, which would see
        only this rank's stages.
        """
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for gradient in gradients:
            squares += torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32)) ** 2
        all_reduce(squares, self._groups.pp)
        norm = (squares / len(self._placement.directions)).sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))
        return norm

    def close(self) -> None:
        """Leave the other ranks, together with them. Not needed on a single rank, nor after a `with` block."""
        if self._is_owner:
            disband()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self.num_ranks > 1:
            traceback.print_exception(kind, error, trace)
            leave(1)

    def _run(self, inputs: Any, targets: Any, is_training: bool) -> Tensor:
        microbatches = self._split(inputs, targets)
        if self._messages is None:
            self._messages = self._find_messages(microbatches[0])
        messages = self._messages
        if is_training:
            for reduction in self._reductions.values():
                reduction.begin()
        reports = self._engine(is_training).run(Step(microbatches, lambda boundary: messages[boundary], self._scaled))
        if is_training:
            for reduction in self._reductions.values():
                reduction.finish()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for report in reports:
            total += report
        all_reduce(total, self._groups.world)
        return total / (self.num_microbatches * self.num_replicas)

    def _scaled(self, output: Any, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        value = self._loss(output, microbatch.target)
        return value / self.num_microbatches, value.detach()

    def _engine(self, is_training: bool) -> Engine:
        if is_training not in self._engines:
            schedule = self._schedule
            if not is_training:
                schedule = build_forward_only(self._placement, self.num_microbatches, RECEIVE_DEPTH)
            sends = 1 + unhindered_send_depth(schedule)
            for channel in self._channels.values():
                channel.max_in_flight = max(sends, channel.max_in_flight or 0)
            self._engines[is_training] = Engine(
                schedule,
                self._groups.pp.rank,
                self._runners,
                self._channels,
                {Op.REDUCE_GRAD: lambda action: self._reductions[action.stage].start()},
            )
        return self._engines[is_training]

    def _split(self, inputs: Any, targets: Any) -> list[Microbatch]:
        """Return this rank's microbatches. Raises ConfigError."""
        count = self.num_microbatches
        first: list[Any] = [None] * count
        last: list[Any] = [None] * count
        if self.holds_first:
            given = (inputs,) if isinstance(inputs, Tensor) else inputs
            first = _parts(given, count, "inputs", self.device)
        if self.holds_last:
            last = _parts(targets, count, "targets", self.device)
        for what, value in ("inputs", first[0]), ("targets", last[0]):
            shapes = tuple(map(MessageSpec.of, _tensors(value)))
            before = self._shapes.setdefault(what, shapes)
            if shapes != before:
                raise ConfigError(
                    f"a microbatch has the {what} {_shown(shapes)}, those of the first step were {_shown(before)}; "
                    "every step has the same shapes (DataLoader: drop_last=True)"
                )
        return [Microbatch(*pair) for pair in zip(first, last, strict=True)]

    def _find_messages(self, microbatch: Microbatch) -> list[Specs]:
        """Run one forward of every stage on zeros; return what crosses each boundary. All ranks call it.

        Buffers and torch's random state are then as before. Raises a stage's error as ConfigError on all ranks.
        """
        messages: list[Specs] = []
        last = self._placement.num_stages - 1
        for stage in range(self._placement.num_stages):
            source, found = self._placement.rank_of_stage[stage], ("", "", ())
            if self._groups.pp.rank == source:
                found = self._try_stage(stage, messages[-1] if stage else (), microbatch, stage == last)
            problem, kind, specs = broadcast_object(found, self._groups.pp, source)
            if problem:
                got = f"{_shown(messages[-1])} from stage {stage - 1}" if stage else "its inputs"
                raise ConfigError(f"stage {stage} for {got}: {kind}: {problem}")
            messages.append(tuple(MessageSpec(tuple(shape), getattr(torch, dtype)) for shape, dtype in specs))
        return messages

    def _try_stage(self, stage: int, inputs: Specs, microbatch: Microbatch, is_last: bool) -> tuple[str, str, Any]:
        """Return (error, its type, shapes and dtypes of the outputs) of a forward on zeros."""
        module, microbatch = self._stages[stage], copy.deepcopy(microbatch)  # it may change its inputs in place
        buffers = [(buffer, buffer.clone()) for part in module.modules for buffer in part.buffers()]
        try:
            with torch.no_grad(), torch.random.fork_rng(self._generators):
                zeros = (torch.zeros(spec.shape, dtype=spec.dtype, device=self.device) for spec in inputs)
                output = module(*zeros, microbatch)
                if is_last:
                    output = self._loss(output, microbatch.target)
                    if not isinstance(output, Tensor) or output.numel() != 1 or output.dim():
                        raise ConfigError(f"loss returned {_kind(output)}; it must return a scalar: average it")
                outputs = output if isinstance(output, tuple) else (output,)
                if not outputs or any(not isinstance(tensor, Tensor) for tensor in outputs):
                    raise ConfigError(f"it returned {_kind(output)}; return a tensor or a tuple of tensors")
        except Exception as error:
            return next(iter(str(error).splitlines()), "no message"), type(error).__name__, ()
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
        return "", "", [(list(t.shape), str(t.dtype).removeprefix("torch.")) for t in outputs]

    def _plan_reductions(self, parts: Mapping[int, list[nn.Module]]) -> dict[int, _Reduction]:
        """Make the replicas equal, and return how each stage's gradients are averaged.

        A parameter of several stages of this rank is averaged with the stage that is complete last.
        """
        replicas, seen = self._groups.replicas, set()
        reductions: dict[int, _Reduction] = {}
        row = self._schedule.rows[self._groups.pp.rank]
        for stage in [action.stage for action in row if action.op is Op.REDUCE_GRAD][::-1]:
            parameters = [p for module in parts[stage] for p in module.parameters() if p.requires_grad]
            new = [parameter for parameter in dict.fromkeys(parameters) if parameter not in seen]
            seen |= set(new)
            reductions[stage] = _Reduction(new, replicas, self.num_replicas)
        if replicas.size > 1:
            with torch.no_grad():
                for module in self.model.values():
                    for tensor in (*module.parameters(), *module.buffers()):
                        value = tensor.detach().contiguous()
                        broadcast(value, replicas)
                        tensor.copy_(value)
        return reductions


class _StageModule:
    """Consecutive modules as one stage of the engine: called with the tensors before it and the microbatch."""

    def __init__(self, modules: list[nn.Module], is_first: bool) -> None:
        self.modules, self._is_first = modules, is_first

    def __call__(self, *arguments: Any) -> Any:
        *received, microbatch = arguments
        value: Any = tuple(_Entry.apply(t) if t.requires_grad else t for t in received)  # type: ignore[no-untyped-call]
        if self._is_first:
            value = microbatch.inputs
        for module in self.modules:
            value = module(*value) if isinstance(value, tuple) else module(value)
        return value


class _Entry(torch.autograd.Function):
    """The identity. Its result may be changed in place, which autograd refuses for a leaf; they share the memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


@dataclass(eq=False)
class _Reduction:
    """The average of some parameters' gradients over replicas, one all-reduce for each dtype.

    A gradient that is None on every replica stays None, so that optimizers leave the parameter alone. divisor: the
    number of replicas that differ in data. A mirrored pipeline has twice as many holders of a stage, whose gradients
    of one step are a sum: there those of earlier steps are set aside.
    """

    parameters: list[nn.Parameter]
    replicas: Group
    divisor: int

    def __post_init__(self) -> None:
        self._pending: list[tuple[Work, Tensor, list[nn.Parameter]]] = []
        self._before: list[Tensor | None] = []

    def begin(self) -> None:
        """Prepare for the gradients of a step."""
        if self.replicas.size > self.divisor:
            self._before = [parameter.grad for parameter in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None

    def start(self) -> None:
        """Start it when all gradients are complete."""
        if self.replicas.size == 1:
            return
        for dtype in dict.fromkeys(parameter.dtype for parameter in self.parameters):
            mine = [parameter for parameter in self.parameters if parameter.dtype is dtype]
            pieces = [torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1) for p in mine]
            present = torch.tensor([float(p.grad is not None) for p in mine], dtype=dtype, device=mine[0].device)
            flat = torch.cat([*pieces, present])
            self._pending.append((all_reduce(flat, self.replicas, async_op=True), flat, mine))

    def finish(self) -> None:
        """Wait for it and put the averages into .grad."""
        pending, self._pending = self._pending, []
        for work, flat, parameters in pending:
            work.wait()
            *sums, present = flat.div(self.divisor).split([*(p.numel() for p in parameters), len(parameters)])
            for parameter, total, is_present in zip(parameters, sums, present.tolist(), strict=True):
                if is_present and parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                if parameter.grad is not None:
                    parameter.grad.copy_(total.view_as(parameter))
        for parameter, before in zip(self.parameters, self._before, strict=False):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)


def _schedule(name: str, num_ranks: int, chunks: int | None, microbatches: int, group_size: int | None) -> Schedule:
    """Return the lowered schedule. Raises ConfigError if it is unknown, not synchronous, or does not fit."""
    if name == "auto":
        name = default_schedule(chunks or 1)
    family = schedule_family(name)
    if not family.is_synchronous:
        raise ConfigError(
            f"schedule {name} updates weights within a step, but the step of a Pipeline leaves that to your optimizer; "
            f"use {default_schedule(chunks or 1)}"
        )
    return build_lowered(
        name, num_ranks, family.num_chunks(1) if chunks is None else chunks, microbatches, group_size, RECEIVE_DEPTH
    )


def _modules_per_stage(stages: Sequence[StageModule], placement: Placement, num_ranks: int) -> int:
    """Return the number of modules of a virtual stage.

    Raises ConfigError if they do not divide, or if two modules on different ranks share a parameter: each rank would
    train its own copy.
    """
    count, num_stages = len(stages), placement.num_stages
    if count == 0 or count % num_stages:
        places = f"{num_ranks} pipeline rank(s) x {num_stages // num_ranks} chunk(s)"
        raise ConfigError(f"{count} stages do not divide over {places}; give a multiple of {num_stages}")
    size = count // num_stages
    first_use: dict[nn.Parameter, tuple[int, str]] = {}
    for position, module in enumerate(stages):
        for name, parameter in module.named_parameters() if isinstance(module, nn.Module) else ():
            before, known = first_use.setdefault(parameter, (position, name))
            if placement.ranks_of(before // size) != placement.ranks_of(position // size):
                raise ConfigError(
                    f"stages {before} and {position} share the parameter {known} ({name}), but different ranks hold "
                    "them; put both on one rank (a V-shaped schedule holds the first and the last stage on one rank), "
                    "or give each its own parameter"
                )
    return size


def _facts(environment: Environment, backend: str, device: str, arguments: Mapping[str, Any]) -> Facts:
    """Return what the ranks compare: the arguments of the pipeline, the script, versions and device."""
    facts = {f"{name} of Pipeline": Fact(str(value)) for name, value in arguments.items()}
    facts["script"] = file_fact(getattr(sys.modules["__main__"], "__file__", None) or "none")
    return {**facts, **software_facts(with_text=False), **process_facts(environment, backend, device)}


def _parts(value: Any, count: int, what: str, device: torch.device) -> list[Any]:
    """Cut tensors, and tuples and dictionaries of them, into `count` equal parts along dim 0. Raises ConfigError."""
    if isinstance(value, Tensor):
        if value.dim() == 0 or value.shape[0] == 0 or value.shape[0] % count:
            batch = "no batch dimension" if value.dim() == 0 else f"a batch of {value.shape[0]}"
            raise ConfigError(f"{what} {MessageSpec.of(value)}: {batch} does not divide into {count} microbatches")
        return list(value.to(device, non_blocking=True).split(value.shape[0] // count))
    if isinstance(value, tuple | list) and value:
        return [tuple(parts) for parts in zip(*(_parts(item, count, what, device) for item in value), strict=True)]
    if isinstance(value, Mapping) and value:
        by_key = {key: _parts(item, count, what, device) for key, item in value.items()}
        return [{key: parts[number] for key, parts in by_key.items()} for number in range(count)]
    raise ConfigError(f"{what} is {_kind(value)} on a rank that needs it; give tensors [batch, ...]")


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in tuples and dictionaries, in order."""
    if isinstance(value, Tensor):
        return [value]
    members = value.values() if isinstance(value, Mapping) else value or ()
    return [tensor for member in members for tensor in _tensors(member)]


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {MessageSpec.of(value)}"
    return "None" if value is None else type(value).__name__


def _shown(specs: Specs) -> str:
    return ", ".join(map(str, specs))
