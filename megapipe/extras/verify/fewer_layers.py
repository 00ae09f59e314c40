"""A plan's configuration with fewer layers in its stages: grid, stages, schedule and every switch are kept.

`shrink` uses it for small models, `megapipe.extras.streams` for the smallest step that has all kinds of actions.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from megapipe.config.config import Config, ResolvedModelConfig, convert
from megapipe.config.fields import value_text
from megapipe.config.layers import LayerConfig, layer_configs
from megapipe.config.model import ModelConfig
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.schedule_choice import BY_HAND
from megapipe.schedule.partition import from_counts

AnyConfig = TypeVar("AnyConfig", bound=Config)


def with_layers(
    config: AnyConfig,
    plan: RunPlan,
    counts: Sequence[int],
    sizes: Callable[[LayerConfig], dict[str, Any]] = lambda layer: {},
) -> AnyConfig:
    """Return a configuration with so many layers of every stage of its plan, which `kept_layers` chooses.

    The layers of a stage are then given by hand, and so is the schedule. config: another batch than that of the plan
    is kept. sizes: values of a layer that replace its own, where layers differ in them.
    """
    model, numbers = plan.config.model, kept_layers(plan, counts)
    layers = [layer_configs(model)[number] for number in numbers]
    has_experts = [int(layer.num_experts is not None) for layer in layers]
    kinds = config.parallel.cp_comm_type
    if len(kinds) > len(layers):  # one for each layer
        kinds = tuple(kind for kind, _ in zip(itertools.cycle(dict.fromkeys(kinds)), layers, strict=False))
    return dataclasses.replace(
        config,
        model=convert(
            ModelConfig,
            model,
            num_layers=len(layers),
            layer_pattern=_layer_pattern(model, layers, sizes),
            window_attn_skip_freq=None,
            no_rope_freq=None,
            moe_layer_freq=None if model.num_experts is None or all(has_experts) else str(has_experts),
        ),
        parallel=dataclasses.replace(
            config.parallel,
            cp_comm_type=kinds,
            **BY_HAND | {"pipeline_model_parallel_layout": from_counts(counts, len(layers)).layout()},
            pipeline_schedule=plan.schedule_name,
            num_virtual_stages_per_pipeline_rank=plan.config.parallel.num_virtual_stages_per_pipeline_rank,
        ),
        optimizer=dataclasses.replace(config.optimizer, freeze=_frozen_of_layers(plan, numbers)),
    )


def kept_layers(plan: RunPlan, counts: Sequence[int]) -> list[int]:
    """Return the numbers of the layers that the stages keep, so many of each: first kinds new to the model, then new to
    the stage.
    """
    kinds, kept = kinds_of_layers(plan), list[int]()
    for stage, count in zip(plan.whole_stages().partition.stages, counts, strict=True):
        first, seen = stage.first_layer, [kinds[number] for number in kept]
        held = kinds[first : stage.last_layer_exclusive]
        known = [kind in held[:place] for place, kind in enumerate(held)]
        order = sorted(range(len(held)), key=lambda place: (known[place], held[place] in seen))
        kept += [first + place for place in sorted(order[:count])]
    return kept


def kinds_of_layers(plan: RunPlan) -> list[tuple[LayerConfig, frozenset[str]]]:
    """Return the layers of a plan with the names, within the layer, of parameters that are not trained."""
    return [(layer, _frozen_in(plan, number)) for number, layer in enumerate(layer_configs(plan.config.model))]


def _frozen_in(plan: RunPlan, layer: int) -> frozenset[str]:
    """Return the names, within a layer, of its parameters that are not trained."""
    frozen = (spec.name for spec in plan.specs if spec.owner == layer and not spec.trainable)
    return frozenset(name.removeprefix(f"decoder.layers.{layer}.") for name in frozen)


def _frozen_of_layers(plan: RunPlan, numbers: Sequence[int]) -> tuple[str, ...]:
    """Return the names of the parameters that are not trained in a model of the layers of these numbers."""
    ends = [spec.name for spec in plan.specs if not spec.trainable and isinstance(spec.owner, str)]
    held = ((place, name) for place, layer in enumerate(numbers) for name in sorted(_frozen_in(plan, layer)))
    return (*ends, *(f"decoder.layers.{place}.{name}" for place, name in held))


def _layer_pattern(
    model: ResolvedModelConfig, layers: Sequence[LayerConfig], sizes: Callable[[LayerConfig], dict[str, Any]]
) -> tuple[str, ...]:
    """Return --layer-pattern for these layers with these sizes; nothing if all are like the model."""
    words = []
    for layer, run in itertools.groupby(layers):
        names = layer.used_options  # those without effect in this layer are refused
        values = {name: getattr(layer, name) for name in names if getattr(layer, name) != getattr(model, name)}
        values |= {name: size for name, size in sizes(layer).items() if name in values}
        settings = dict.fromkeys(layer.missing_parts, "none")
        settings |= {name: value if isinstance(value, str) else value_text(value) for name, value in values.items()}
        words.append(" ".join([str(len(list(run))), *(f"{name}={text}" for name, text in settings.items())]))
    return tuple(words) if any(" " in word for word in words) else ()
