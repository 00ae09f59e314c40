"""Full recompute that keeps what the attention kernel returns: its output and log-sum-exp. The replay makes the rest of a layer again.

The replayed backward is the kernel's own, over q, k and v made again and the results kept. Only what a fused kernel returns can be kept;
attention that is written out would have to keep its probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from megapipe.errors import ConfigError

# forwards of attention as torch's dispatcher names them: torch's own, then flash-attn's
KERNELS = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "flash_attn::_flash_attn_forward",
    }
)
Results = tuple[Any, ...]  # of one kernel: tensors and numbers
Core = Callable[[Tensor, Tensor, Tensor], Tensor]


class KeptAttention:
    """Of one forward of some layers and its one replay. Outside `recording` and `playing` attention is computed as without it."""

    def __init__(self) -> None:
        self._results: list[Results] = []
        self._run: Callable[[Core, tuple[Tensor, Tensor, Tensor]], Tensor] = _compute

    def __call__(self, core: Core, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """core(q, k, v), in a replay without running its kernel."""
        return self._run(core, (q, k, v))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, results are kept: the forward."""
        self._run = self._record
        try:
            yield
        finally:
            self._run = _compute

    @contextmanager
    def playing(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Inside, kernels return what they returned in the forward: the replay. tensors: what `take` gave."""
        self._give(tensors)
        self._run = self._play
        try:
            yield
        finally:
            self._run = _compute
            self._results = []

    def take(self) -> tuple[Tensor, ...]:
        """The tensors among the results, for whoever keeps them until the backward; here only their places are left."""
        tensors = tuple(each for result in self._results for each in result if isinstance(each, Tensor))
        self._results = [
            tuple(Tensor if isinstance(each, Tensor) else each for each in result) for result in self._results
        ]
        return tensors

    def _give(self, tensors: Sequence[Tensor]) -> None:
        left = iter(tensors)
        self._results = [tuple(next(left) if each is Tensor else each for each in result) for result in self._results]

    def _record(self, core: Core, heads: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        before = len(self._results)
        # with gradients, though nothing is kept of the graph: without, some kernels return no log-sum-exp
        leaves = tuple(x.detach().requires_grad_() for x in heads)
        with (
            torch.enable_grad(),
            saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing),
            _Kernels(self._kept),
        ):
            output = core(*leaves).detach()
        if len(self._results) != before + 1:
            raise ConfigError(
                f"--recompute-keep-attention keeps what a fused attention kernel returns, but on {output.device.type} in {output.dtype} "
                "attention ran without one that torch can see (CUDA has none for fp64); use --bf16 or --fp16, --attention-impl sdpa, "
                "or leave it out"
            )
        return output

    def _kept(self, kernel: Callable[[], Any]) -> Any:
        result = kernel()
        self._results.append(_aliases(result))
        return result

    def _play(self, core: Core, heads: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        with _Kernels(self._played):
            return core(*heads)

    def _played(self, kernel: Callable[[], Any]) -> Any:
        return _aliases(self._results.pop(0))


class _Kernels(TorchDispatchMode):
    """Inside, every attention kernel goes through `handle`; it is entered around attention alone, for it costs each operation some time."""

    def __init__(self, handle: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._handle = handle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def run() -> Any:
            return func(*args, **(kwargs or {}))

        return self._handle(run) if func._schema.name in KERNELS else run()


def _aliases(results: Results) -> Results:
    """The same values: autograd ties the tensors that a kernel returns to the graph of the call, q, k and v included."""
    return tuple(each.detach() if isinstance(each, Tensor) else each for each in results)


def _compute(core: Core, heads: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return core(*heads)
