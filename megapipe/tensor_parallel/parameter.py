"""`DeclaredParameter`: a parameter on the meta device with its `ParamSpec`; `declarations`: the specs of a module.

A module declares each parameter where it makes it. Name and owner follow from its place in the model and are filled in
by `declarations`. Buffers replace the parameters by others, with values, when they are materialised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from megapipe.errors import ConfigError
from megapipe.sharding.spec import Owner, ParamSpec


class DeclaredParameter(nn.Parameter):
    """A parameter without values. spec: of the whole model's tensor."""

    spec: ParamSpec


def declared(spec: ParamSpec, rank: int = 0, ranks: int = 1) -> DeclaredParameter:
    """Make this rank's slice of a parameter. rank, ranks: of those that cut it. Raises ConfigError if they cannot."""
    made = DeclaredParameter(torch.empty(spec.local_shape(rank, ranks), device="meta"))
    made.spec = spec
    return made


def declarations(module: nn.Module, prefix: str = "", owner: Owner = 0) -> Iterator[ParamSpec]:
    """Yield the specs of a module's parameters, its own before those of the modules in it. Those that its class names
    in `declared_last` come last. prefix: of their names. Raises ConfigError for a parameter that is not declared.
    """
    last: tuple[str, ...] = getattr(module, "declared_last", ())
    held = dict(module.named_parameters(recurse=False)) | dict(module.named_children())
    for name in (*(name for name in held if name not in last), *(name for name in last if name in held)):
        each = held[name]
        if isinstance(each, nn.Module):
            yield from declarations(each, f"{prefix}{name}.", owner)
        elif isinstance(each, DeclaredParameter):
            yield replace(each.spec, name=prefix + name, owner=owner)
        else:
            raise ConfigError(f"{prefix}{name} is not declared: make it by `declared`, in a token mixer by `parameter`")
