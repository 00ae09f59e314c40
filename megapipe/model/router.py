"""`Router`: the choice of k experts for each token, and the losses that balance it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.comm.collectives import all_reduce
from megapipe.comm.groups import Group
from megapipe.config.layers import LayerConfig
from megapipe.dtypes import DTYPES
from megapipe.layers.moe import expert_capacity, rows_of_capacity
from megapipe.model.context import LayerContext, Unit
from megapipe.model.segments import Elements, Segment, run_branch
from megapipe.sharding.spec import Init, ParamSpec
from megapipe.tensor_parallel.gemms import at_least_fp32
from megapipe.tensor_parallel.gradients import InputRecompute
from megapipe.tensor_parallel.parameter import declared

OUTSIDE = LayerContext(None, None, False, None)  # of a router that is called on its own, not in training


class Router(nn.Module):
    """The choice of k experts for each token, with the losses that balance it.

    Scores are in at least fp32. Ties go to the expert, or the group, of the smaller number. expert_bias: [experts]
    fp32, added to the scores for the choice alone (Wang et al. 2024, arXiv:2408.15664); changed after each step by
    train.step. loads: tokens of this rank for each expert, [experts] int64, by number of the microbatch in the
    global batch and of its slice; a replay writes the same again. dropped: rows above the capacity, likewise.
    loss_scale: factor on gradients, asked for in the backward.

    The losses of a microbatch in slices are those of the whole one: a slice's part of them depends on the tokens of all
    slices, which are known in its backward.
    """

    expert_bias: Tensor | None

    def __init__(
        self,
        model: LayerConfig,
        tp: Group,
        dp: Group | None = None,
        cp: Group | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        assert model.num_experts is not None
        self.model, self.tp, self.num_experts = model, tp, model.num_experts
        self.dp = Group.alone("dp") if dp is None else dp
        self.cp = Group.alone("cp") if cp is None else cp
        self.loss_scale: Callable[[], float] = lambda: 1.0
        self.dtype = (
            None if model.moe_router_dtype is None else getattr(torch, DTYPES[model.moe_router_dtype].torch_name)
        )
        init, is_partial = Init("normal", model.init_method_std), sequence_parallel
        shape = (model.num_experts, model.hidden_size)
        self.weight = declared(ParamSpec("", shape, 0, init=init, partial_gradient=is_partial))
        self.bias: nn.Parameter | None = None
        if model.add_bias_linear:
            self.bias = declared(ParamSpec("", shape[:1], 0, weight_decay=False, partial_gradient=is_partial))
        bias = torch.zeros(model.num_experts) if model.moe_router_enable_expert_bias else None
        self.register_buffer("expert_bias", bias, persistent=False)
        self.measures = ("squares",) * bool(model.moe_z_loss_coeff) + ("counts", "sums") * bool(model.balance_losses)
        self.choice = {  # by whether losses are needed
            trains: Elements([Segment("router", Choice(model, self.measures * trains, tp.rank), self._operands)])
            for trains in (False, True)
        }
        self.loads: dict[Unit, Tensor] = {}
        self.dropped: dict[Unit, Tensor] = {}
        self.losses: dict[Unit, dict[str, Tensor]] = {}  # this rank's parts
        # of a microbatch by its slices: the tokens of each expert, and the sums of their shares
        self._slices: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        # by number of a microbatch, what `_global_counts` returned in its forward
        self._global: dict[int, tuple[Tensor, Tensor]] = {}
        self._counted: tuple[int, Tensor] | None = None  # the step's microbatches so far, and their counts over dp

    def clear(self) -> None:
        """Forget what the forwards of a step have recorded. None of its microbatches is in flight."""
        for kept in (self.loads, self.dropped, self.losses, self._slices, self._global):
            kept.clear()
        self._counted = None

    def padding(self, context: LayerContext, num_tokens: int) -> Tensor | None:
        """Return [s, b], True for those of this rank's num_tokens = s b tokens that are padding; None if none is."""
        real = context.real
        return None if real is None else ~real.held(num_tokens // real.mask.shape[1], self.tp.rank)

    def capacity(self, num_tokens: int, padding: Tensor | None) -> int | Tensor | None:
        """Return the most rows that this rank sends to one expert, by the tokens that are not padding."""
        if padding is None:
            return expert_capacity(self.model, num_tokens)
        rows = rows_of_capacity(self.model, (~padding).sum(dtype=torch.float64))
        return None if rows is None else rows.ceil().long()

    def record(self, unit: Unit, load: Tensor, capacity: int | Tensor | None) -> None:
        """Keep what a forward in training has chosen. load: [experts]."""
        self.loads[unit] = load
        if capacity is not None:
            self.dropped[unit] = (load - capacity).clamp(min=0).sum()

    @torch.no_grad()
    def take(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the sums over the step's microbatches, and forget them: the load [experts], the dropped rows, and this
        rank's part of each loss with its coefficient. Microbatches of the step may still be in flight.
        """
        loads = torch.stack(list(self.loads.values()) or [torch.zeros(self.num_experts, dtype=torch.int64)])
        losses: dict[str, Tensor] = {}
        for found in self.losses.values():
            for name, loss in found.items():
                losses[name] = losses[name] + loss if name in losses else loss
        dropped = sum(self.dropped.values(), loads.new_zeros(()))
        for kept in (self.loads, self.dropped, self.losses):
            kept.clear()
        self._counted = None
        return loads.sum(0), dropped, losses

    def forward(
        self, x: Tensor, context: LayerContext = OUTSIDE, again: InputRecompute | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return weights [t, k] in at least fp32 and experts [t, k] int64, t = s b, the best first. x: [s, b, h].

        With the context of a microbatch in training, the backward of the weights is also that of the router's losses.
        In a recompute the experts are those of its forward. again: how the backward makes x again, which is then not
        saved.
        """
        dtype = x.dtype if self.dtype is None else torch.promote_types(x.dtype, self.dtype)
        logits = wide_linear(x, self.weight, self.bias, dtype, again).to(at_least_fp32(dtype))
        trains = context.dropout_key is not None
        weights, chosen, *measured = run_branch(self.choice[trains], (logits,), context)
        if trains:
            kept = context.kept_routing
            is_replay = kept is not None and kept.is_reused
            if not is_replay:
                self._global.pop(self._number(context.unit[0]), None)
            losses = dict(self._losses(dict(zip(self.measures, measured, strict=True)), x.shape, context))
            for loss in losses.values():
                weights = _WithLoss.apply(weights, loss, self.loss_scale, context.loss_weight)
            if not is_replay:
                self.losses[context.unit] = {name: loss.detach() for name, loss in losses.items()}
        return weights, chosen

    def _operands(self, context: LayerContext, logits: Tensor) -> tuple[Tensor | None, ...]:
        """Return the operands of `Choice`."""
        kept = context.kept_routing
        given = kept.routing.chosen if kept is not None and kept.is_reused and kept.routing is not None else None
        padding = self.padding(context, logits.shape[0] * logits.shape[1])
        chooses = given is None and not self.model.moe_router_force_load_balancing
        if chooses and self.model.has_sinkhorn and context.dropout_key is not None:
            given = balanced_choice(logits, self.model.moe_router_topk, padding)
        return given, self.expert_bias, padding

    def _losses(
        self, measured: dict[str, Tensor], shape: torch.Size, context: LayerContext
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's parts of the losses with their coefficients, by name.

        measured: what `Choice` has measured. shape: of the tokens, [s, b, ...].
        """
        model, batch, real, of_slice = self.model, shape[1], context.real, context.slice
        length: int | Tensor = shape[0] * self.tp.size * self.cp.size  # of each sequence
        if of_slice is not None:
            length = of_slice.place.seq
        tokens: int | Tensor = length * batch
        if real is not None:
            lengths = real.lengths.to(at_least_fp32(self.weight.dtype))
            length, tokens = lengths.clamp(min=1)[:, None], lengths.sum().clamp(min=1)
        if model.moe_z_loss_coeff:
            yield "z_loss", measured["squares"] * (model.moe_z_loss_coeff / tokens)
        if not model.balance_losses:
            return
        sums, counts = measured["sums"], measured["counts"]
        for group in (self.tp, self.cp):
            all_reduce(counts, group)
        microbatch = context.unit[0]
        if of_slice is None:
            yield from self._balance_losses(sums, counts, length, tokens, microbatch)
            return
        found = self._slices.setdefault(microbatch, {})
        found[of_slice.place.number] = counts, sums.detach()

        def of_all(sums: Tensor) -> dict[str, Tensor]:
            counts = torch.stack([each for each, _ in found.values()]).sum(0)
            return dict(self._balance_losses(sums, counts, length, tokens, microbatch))

        is_last, values = of_slice.place.stop == of_slice.place.seq, dict[str, Tensor]()
        if is_last:
            values = of_all(torch.stack([each for _, each in found.values()]).sum(0))
        later = _SumInBackward.apply(sums, of_all)
        for name in model.balance_losses:
            yield name, later + values.get(name, 0.0)
            later = later.detach()

    def _balance_losses(
        self, sums: Tensor, counts: Tensor, length: int | Tensor, tokens: int | Tensor, microbatch: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the balance losses of a microbatch by name, or the parts of them that its slices have.

        sums: of the shares, of all tokens or of a slice's. counts: tokens of each expert. Both [b, experts]. length: of
        each sequence; tokens: of all.
        """
        for name, coefficient in self.model.balance_losses.items():
            if name == "seq_aux_loss":
                yield name, self._balance_loss(sums, counts, length, coefficient / sums.shape[0])
                continue
            whole, total = counts.sum(0, keepdim=True) if len(counts) > 1 else counts, tokens
            if name == "global_aux_loss":
                whole, total = self._global_counts(whole, microbatch)
                coefficient *= self.dp.size  # gradients are averaged over dp, but this is the sum of its ranks' parts
            yield name, self._balance_loss(sums, whole, total, coefficient)

    def _global_counts(self, counts: Tensor, microbatch: int) -> tuple[Tensor, Tensor]:
        """Return the mean of such counts over the microbatches of all dp ranks up to this one, by number, and the
        tokens of these ranks' microbatches of this number.

        Megatron's running mean, but in the order of the numbers. The backward of a slice and a replay find what the
        forward has returned: where steps follow each other without a drain, forwards of the next one are in between.
        """
        number = self._number(microbatch)
        if number not in self._global:
            own = counts.clone()
            all_reduce(own, self.dp)
            before, total = (0, torch.zeros_like(own)) if self._counted is None else self._counted
            self._counted = before + 1, total + own
            self._global[number] = (total + own) / (before + 1), own.sum().clamp(min=1) / self.model.moe_router_topk
        return self._global[number]

    def _number(self, microbatch: int) -> int:
        """Return the number of a microbatch among those of its dp rank. microbatch: in the global batch."""
        return microbatch // self.dp.size

    def _balance_loss(self, sums: Tensor, counts: Tensor, total: int | Tensor, coefficient: float) -> Tensor:
        """Return coefficient x experts / (k T^2) x sum over experts of their tokens x their sum of shares, summed over
        the rows of counts [b or 1, experts].

        sums: of the shares of each sequence, [b, experts]. T: the tokens that counts count, in `total`, [b, 1] for each
        row (Shazeer et al. 2017; Wang et al. 2024, arXiv:2408.15664).
        """
        factor = coefficient * self.num_experts / (self.model.moe_router_topk * total * total)
        return (factor * counts * sums).sum()


@dataclass(frozen=True)
class Choice:
    """(logits [s, b, experts], an earlier choice or None, the experts' bias or None, padding [s, b] or None) ->
    weights [t, k], experts [t, k] and what it measures.

    measures: `squares`, the sum of the squared logsumexp of the logits; of each sequence `counts`, the tokens that
    would choose an expert by its share alone, and `sums`, those of the shares, both [b, experts]. rank: of tp.
    """

    model: LayerConfig
    measures: tuple[str, ...]
    rank: int

    def __call__(
        self, logits: Tensor, chosen: Tensor | None, bias: Tensor | None, padding: Tensor | None
    ) -> tuple[Tensor, ...]:
        model, topk, num_experts = self.model, self.model.moe_router_topk, logits.shape[-1]
        is_softmax = model.moe_router_score_function == "softmax"
        whole = logits if is_softmax else logits.sigmoid()
        if is_softmax and model.moe_router_pre_softmax:
            whole = logits.softmax(-1)
        scores = whole.flatten(0, 1)
        if chosen is None and model.moe_router_force_load_balancing:
            places = torch.arange(scores.shape[0] * topk, device=scores.device) + self.rank
            chosen = (places % num_experts).view(-1, topk)
        elif chosen is None:
            seen = scores.detach()
            if bias is not None:  # it is added to shares of logits
                seen = (seen.softmax(-1) if is_softmax and not model.moe_router_pre_softmax else seen) + bias
            chosen = self._chosen(seen)
        weights = scores.gather(1, chosen)
        if is_softmax and not model.moe_router_pre_softmax:
            weights = weights.softmax(-1)
        elif not is_softmax and topk > 1 and model.moe_router_norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if model.moe_router_topk_scaling_factor is not None:
            weights = weights * model.moe_router_topk_scaling_factor
        return weights, chosen, *self._measured(logits, whole, padding)

    def _chosen(self, scores: Tensor) -> Tensor:
        """Return the best experts [t, k] by scores [t, experts], in the best groups where there are groups."""
        model, topk, groups = self.model, self.model.moe_router_topk, self.model.moe_router_num_groups
        if groups is not None:
            taken = model.moe_router_group_topk or groups
            grouped = scores.view(-1, groups, scores.shape[-1] // groups)
            best = grouped.sort(dim=-1, descending=True, stable=True).values
            best = best[..., : model.moe_router_group_score_topk].sum(-1)
            kept = best.sort(dim=-1, descending=True, stable=True).indices[:, :taken]
            is_kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
            scores = grouped.masked_fill(~is_kept[..., None], -torch.inf).flatten(1)
        # a copy, since a view would keep the indices of all experts
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, :topk].contiguous()

    def _measured(self, logits: Tensor, whole: Tensor, padding: Tensor | None) -> Iterator[Tensor]:
        """Yield what is measured, in the order of its names. whole: the scores, [s, b, experts]."""
        model = self.model
        if "squares" in self.measures:
            squares = logits.logsumexp(-1).square()
            yield (squares if padding is None else squares.masked_fill(padding, 0.0)).sum()
        if "counts" in self.measures:
            shares = whole
            is_softmax = model.moe_router_score_function == "softmax"
            if not (is_softmax and model.moe_router_pre_softmax):
                shares = logits.softmax(-1) if is_softmax else whole / whole.sum(-1, keepdim=True)
            best = shares.detach().sort(dim=-1, descending=True, stable=True).indices[..., : model.moe_router_topk]
            choices = torch.zeros_like(shares).scatter_(-1, best, 1.0)
            if padding is not None:
                choices, shares = (each.masked_fill(padding[..., None], 0.0) for each in (choices, shares))
            yield choices.sum(0)
            yield shares.sum(0)


SINKHORN_TOLERANCE, SINKHORN_EPSILON = 1e-4, 1e-8  # of Megatron: on the mean change of the experts' factors


@torch.no_grad()
def balanced_choice(logits: Tensor, topk: int, padding: Tensor | None) -> Tensor:
    """Return the experts [t, k] int64 of this rank's tokens, t = s b, so that each expert gets about as many.

    Sinkhorn's iteration, as in Megatron: factors of tokens and of experts with which the rows of exp(logits) sum to
    1 / t and its columns to 1 / experts (Lewis et al. 2021, arXiv:2103.16716; Clark et al. 2022, arXiv:2202.01169).
    The host waits for the end of each iteration. logits: [s, b, experts]; padding [s, b] takes no share.
    """
    shares, num_tokens = logits.flatten(0, 1).exp(), float(logits.shape[0] * logits.shape[1])
    if padding is not None:
        shares = shares.masked_fill(padding.reshape(-1, 1), 0.0)
        num_tokens = max(1.0, float((~padding).sum()))
    of_experts, is_done = torch.ones_like(shares[0]), False
    while not is_done:
        of_tokens = (1 / num_tokens) / ((of_experts * shares).sum(1) + SINKHORN_EPSILON)
        before, columns = of_experts, (of_tokens[:, None] * shares).sum(0)
        of_experts = (1 / shares.shape[1]) / (columns + SINKHORN_EPSILON)
        # a dry run has no values
        is_done = shares.is_meta or not bool((before - of_experts).abs().mean() > SINKHORN_TOLERANCE)
    balanced = of_experts * shares * of_tokens[:, None]
    return balanced.sort(dim=-1, descending=True, stable=True).indices[:, :topk].contiguous()


def wide_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, again: InputRecompute | None
) -> Tensor:
    """Return x W^T + b in a dtype that is at least as wide as that of x. again: of x, which is then not saved."""
    if x.dtype == dtype and again is None:
        return F.linear(x, weight, bias)
    return _WideLinear.apply(x, weight, bias, dtype, again)


class _WideLinear(Function):
    """x W^T + b; x is saved as it is, or recomputed, and cast again in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, again: InputRecompute | None
    ) -> Tensor:
        ctx.save_for_backward(weight, *((x,) if again is None else again.inputs))
        ctx.arguments = dtype, None if bias is None else bias.dtype, None if again is None else again.function
        if x.is_cuda and bias is None and dtype == torch.float32 and x.dtype == weight.dtype:
            # the products of 16-bit numbers are exact in fp32, in which they are summed
            return torch.mm(x.flatten(0, -2), weight.t(), out_dtype=dtype).view(*x.shape[:-1], -1)
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight, *inputs), (dtype, bias_dtype, function) = ctx.saved_tensors, ctx.arguments
        x = inputs[0] if function is None else function(*inputs)
        of_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2).to(dtype)
        of_bias = None if bias_dtype is None else grad.flatten(0, -2).sum(0).to(bias_dtype)
        return (grad @ weight.to(dtype)).to(x.dtype), of_weight.to(weight.dtype), of_bias, None, None


class _SumInBackward(Function):
    """0, with the gradient of the sum of losses(x), which are asked for in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, losses: Callable[[Tensor], dict[str, Tensor]]) -> Tensor:
        ctx.losses = losses
        ctx.save_for_backward(x)
        return x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_()
        with torch.enable_grad():
            total = torch.stack(list(ctx.losses(x).values())).sum()
        return torch.autograd.grad(total, x)[0] * grad, None


class _WithLoss(Function):
    """x, so that the backward of x also runs that of a loss, with gradient scale() x weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Callable[[], float], weight: Tensor | float) -> Tensor:
        ctx.loss = loss.dtype, loss.device
        ctx.factors = scale, weight
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (dtype, device), (scale, weight) = ctx.loss, ctx.factors
        return grad, torch.full((), scale(), dtype=dtype, device=device) * weight, None, None
