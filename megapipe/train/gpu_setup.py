"""What a run does only for the sake of a GPU: settings before the start, names of ranges, the allocator's history, memory that runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from megapipe.comm.bootstrap import World, choose_backend
from megapipe.comm.nccl import NcclSettings
from megapipe.config.config import Config
from megapipe.config.gpu import GpuConfig
from megapipe.config.logging import LoggingConfig
from megapipe.environment import Environment, set_for_libraries
from megapipe.errors import ConfigError, TrainingError
from megapipe.formatting import bytes_text
from megapipe.plan.memory import rank_memory
from megapipe.plan.run_plan import RunPlan
from megapipe.tensor_parallel.fp8 import fp8_unsupported_reason

FLIGHT_RECORDER_FOLDER = "nccl"
MOST_HISTORY_ENTRIES = 100_000

Marks = Callable[[str], AbstractContextManager[Any]]  # name -> what it is open for


def prepare(config: Config, environment: Environment) -> NcclSettings:
    """Set what CUDA's allocator and NCCL read at their start; called before anything is sent or lies on a GPU. Raises ConfigError."""
    settings = NcclSettings.of(config.gpu)
    backend, device = choose_backend(
        config.parallel.distributed_backend, config.training.device, environment.local_rank
    )
    if device.type == "cuda":
        # segments that grow: messages and replays of many sizes otherwise leave holes that nothing fits
        set_for_libraries(PYTORCH_ALLOC_CONF="expandable_segments:True")
    elif config.gpu.nvtx_ranges or config.gpu.record_memory_history:
        flag = "--nvtx-ranges" if config.gpu.nvtx_ranges else "--record-memory-history"
        raise ConfigError(
            f"{flag} looks at a GPU, and this run has none; leave it out (--profile and --timing-log-level work on CPUs)"
        )
    if device.type != "cuda" and config.gpu.cuda_graph_impl != "none":
        raise ConfigError(
            "--cuda-graph-impl local records what a GPU is given to do, and this run has none; leave it out"
        )
    if backend == "nccl":
        settings.prepare(
            None if config.checkpoint.save is None else Path(config.checkpoint.save) / FLIGHT_RECORDER_FOLDER
        )
        if config.gpu.cuda_graph_impl != "none":
            # NCCL registers what collectives in a graph work on, and takes it for one allocation: segments that grow are several
            set_for_libraries(NCCL_GRAPH_REGISTER=0)
    return settings


def check_fp8(config: Config, device: torch.device) -> None:
    """Raises ConfigError where the linears are to multiply in 8 bits and the card cannot. Of Transformer Engine the library says it."""
    if config.precision.fp8_format is None or config.kernels.transformer_impl != "local":
        return
    why = fp8_unsupported_reason(device)
    if why is not None:
        raise ConfigError(f"--fp8-format {config.precision.fp8_format}: {why}; leave it out")


def unused(config: GpuConfig, world: World) -> list[str]:
    """What was said to NCCL that nobody hears."""
    if world.backend == "nccl":
        return []
    default = GpuConfig()
    names = ("nccl_settings", "nccl_communicator_config_path", "high_priority_stream_groups")
    said = ["--" + name.replace("_", "-") for name in names if getattr(config, name) != getattr(default, name)]
    return [f"{', '.join(said)}: without effect, ranks talk over {world.backend}"] if said else []


def graph_words(plan: RunPlan) -> tuple[str, ...]:
    """What is recorded and when, one line for the start of a run; none without CUDA graphs."""
    gpu = plan.config.gpu
    if gpu.cuda_graph_impl == "none":
        return ()
    slots = [sum(plan.num_slots(pp_rank).values()) for pp_rank in range(plan.topology.pp)]
    parts = "forward, I and W" if plan.splits_backward else "forward and backward"
    text = f"{parts} of each of {'/'.join(map(str, slots))} microbatches in flight (by pp_rank), recorded after"
    return (
        f"graphs     {text} {gpu.cuda_graph_warmup_steps} steps; evaluation as written (--cuda-graph-impl {gpu.cuda_graph_impl})",
    )


def marks_of(gpu: GpuConfig, logging: LoggingConfig, global_rank: int) -> Marks | None:
    """What names actions and phases: ranges for Nsight Systems, or for torch's profiler on a rank that --profile traces."""
    if gpu.nvtx_ranges:
        return torch.cuda.nvtx.range
    return torch.profiler.record_function if logging.profile and global_rank in logging.profile_ranks else None


@contextmanager
def watched_memory(plan: RunPlan, device: torch.device, global_rank: int) -> Iterator[None]:
    """Inside the block the allocator's history is recorded if that is asked for, and running out of memory is told in terms of the plan.

    Raises TrainingError for torch's OutOfMemoryError.
    """
    gpu = plan.config.gpu
    history = _History(snapshot_path(gpu, global_rank)) if gpu.record_memory_history else None
    try:
        yield
    except torch.OutOfMemoryError as error:
        where = history.write() if history is not None else "; --record-memory-history shows who holds it"
        raise TrainingError(out_of_memory(plan, device, global_rank, error) + where) from error
    except BaseException:
        if history is not None:
            history.write()
        raise
    if history is not None:
        history.write()


def snapshot_path(gpu: GpuConfig, global_rank: int) -> Path:
    path = Path(gpu.memory_snapshot_path)
    return path.with_name(f"{path.stem}_rank_{global_rank:05}{path.suffix}")


class _History:
    def __init__(self, path: Path) -> None:
        self._path = path
        torch.cuda.memory._record_memory_history(max_entries=MOST_HISTORY_ENTRIES)

    def write(self) -> str:
        """Where it went, for a message; the run does not depend on it."""
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.cuda.memory._dump_snapshot(str(self._path))
        except (OSError, RuntimeError) as error:
            return f"; the allocator's history cannot be written to {self._path}: {error}"
        return f"; the allocator's history is in {self._path}"


def out_of_memory(plan: RunPlan, device: torch.device, global_rank: int, error: BaseException) -> str:
    """The message of a rank whose memory ran out: what was planned, what is held, what is nearest at hand to change."""
    pp_rank = plan.topology.coordinates(global_rank).pp_rank
    planned = rank_memory(plan, pp_rank)
    largest = sorted(planned.items.items(), key=lambda item: -item[1])[:3]
    shown = ", ".join(f"{name} {bytes_text(size)}" for name, size in largest)
    text = f"rank {global_rank} (pp {pp_rank}) ran out of memory: planned {bytes_text(planned.total)} ({shown})"
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        text += (
            f"; of the card's {bytes_text(total)} {bytes_text(held)} are in tensors, {bytes_text(reserved - held)} kept by the allocator, "
            f"{bytes_text(total - free - reserved)} taken by CUDA, NCCL and other processes"
        )
    return f"{text}. {ways_out(plan)}. torch: {str(error).split('. ')[0]}"


def ways_out(plan: RunPlan) -> str:
    """What would lower the planned memory most, in the order in which it costs speed."""
    config, ways = plan.config, []
    if not config.parallel.use_distributed_optimizer and plan.topology.dp > 1:
        ways.append("--use-distributed-optimizer")
    if plan.topology.tp > 1 and not config.parallel.sequence_parallel:
        ways.append("--sequence-parallel")
    if config.recompute.recompute_granularity is None:
        ways.append("--recompute-granularity selective")
    if config.gpu.cuda_graph_impl != "none":
        ways.append("no --cuda-graph-impl")
    if config.training.micro_batch_size > 1:
        ways.append(f"--micro-batch-size {config.training.micro_batch_size // 2}")
    if config.recompute.recompute_granularity != "full":
        ways.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    if not config.offload.cpu_offloading_num_layers:
        ways.append("--cpu-offloading-num-layers N, at the price of copies to the host (--plan says how much)")
    ways.append("more tensor- or pipeline-parallel ranks (megapipe plan --gpus N --gpu NAME finds a layout that fits)")
    return "Ways out: " + "; ".join(ways)
