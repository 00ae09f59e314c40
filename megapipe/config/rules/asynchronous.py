"""Rules of the schedules that update weights while microbatches are under way: what needs all ranks at one moment, they cannot have."""

from __future__ import annotations

from megapipe.config.config import Config
from megapipe.config.parallel import ASYNCHRONOUS_SCHEDULES


def _asynchronous(config: Config) -> str:
    """'--pipeline-schedule NAME updates ...', the reason of every rule here; empty for other schedules."""
    name = config.parallel.pipeline_schedule
    if name not in ASYNCHRONOUS_SCHEDULES:
        return ""
    return f"--pipeline-schedule {name} updates each stage at a time of its own"


def no_clipping(config: Config) -> str | None:
    reason, clip = _asynchronous(config), config.optimizer.clip_grad
    if not reason or clip == 0:
        return None
    return f"{reason}, so that the norm of all gradients, which --clip-grad {clip:g} compares, does not exist then; give --clip-grad 0"


def no_dynamic_loss_scale(config: Config) -> str | None:
    reason = _asynchronous(config)
    if not reason or config.precision.dtype != "fp16" or config.precision.loss_scale is not None:
        return None
    return (
        f"{reason} and cannot skip an update that overflowed elsewhere; use --bf16, or a fixed --loss-scale with --fp16"
    )


def no_per_token_loss(config: Config) -> str | None:
    reason = _asynchronous(config)
    if not reason or not config.training.calculate_per_token_loss:
        return None
    return (
        f"{reason}, before the tokens of the batch, by which --calculate-per-token-loss divides, are counted; leave that out: each "
        "microbatch then counts the same"
    )


def no_tied_ends(config: Config) -> str | None:
    reason = _asynchronous(config)
    if (
        not reason
        or config.model.untie_embeddings_and_output_weights
        or config.parallel.pipeline_model_parallel_size == 1
    ):
        return None
    return (
        f"{reason}, but the tied embedding lies on the first and on the last one and has one gradient; "
        "give --untie-embeddings-and-output-weights"
    )


ASYNCHRONOUS_RULES = (no_clipping, no_dynamic_loss_scale, no_per_token_loss, no_tied_ends)
