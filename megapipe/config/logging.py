"""The logging section: what is written where and how often, and profiling."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.option import option


@dataclass(frozen=True)
class LoggingConfig:
    """Everything logged goes to the console, to metrics.jsonl and to each writer asked for."""

    log_interval: int = option(100, "steps between log lines", unit="steps", at_least=1)
    tensorboard_dir: str | None = option(None, "directory of TensorBoard files; unset: none")
    wandb_project: str | None = option(None, "Weights & Biases project; unset: none")
    wandb_exp_name: str | None = option(None, "Weights & Biases run name")
    wandb_save_dir: str | None = option(None, "directory of Weights & Biases files")
    log_params_norm: bool = option(False, "log the norm of the weights")
    log_num_zeros_in_grad: bool = option(False, "log how many gradient elements are zero")
    log_throughput: bool = option(False, "log TFLOP/s per device")
    timing_log_level: int = option(0, "phase timers: 0 the step, 1 its phases, 2 every action", at_least=0, at_most=2)
    log_straggler: bool = option(
        False, "at every log line tell which ranks compute longest, and name a slow rank, link or group"
    )
    straggler_minmax_count: int = option(
        1, "ranks that --log-straggler shows at either end, slowest and fastest", unit="ranks", at_least=1
    )
    profile: bool = option(False, "write a trace of some steps")
    profile_step_start: int = option(10, "first step that is traced; the first of all is 0", unit="steps", at_least=0)
    profile_step_end: int = option(12, "step at which tracing ends (not traced)", unit="steps", at_least=1)
    profile_ranks: tuple[int, ...] = option((0,), "global ranks that are traced", at_least=0)
    profile_pipeline: bool = option(
        False,
        "in the same steps record every action of every rank, and write it beside its plan: trace, data, measured bubble",
    )
    metrics_file: str | None = option(
        None, "JSON lines, one a step", derived="metrics.jsonl in --save; without --save none"
    )
    sample_prompts: tuple[str, ...] | None = option(None, "texts that the trained model continues at the end, printed")
    sample_tokens: int = option(48, "tokens that each of --sample-prompts is continued by", unit="tokens", at_least=1)
