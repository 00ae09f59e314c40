"""The MLP of a layer, and a mixture of experts: every expert is a plain product over the tokens that chose it.

weight1 [experts x gates x f, h] and weight2 [experts x f, h] hold the experts one after the other; weight2 is not
transposed: an expert is act(x weight1^T + bias1) weight2 + bias2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.extras.reference.config import ReferenceConfig


class MLP(nn.Module):
    """linear_fc2(activation(linear_fc1(x))). Gated: linear_fc1 has the rows [gate; up], then act(gate) * up."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.config = config
        hidden, width, bias = config.hidden_size, config.ffn_hidden_size, config.add_bias_linear
        self.linear_fc1 = nn.Linear(hidden, 2 * width if config.gated else width, bias=bias)
        self.linear_fc2 = nn.Linear(width, hidden, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.linear_fc1(hidden)
        return self.linear_fc2(activated(self.config, inner))


def activated(config: ReferenceConfig, inner: Tensor) -> Tensor:
    """Return the activation of linear_fc1's output, [..., F] of [..., F or 2 F]."""
    if config.activation_function is not None:
        return config.activation_function(inner)
    function = ACTIVATIONS[config.activation]
    if not config.gated:
        return function(inner)
    gate, up = inner.chunk(2, dim=-1)
    limit = config.activation_func_clamp_value
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return function(gate) * (up + config.glu_linear_offset)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "swiglu": F.silu,
    "geglu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_geglu": lambda x: x * torch.sigmoid(1.702 * x),
}


class Experts(nn.Module):
    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.config, self.width = config, config.moe_ffn_hidden_size or config.ffn_hidden_size
        self.gates = 2 if config.gated else 1
        self.weight1 = nn.Parameter(torch.empty(config.num_experts * self.gates * self.width, config.hidden_size))
        self.weight2 = nn.Parameter(torch.empty(config.num_experts * self.width, config.hidden_size))
        if config.add_bias_linear:
            self.bias1 = nn.Parameter(torch.empty(config.num_experts * self.gates * self.width))
            self.bias2 = nn.Parameter(torch.empty(config.num_experts * config.hidden_size))

    def forward(self, expert: int, tokens: Tensor, weights: Tensor) -> Tensor:
        """Return one expert's result times the weights of its tokens. tokens: [n, h]. weights: [n, 1]."""
        rows = self.gates * self.width
        inner = tokens @ self.weight1[expert * rows : (expert + 1) * rows].t()
        if self.config.add_bias_linear:
            inner = inner + self.bias1.view(-1, rows)[expert]
        # before the product, as in Megatron: a gradient of the weights then depends on those of linear_fc2
        scaled = (activated(self.config, inner) * weights).to(tokens.dtype)
        output = scaled @ self.weight2[expert * self.width : (expert + 1) * self.width]
        if not self.config.add_bias_linear:
            return output
        return (output + self.bias2.view(-1, output.shape[1])[expert] * weights).to(tokens.dtype)


class SharedExperts(MLP):
    def __init__(self, config: ReferenceConfig, width: int) -> None:
        super().__init__(replace(config, ffn_hidden_size=width))
        if config.moe_shared_expert_gate:
            self.gate_weight = nn.Parameter(torch.empty(1, config.hidden_size))

    def forward(self, hidden: Tensor) -> Tensor:
        output = super().forward(hidden)
        return output * torch.sigmoid(hidden @ self.gate_weight.t()) if hasattr(self, "gate_weight") else output


@dataclass
class Sets:
    """The position in a step: dp ranks run `size` microbatches at once, and the next forward is of `microbatch`.

    collects: forwards only count for the losses over all of them.
    """

    size: int = 1
    microbatch: int = 0
    collects: bool = False


class MoE(nn.Module):
    """Router, experts and shared experts.

    loss: the router's losses in the last forward. chosen: the experts of each token there [b, s, k]. expert_bias:
    [experts] fp32, None without --moe-router-enable-expert-bias. load: tokens for each expert since the last `balance`.
    seen: counts of each microbatch of the step for global_aux_loss. padding: [b, s] bool, set before a forward, the
    positions without a token, for which experts add 0; None: every position has one.
    """

    loss: Tensor | float = 0.0
    chosen: Tensor | None = None
    expert_bias: Tensor | None = None
    load: Tensor | int = 0
    padding: Tensor | None = None

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.config, self.sets = config, Sets()
        self.seen: list[Tensor] = []
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=config.add_bias_linear)
        self.experts = Experts(config)
        if config.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = SharedExperts(config, config.moe_shared_expert_intermediate_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] -> the same."""
        config, is_softmax = self.config, self.config.moe_router_score_function == "softmax"
        logits = self.router(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
        real = ~self.padding if self.padding is not None else torch.ones_like(logits[..., 0], dtype=torch.bool)
        self.loss = self._losses(logits, scores, real)
        if is_softmax and not config.moe_router_pre_softmax:
            scores = logits
        seen, bias = scores.detach(), self.choice_bias()
        if bias is not None:
            seen = (logits.detach().softmax(-1) if is_softmax else seen) + bias
        chosen = self._best(seen)
        if "sinkhorn" in config.moe_router_load_balancing_type and self.training:
            chosen = self._balanced(logits.detach(), real)
        self.chosen = chosen
        if not self.sets.collects:
            self.load = self.load + F.one_hot(chosen[real], config.num_experts or 0).sum((0, 1))
        weights = scores.gather(-1, chosen)
        if is_softmax and not config.moe_router_pre_softmax:
            weights = weights.softmax(-1)
        elif not is_softmax and config.moe_router_topk > 1 and config.moe_router_norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * (config.moe_router_topk_scaling_factor or 1.0)
        if config.moe_expert_capacity_factor is not None:
            weights = weights * self._kept(weights.detach(), chosen, real)
        output = torch.zeros_like(hidden)
        for expert in range(config.num_experts or 0):
            share = (weights * (chosen == expert)).sum(-1, keepdim=True)  # [b, s, 1]
            seen = (chosen == expert).any(-1) & real
            # factors on inputs and results; a dropped row's weight is 0, and so is its result, even with biases
            before, after = (share[seen], share[seen] != 0) if config.moe_apply_probs_on_input else (1.0, share[seen])
            result = self.experts(expert, (hidden[seen] * before).to(hidden.dtype), after)
            output = output.index_put(torch.where(seen), result, accumulate=True)
        return output + self.shared_experts(hidden) if hasattr(self, "shared_experts") else output

    def choice_bias(self) -> Tensor | None:
        """Return expert_bias, which starts as zeros on the device of the weights."""
        if self.config.moe_router_enable_expert_bias and self.expert_bias is None:
            self.expert_bias = torch.zeros(self.config.num_experts or 0, device=self.router.weight.device)
        return self.expert_bias

    def _kept(self, weights: Tensor, chosen: Tensor, real: Tensor) -> Tensor:
        """Return 1 for the rows that their experts' capacity leaves in a slice of the sequence, else 0, [b, s, k].

        real: [b, s], False for padding, which takes no place and does not add to a capacity.
        """
        config, kept = self.config, torch.zeros_like(weights)
        factor = config.moe_expert_capacity_factor or 0.0
        for positions in config.moe_capacity_slices or (tuple(range(weights.shape[1])),):
            held = torch.tensor(positions, device=weights.device)
            # in the order of positions, then sequences
            parts = [each[:, held].transpose(0, 1) for each in (weights, chosen, real[..., None].expand(chosen.shape))]
            scores, experts, is_real = (part.flatten() for part in parts)
            flags = torch.zeros_like(scores)
            capacity = math.ceil(int(is_real.sum()) / (config.num_experts or 1) * factor)
            for expert in range(config.num_experts or 0):
                (rows,) = torch.where((experts == expert) & is_real)
                if config.moe_token_drop_policy == "probs":
                    rows = rows[ordered(scores[rows])[1]]
                flags[rows[:capacity]] = 1.0
            kept[:, held] = flags.view(parts[0].shape).transpose(0, 1)
        return kept

    def balance(self) -> None:
        """End a step: raise the bias of experts below the mean load, lower that of those above it."""
        if self.expert_bias is not None:
            assert isinstance(self.load, Tensor)
            sign = (self.load.double().mean() - self.load.double()).sign().to(torch.float32)
            self.expert_bias = self.expert_bias + self.config.moe_router_bias_update_rate * sign
        self.load, self.seen = 0, []

    def _best(self, scores: Tensor) -> Tensor:
        """Return the k best experts of each token [b, s, k]; of equal ones those of smaller numbers."""
        config, groups = self.config, self.config.moe_router_num_groups
        if groups is not None:
            per_group = scores.unflatten(-1, (groups, -1))
            taken = config.moe_router_group_topk or groups
            count = config.moe_router_group_score_topk or config.moe_router_topk // taken
            sums = ordered(per_group)[0][..., :count].sum(-1)
            best = ordered(sums)[1][..., :taken]
            lost = torch.ones_like(sums, dtype=torch.bool).scatter(-1, best, False)
            scores = per_group.masked_fill(lost[..., None], -torch.inf).flatten(-2)
        return ordered(scores)[1][..., : config.moe_router_topk]

    def _balanced(self, logits: Tensor, real: Tensor) -> Tensor:
        """Return the k best experts of each token [b, s, k] by shares that sum to 1 / tokens over experts, and to
        1 / experts over the tokens of a slice of the sequence.
        """
        config, num_experts = self.config, logits.shape[-1]
        shares = logits.exp() * real[..., None]
        for positions in config.moe_capacity_slices or (tuple(range(logits.shape[1])),):
            held = torch.tensor(positions, device=logits.device)
            costs, count = shares[:, held], max(1, int(real[:, held].sum()))
            factors, change = torch.ones_like(costs[0, 0]), 1.0
            while change > 1e-4:
                of_tokens = 1 / count / ((factors * costs).sum(-1, keepdim=True) + 1e-8)
                sums = (of_tokens * costs).sum((0, 1))
                change, factors = float((factors - (new := 1 / num_experts / (sums + 1e-8))).abs().mean()), new
            shares[:, held] = factors * costs * of_tokens
        return ordered(shares)[1][..., : config.moe_router_topk]

    def _losses(self, logits: Tensor, scores: Tensor, real: Tensor) -> Tensor | float:
        """Return coefficient x experts / (k T^2) x sum of n_i p_i, and the z loss.

        n_i: tokens whose k best shares include expert i; p_i: the sum of its shares; T tokens: those of the microbatch,
        or of a sequence, with the mean over sequences, or of the microbatches of all dp ranks so far. Of the last kind
        it is this microbatch's part of the loss of the `sets.size` microbatches that dp ranks run at once, times their
        number, as the parts are averaged; nothing while counts are collected.
        """
        config, topk, sets = self.config, self.config.moe_router_topk, self.sets
        loss: Tensor | float = 0.0
        if config.moe_z_loss_coeff:
            loss = config.moe_z_loss_coeff * logits[real].logsumexp(-1).square().mean()
        shares = scores / scores.sum(-1, keepdim=True)
        for name, coefficient in zip(config.moe_router_load_balancing_type, config.moe_aux_loss_coeff, strict=True):
            if name == "global_aux_loss" and sets.collects:
                self.seen.append(self._counts(shares[real]))
            elif name == "global_aux_loss":
                last = sets.microbatch // sets.size + 1  # sets of microbatches up to this one
                counts = torch.stack(self.seen[: last * sets.size]).sum(0) / last
                total = float(torch.stack(self.seen[(last - 1) * sets.size : last * sets.size]).sum()) / topk
                loss = loss + coefficient * (balance_loss(shares[real], counts, total) * sets.size / topk)
            elif name not in ("sinkhorn", "none"):
                by_sequence = [one[held] for one, held in zip(shares, real, strict=True)]
                parts = by_sequence if name == "seq_aux_loss" else [shares[real]]
                for one in parts:  # [T, experts]
                    loss = loss + coefficient * balance_loss(one, self._counts(one), one.shape[0]) / (len(parts) * topk)
        return loss

    def _counts(self, shares: Tensor) -> Tensor:
        """Return how many tokens have each expert among their k best shares. shares: [T, experts]."""
        best = ordered(shares.detach())[1][:, : self.config.moe_router_topk]
        return F.one_hot(best, shares.shape[1]).sum((0, 1)).to(shares.dtype)


def balance_loss(shares: Tensor, counts: Tensor, total: float) -> Tensor:
    """Return experts / T^2 x sum of n_i p_i. shares: [tokens, experts], counts: n_i, total: T."""
    return (counts * shares.sum(0)).sum() * shares.shape[1] / total**2


def ordered(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores and their places, the largest first, of equal ones the first."""
    found = scores.sort(dim=-1, descending=True, stable=True)
    return found.values, found.indices
