"""torch.compile for pointwise functions: one kernel for what would be a chain of them, each a read and a write of the activations.

Only what stands inside our hand-written Functions is compiled, never a graph with a linear in it: main gradients and the weight queue are
side effects that a compiled graph would lose. What is kept for the backward stays what it is without compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def compiled(function: AnyFunction) -> AnyFunction:
    """`function` as one graph (fullgraph: a break would be an error), for tensors of any size."""
    # torch keeps 8 graphs of a function, and with fullgraph a ninth is an error: the casts of one layer's linears have more shapes
    return torch.compile(function, fullgraph=True, dynamic=True)  # type: ignore[return-value]
