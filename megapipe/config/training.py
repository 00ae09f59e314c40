"""The training section: batch, length, evaluation, seed, loss."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.option import option

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class TrainingConfig:
    """Batch size, length, evaluation, seed, loss, and what to do about spikes and silent corruption."""

    micro_batch_size: int = option(
        1,
        "sequences of one microbatch on one data-parallel rank",
        unit="sequences",
        at_least=1,
        required=True,
    )
    global_batch_size: int | None = option(
        None,
        "sequences in one step over all data-parallel ranks",
        unit="sequences",
        at_least=1,
        derived="micro-batch-size x dp",
    )
    rampup_batch_size: tuple[int, int, int] | None = option(
        None,
        "grow the global batch: START INCREMENT SAMPLES, from START to global-batch-size in equal shares of SAMPLES",
        unit="sequences",
        at_least=0,
    )
    train_iters: int | None = option(None, "steps to train (or --train-samples)", unit="steps", at_least=1)
    train_samples: int | None = option(None, "sequences to train on (or --train-iters)", unit="sequences", at_least=1)
    exit_interval: int | None = option(None, "save and exit after a step divisible by this", unit="steps", at_least=1)
    exit_duration_in_mins: float | None = option(None, "save and exit after this time", unit="minutes", above=0)
    exit_signal_handler: bool = option(True, "save and exit on SIGTERM and SIGUSR1")
    skip_train: bool = option(False, "evaluate only")
    eval_interval: int | None = option(1000, "steps between evaluations", unit="steps", at_least=1)
    eval_iters: int = option(100, "batches in one evaluation; 0: none", unit="batches", at_least=0)
    seed: int = option(1234, "seed of weights, data order and dropout", at_least=0)
    deterministic_mode: bool = option(False, "use only kernels that give bit-identical results in every run")
    label_smoothing: float = option(
        0.0, "share of the target spread over the vocabulary", unit="probability", at_least=0, below=1
    )
    z_loss: float = option(0.0, "weight of log(sum(exp(logits)))^2 in the loss; 0: none", at_least=0)
    cross_entropy_chunk_size: int | None = option(
        None,
        "compute output layer and loss for this many tokens at a time: the logits (tokens x vocabulary) never exist "
        "as a whole, and are recomputed in the backward; unset: all at once",
        unit="tokens",
        at_least=1,
    )
    calculate_per_token_loss: bool = option(
        False, "average over the tokens of the global batch instead of over each microbatch first"
    )
    check_for_nan_in_loss_and_grad: bool = option(
        True, "stop at a NaN or infinite loss or gradient", off_flag="--no-check-for-nan-in-loss-and-grad"
    )
    spike_rollback: int | None = option(
        None,
        "when the loss or the gradient norm spikes or is not finite, go back this many checkpoints and skip the "
        "samples since then; unset: never",
        unit="checkpoints",
        at_least=1,
    )
    spike_threshold: float = option(
        8.0,
        "a step spikes if the logarithm of its loss or gradient norm is this many robust standard deviations above the "
        "median of the --spike-window steps before it",
        above=0,
    )
    spike_steps: int = option(3, "consecutive steps that must spike", unit="steps", at_least=1)
    spike_window: int = option(
        100,
        "steps that a step is compared with; no spike is reported before half of them exist",
        unit="steps",
        at_least=8,
    )
    spike_limit: int = option(3, "rollbacks in total; the next spike ends the run", unit="rollbacks", at_least=1)
    check_weight_hash_across_dp_replicas_interval: int | None = option(
        None,
        "compare replicated state of all ranks bit by bit: before the first step, after this many steps each and "
        "before every save; a difference ends the run and names the ranks; unset: never",
        unit="steps",
        at_least=1,
    )
    device: str = option("auto", "device of the tensors; auto: cuda if there is a GPU", choices=DEVICES)
