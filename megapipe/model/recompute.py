"""What is made again in the backward instead of being kept (Chen et al. 2016, arXiv:1604.06174; Korthikanti et al. 2022, arXiv:2205.05198).

- full: whole layers; only their input is kept, and what attention kernels return with --recompute-keep-attention (`kept_attention`).
- selective: `core_attn` (attention without its projections), `mlp` (linear_fc1 and the activation), `layernorm` and `activation` (an
  elementwise function whose output is a linear's input: the linear makes it again from what is kept anyway).

Randomness needs no care: dropout masks are functions of their keys, so a replay draws the same ones. In a split backward the
replay happens in I.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megapipe.config.recompute import RecomputeConfig
from megapipe.errors import ConfigError
from megapipe.model.kept_attention import KeptAttention
from megapipe.tensor_parallel.weight_gradient import Remake


def selected_modules(config: RecomputeConfig) -> frozenset[str]:
    """The modules that every layer recomputes; empty unless the granularity is selective."""
    return frozenset(config.recompute_modules) if config.recompute_granularity == "selective" else frozenset()


def layer_groups(config: RecomputeConfig, layers: Sequence[int]) -> list[tuple[tuple[int, ...], bool]]:
    """The layers of a stage in groups that run as one: (layers, whether the group is checkpointed).

    Megatron's meaning of N = recompute_num_layers: uniform keeps the input of every N layers; block recomputes each of the first N.
    Raises ConfigError if full recompute lacks its method or N.
    """
    if config.recompute_granularity != "full":
        return [((layer,), False) for layer in layers]
    size = config.recompute_num_layers
    if config.recompute_method is None or size is None:
        raise ConfigError(
            "--recompute-granularity full needs --recompute-method uniform or block, and --recompute-num-layers N"
        )
    if config.recompute_method == "block":
        return [((layer,), index < size) for index, layer in enumerate(layers)]
    return [(tuple(layers[start : start + size]), True) for start in range(0, len(layers), size)]


class Replay:
    """Runs `fn` without keeping its inside, and once more in the backward; one object for one run.

    `fn` is a function of its tensor arguments and of parameters (whose gradients the replayed backward accumulates as usual).
    A linear that consumes the output takes `remake(...)`, so that the output is not kept either; the linear and the backward share one
    replay, in whichever order they come (a linear that waits for W asks after it). attention: what `fn` runs its attention through, if the
    replay shall not compute that again; for a Replay without consumer.
    """

    def __init__(self, fn: Callable[..., Tensor], attention: KeptAttention | None = None) -> None:
        self.fn = fn
        self.attention = attention
        self._has_consumer = False
        self._graph: tuple[tuple[Tensor, ...], Tensor] | None = None  # leaves and output of the replay
        self._output: Tensor | None = None  # for a consumer that comes after the backward

    def __call__(self, *inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.fn(*inputs)
        if not any(x.requires_grad for x in inputs):  # the parameters inside still want gradients
            inputs = (inputs[0].detach().requires_grad_(), *inputs[1:])
        return _Replayed.apply(self, *inputs)

    def remake(self, *inputs: Tensor) -> Remake:
        """How the one linear that consumes the output makes it again; without the inputs once the backward has been through here."""
        self._has_consumer = True
        return Remake(self._again, inputs, is_made_in_backward=True)

    def into(self, linear: nn.Module, *inputs: Tensor) -> Tensor:
        """linear(fn(*inputs)); a linear that can make its input again does not keep it."""
        output = self(*inputs)
        return linear(output, self.remake(*inputs)) if getattr(linear, "takes_remake", True) else linear(output)

    def _again(self, *inputs: Tensor) -> Tensor:
        self._has_consumer = False
        output, self._output = self._output, None
        return output if output is not None else self._replay(inputs)[1].detach()

    def first(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The forward: its output, and what to keep besides the inputs."""
        if self.attention is None:
            return self.fn(*inputs), ()
        with self.attention.recording():
            output = self.fn(*inputs)
        return output, self.attention.take()

    def _replay(self, inputs: tuple[Tensor, ...], kept: tuple[Tensor, ...] = ()) -> tuple[tuple[Tensor, ...], Tensor]:
        if self._graph is None:
            leaves = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in inputs)
            with torch.enable_grad(), nullcontext() if self.attention is None else self.attention.playing(kept):
                self._graph = leaves, self.fn(*leaves)
        return self._graph

    def backward(self, inputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs; those of parameters accumulate. kept: as `first` returned it."""
        leaves, output = self._replay(inputs, kept)
        self._graph = None
        if self._has_consumer:
            self._output = output.detach()
        torch.autograd.backward(output, grad)
        return tuple(leaf.grad for leaf in leaves)


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replay: Replay, *inputs: Tensor) -> Tensor:
        ctx.replay, ctx.num_inputs = replay, len(inputs)
        output, kept = replay.first(inputs)
        ctx.save_for_backward(*inputs, *kept)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors
        return None, *ctx.replay.backward(saved[: ctx.num_inputs], saved[ctx.num_inputs :], grad)


def remaking(remake: Remake | None) -> tuple[Remake, ...]:
    """The further argument of a linear that makes its input again; none where it keeps it."""
    return () if remake is None else (remake,)


class Layers(Protocol):
    """Some layers of a stage."""

    def __call__(self, hidden: Tensor, *, attention: KeptAttention | None) -> Tensor: ...


def checkpoint(fn: Layers, x: Tensor, *, keeps_attention: bool) -> Tensor:
    """fn(x, attention), keeping only x, and what attention kernels return where asked for: full recompute."""
    attention = KeptAttention() if keeps_attention else None
    return Replay(partial(fn, attention=attention), attention)(x)
