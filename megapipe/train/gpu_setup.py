"""GPU setup of a run: settings of CUDA and NCCL, profiler ranges, the allocator's history, out-of-memory messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from megapipe.comm.bootstrap import World, choose_backend
from megapipe.comm.nccl import NcclSettings, channels_of_messages
from megapipe.config.config import Config
from megapipe.config.files import LoggingConfig
from megapipe.config.gpu import GpuConfig
from megapipe.config.tuned import read_tuned
from megapipe.dtypes import FP8_BLOCKS
from megapipe.environment import (
    Environment,
    replace_for_libraries,
    set_for_libraries,
    set_meanwhile,
    value_for_libraries,
)
from megapipe.errors import ConfigError, TrainingError
from megapipe.formatting import bytes_text
from megapipe.gpu.kernels import missing_compiler
from megapipe.plan.memory import rank_memory
from megapipe.plan.nccl_memory import CHANNELS_IN_NODE
from megapipe.plan.run_plan import RunPlan
from megapipe.tensor_parallel.fp8 import fp8_unsupported_reason

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
