"""`RegisteredRule`: the update rule of an extension, applied to this rank's shards chunk by chunk.

A rule is elementwise: element i of weights and states after an update depends on element i of weights, gradient and
states alone. So it may be applied to any part of a parameter: a rank holds parts with the distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megapipe.config.rules.optimizer import rule_options
from megapipe.config.training import OPTIMIZERS, OptimizerConfig, UpdateKind, UpdateStep
from megapipe.errors import ConfigError
from megapipe.optimizer.schedule import Rates
from megapipe.optimizer.shards import Shard
from megapipe.optimizer.update_rule import Rule
from megapipe.sharding.state_dtypes import MASTER

TRIED = 64  # elements of the trial


class RegisteredRule(Rule):
    """The rule of --optimizer over shards. Raises ConfigError if a trial shows that the rule cannot be used so."""

    def __init__(self, config: OptimizerConfig, shards: Sequence[Shard]) -> None:
        self._kind, self._options = OPTIMIZERS[config.optimizer], rule_options(config)
        self._chunks = [(shard, chunk) for shard in shards for chunk in shard.chunks()]
        try_rule(config.optimizer, self._kind, self._options)

    def step(self, factor: float, rates: Rates) -> None:
        """Update the master weights with gradient x factor; the gradients hold the product afterwards."""
        self.num_steps += 1
        assert self._kind.update is not None
        for shard, chunk in self._chunks:
            part, spec = slice(chunk.start, chunk.stop), chunk.spec
            gradient = shard.updated_from[part].mul_(factor)
            states = {name: shard.states[name].detach()[part] for name in self._kind.states}
            step = UpdateStep(self.num_steps, *rates.of(spec.weight_decay, spec.decoupled_lr), self._options)
            self._kind.update(shard.states[MASTER].detach()[part], gradient, states, step)


def try_rule(name: str, kind: UpdateKind, options: Mapping[str, float]) -> None:
    """Run a rule on a small tensor as a whole and in two parts. Raises ConfigError if it fails.

    It must write weights and states in place, leave the gradient as it is, and be elementwise.
    """
    generator = torch.Generator().manual_seed(0)
    start, gradient = torch.randn(2, TRIED, dtype=torch.float64, generator=generator)
    whole, of_whole = _tried(name, kind, options, start, gradient)
    parts = [_tried(name, kind, options, start[part], gradient[part]) for part in (slice(7), slice(7, None))]
    joined = torch.cat([weights for weights, _ in parts])
    of_parts = {state: torch.cat([states[state] for _, states in parts]) for state in kind.states}
    if torch.equal(whole, start):
        raise ConfigError(f"update rule {name!r} left the weights as they were; write them in place: weights.sub_(...)")
    both = [("weights", whole, joined), *((state, of_whole[state], of_parts[state]) for state in kind.states)]
    for what, one, other in both:
        if not torch.allclose(one, other, rtol=1e-9, atol=1e-12):
            raise ConfigError(
                f"update rule {name!r} is not elementwise: {what} differ when it updates a tensor in two parts; ranks "
                "hold parts of parameters, so that a rule must not use their norms, means or shapes"
            )


def _tried(
    name: str, kind: UpdateKind, options: Mapping[str, float], start: Tensor, gradient: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return weights and states after two updates from zero states."""
    assert kind.update is not None
    weights, states = start.clone(), {state: torch.zeros_like(start) for state in kind.states}
    for number in (1, 2):
        given, untouched = dict(states), gradient.clone()
        try:
            kind.update(weights, untouched, given, UpdateStep(number, 1e-2, 0.1, options))
        except Exception as error:
            raise ConfigError(f"update rule {name!r} failed on a trial: {type(error).__name__}: {error}") from None
        for state in kind.states:
            if given.get(state) is not states[state] or states[state].shape != start.shape:
                found = list(given[state].shape) if isinstance(given.get(state), Tensor) else "none"
                raise ConfigError(
                    f"update rule {name!r}: state {state!r} of shape {list(start.shape)} was replaced by one of shape "
                    f"{found}; write states in place, such as states[{state!r}].lerp_(gradient, 0.1)"
                )
        if set(given) != set(kind.states):
            extra = ", ".join(sorted(set(given) - set(kind.states)))
            raise ConfigError(
                f"update rule {name!r} adds the state {extra}, which it does not declare; add it to states"
            )
        if not torch.equal(untouched, gradient):
            raise ConfigError(f"update rule {name!r} changed the gradient, which is logged afterwards; use a copy")
    return weights, states
