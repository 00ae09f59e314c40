"""`Mixer`: the base class of token mixers of extensions, which `megapipe.extend.register_mixer` registers.

A mixer stands in attention's place: linear_in, a function of the whole sequence, linear_out. Its linears come from the
layer factory, so that tensor and sequence parallelism, split backwards, 8 bits and recompute work as in other layers.
What it declares where it makes it (shapes, cuts, initial values) is all that plan, optimizer and checkpoints know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Literal

from torch import Tensor, nn

from megapipe.comm.groups import Group
from megapipe.config.layers import LayerConfig
from megapipe.gpu.kernels import TORCH
from megapipe.layers.mixer import Declared
from megapipe.layers.table import WHOLE
from megapipe.model.layer_factory import LayerFactory
from megapipe.model.registered import replayed
from megapipe.model.segments import NOTHING, Element, Elements, Operator, again_if, linear_element
from megapipe.sharding.spec import Fused, Init, ParamSpec, Replicated
from megapipe.tensor_parallel.gradients import WeightQueue
from megapipe.tensor_parallel.parameter import declarations, declared


class Mixer(nn.Module):
    """A token mixer: elements from [s, b, h] (a slice of s with sequence parallelism) to the same shape.

    A subclass makes linear_in by `column`, then linear_out by `row`, and its own parameters by `parameter`, all as
    attributes, and defines mix(x, *own) -> the input of linear_out, [s, b, channels of this tp rank].

    x: linear_in's output, [s, b, rows of this rank], with the whole sequence. own: the module's own parameters, as this
    rank has them, in the order in which it made them. Only these inputs are kept for the backward, which runs the
    function again; it computes in the model's dtype.

    hidden_size: h. options: those of the registration, as --attention-options has them. flops: of `mix` in a forward,
    per token of the whole model, for plans; set by the subclass.
    """

    mix: Callable[..., Tensor]
    flops = 0.0
    linear_in: nn.Module
    linear_out: nn.Module

    def __init__(self, layer: int, factory: LayerFactory) -> None:
        super().__init__()
        config = factory.config
        self.layer, self._factory, self.recompute = layer, factory, factory.recompute
        self.kind, self.options, self.hidden_size = config.mixer, config.mixer_options, config.hidden_size

    def column(self, outputs: int, parts: int = 1) -> nn.Module:
        """Make linear_in: h -> outputs, cut over tp. parts: equal stacked tensors that are each cut: [a_r; b_r]."""
        factory, bias = self._factory, self._factory.config.add_bias_linear
        return factory.linear("column", self.layer, self.hidden_size, outputs, bias, Fused(0, parts))

    def row(self, inputs: int) -> nn.Module:
        """Make linear_out: inputs, cut over tp, -> h, summed over tp."""
        bias = self._factory.config.add_bias_linear
        return self._factory.linear("row", self.layer, inputs, self.hidden_size, bias)

    def parameter(
        self,
        *shape: int,
        cut: int | None = 0,
        init: Literal["normal", "zeros", "ones"] = "zeros",
        std: float | None = None,
        weight_decay: bool = False,
    ) -> nn.Parameter:
        """Make a parameter of the mixer's own. shape: of the whole model. cut: the dimension that tp divides; None:
        every rank has all of it, and gradients are summed over tp, since each rank computes other channels. std: of
        normal values, by default that of --init-method-std.
        """
        slicing = Replicated() if cut is None else Fused(cut)
        deviation = self._factory.config.init_method_std if std is None else std
        values = Init(init, deviation if init == "normal" else 0.0)
        spec = ParamSpec("", shape, 0, slicing, values, weight_decay, partial_gradient=cut is None)
        return declared(spec, self._factory.tp.rank, self._factory.tp.size)

    def elements(self, norm: Elements = NOTHING) -> Iterator[Element]:
        """Yield the elements of the branch. norm: those before linear_in, which may be recomputed."""

        def mix(context: Any, x: Tensor) -> Tensor:
            (seq, batch, _), own = x.shape, self.parameters(recurse=False)
            channels = self.linear_out.get_parameter("weight").shape[1]
            return replayed(self.mix, f"attention kind {self.kind!r}", (seq, batch, channels), x, *own)

        yield from again_if("layernorm" in self.recompute, norm)
        yield linear_element("linear_in", self.linear_in)
        yield from again_if("core_attn" in self.recompute, Elements([Operator("mix", mix)]))
        yield linear_element("linear_out", self.linear_out)

    @classmethod
    def declare(cls, config: LayerConfig) -> Declared:
        """Return what the mixer of a layer declares, of the whole model."""
        return _declared(cls, config)  # type: ignore[arg-type]


@cache
def _declared(kind: type[Mixer], config: LayerConfig) -> Declared:
    made = kind(0, LayerFactory(config, Group.alone("tp"), False, frozenset(), WeightQueue(), TORCH, WHOLE))
    return Declared(tuple(declarations(made)), made.flops)
