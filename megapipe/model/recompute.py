"""Activation recompute (Chen et al. 2016, arXiv:1604.06174; Korthikanti et al. 2022, arXiv:2205.05198).

- full: whole layers; only their input and the routing of experts is saved, plus the results of attention with
  --recompute-keep-attention.
- selective: `core_attn` (attention without its projections), `mla_up_proj` (from latents to heads; without core_attn
  the results of its kernel are kept), `mlp` (linear_fc1 and the activation), `layernorm` and
  `activation` (elementwise functions whose output is a linear's input: the linear recomputes it from tensors that are
  saved anyway). With experts `moe` (router, experts and shared experts), `moe_act` (the experts' activation, as
  `activation`) and `shared_experts` (as `mlp`).

Randomness needs no care, since dropout masks are functions of their keys. In a split backward the recompute happens
in I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from megapipe.config.parallel import RecomputeConfig
from megapipe.errors import ConfigError
from megapipe.tensor_parallel.gradients import InputRecompute


def recomputed_modules(config: RecomputeConfig) -> frozenset[str]:
    """Return the modules that selective recompute runs again."""
    return frozenset(config.recompute_modules if config.recompute_granularity == "selective" else ())


def layer_groups(config: RecomputeConfig, layers: Sequence[int]) -> list[tuple[tuple[int, ...], bool]]:
    """Split the layers of a stage into groups that run as one: (layers, True if the group is checkpointed).

    N = recompute_num_layers as in Megatron-LM: uniform saves the input of every N layers; block recomputes each of the
    first N. Raises ConfigError if full recompute lacks its method or N.
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


class KeptResults(Protocol):
    """Results of a segment's forward that its recompute uses again instead of computing them."""

    def record(self, fn: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run fn(*inputs); return its output and the tensors to save."""

    def reuse(self, fn: Callable[..., Tensor], inputs: tuple[Tensor, ...], tensors: tuple[Tensor, ...]) -> Tensor:
        """Run the recompute fn(*inputs) with the kept results. tensors: as `record` returned."""


class KeptTogether:
    """The results of several `KeptResults` of one segment."""

    def __init__(self, kinds: Sequence[KeptResults]) -> None:
        self._kinds = kinds
        self._counts: list[int] = []  # tensors of each

    def record(self, fn: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        tensors: list[Tensor] = []

        def recorded(kept: KeptResults, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
            output, own = kept.record(run, inputs)
            tensors.extend(own)
            self._counts.append(len(own))
            return output

        for kept in self._kinds:
            fn = partial(recorded, kept, fn)
        return fn(*inputs), tuple(tensors)

    def reuse(self, fn: Callable[..., Tensor], inputs: tuple[Tensor, ...], tensors: tuple[Tensor, ...]) -> Tensor:
        def reused(kept: KeptResults, run: Callable[..., Tensor], own: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
            return kept.reuse(run, inputs, own)

        left = iter(tensors)
        for kept, count in zip(self._kinds, self._counts, strict=True):
            fn = partial(reused, kept, fn, tuple(islice(left, count)))
        return fn(*inputs)


class RecomputedSegment:
    """Runs `fn` without saving its intermediate tensors, and again in the backward. Use one object per forward.

    `fn` is a function of its tensor arguments and of parameters, whose gradients the recomputed backward accumulates
    as usual. A linear that consumes the output takes `input_recompute(...)`, so that the output is not saved either.
    The linear and the backward share one recompute, in either order (a weight gradient that waits for W asks for it
    afterwards).
    kept: results that the recompute uses again; for a segment without a consumer.
    """

    def __init__(self, fn: Callable[..., Tensor], kept: KeptResults | None = None) -> None:
        self.fn = fn
        self.kept = kept
        self.num_inputs = 0
        self._has_consumer = False
        self._graph: tuple[tuple[Tensor, ...], Tensor] | None = None  # leaves and output of the recompute
        self._ahead: tuple[tuple[Tensor, ...], GradientEdge] | None = None  # of one that has run before the backward
        self._output: Tensor | None = None  # for a consumer that asks after the backward

    def __call__(self, *inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.fn(*inputs)
        self.num_inputs = len(inputs)
        if not any(x.requires_grad for x in inputs):  # the parameters inside still need gradients
            inputs = (inputs[0].detach().requires_grad_(), *inputs[1:])
        return _Recomputed.apply(self, *inputs)

    def input_recompute(self, *inputs: Tensor) -> InputRecompute:
        """Return how the one linear that consumes the output recomputes it; after the backward it needs no inputs."""
        self._has_consumer = True
        return InputRecompute(self._recomputed_output, inputs, in_backward=True)

    def _recomputed_output(self, *inputs: Tensor) -> Tensor:
        self._has_consumer = False
        output, self._output = self._output, None
        return output if output is not None else self.recompute(inputs)[1].detach()

    def recompute(self, saved: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
        """Run `fn` again, once; return the leaves and the output of its graph. saved: the inputs, then kept tensors."""
        if self._graph is None:
            inputs, kept = saved[: self.num_inputs], self.kept
            leaves = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in inputs)
            with torch.enable_grad():
                output = self.fn(*leaves) if kept is None else kept.reuse(self.fn, leaves, saved[self.num_inputs :])
            self._graph = leaves, output
        return self._graph

    def ahead(self, output: Tensor) -> Callable[[], None]:
        """Return what runs `fn` again before the backward, which then need not. output: that of the forward; no
        consumer recomputes it.
        """
        node: Any = output.grad_fn

        def replay() -> None:
            leaves, again = self.recompute(node.saved_tensors)
            # not the output itself, of which the graph keeps what its backward reads
            self._graph, self._ahead = None, (leaves, get_gradient_edge(again))

        return replay

    def backward(self, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs; those of parameters accumulate. saved: as for `recompute`."""
        root: Tensor | GradientEdge
        if self._ahead is None:
            leaves, root = self.recompute(saved)
            if self._has_consumer:
                self._output = root.detach()
        else:
            leaves, root = self._ahead
        self._graph = self._ahead = None
        torch.autograd.backward(root, grad)
        return tuple(leaf.grad for leaf in leaves)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, segment: RecomputedSegment, *inputs: Tensor) -> Tensor:
        ctx.segment, kept = segment, segment.kept
        output, results = (segment.fn(*inputs), ()) if kept is None else kept.record(segment.fn, inputs)
        ctx.save_for_backward(*inputs, *results)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *ctx.segment.backward(ctx.saved_tensors, grad)


# forward kernels of attention by the names of torch's dispatcher: torch's own, then flash-attn's
ATTENTION_KERNELS = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
    }
)
KernelResults = tuple[Any, ...]  # what one kernel returned: tensors and numbers
AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


class KeptAttention:
    """Keeps what attention kernels return in a forward, output and log-sum-exp, so that its one recompute skips them.

    The backward in the recompute is the kernel's own, over recomputed q, k and v and the kept results. Only the
    results of a fused kernel can be kept; explicit attention would have to keep its probabilities. Outside
    `record` and `reuse`, attention is computed as usual.
    """

    def __init__(self) -> None:
        self._results: list[KernelResults] = []
        self._run: Callable[..., Tensor] | None = None
        self._kept: Iterator[KernelResults] | None = None  # while reusing

    def __call__(self, core: AttentionFunction, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return core(q, k, v); while reusing, without running its kernel."""
        return core(q, k, v) if self._run is None else self._run(core, q, k, v)

    def results(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return the results of attention in blocks, output and log-sum-exp; while reusing, the kept ones."""
        if self._kept is not None:
            output, lse = next(self._kept)
            return output, lse
        output, lse = compute()
        if self._run is not None:
            self._results.append((output, lse))
        return output, lse

    def record(self, fn: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run fn(*inputs); return its output and, for the caller to save, the tensors of its attention kernels."""
        self._run = self._compute_and_keep
        try:
            output = fn(*inputs)
        finally:
            self._run = None
        tensors = tuple(each for result in self._results for each in result if isinstance(each, Tensor))
        self._results = [  # the class Tensor in the place of each tensor, which the caller saves
            tuple(Tensor if isinstance(each, Tensor) else each for each in result) for result in self._results
        ]
        return output, tensors

    def reuse(self, fn: Callable[..., Tensor], inputs: tuple[Tensor, ...], tensors: tuple[Tensor, ...]) -> Tensor:
        """Run the recompute fn(*inputs) with the kept results in place of kernels. tensors: as `record` returned."""
        left = iter(tensors)
        results = iter([tuple(next(left) if each is Tensor else each for each in kept) for kept in self._results])
        self._kept = results

        def from_kept(core: AttentionFunction, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with _InterceptKernels(lambda kernel: _detached(next(results))):
                return core(q, k, v)

        self._run = from_kept
        try:
            return fn(*inputs)
        finally:
            self._run, self._kept, self._results = None, None, []

    def _compute_and_keep(self, core: AttentionFunction, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before = len(self._results)

        def keep(kernel: Callable[[], Any]) -> Any:
            result = kernel()
            self._results.append(_detached(result))
            return result

        # with gradients, though the graph is dropped: without them some kernels return no log-sum-exp
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        drop_saved = saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)
        with torch.enable_grad(), drop_saved, _InterceptKernels(keep):
            output = core(*leaves).detach()
        if len(self._results) != before + 1:
            raise ConfigError(
                "--recompute-keep-attention keeps the results of a fused attention kernel, but on "
                f"{output.device.type} in {output.dtype} attention ran without one that torch can see (CUDA has none "
                "for fp64); use --bf16 or --fp16, --attention-impl sdpa, or leave it out (if "
                "--recompute-memory-budget chose it: use --recompute-granularity instead)"
            )
        return output


class _InterceptKernels(TorchDispatchMode):
    """Passes every attention kernel to `handle`. Entered around attention alone, since it slows down each operation."""

    def __init__(self, handle: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._handle = handle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = partial(func, *args, **(kwargs or {}))
        return self._handle(run) if func._schema.name in ATTENTION_KERNELS else run()


def _detached(results: KernelResults) -> KernelResults:
    """Detach the tensors, since autograd ties a kernel's results to the graph of its call, including q, k and v."""
    return tuple(each.detach() if isinstance(each, Tensor) else each for each in results)
