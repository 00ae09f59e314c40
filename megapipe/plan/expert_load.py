"""The load of experts: the rows of the fullest expert-parallel rank over the mean."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from megapipe.config.layers import expert_layers
from megapipe.config.model import ModelConfig
from megapipe.formatting import ranges_text
from megapipe.layers.model import LayerSpec, ModelSpec


@dataclass(frozen=True)
class ExpertLoad:
    """The load for which a plan gives memory and time.

    of_rank: rows of the fullest rank of every ep group over the mean, in all layers. of_layers: in its place the rows
    of each expert over the mean, by the number of the layer, as a run logs them (--moe-per-layer-logging).
    """

    of_rank: float = 1.0
    of_layers: tuple[tuple[int, tuple[float, ...]], ...] = ()

    def problem(self, model: ModelConfig, ep: int) -> str:
        """Return why no run of the model can have this load, '' if one can. ep: the most that is considered."""
        layers, experts = expert_layers(model), model.num_experts or 0
        if not layers:
            return "the model has no experts; give --num-experts, or leave it out"
        if self.of_layers:
            logged = tuple(number for number, _ in self.of_layers)
            if logged != layers:
                return f"it has layers {ranges_text(logged)}, the model has experts in layers {ranges_text(layers)}"
            other = next((len(loads) for _, loads in self.of_layers if len(loads) != experts), None)
            return "" if other is None else f"it has {other} experts a layer, --num-experts is {experts}"
        most = most_imbalance(model, ep)
        if 1.0 <= self.of_rank <= most:
            return ""
        return (
            f"the fullest rank has 1 to {most:.4g} times the mean of rows, with {experts} experts of which a token "
            f"chooses {model.moe_router_topk}, on ep {ep}"
        )

    def of(self, model: ModelConfig, ep: int) -> tuple[tuple[int, float], ...]:
        """Return each layer with experts, and the rows of its fullest rank over the mean."""
        if not self.of_layers:
            imbalance = min(self.of_rank, most_imbalance(model, ep))
            return tuple((number, imbalance) for number in expert_layers(model))
        held = (model.num_experts or 0) // ep
        return tuple(
            (number, max(sum(loads[first : first + held]) / held for first in range(0, len(loads), held)))
            for number, loads in self.of_layers
        )


BALANCED = ExpertLoad()


def most_imbalance(model: ModelConfig, ep: int) -> float:
    """Return the most rows that one of ep ranks can get, over the mean: all that a token can send to its experts."""
    experts, topk = model.num_experts or 1, model.moe_router_topk
    most = min(ep, experts / topk)
    capacity = model.moe_expert_capacity_factor
    return most if capacity is None else max(1.0, min(most, capacity))


@cache
def with_load(model: ModelSpec, imbalance: tuple[tuple[int, float], ...]) -> ModelSpec:
    """Return the model whose experts see so many rows over the mean, by the number of the layer."""
    loads = dict(imbalance)

    @cache
    def loaded(layer: LayerSpec, of_layer: float) -> LayerSpec:  # alike layers are one object, as in `model_spec`
        return replace(layer, imbalance=of_layer) if layer.num_experts else layer

    layers = tuple(loaded(layer, loads.get(number, 1.0)) for number, layer in enumerate(model.layers))
    predictions = tuple(
        loaded(layer, loads.get(number, 1.0)) for number, layer in enumerate(model.predictions, len(layers))
    )
    return replace(model, layers=layers, predictions=predictions)
