"""`Unit`: some layers of a stage, or an end of the model, on the meta device, as one rank of a grid runs them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.comm.groups import ExpertGroups, fake_process_groups
from megapipe.config.config import ResolvedModelConfig
from megapipe.config.model import PrecisionConfig
from megapipe.config.training import TrainingConfig
from megapipe.dtypes import BLOCK, DTYPES, MICRO_BLOCK
from megapipe.gpu.kernels import Kernels
from megapipe.gpu.packed_attention import DocumentBorders
from megapipe.layers.table import Kept, RankShape, total_bytes
from megapipe.model.block import Block
from megapipe.model.context import LayerContext, SharedTables
from megapipe.model.microbatch import Microbatch, MicrobatchSlice, SliceKeys, StageLoss
from megapipe.model.stage import GPTStage
from megapipe.pipeline.parts import Exchange, elements_of_parts, part_runners
from megapipe.pipeline.stage import StageRunner
from megapipe.schedule.action import Op
from megapipe.schedule.partition import StageLayers
from megapipe.schedule.parts import NETWORK_PARTS, Part, Parts, Site
from megapipe.tensor_parallel.gradients import GradientSlot, WeightQueue
from megapipe.tensor_parallel.random import DropoutKey
from megapipe.topology import Topology
from megapipe.trace.libraries import LIBRARIES
from megapipe.trace.meta import MetaMode
from megapipe.trace.recorder import AGAIN, MESSAGES, STEP, RecordedQueue, RecordedTraffic, Recorder
from megapipe.trace.traced import INPUT, STAGE, Traced, TracedLayer

META = torch.device("meta")
FP8_RECIPES = {None: "tensorwise", BLOCK: "blockwise", MICRO_BLOCK: "mxfp8"}  # by the elements that share a scale
SHARED = {  # by microbatches or slices, with their labels
    "shared_masks": "shared masks",
    "shared_rotary": "shared rotary",
    "slice_keys": "slice keys",
    "slice_key_gradients": "slice key gradients",
}
DROPOUT_KEY = DropoutKey(0, 0, 0)  # any: there are no values


class Unit:
    """A stage of a few layers, or of an end of the model, on one rank.

    each: its layers; () for an end. is_fp8, comm_type: of the layers of multi-token prediction. frozen: names of the
    parameters of an end that are not trained.
    """

    def __init__(
        self,
        model: ResolvedModelConfig,
        layers: StageLayers,
        each: tuple[TracedLayer, ...],
        shape: RankShape,
        is_fp8: bool = False,
        comm_type: str = "p2p",
        frozen: tuple[str, ...] = (),
    ) -> None:
        self.model, self.layers, self.shape = model, layers, shape
        # which layers are in 8 bits depends on how many there are
        self.each = [layer._replace(config=replace(layer.config, num_layers=len(each))) for layer in each]
        self.dtype = _dtype(shape.dtype)
        self.frozen = frozen
        self.comm_types = [layer.comm_type for layer in each] or [comm_type]
        self.precision = _precision(shape, [layer.is_fp8 for layer in each] or [is_fp8])

    def traced(self) -> Traced:
        """Run the unit once, after what all microbatches share has been made."""
        self.live = live = Recorder(STEP, AGAIN)
        with self._prepared() as microbatch:
            shared: dict[str, Any] = {
                name: live.by_label[label] for name, label in SHARED.items()
            }  # before a slice frees its keys
            replays = self.stage.replays = [] if self.shape.recompute.recompute_in_bubbles else None
            traced = self._run(StageRunner(self._forward, self.queue, replays=replays), microbatch)
        return replace(traced, **shared)

    def traced_parts(self) -> dict[Part, Traced]:
        """Run the layer in parts."""
        self.live = Recorder(STEP, AGAIN, MESSAGES)
        with self._prepared() as microbatch:
            return self._run_parts(microbatch)

    @contextmanager
    def _prepared(self) -> Iterator[Microbatch]:
        """Enter the modes, and give the microbatch."""
        with MetaMode("cuda" if self.shape.is_cuda else "cpu"), self.live as live:
            live.label, self.queue = "weights", RecordedQueue(live)
            self.stage = self._stage(self.queue)
            self._give_weights()
            self.stage.begin_row()
            live.label = "fp8 weights"
            self.stage.cast_weights()
            live.follow_elements(self.stage, self._in_fp8)
            live.label = "microbatch"
            microbatch = self._microbatch()
            self._contexts(microbatch, "shared masks", "shared rotary")
            if microbatch.slice is not None:
                self._make_keys(microbatch, microbatch.slice.keys)
            yield microbatch

    def _run_parts(self, microbatch: Microbatch) -> dict[Part, Traced]:
        """Run the parts in order. What a part sends counts for the one that it is sent to, if that keeps it."""
        live, splits = self.live, self.shape.splits_backward
        (block,) = (module for module in self.stage.modules() if isinstance(module, Block))
        order = tuple(elements_of_parts(block))
        parts, whole = Parts(tuple(Site(0, 0, part) for part in order)), StageRunner(self.stage, self.queue)
        runners = dict(zip(order, part_runners(parts, 0, self.stage, whole, frees_weights=False).values(), strict=True))
        part_of: dict[int | None, Part | None] = {}  # by the number of a tensor

        def sent(state: Any, part: Part, to: Part | None) -> Any:
            state = state.wait() if isinstance(state, Exchange) else state
            part_of.update({number: part for number in live.alive() if number not in part_of})
            for each in state if to is not None else ():
                if isinstance(each, Tensor) and (number := live.number_of(each)) is not None:
                    live.name([each], MESSAGES)
                    part_of[number] = to
            return state

        def held() -> dict[Part, tuple[Kept, ...]]:
            alive = {
                number: replace(each, name=INPUT) if number == given else each for number, each in live.alive().items()
            }
            return {
                part: tuple(kept for number, kept in alive.items() if part_of.get(number) is part) for part in order
            }

        behind, before = (dict(pairwise(each)) for each in (order, order[::-1]))
        state: Any = sent((self._hidden(MESSAGES),), order[0], order[0])
        given = live.number_of(state[0])
        for part, runner in runners.items():
            state = sent(runner.forward(0, state, microbatch, None), part, behind.get(part))
        del state
        kept, levels, live.phase = held(), {}, Op.B
        state = (self._hidden("gradient"),)
        for part in order[::-1]:
            run = runners[part].backward_input if splits and part not in NETWORK_PARTS else runners[part].backward
            level = live.watch()
            gradients = sent(run(0, state), part, before.get(part))
            levels[part] = (*live.levels_over(level), live.level - level)
            state = gradients
        del state, gradients
        waiting = held()
        return {part: Traced(kept[part], waiting=total_bytes(waiting[part]), backward=levels[part]) for part in order}

    def _make_keys(self, microbatch: Microbatch, keys: SliceKeys) -> None:
        """Make the keys and values that the slices of a microbatch share, and their gradients, which others count."""
        with torch.no_grad():
            self._forward(self._hidden("keys"), microbatch)
        values, gradients = keys.with_gradients()
        self.live.name(values, SHARED["slice_keys"])
        self.live.name(gradients, SHARED["slice_key_gradients"])

    def _run(self, runner: StageRunner, microbatch: Microbatch) -> Traced:
        live = self.live
        inputs = () if self.layers.has_embedding else (self._hidden(STEP),)
        own, given = sum(each.nbytes for each in inputs), [live.number_of(each) for each in inputs]
        start = live.level - own
        live.watch()
        live.begin_forward()
        output = runner.forward(0, inputs, microbatch, _loss if self.layers.has_head else None)
        # a frozen embedding's is a leaf, which counts for the layer that it goes to
        sent = None if output is None else live.number_of(output[0])
        made_by = STAGE if sent is None else live.alive()[sent].name
        del inputs, output
        kept, level = live.alive(), live.level
        forward = live.levels_over(level)
        masks, rotary = live.by_label["masks"], live.by_label["rotary"]
        ahead, recompute = 0, tuple[int, ...]()
        if self.shape.recompute.recompute_in_bubbles:
            live.watch()
            live.phase = Op.RECOMPUTE
            runner.recompute(0)
            ahead, recompute = live.level - level, live.levels_over(level)
            level = live.level
        gradient = None if self.layers.has_head else self._hidden(MESSAGES)
        live.watch()
        live.phase = Op.I if self.shape.splits_backward else Op.B
        waiting, weights = 0, tuple[int, ...]()
        if self.shape.splits_backward:
            gradients = runner.backward_input(0, (gradient,))
            backward, replayed = live.levels_over(level), tuple(live.replayed)
            del gradients, self.graph, gradient  # that of the output waits for W, too, where linears use it
            waiting = live.level + live.by_label[MESSAGES] - start
            level, live.phase = live.watch(), Op.W
            runner.backward_weight(0)
            weights = live.levels_over(level)
        else:
            gradients = runner.backward(0, (gradient,))
            # a leaf holds the input until the graph ends; where another layer has made it, it is freed before
            backward, replayed = (*live.levels_over(level), live.level - own - level), tuple(live.replayed)
        return Traced(
            tuple(
                replace(each, name=INPUT) if number in given else each
                for number, each in kept.items()
                if number != sent
            ),
            masks,
            rotary,
            fp8_weights=live.by_label["fp8 weights"],
            waiting=waiting,
            ahead=ahead,
            forward=forward,
            backward=backward,
            weights=weights,
            replayed=replayed,
            recompute=recompute,
            reads_weights=live.reads_weights,
            products=live.products,
            attention=live.attention,
            messages=live.messages,
            output=made_by,
        )

    def _forward(self, *inputs: Any) -> Any:
        """Run the stage; the contexts of its layers are counted apart."""
        *hidden, microbatch = inputs
        stage = self.stage
        stream = stage.embed(hidden[0] if hidden else None, microbatch)
        contexts = self._contexts(microbatch, "masks", "rotary")
        stream = stage.run_layers(stream, contexts)
        self.graph = stream.grad_fn  # held until the backward has ended, as that of a stage is
        return stream if stage.loss is None else stage.run_head(stream, microbatch, contexts)

    def _contexts(self, microbatch: Microbatch, masks: str, rotary: str) -> dict[int, LayerContext]:
        """Return the contexts of the layers, with what is made for them under these labels."""
        self.live.label = masks
        made = self.stage.make_context(microbatch, self.dtype)
        tables = [table for context in made.values() for table in context.rotary or ()]
        self.live.name((table for table in tables if self.live.label_of(table) == masks), rotary)
        self.live.label = STEP
        return made

    def _stage(self, queue: WeightQueue) -> GPTStage:
        shape = self.shape
        is_local = shape.transformer_impl == "local"  # what a library keeps in 8 bits is not known
        attention: Any = LIBRARIES.get(shape.attention_impl)
        if shape.recompute.recompute_keep_attention:
            attention = None  # a recompute takes results from kernels alone, and a library's are those of torch's
        kernels = Kernels(
            attention=attention,
            fp8=self.precision if is_local and self.precision.fp8_format is not None else None,
            compiles=shape.compile_pointwise,
            compiles_loss=shape.compile_loss,
            splits_backward=shape.splits_backward,
        )
        groups = fake_process_groups(_topology(shape, self.model), 0, RecordedTraffic(self.live))
        experts = ExpertGroups(groups.ep, groups.etp, groups.dp, groups.cp, groups.ep_places, groups.ep_nodes)
        # of layers in one group, which are traced for full recompute, the largest
        experts = replace(experts, imbalance=max((layer.imbalance for layer in self.each), default=1.0))
        return GPTStage(
            self.model,
            self.layers,
            groups.tp,
            sequence_parallel=shape.sequence_parallel,
            recompute=shape.recompute,
            loss=TrainingConfig(cross_entropy_chunk_size=shape.loss_chunk),
            weight_queue=queue,
            kernels=kernels,
            chunks=shape.chunks,
            experts=experts,
            context=groups.context,
            cp_comm_types=self.comm_types,
            tables=SharedTables(),
            configs=[layer.config for layer in self.each] or None,
        )

    def _give_weights(self) -> None:
        """Give the stage parameters and, where these are trained, main gradients to which everything is added."""
        names = {parameter: name for name, parameter in self.stage.named_parameters()}
        places: dict[nn.Parameter, list[tuple[Any, str]]] = {}
        for module in self.stage.modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(parameter, []).append((module, attribute))
        for old, held in places.items():
            self.live.label, is_trained = "weights", not self._is_frozen(names[old])
            weight = torch.empty(old.shape, dtype=self.dtype, device=META)
            new = nn.Parameter(weight, requires_grad=is_trained)
            for module, attribute in held:
                module._parameters[attribute] = new
            self.live.label = "gradients"
            if is_trained:
                _give_gradient(new, held, torch.empty(old.shape, dtype=self._gradient_dtype, device=META))
        for router in self.stage.routers().values():
            if router.expert_bias is not None:
                router.expert_bias = router.expert_bias.to(META)

    @property
    def _in_fp8(self) -> tuple[str, ...]:
        """The layers whose linears multiply in 8 bits, by the beginnings of their names."""
        if not self.each:
            return ("mtp.",) if self.precision.fp8_format is not None else ()
        return tuple(f"decoder.layers.{number}." for number, layer in enumerate(self.each) if layer.is_fp8)

    def _is_frozen(self, name: str) -> bool:
        if not self.each:
            return name in self.frozen
        _, _, number, *_, module, kind = name.split(".")  # decoder.layers.0.mlp.linear_fc1.weight
        return kind == "weight" and module in self.each[int(number)].frozen

    @property
    def _gradient_dtype(self) -> torch.dtype:
        name = self.shape.gradient_dtype
        return torch.promote_types(self.dtype, torch.float32) if name is None else _dtype(name)

    def _hidden(self, label: str) -> Tensor:
        """Return hidden states between stages, or their gradient."""
        self.live.label = label
        tokens = self.shape.own_tokens // self.shape.batch
        made = torch.empty(tokens, self.shape.batch, self.model.hidden_size, dtype=self.dtype, device=META)
        self.live.label = STEP
        return made

    def _microbatch(self) -> Microbatch:
        shape, documents = self.shape, self.shape.documents

        def tokens(length: int = shape.seq, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape.batch, length, dtype=dtype, device=META)

        whole = shape.whole_seq
        borders = None
        if documents.borders:
            borders = DocumentBorders(torch.zeros(shape.batch + 1, dtype=torch.int32, device=META), shape.seq)
        made = Microbatch(
            tokens(),
            tokens(),
            tokens(dtype=torch.float32) if documents.loss_mask else None,
            tokens() if documents.position_ids else None,
            tokens(whole) if documents.attention_mask else None,
            DROPOUT_KEY,
            borders=borders,
            slice=None if shape.slice is None else MicrobatchSlice(shape.slice, SliceKeys(trains=True)),
        )
        ahead = self.model.mtp_num_layers or 0 if self.layers.has_head else 0
        modules = (Microbatch(tokens(), tokens(), tokens(dtype=torch.float32)) for _ in range(ahead))
        return replace(made, ahead=tuple(modules))


def _loss(output: StageLoss, _: Microbatch) -> tuple[Tensor, None]:
    """Return the scalar to differentiate."""
    return output.loss_sum + sum(each.loss_sum for each in output.ahead), None


def _give_gradient(parameter: nn.Parameter, places: Sequence[tuple[Any, str]], total: Tensor) -> None:
    """Let everything that computes a gradient of a parameter add it to `total`. places: (module, attribute)."""
    by_hand = [(module, name) for module, name in places if isinstance(getattr(module, "slots", None), dict)]
    slot = GradientSlot(total, sum(getattr(module, "uses", 1) for module, _ in by_hand))
    for module, name in by_hand:
        module.slots[name] = slot
    parameter.register_post_accumulate_grad_hook(partial(_add, total))


def _add(total: Tensor, parameter: Tensor) -> None:
    """Add the gradient that autograd left to the main gradient."""
    if parameter.grad is not None:
        total.add_(parameter.grad)
        parameter.grad = None


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, DTYPES[name].torch_name)
    return found


def _precision(shape: RankShape, in_fp8: Sequence[bool]) -> PrecisionConfig:
    """Return the settings of fp8. in_fp8: of each layer; those without come first or last."""
    if not any(in_fp8):
        return PrecisionConfig(dtype=shape.dtype)
    first, end = in_fp8.index(True), len(in_fp8) - in_fp8[::-1].index(True)
    return PrecisionConfig(
        dtype=shape.dtype,
        fp8_format="hybrid" if shape.fp8_block is None else "e4m3",
        fp8_recipe=FP8_RECIPES[shape.fp8_block],
        first_last_layers_bf16=not all(in_fp8),
        num_layers_at_start_in_bf16=first,
        num_layers_at_end_in_bf16=len(in_fp8) - end,
    )


def _topology(shape: RankShape, model: ResolvedModelConfig) -> Topology:
    """Return the smallest grid whose groups have these sizes."""
    cells, experts = shape.tp * shape.cp, shape.ep * shape.etp
    dp = experts // math.gcd(cells, experts)
    replicas = 1 if model.multi_latent_attention else max(1, shape.tp // model.num_query_groups)
    return Topology(
        shape.tp,
        shape.cp,
        dp=dp,
        ranks_per_node=shape.ep_inner * shape.etp if shape.has_levels else None,
        kv_replicas=replicas,
        ep=shape.ep,
        expert_tp=shape.etp,
        cp_inner=shape.cp_inner,
        divides_ep=shape.has_levels,
        allow_tp_across_nodes=True,
    )
