"""The logging section: logs and metrics, and profiling."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.option import Need, option

WANDB = Need("logging.wandb_project", "--wandb-project")
HEARTBEATS = Need("parallel.hang_timeout_seconds", "--hang-timeout-seconds above 0, whose heartbeats it reads")


@dataclass(frozen=True)
class LoggingConfig:
    """Logging to the console, to metrics.jsonl and to each writer that is configured; profiles; samples at the end."""

    log_interval: int = option(100, "steps between log lines", unit="steps", at_least=1)
    tensorboard_dir: str | None = option(None, "directory of TensorBoard files; unset: none")
    wandb_project: str | None = option(None, "Weights & Biases project; unset: none")
    wandb_exp_name: str | None = option(None, "Weights & Biases run name", needs=WANDB)
    wandb_save_dir: str | None = option(None, "directory of Weights & Biases files", needs=WANDB)
    log_params_norm: bool = option(False, "log the norm of the weights")
    log_num_zeros_in_grad: bool = option(False, "log how many gradient elements are zero")
    log_throughput: bool = option(False, "log TFLOP/s per device")
    timing_log_level: int = option(0, "phase timers: 0 the step, 1 its phases, 2 every action", at_least=0, at_most=2)
    log_straggler: bool = option(
        False,
        "report with every log line which ranks compute longest, and name a slow rank, link or group",
        needs=HEARTBEATS,
    )
    straggler_minmax_count: int = option(
        1, "how many of the slowest and of the fastest ranks --log-straggler shows", unit="ranks", at_least=1
    )
    profile: bool = option(False, "write a trace of some steps")
    profile_step_start: int = option(
        10, "first step that is traced; the first step of the run is 0", unit="steps", at_least=0
    )
    profile_step_end: int = option(12, "step at which tracing ends (it is not traced)", unit="steps", at_least=1)
    profile_ranks: tuple[int, ...] = option((0,), "global ranks that are traced", at_least=0)
    profile_pipeline: bool = option(
        False,
        "in the same steps record every action of every rank, and compare it with the plan: trace, data, measured "
        "bubble",
    )
    metrics_file: str | None = option(
        None, "JSON lines file with one line per step", derived="metrics.jsonl in --save; without --save none"
    )
    sample_prompts: tuple[str, ...] | None = option(
        None, "prompts that the trained model continues at the end of the run"
    )
    sample_tokens: int = option(48, "tokens generated for each of --sample-prompts", unit="tokens", at_least=1)
