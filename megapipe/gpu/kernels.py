"""`Kernels`: the implementations that the configuration chose; torch.compile for pointwise functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from megapipe.config.config import Config
from megapipe.config.layers import layer_configs, why_masked
from megapipe.config.model import ATTENTIONS, PrecisionConfig
from megapipe.config.problems import chosen
from megapipe.config.training import OPTIMIZERS
from megapipe.dtypes import ELEMENT_BYTES, FP8_BLOCKS
from megapipe.environment import missing_for_triton
from megapipe.gpu.libraries import Apex, FlashAttention, TransformerEngine
from megapipe.gpu.meta_results import MetaResults
from megapipe.registry import BUILT_IN

FUSED_GROUPS = (9, 10)  # compute capabilities for which torch has a grouped GEMM in one kernel, in bf16
GROUPED_BYTES = 16  # torch's grouped GEMM takes rows of a multiple of these
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
OLDEST_CAPABILITY = (8, 0)  # of torch's variable-length flash kernel
MOST_KINDS = 64  # of arguments for which one function is compiled apart


@dataclass(frozen=True)
class Kernels:
    """The library behind each part of the model; None for torch's own kernels."""

    layers: TransformerEngine | None = None  # linears and norms
    norms: Apex | None = None  # norms alone
    attention: FlashAttention | TransformerEngine | None = None
    optimizer: Apex | TransformerEngine | None = None
    compiles_update: bool = False  # the optimizer's pass is compiled
    fp8: PrecisionConfig | None = None  # settings of fp8; None without it
    compiles: bool = False  # pointwise functions are compiled
    compiles_loss: bool = False  # the passes over 16-bit logits are compiled
    splits_backward: bool = False  # the schedule has I and W
    deterministic: bool = False  # --deterministic-mode
    groups_experts: bool = False  # rows of all experts are multiplied in one kernel
    sm_carveout: int = 0  # SMs that GEMMs beside collectives over tp leave free

    def pointwise(self, function: AnyFunction) -> AnyFunction:
        """Return the function, compiled if that was chosen."""
        return compiled(function) if self.compiles else function

    def fused(self, function: AnyFunction, is_exact: bool = False) -> AnyFunction:
        """Return a cast to fp8 or a merge of partial results, compiled on CUDA always: as a chain of kernels they would
        cost more than fp8, or context parallelism, saves.
        """
        kernel = compiled(function, is_exact)
        if self.compiles:
            return kernel
        return lambda x, *others: (kernel if x.is_cuda else function)(x, *others)  # type: ignore[return-value]

    def cast(self, function: AnyFunction) -> AnyFunction:
        """Return a cast to fp8 as `fused` does: it scales by maxima and rounds, so all of its graphs agree."""
        return self.fused(function, is_exact=True)


TORCH = Kernels()


def choose_kernels(config: Config, splits_backward: bool = False) -> Kernels:
    """Import the chosen libraries and no others. Raises ConfigError for a library that is not installed."""
    chosen, precision = config.kernels, config.precision
    layers: TransformerEngine | None = None
    norms: Apex | None = None
    attention: FlashAttention | TransformerEngine | None = None
    optimizer: Apex | TransformerEngine | None = None
    if chosen.transformer_impl == "transformer_engine":
        layers = TransformerEngine("--transformer-impl transformer_engine", "--transformer-impl local", precision)
    if chosen.attention_impl == "flash":
        attention = FlashAttention()
    elif chosen.attention_impl == "te":
        attention = layers or TransformerEngine("--attention-impl te", "--attention-impl sdpa", precision)
    if chosen.optimizer_impl == "apex":
        optimizer = norms = Apex()
    elif chosen.optimizer_impl == "te":
        optimizer = layers or TransformerEngine("--optimizer-impl te", "--optimizer-impl torch", precision)
    return Kernels(
        layers,
        norms,
        attention,
        optimizer,
        compiles_update=chosen.optimizer_impl == "compiled",
        fp8=precision if precision.fp8_format is not None else None,
        compiles=chosen.compile_pointwise,
        compiles_loss=bool(chosen.compile_loss),
        splits_backward=splits_backward,
        deterministic=config.training.deterministic_mode,
        groups_experts=config.model.num_experts is not None and why_not_grouped(config) is None,
        sm_carveout=config.gpu.gemm_sm_carveout,
    )


def why_not_grouped(config: Config) -> str | None:
    """Return why torch's grouped GEMM does not multiply the rows of these experts; None if it does.

    Unless --moe-grouped-gemm says it, where it is one kernel: elsewhere torch copies the numbers of rows to the host.
    """
    dtype, parallel, asked = config.precision.dtype, config.parallel, config.kernels.moe_grouped_gemm
    if asked is False or (asked is None and (config.training.device == "cpu" or not torch.cuda.is_available())):
        return "not asked for"
    if asked is None:
        major, minor = torch.cuda.get_device_capability()
        if dtype != "bf16" or major not in FUSED_GROUPS or torch.version.hip is not None:
            here = f"{dtype} on {major}.{minor}"
            return f"torch has one kernel for bf16 on compute capability 9 and 10 alone, not for {here}"
    if not hasattr(torch.nn.functional, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped GEMM"
    if dtype == "fp64":
        return "torch has no grouped GEMM in fp64"
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    layers = [layer for layer in layer_configs(config.model) if layer.num_experts is not None]
    sizes = {size for layer in layers for size in (layer.hidden_size, layer.expert_ffn_size // etp)}
    for size in sorted(sizes):
        if size * ELEMENT_BYTES[dtype] % GROUPED_BYTES:
            return f"rows of {size} channels in {dtype} are no multiple of {GROUPED_BYTES} bytes"
    return None


def describe_kernels(kernels: Kernels, config: Config, device: torch.device) -> tuple[str, ...]:
    """Return one line per part of the model: the active implementation, and why."""
    asked = config.kernels
    if kernels.layers is not None:
        norms = f"Transformer Engine {kernels.layers.version}"
        model = config.model
        own = chosen(
            ("experts' products", model.num_experts is not None),
            ("down-projections of latent attention", model.multi_latent_attention),
            ("projections of multi-token prediction", model.mtp_num_layers is not None),
        )
        linears = f"{norms}, megapipe's own for {' and '.join(own)}" if own else norms
    else:
        linears = "megapipe's on torch's GEMMs"
        norms = "torch's" if kernels.norms is None else "apex's fused norms"
    precision = config.precision
    fp8 = "no fp8"
    if precision.fp8_format is not None:
        fp8 = f"fp8 {precision.fp8_format}, {precision.fp8_recipe} scaling"
        if kernels.layers is None and device.type == "cuda":
            in_blocks = precision.fp8_recipe in FP8_BLOCKS
            fp8 += " (torch.nn.functional.scaled_mm)" if in_blocks else " (torch._scaled_mm)"
        elif kernels.layers is None:
            fp8 += " (emulated on this CPU, for tests: operands rounded to fp8, products in fp32)"
    pointwise = "compiled" if kernels.compiles else "not compiled"
    if kernels.fp8 is not None and kernels.layers is None and device.type == "cuda" and not kernels.compiles:
        pointwise += ", casts to fp8 compiled"
    lacking = missing_compiler("cuda") if device.type == "cuda" else None
    why = f": {lacking}" if lacking else ""
    attention = _describe_attention(kernels, config, device)
    if isinstance(kernels.optimizer, Apex):
        optimizer = "FusedAdam of apex, and its accumulating weight gradient"
    elif kernels.optimizer is not None:
        optimizer = f"FusedAdam of Transformer Engine {kernels.optimizer.version}"
    elif OPTIMIZERS.origin(config.optimizer.optimizer) != BUILT_IN:
        optimizer = f"{config.optimizer.optimizer} of {OPTIMIZERS.origin(config.optimizer.optimizer)}"
    elif kernels.compiles_update:
        optimizer = "AdamW, compiled, which writes the weights in the same pass"
    elif config.optimizer.optimizer == "muon":
        steps, products = config.optimizer.muon_num_ns_steps, config.optimizer.muon_fp32_matmul_prec
        optimizer = (
            f"Muon for the matrices of hidden layers, {steps} steps of Newton-Schulz (fp32 on GPUs: {products}), "
            "torch's fused AdamW for the rest"
        )
    else:
        optimizer = f"torch's fused {'AdamW' if config.optimizer.optimizer == 'adam' else 'SGD'}{why}"
    experts: tuple[str, ...] = ()
    if config.model.num_experts is not None:
        experts = (f"experts    {_describe_experts(kernels, config, device)} (--moe-grouped-gemm)",)
    return (
        f"linears    {linears} (--transformer-impl {asked.transformer_impl}); {fp8}",
        f"norms      {norms}; pointwise functions {pointwise} (--compile-pointwise)",
        f"loss       {'compiled' if kernels.compiles_loss else f'not compiled{why}'} (--compile-loss)",
        f"blocks     {_describe_blocks(config, device.type)} (--compile-blocks {asked.compile_blocks})",
        f"attention  {attention} (--attention-impl {asked.attention_impl})",
        *experts,
        f"optimizer  {optimizer} (--optimizer-impl {asked.optimizer_impl})",
    )


def _describe_experts(kernels: Kernels, config: Config, device: torch.device) -> str:
    how = f"one GEMM after the other: {why_not_grouped(config)}"
    how = "torch's grouped GEMM, weight gradients one by one in fp32" if kernels.groups_experts else how
    has_own_line = kernels.fp8 is not None and kernels.fp8.fp8_recipe == "mxfp8" and device.type == "cuda"
    return how if kernels.fp8 is None or has_own_line else f"in fp8 one GEMM after the other, else {how}"


def _describe_blocks(config: Config, device_type: str) -> str:
    wanted = config.kernels.compile_blocks
    if wanted == "off" or (wanted == "auto" and device_type != "cuda"):
        return "not compiled"
    return "compiled before the first step, if equal" + (" and faster" if wanted == "auto" else "")


def _describe_attention(kernels: Kernels, config: Config, device: torch.device) -> str:
    if isinstance(kernels.attention, FlashAttention):
        return f"flash-attn {kernels.attention.version}" + ", by documents" * config.data.reset_attention_mask
    if kernels.attention is not None:
        return f"DotProductAttention of Transformer Engine {kernels.attention.version}"
    model = config.model
    explicit = {
        "--attention-dropout": model.attention_dropout > 0,
        "--attn-logit-softcapping": any(layer.attn_logit_softcapping is not None for layer in layer_configs(model)),
        "--attention-softmax-in-fp32": model.attention_softmax_in_fp32,
        f"--softmax-type {model.softmax_type}": model.softmax_type != "vanilla",
        "--attention-kind": any(
            ATTENTIONS[layer.attention_kind].function is not None for layer in layer_configs(model)
        ),
    }
    reasons = [flag for flag, is_on in explicit.items() if is_on]
    if reasons:
        return f"explicit, not fused, for {' and '.join(reasons)}"
    if config.data.reset_attention_mask:
        reason = why_not_packed(config, device)
        if reason is None:
            return "torch's variable-length flash kernel, by documents"
        return f"scaled_dot_product_attention under a mask of documents: {reason}"
    is_half = device.type == "cuda" and config.precision.dtype in ("bf16", "fp16")
    return "scaled_dot_product_attention" + (", a fused kernel" if is_half else "")


def why_not_packed(config: Config, device: torch.device) -> str | None:
    """Return why documents get a mask on this device; None if kernels take their borders, or there are none."""
    reason = why_masked(config, device.type != "cpu")
    if reason is not None or device.type != "cuda" or config.kernels.attention_impl == "flash":
        return reason
    if torch.version.hip is not None:
        return "torch's variable-length kernel has not been tried with ROCm"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < OLDEST_CAPABILITY:
        return f"torch's variable-length kernel needs compute capability 8.0, and this GPU has {major}.{minor}"
    return None


def compiled(function: AnyFunction, is_exact: bool = False) -> AnyFunction:
    """Compile a function of tensors, pointwise or with reductions, into as few kernels as torch finds.

    It returns a tensor, several or none; some may be arguments that it has overwritten.

    Only the inside of our hand-written Functions is compiled, never a graph with a linear in it, which would lose side
    effects such as main gradients and the weight queue. What is saved for the backward does not change.

    Each kind of arguments (dtypes, options, and all sizes but the first) is compiled apart, since kernels for known
    sizes read and write 8 to 16 bytes at a time, and those for any size 1 to 4. The number of rows, the first size, is
    dynamic from the first call on: results of two graphs may differ by rounding, and which of them runs would depend on
    what was called before. Beyond `MOST_KINDS` kinds all sizes are dynamic.
    tests/gpu/test_generated_code.py has the kernels.

    is_exact: all graphs have the same bits, as nothing is summed and no product added; the first number of rows then
    has a faster graph of its own.
    """
    kernels: dict[Any, Callable[..., Any]] = {}

    @wraps(function)
    def call(x: Tensor, *others: Any) -> Tensor:
        if not x.is_meta:
            kind = tuple(_kind(each) for each in (x, *others))
            if kind not in kernels:
                is_known = len(kernels) < MOST_KINDS
                own = _shared_code(function, kind if is_known else None)
                kernels[kind] = torch.compile(own, fullgraph=True, dynamic=None if is_known else True)
                if is_known and not is_exact:
                    _mark_rows(x, *others)
            return kernels[kind](x, *others)  # type: ignore[no-any-return]
        # what counts sees the result of the one kernel, not the function's temporaries
        with _disable_current_modes(), MetaResults():
            results = function(x, *others)

        def made(result: Tensor) -> Tensor:
            if any(result is given for given in (x, *others)):  # overwritten
                return result
            return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=x.device)

        return tree_map_only(Tensor, made, results)

    return call  # type: ignore[return-value]


def _mark_rows(x: Tensor, *others: Any) -> None:
    """Tell torch.compile that the number of rows varies."""
    for each in (x, *others):
        if isinstance(each, Tensor) and each.dim() and each.shape[0] == x.shape[0]:
            torch._dynamo.maybe_mark_dynamic(each, 0)  # type: ignore[attr-defined]


def _kind(value: Any) -> Any:
    """Return the part of an argument that `compiled` specializes on."""
    if not isinstance(value, Tensor):
        return value
    return value.dtype, value.shape[1:], value.is_contiguous()


def own_code(function: Callable[..., Any], kind: Any) -> Callable[..., Any]:
    """Return this function with a code object for one kind of arguments.

    torch.compile keeps 8 graphs for a code object, with fullgraph a ninth is an error, and it finds the sizes that vary
    by the code's place and name.
    """

    def call(*args: Any) -> Any:
        return function(*args)

    name = getattr(function, "__name__", "function")
    code = call.__code__.replace(co_name=f"{name} of {kind}")
    own = FunctionType(code, call.__globals__, name, None, call.__closure__)
    own.__module__ = function.__module__
    return own


_shared_code = cache(own_code)  # linears of one shape share graphs


def missing_compiler(device_type: str) -> str | None:
    """Return what torch.compile lacks on this machine: Triton for CUDA, a C++ compiler for CPUs; None if nothing."""
    if device_type == "cuda":
        return missing_for_triton()
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "torch.compile needs a C++ compiler, and found none (g++, or the one named by CXX)"
    return None
