"""torch.compile for pointwise functions: one kernel for what would be a chain of them, each a read and a write of the activations.

Only what stands inside our hand-written Functions is compiled, never a graph with a linear in it: main gradients and the weight queue are
side effects that a compiled graph would lose. What is kept for the backward stays what it is without compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def compiled(function: AnyFunction) -> AnyFunction:
    """`function` as one graph (fullgraph: a break would be an error), for tensors of any size; it returns one tensor."""
    # torch keeps 8 graphs of a function, and with fullgraph a ninth is an error: the casts of one layer's linears have more shapes
    kernel = torch.compile(function, fullgraph=True, dynamic=True)

    @wraps(function)
    def call(x: Tensor, *others: Any) -> Tensor:
        return _on_paper(function, x, *others) if x.is_meta else kernel(x, *others)  # type: ignore[no-any-return]

    return call  # type: ignore[return-value]


def _on_paper(function: Callable[..., Any], *arguments: Any) -> Tensor:
    """What one kernel makes: its result, and nothing on the way that a dry run would count."""
    with _disable_current_modes():
        result = function(*arguments)
    return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device)
