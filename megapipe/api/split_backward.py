"""The backward of any module in two halves: gradients of its inputs first (op I), of its weights later (op W).

Qi et al. 2023 (arXiv:2401.10241) split the backward of each linear by hand. Here autograd's graph of one microbatch is
split as it is. Call inner the nodes from which an input of the stage can be reached. A weight hangs below a
node outside, which some inner nodes lead to:

    output -> [inner ... inner -> inner] -> input
                 |
                 +-> transpose -> weight         (the product with the weight is inner, its transpose is not)

I runs the inner nodes and keeps the gradients that arrive at an inner node with such a branch; W starts again from them
and runs the branch alone. The formulas of torch compute only the gradients that a run asks for, so no product is
computed twice. Two kinds of weights are left to I, where autograd handles them in one run: those that several inner
nodes lead to (a weight used twice, as by a shared submodule), and those below a Python autograd Function (torch.compile
makes these), which computes all its gradients whenever it runs.

What the forward saved stays in memory until W. Activation checkpoints are recomputed for I and for each branch of W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from megapipe.pipeline.stage import Gradients, StageRunner, Tensors
from megapipe.tensor_parallel.gradients import QueuedGradient, WeightQueue


@dataclass
class Branch(QueuedGradient):
    """The weights below one inner node, or below the outputs, and the gradients that arrive there."""

    leaves: list[Tensor]
    roots: list[GradientEdge]
    gradients: list[Tensor | None]

    def accumulate(self) -> None:
        """Add the gradients of the weights to their .grad."""
        if self.roots:
            torch.autograd.backward(self.roots, self.gradients, inputs=self.leaves)


class SplitStageRunner(StageRunner):
    """A StageRunner whose `backward_input` and `backward_weight` work for any module."""

    def __init__(self, module: object) -> None:
        super().__init__(module, WeightQueue())  # type: ignore[arg-type]

    def backward_input(self, microbatch: int, gradients: Gradients) -> Tensors:
        """Compute the gradients of the inputs (op I), and what `backward_weight` starts from."""
        queue, kept = self._queue(), self._kept.pop(microbatch)
        pairs = [(edge, gradient) for edge, gradient in zip(kept.edges, gradients, strict=True) if edge is not None]
        queue.defer(microbatch)
        try:
            for branch in input_gradients([edge for edge, _ in pairs], [grad for _, grad in pairs], kept.inputs):
                queue.submit(branch)
        finally:
            queue.immediate()
        return tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in kept.inputs)


def input_gradients(roots: Sequence[GradientEdge], gradients: Sequence[Tensor | None], inputs: Tensors) -> list[Branch]:
    """Add the gradients of `inputs`, leaves, to their .grad, and return the branches whose weights wait.

    roots, gradients: the outputs, by their edges, and their gradients; None for a scalar means 1. Weights that cannot
    wait get theirs now.
    """
    inner = _inner_nodes([edge.node for edge in roots], {get_gradient_edge(t).node for t in inputs})
    outside = [(edge, gradient) for edge, gradient in zip(roots, gradients, strict=True) if edge.node not in inner]
    owners = _Owners()
    owners.claim("outputs", [edge.node for edge, _ in outside])
    for node in inner:
        below = [child for child in _children(node) if child not in inner]
        owners.claim(None if isinstance(node, BackwardCFunction) else node, below)
    leaves = owners.leaves()
    now = [*inputs, *leaves.pop(None, ())]
    branches: dict[Node | str | None, Branch] = {}
    hooks = []
    for owner, waiting in leaves.items():
        if isinstance(owner, str):
            branches[owner] = Branch(waiting, [edge for edge, _ in outside], [gradient for _, gradient in outside])
        else:
            assert owner is not None
            branches[owner] = Branch(waiting, [], [])
            hooks.append(owner.register_prehook(_keep(owner, branches[owner])))
    try:
        if now and roots:
            torch.autograd.backward(list(roots), list(gradients), inputs=now, retain_graph=bool(branches))
    finally:
        for hook in hooks:
            hook.remove()
    return list(branches.values())


class _Owners:
    """Records which inner node leads to each node outside: a node, 'outputs', or None if its weights cannot wait."""

    def __init__(self) -> None:
        self._of: dict[Node, Node | str | None] = {}

    def claim(self, owner: Node | str | None, nodes: Iterable[Node]) -> None:
        """Give `owner` everything below these nodes; what another one has claimed becomes None."""
        stack = list(nodes)
        while stack:
            node = stack.pop()
            now = owner if self._of.get(node, owner) is owner else None
            if node not in self._of or self._of[node] is not now:
                self._of[node] = now
                stack += _children(node)

    def leaves(self) -> dict[Node | str | None, list[Tensor]]:
        """Return the leaves of each owner."""
        found: dict[Node | str | None, list[Tensor]] = {}
        for node, owner in self._of.items():
            if node.name() == "torch::autograd::AccumulateGrad":
                found.setdefault(owner, []).append(node.variable)  # type: ignore[attr-defined]
        return found


def _inner_nodes(roots: Sequence[Node], inputs: set[Node]) -> set[Node]:
    """Return the nodes from which a node of `inputs` can be reached, these included."""
    users: dict[Node, list[Node]] = {}
    seen, stack = set(roots), list(roots)
    while stack:
        node = stack.pop()
        for child in _children(node):
            users.setdefault(child, []).append(node)
            if child not in seen:
                seen.add(child)
                stack.append(child)
    inner: set[Node] = set()
    stack = [node for node in inputs if node in seen]
    while stack:
        node = stack.pop()
        if node not in inner:
            inner.add(node)
            stack += users.get(node, ())
    return inner


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _keep(node: Node, branch: Branch) -> Callable[[Sequence[Tensor | None]], None]:
    """Return a hook that keeps the gradients which arrive at an inner node."""

    def hook(gradients: Sequence[Tensor | None]) -> None:
        arrived = [(number, gradient) for number, gradient in enumerate(gradients) if gradient is not None]
        branch.roots = [GradientEdge(node, number) for number, _ in arrived]
        branch.gradients = [gradient for _, gradient in arrived]

    return hook
