"""GPU setup of a run: settings of CUDA and NCCL, profiler ranges, the allocator's history, out-of-memory messages, and
the kernels that torch really picks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from megapipe.comm.bootstrap import World, choose_backend
from megapipe.comm.nccl import NcclSettings, channels_of_messages
from megapipe.config.config import Config, ResolvedModelConfig
from megapipe.config.files import LoggingConfig
from megapipe.config.gpu import GpuConfig
from megapipe.config.layers import has_narrow_values, is_explicit, layer_configs
from megapipe.config.tuned import read_tuned
from megapipe.dtypes import DTYPES, FP8_BLOCKS
from megapipe.environment import (
    Environment,
    replace_for_libraries,
    set_for_libraries,
    set_meanwhile,
    value_for_libraries,
)
from megapipe.errors import ConfigError, TrainingError
from megapipe.formatting import bytes_text
from megapipe.gpu.kernels import Kernels, missing_compiler, why_not_packed
from megapipe.layers.model import model_spec
from megapipe.model.deep_ep import why_not_deep_ep
from megapipe.plan.hardware import hardware_named, hardware_of
from megapipe.plan.layer_time import layer_seconds, ring_link
from megapipe.plan.memory import rank_memory
from megapipe.plan.nccl_memory import CHANNELS_IN_NODE
from megapipe.plan.run_plan import RunPlan
from megapipe.tensor_parallel.fp8 import fp8_unsupported_reason
from megapipe.tensor_parallel.fp8_matrix import why_no_grouped_product
from megapipe.tensor_parallel.gradients import gemm_adds_to_fp32

FLIGHT_RECORDER_FOLDER = "nccl"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
DEFAULT_CONNECTIONS, MOST_CONNECTIONS = 8, 32  # CUDA's, if the variable is unset, and the most that it takes
MOST_HISTORY_ENTRIES = 100_000
# Set in every job: torch reads it at the first product of the process, and a later job may be deterministic. It is
# 32 MiB for each stream with products, which is torch's default on Hopper; 24 MiB more than on Ampere and Ada.
CUBLAS_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
# set before CUDA starts; without segments that grow, messages and graph replays of many sizes fragment the memory
GPU_LIBRARIES = {**CUBLAS_WORKSPACES, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}

Marks = Callable[[str], AbstractContextManager[Any]]  # name -> profiler range
ATTENTION_KERNELS = {
    SDPBackend.FLASH_ATTENTION: "torch's flash kernel",
    SDPBackend.CUDNN_ATTENTION: "cuDNN's fused kernel",
    SDPBackend.EFFICIENT_ATTENTION: "torch's memory-efficient kernel",
    SDPBackend.MATH: "separate kernels, not fused",
}
FEW_TOKENS = 256  # the choice depends on the GPU, dtype and sizes of heads


def prepare(plan: RunPlan, environment: Environment) -> tuple[NcclSettings, tuple[str, ...]]:
    """Set what CUDA, its allocator and NCCL read when they start, before the first use of any; returns lines to print.

    Raises ConfigError.
    """
    config = plan.config
    said = connections_line(plan) if config.training.device != "cpu" else ()
    if config.training.device != "cpu" and (torch.version.cuda or torch.version.hip):
        # before `choose_backend`, which starts CUDA and with it the allocator, which reads its settings once
        set_for_libraries(**GPU_LIBRARIES)
    settings, save = NcclSettings.of(config.gpu), config.checkpoint.save
    wanted = config.parallel.distributed_backend
    backend, device = choose_backend(wanted, config.training.device, environment.gpu_index)
    if device.type != "cuda" and (config.gpu.nvtx_ranges or config.gpu.record_memory_history):
        flag = "--nvtx-ranges" if config.gpu.nvtx_ranges else "--record-memory-history"
        raise ConfigError(
            f"{flag} needs a GPU, and this run has none; leave it out (--profile and --timing-log-level work on CPUs)"
        )
    if device.type != "cuda" and config.gpu.cuda_graph_impl != "none":
        raise ConfigError("--cuda-graph-impl local needs a GPU, and this run has none; leave it out")
    said = (*(said if device.type == "cuda" else ()), *tuned_line(config.gpu.tuned, device))
    if backend == "nccl":
        if environment.ranks_per_gpu == 1:  # else NCCL uses its network, also between stages
            settings, line = limit_channels(plan, settings)
            said += line
        settings.prepare(None if save is None else Path(save) / FLIGHT_RECORDER_FOLDER)
        if config.gpu.cuda_graph_impl != "none":
            # NCCL registers the buffers of collectives in a graph and assumes that each is one allocation;
            # a segment that has grown consists of several
            set_for_libraries(NCCL_GRAPH_REGISTER=0)
    return settings, said


def connections_line(plan: RunPlan) -> tuple[str, ...]:
    """Raise a CUDA_DEVICE_MAX_CONNECTIONS that is too low for the grid, and return a line that says so. Called before
    CUDA starts.

    CUDA maps streams to so many hardware work queues, and each queue is strictly in order. In a pipeline a receive can
    come behind a kernel that waits for the receive's sender, and the step hangs; elsewhere kernels can come behind
    collectives that should overlap with them. Megatron's scripts export 1, for an order of kernels that nothing here
    relies on.
    """
    if plan.topology.world_size == 1 or (torch.version.cuda is None and torch.version.hip is None):
        return ()
    text = value_for_libraries(CONNECTIONS)
    given = int(text) if text is not None and text.isascii() and text.isdigit() and int(text) else DEFAULT_CONNECTIONS
    needed, why = DEFAULT_CONNECTIONS, "with fewer, kernels can wait for collectives that overlap with them"
    if plan.topology.pp > 1:
        needed, why = MOST_CONNECTIONS, "with fewer, a step of a pipeline can hang"
    if given >= needed:
        return ()
    replace_for_libraries(CONNECTIONS, str(needed))
    origin = "CUDA's default" if text is None else "of the environment"
    return (f"{CONNECTIONS}: {needed} instead of {given}, {origin}: {why}",)


def limit_channels(plan: RunPlan, settings: NcclSettings) -> tuple[NcclSettings, tuple[str, ...]]:
    """Limit the channels of messages between stages inside a node, unless the user has; return a line that says so.

    A waiting receive holds an SM for each channel, up to 32 over NVLink. Only communicators of pipelines are limited:
    all-to-alls of experts and rings of context parallelism need the channels (github.com/NVIDIA/nccl/issues/1703).
    """
    topology = plan.topology
    neighbours = [pair for pipeline in topology.groups("pp") for pair in pairwise(pipeline)]
    if all(len(topology.nodes_of(pair)) > 1 for pair in neighbours):  # or pp is 1
        return settings, ()  # NCCL uses two channels a peer over the network
    limited = settings.with_default("pp", CHANNELS_IN_NODE)
    max_ctas = limited.communicators.get("pp", {}).get("max_ctas")
    if not isinstance(max_ctas, int):
        return settings, ()
    origin = "" if limited is not settings else ", of --nccl-communicator-config-path"
    held = f"a waiting receive holds at most {channels_of_messages(max_ctas)} SMs"
    return limited, (f"NCCL: max_ctas {max_ctas} for communicators of the pipeline{origin}: {held}",)


def tuned_line(path: str | None, device: torch.device) -> tuple[str, ...]:
    """Return a line on the settings of --tuned. Raises ConfigError if they were measured on another kind of device."""
    if path is None:
        return ()
    tuned, here = read_tuned(path), device_kind(device)
    if tuned.device != here:
        raise ConfigError(
            f"--tuned {path} was measured on {tuned.device}, this run is on {here}; tune here, or leave it out"
        )
    settings = ", ".join(f"{key.partition('.')[2]} {value}" for key, value in tuned.settings.items())
    return (f"tuned by {path} (flags and --config win): {settings or 'the defaults are fastest'}",)


def device_kind(device: torch.device) -> str:
    """Return 'cpu', or the driver's name of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@contextmanager
def deterministic_algorithms(config: Config) -> Iterator[None]:
    """Use only bit-reproducible kernels and algorithms of NCCL with --deterministic-mode, and restore the settings at
    the end. torch raises where it has no such kernel.
    """
    if not config.training.deterministic_mode:
        yield
        return
    before = torch.get_deterministic_debug_mode()
    set_for_libraries(**CUBLAS_WORKSPACES)
    with set_meanwhile(NCCL_ALGO="Ring"):
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)


def check_deterministic(config: Config, device: torch.device) -> None:
    """Raise ConfigError if torch has started cuBLAS in this process with settings that are not reproducible."""
    if not config.training.deterministic_mode or device.type != "cuda":
        return
    try:
        torch.mm(*(torch.ones(1, 1, device=device) for _ in range(2)))
    except RuntimeError as error:
        if "CUBLAS_WORKSPACE_CONFIG" not in str(error):
            raise
        raise ConfigError(
            "--deterministic-mode: CUBLAS_WORKSPACE_CONFIG was not :4096:8 or :16:8 when this process first multiplied "
            "matrices on the GPU; set it before the process starts"
        ) from error


def check_fp8(config: Config, device: torch.device) -> None:
    """Raise ConfigError if --fp8-format is given and the GPU has no 8-bit matrix multiplication."""
    if config.precision.fp8_format is None or config.kernels.transformer_impl != "local":
        return  # Transformer Engine checks this itself
    recipe = config.precision.fp8_recipe
    why = fp8_unsupported_reason(device, recipe)
    if device.type == "cuda" and recipe in FP8_BLOCKS and config.precision.fp8_format != "e4m3":
        raise ConfigError(
            f"--fp8-format {config.precision.fp8_format} --fp8-recipe {recipe}: torch multiplies blocks of scaled "
            "values on GPUs in e4m3 alone; give --fp8-format e4m3"
        )
    if why is not None:
        given = f" --fp8-recipe {recipe}" if recipe in FP8_BLOCKS else ""
        raise ConfigError(f"--fp8-format {config.precision.fp8_format}{given}: {why}; leave it out")


def check_compiler(config: Config, device: torch.device) -> None:
    """Raise ConfigError if functions are to be compiled and this machine lacks what that needs."""
    kernels = config.kernels
    flags = {
        "--compile-pointwise": kernels.compile_pointwise,
        "--compile-loss": kernels.compile_loss,
        "--optimizer-impl compiled": kernels.optimizer_impl == "compiled",
    }
    asked = ", ".join(flag for flag, is_on in flags.items() if is_on)
    reason = missing_compiler(device.type) if asked else None
    if reason is not None:
        raise ConfigError(f"{asked}: {reason}; change that, or give --no-compile-loss --optimizer-impl torch")


def dropout_line(plan: RunPlan, device_name: str) -> tuple[str, ...]:
    """Return a line on what --attention-dropout costs by the planner's model; () where attention has none.

    A GPU that is not in the planner's table is taken to be an H100.
    """
    config, hardware = plan.config, hardware_of(device_name) or hardware_named("h100")
    if not config.model.attention_dropout or config.precision.dtype not in hardware.flops:
        return ()
    tp_link = ring_link(plan.topology, "tp", hardware.node, hardware.network)

    def seconds(model: ResolvedModelConfig) -> float:
        spec = model_spec(model, config.precision, config.parallel.cp_comm_type)
        times = (layer_seconds(kind, plan.shape, hardware, tp_link) for kind in spec.kinds)
        return sum(sum(part.values()) for each in times for part in (each.forward, each.inputs, each.weights))

    ratio = seconds(config.model) / seconds(replace(config.model, attention_dropout=0.0))
    rate = config.model.attention_dropout
    return (
        f"           --attention-dropout {rate:g} has no fused kernel: layers take {ratio:.1f} times as long as with 0 "
        f"(an estimate, with the rates of {hardware.name})",
    )


def unused(config: GpuConfig, world: World) -> list[str]:
    """Return remarks on settings that have no effect on this device or backend."""
    idle = (
        ["--gemm-sm-carveout: no effect without a GPU"]
        if config.gemm_sm_carveout and world.device.type != "cuda"
        else []
    )
    if world.backend == "nccl":
        return idle
    default = GpuConfig()
    names = ("nccl_settings", "nccl_communicator_config_path", "high_priority_stream_groups")
    given = ["--" + name.replace("_", "-") for name in names if getattr(config, name) != getattr(default, name)]
    return idle + ([f"{', '.join(given)}: no effect, as ranks communicate over {world.backend}"] if given else [])


def graph_words(plan: RunPlan) -> tuple[str, ...]:
    """Describe what CUDA graphs record and when, in one line for the start of a run; () without CUDA graphs."""
    gpu = plan.config.gpu
    if gpu.cuda_graph_impl == "none":
        return ()
    slots = [sum(plan.num_slots(pp_rank).values()) for pp_rank in range(plan.topology.pp)]
    parts = "forward, I and W" if plan.splits_backward else "forward and backward"
    recorded = f"{parts} of each of {'/'.join(map(str, slots))} microbatches in flight (by pp_rank), recorded after"
    rest = f"steps; evaluation runs without graphs (--cuda-graph-impl {gpu.cuda_graph_impl})"
    return (f"graphs     {recorded} {gpu.cuda_graph_warmup_steps} {rest}",)


def dispatch_words(plan: RunPlan, backend: str) -> tuple[str, ...]:
    """Describe how --moe-token-dispatcher-type flex sends tokens, in one line for the start of a run; () without it.

    backend: of the communicators.
    """
    model, topology = plan.config.model, plan.topology
    if model.num_experts is None or model.moe_token_dispatcher_type != "flex":
        return ()
    flag, places = "(--moe-token-dispatcher-type flex)", topology.ep_inner
    why_not = why_not_deep_ep(plan.config, topology, plan.parts is not None, backend)
    if not why_not:
        sums = "results are added on the way, equal up to rounding (--moe-flex-dispatcher-backend deepep)"
        return (f"dispatch   a token once to each rank by DeepEP {flag}; {sums}",)
    if model.moe_flex_dispatcher_backend is not None:
        why_not = why_not if model.moe_flex_dispatcher_backend == "deepep" else "megapipe has no adapter of it"
        flag += f", not --moe-flex-dispatcher-backend {model.moe_flex_dispatcher_backend}: {why_not}"
    if not plan.shape.has_levels:
        where = "lies on one node" if places == topology.ep else "has one rank on each node"
        return (f"dispatch   k rows of each token by all-to-all, since ep {topology.ep} {where} {flag}",)
    back = "all rows come back, added in the order of the choice"
    if model.moe_combine_in_node:
        back = "results are added in the node before they come back, equal up to rounding (--moe-combine-in-node)"
    nodes = f"each of {topology.ep // places} nodes, which copies it for its {places} ranks"
    return (f"dispatch   a token once to {nodes} {flag}; {back}",)


def marks_of(gpu: GpuConfig, logging: LoggingConfig, global_rank: int) -> Marks | None:
    """Return the kind of profiler ranges around actions and phases: NVTX, torch's on ranks of --profile, or None."""
    if gpu.nvtx_ranges:
        return torch.cuda.nvtx.range
    return torch.profiler.record_function if logging.profile and global_rank in logging.profile_ranks else None


@contextmanager
def watched_memory(plan: RunPlan, device: torch.device, global_rank: int) -> Iterator[None]:
    """Record the allocator's history if asked for; an out-of-memory error is raised as TrainingError, with the plan."""
    gpu = plan.config.gpu
    if gpu.record_memory_history:
        torch.cuda.memory._record_memory_history(max_entries=MOST_HISTORY_ENTRIES)
    where = ""
    try:
        yield
    except torch.OutOfMemoryError as error:
        where = "; --record-memory-history shows what holds it"
        if gpu.record_memory_history:
            where = _write_history(gpu, global_rank)
        raise TrainingError(out_of_memory(plan, device, global_rank, error) + where) from error
    finally:
        if gpu.record_memory_history:
            if not where:
                _write_history(gpu, global_rank)
            torch.cuda.memory._record_memory_history(enabled=None)


def _write_history(gpu: GpuConfig, global_rank: int) -> str:
    """Write the allocator's history and say where, for an error message. A failure does not stop the run."""
    path = snapshot_path(gpu, global_rank)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError) as error:
        return f"; the allocator's history could not be written to {path}: {error}"
    return f"; the allocator's history is in {path}"


def snapshot_path(gpu: GpuConfig, global_rank: int) -> Path:
    path = Path(gpu.memory_snapshot_path)
    return path.with_name(f"{path.stem}_rank_{global_rank:05}{path.suffix}")


def out_of_memory(plan: RunPlan, device: torch.device, global_rank: int, error: BaseException) -> str:
    """Return the message of a rank that ran out of memory: what was planned, what is allocated, what to change."""
    pp_rank = plan.topology.coordinates(global_rank).pp_rank
    planned = rank_memory(plan, pp_rank)
    largest = sorted(planned.items.items(), key=lambda item: -item[1])[:3]
    shown = ", ".join(f"{name} {bytes_text(size)}" for name, size in largest)
    text = f"rank {global_rank} (pp {pp_rank}) ran out of memory: planned {bytes_text(planned.total)} ({shown})"
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        share = torch.cuda.get_per_process_memory_fraction(device)
        own = f" ({bytes_text(share * total)} for this rank)" if share < 1 else ""
        text += (
            f"; of the GPU's {bytes_text(total)}{own}, {bytes_text(held)} are in tensors, "
            f"{bytes_text(reserved - held)} cached by the allocator, {bytes_text(total - free - reserved)} used by "
            "CUDA, NCCL and other processes"
        )
    return f"{text}. {ways_out(plan)}. torch: {str(error).split('. ')[0]}"


def ways_out(plan: RunPlan) -> str:
    """List flags that lower the planned memory, those that cost the least speed first."""
    config, granularity = plan.config, plan.config.recompute.recompute_granularity
    budget = config.recompute.recompute_memory_budget
    ways = {
        "--use-distributed-optimizer": not config.parallel.use_distributed_optimizer and plan.topology.dp > 1,
        "--sequence-parallel": plan.topology.tp > 1 and not config.parallel.sequence_parallel,
        f"a --recompute-memory-budget below {budget}": bool(budget),
        "--recompute-granularity selective": granularity is None and budget is None,
        "no --cuda-graph-impl": config.gpu.cuda_graph_impl != "none",
        f"--micro-batch-size {config.training.micro_batch_size // 2}": config.training.micro_batch_size > 1,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": granularity != "full"
        and budget is None,
        "--cpu-offloading-num-layers N, which costs copies to the host (--plan says how much)": (
            not config.offload.cpu_offloading_num_layers
        ),
        "more tensor- or pipeline-parallel ranks (megapipe plan --gpus N --gpu NAME finds a layout that fits)": True,
    }
    return "Ways out: " + "; ".join(way for way, is_left in ways.items() if is_left)


def active_kernels(plan: RunPlan, kernels: Kernels, device: torch.device) -> tuple[str, ...]:
    """Return lines on the attention and the weight gradients of this device; () on a CPU."""
    if device.type == "cpu":
        return ()
    config = plan.config
    model, dtype = config.model, getattr(torch, DTYPES[config.precision.dtype].torch_name)
    lines = [*dropout_line(plan, device_kind(device))]
    plain = [layer for layer in layer_configs(model) if not is_explicit(layer)]
    packs = config.data.reset_attention_mask and why_not_packed(config, device) is None
    if kernels.attention is None and plain and not packs:
        # what scaled_dot_product_attention chooses for the heads of one layer, as in model.attention
        queries, head, parts = plain[0].num_attention_heads // plain[0].query_groups(), plain[0].head_size(), []
        q, k = (
            torch.empty(1, heads, FEW_TOKENS, head, dtype=dtype, device=device, requires_grad=True)
            for heads in (queries, 1)
        )
        for masked in sorted({layer.window_size is not None or config.data.reset_attention_mask for layer in plain}):
            mask = torch.zeros(1, 1, FEW_TOKENS, FEW_TOKENS, dtype=dtype, device=device) if masked else None
            # only kernels without a mask get values narrower than keys
            v = k[..., : plain[0].v_head_dim] if has_narrow_values(plain[0]) and not masked else k
            choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, not masked, enable_gqa=queries > 1)
            name = ATTENTION_KERNELS.get(SDPBackend(choice), SDPBackend(choice).name)
            parts.append(f"{name}{' under a mask' * masked}")
        lines.append(f"           on this GPU: {', '.join(parts)}")
    if kernels.layers is None and dtype in (torch.bfloat16, torch.float16):
        adds = kernels.norms is not None or gemm_adds_to_fp32(device, dtype)
        lines.append(f"gradients  of weights are added to fp32 {'inside' if adds else 'by a kernel after'} their GEMMs")
    if model.num_experts is not None and kernels.fp8 is not None and kernels.fp8.fp8_recipe == "mxfp8":
        why = why_no_grouped_product(device) if kernels.groups_experts else "not asked for"
        how = "torch's grouped GEMM for e4m3, weight gradients one by one" if why is None else why
        lines.append(f"experts    in fp8 {'' if why is None else 'one GEMM after the other: '}{how}")
    return tuple(lines)
