"""The training and optimizer sections: batch, length, evaluation, loss, update rule and its schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megapipe.config.options import Flag, Need, count, number_with_suffix, option, zero_is_none
from megapipe.errors import ConfigError
from megapipe.registry import Registry

DEVICES = ("auto", "cpu", "cuda")
LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")
NARROWED_DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class UpdateStep:
    """The numbers of one update."""

    number: int  # of the update, from 1
    lr: float
    weight_decay: float  # 0 for vectors and biases
    options: Mapping[str, float]  # those of the rule, with the values of --optimizer-options


@dataclass(frozen=True)
class UpdateKind:
    """An update rule: the tensors that it keeps of each parameter, all of the parameter's shape.

    update: of an extension: (weights, gradient, states, UpdateStep) -> None, elementwise and in place. The rules of
    megapipe are in optimizer/update_rule.py, those over whole matrices in optimizer/muon.py.
    """

    states: tuple[str, ...]
    options: Mapping[str, float] = field(default_factory=dict)  # of --optimizer-options, with their defaults
    temporaries: int = 0  # tensors of a chunk's size, in at least fp32, that an update makes at the same time
    update: Callable[..., None] | None = None
    matrix_states: tuple[str, ...] | None = None  # in place of states, of the matrices of hidden layers
    # of an extension: (momentum of a matrix [outputs, inputs], UpdateStep) -> what lr multiplies, of the same shape
    direction: Callable[..., Any] | None = None


ADAM_STATES = ("exp_avg", "exp_avg_sq")
OPTIMIZERS = Registry(
    "update rule",
    "--optimizer",
    {
        "adam": UpdateKind(ADAM_STATES),
        "sgd": UpdateKind(("momentum",)),
        "muon": UpdateKind(ADAM_STATES, matrix_states=("momentum",)),
    },
)
# (a, b, c) of the steps of Newton-Schulz, X <- a X + (b X X^T + c (X X^T)^2) X, in turn. Sources: Jordan et al. 2024,
# "Muon: an optimizer for hidden layers in neural networks" (simple); Megatron-Core (quintic)
NEWTON_SCHULZ = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}

WSD = Need("optimizer.lr_decay_style", "--lr-decay-style WSD", ("WSD",))
DECOUPLED_LR = Need("optimizer.decoupled_lr", "--decoupled-lr")
MANUAL_GC = Need("training.manual_gc", "--manual-gc", without="Python decides when garbage is collected")
SPIKES = Need("training.spike_rollback", "--spike-rollback N")
ADAM = Need("optimizer.optimizer", "--optimizer adam or muon", ("adam", "muon"), without="only AdamW reads it")
CLIPPING = Need("optimizer.clip_grad", "--clip-grad")
SGD = Need("optimizer.optimizer", "--optimizer sgd", ("sgd",), without="only SGD reads it")
MUON = Need("optimizer.optimizer", "--optimizer muon", ("muon",), without="only Muon reads it")
PRECISION_AWARE = Need("optimizer.use_precision_aware_optimizer", "--use-precision-aware-optimizer")


def batch_size_steps(words: Sequence[str], seq_length: int) -> tuple[tuple[int, int], ...]:
    """Return (consumed sequences, sequences of a step from there on), ascending, of --step-batch-size-schedule.

    words: TOKENS:SIZE, also several in one word, with blanks or commas between them, as Megatron reads them. Tokens are
    rounded down to sequences. Raises ConfigError.
    """
    text = " ".join(words)
    found = []
    for entry in text.replace(",", " ").split():
        tokens, _, size = (number_with_suffix(part) for part in entry.partition(":"))
        if tokens is None or size is None or size < 1:
            raise ConfigError(
                f"--step-batch-size-schedule {text}: {entry} is not TOKENS:SIZE, two numbers with SIZE at least 1, "
                "such as 2.4B:320"
            )
        found.append((int(tokens) // seq_length, int(size)))
    found.sort()
    if len({start for start, _ in found}) < len(found) or not found or found[0][0] != 0:
        raise ConfigError(
            f"--step-batch-size-schedule {text}: the first TOKENS must be 0, and each at least a sequence of "
            f"{seq_length} tokens above the one before"
        )
    return tuple(found)


@dataclass(frozen=True)
class TrainingConfig:
    """Batch size, length, evaluation, seed, loss, and what to do about spikes and silent corruption."""

    micro_batch_size: int = count(1, "sequences of a microbatch on one data-parallel rank", "sequences", required=True)
    global_batch_size: int | None = count(
        None, "sequences in one step over all data-parallel ranks", "sequences", derived="micro-batch-size x dp"
    )
    rampup_batch_size: tuple[int, int, int] | None = option(
        None,
        "START INCREMENT SAMPLES: grow the batch from START to global-batch-size in equal shares of SAMPLES",
        "sequences",
        at_least=0,
    )
    step_batch_size_schedule: tuple[str, ...] | None = option(
        None,
        "TOKENS:SIZE ...: the global batch size from each number of trained tokens on, such as 0:16 2.4B:320 12B:1536",
        "tokens, sequences",
    )
    train_iters: int | None = count(None, "steps to train (or --train-samples)", "steps")
    train_samples: int | None = count(None, "sequences to train on (or --train-iters)", "sequences")
    exit_interval: int | None = count(None, "save and exit after a step divisible by this", "steps", read=zero_is_none)
    exit_duration_in_mins: float | None = option(
        None, "save and exit after this time", "minutes", above=0, read=zero_is_none
    )
    exit_signal_handler: bool = option(True, "save and exit on SIGTERM, SIGHUP and SIGUSR1")
    skip_train: bool = option(False, "evaluate only")
    eval_interval: int | None = count(1000, "steps between evaluations; unset: none", "steps", read=zero_is_none)
    eval_iters: int = option(
        100,
        "batches in one evaluation; 0: none",
        "batches",
        at_least=0,
        read=lambda text: "0" if text == "-1" else text,
    )
    seed: int = option(1234, "seed of weights, data order and dropout", at_least=0)
    manual_gc: bool = option(
        False, "collect garbage only at fixed steps, the same on all ranks, instead of whenever Python decides"
    )
    manual_gc_interval: int = option(
        0, "steps between collections; 0: only around evaluations", "steps", at_least=0, needs=MANUAL_GC
    )
    manual_gc_eval: bool = option(
        True,
        "manual-gc: also collect before and after an evaluation",
        more_flags=(Flag("--disable-manual-gc-eval", False),),
        needs=MANUAL_GC,
    )
    deterministic_mode: bool = option(False, "use only kernels that give bit-identical results in every run")
    label_smoothing: float = option(
        0.0, "share of the target that is spread over the vocabulary", "probability", at_least=0, below=1
    )
    z_loss: float = option(0.0, "weight of log(sum(exp(logits)))^2 in the loss; 0: none", at_least=0)
    cross_entropy_chunk_size: int | None = count(
        None,
        "compute output layer and loss for this many tokens at a time: the logits (tokens x vocabulary) never exist "
        "as a whole, and are recomputed in the backward; unset: all at once",
        "tokens",
    )
    calculate_per_token_loss: bool = option(
        False, "average over the tokens of the global batch instead of over each microbatch first"
    )
    check_for_nan_in_loss_and_grad: bool = option(
        True, "stop at a NaN or infinite loss or gradient", off_flag="--no-check-for-nan-in-loss-and-grad"
    )
    spike_rollback: int | None = count(
        None,
        "when the loss or the gradient norm spikes or is not finite, go back this many checkpoints and skip the "
        "samples since then; unset: never",
        "checkpoints",
    )
    spike_threshold: float = option(
        8.0,
        "a step spikes if the logarithm of its loss or gradient norm is this many robust standard deviations above the "
        "median of the --spike-window steps before it",
        above=0,
        needs=SPIKES,
    )
    spike_steps: int = count(3, "consecutive steps that must spike", "steps", needs=SPIKES)
    spike_window: int = option(
        100,
        "steps that a step is compared with; no spike is reported before half of them exist",
        "steps",
        at_least=8,
        needs=SPIKES,
    )
    spike_limit: int = count(3, "rollbacks in total; the next spike ends the run", "rollbacks", needs=SPIKES)
    check_weight_hash_across_dp_replicas_interval: int | None = count(
        None,
        "compare replicated state of all ranks bit by bit: before the first step, after this many steps each and "
        "before every save; a difference ends the run and names the ranks; unset: never",
        "steps",
    )
    extension: tuple[str, ...] = option(
        (),
        "FILE.py or MODULE that adds schedules, norms, activations, kinds of attention, update rules, tokenizers, data "
        "sets or loggers; Python code that runs. May be repeated; see docs/extend.md",
        adds_up=True,
    )
    device: str = option("auto", "device of the tensors; auto: cuda if there is a GPU", choices=DEVICES)

    def with_batch(self, size: int) -> TrainingConfig:
        """Return the section with a constant global batch size."""
        return replace(self, global_batch_size=size, rampup_batch_size=None, step_batch_size_schedule=None)


@dataclass(frozen=True)
class OptimizerConfig:
    """Update rule and its schedules. Lengths in samples count the sequences consumed before a step."""

    optimizer: str = option(
        "adam",
        "update rule (adam decouples weight decay: AdamW; muon: matrices of hidden layers by Muon, the rest by AdamW)",
        choices=OPTIMIZERS,
    )
    lr: float | None = option(None, "highest learning rate", above=0, required=True)
    min_lr: float = option(0.0, "lowest learning rate after warm-up", at_least=0)
    lr_decay_style: str = option("linear", "shape of the decay", choices=LR_DECAY_STYLES)
    lr_decay_iters: int | None = count(None, "steps over which it decays", "steps", derived="train-iters")
    lr_decay_samples: int | None = count(None, "sequences over which it decays", "sequences", derived="train-samples")
    lr_warmup_fraction: float | None = option(None, "warm-up as a share of the decay length", at_least=0, below=1)
    lr_warmup_iters: int = option(0, "steps of linear warm-up", "steps", at_least=0)
    lr_warmup_samples: int = option(0, "sequences of linear warm-up", "sequences", at_least=0)
    lr_warmup_init: float = option(0.0, "learning rate at which warm-up starts", at_least=0)
    lr_wsd_decay_style: str = option("exponential", "WSD: shape of the last phase", choices=WSD_DECAY_STYLES, needs=WSD)
    lr_wsd_decay_iters: int | None = count(None, "WSD: steps of the last phase", "steps", needs=WSD)
    lr_wsd_decay_samples: int | None = count(None, "WSD: sequences of the last phase", "sequences", needs=WSD)
    weight_decay: float = option(0.01, "decoupled weight decay of matrices (none on vectors and biases)", at_least=0)
    start_weight_decay: float | None = option(None, "first weight decay of a ramp", at_least=0, derived="weight-decay")
    end_weight_decay: float | None = option(None, "last weight decay of a ramp", at_least=0, derived="weight-decay")
    weight_decay_incr_style: str = option("constant", "shape of the weight-decay ramp", choices=WEIGHT_DECAY_STYLES)
    clip_grad: float = option(1.0, "largest global gradient norm; 0: no clipping", at_least=0)
    clip_grad_delay: int = option(
        0,
        "paci: 1 clips an update by the gradient norm of the model in the update before, 0 by that of its own stage",
        "updates",
        at_least=0,
        at_most=1,
        needs=CLIPPING,
    )
    delay_error_feedback: float = option(
        0.0,
        "pipedream-2bw: share of the last update's error that an update adds: what it would have changed with these "
        "gradients, which came a step late, less what it did",
        at_least=0,
    )
    adam_beta1: float = option(0.9, "decay of the first moment", at_least=0, below=1, needs=ADAM)
    adam_beta2: float = option(0.999, "decay of the second moment", at_least=0, below=1, needs=ADAM)
    adam_eps: float = option(1e-8, "added to the root of the second moment", above=0, at_most=1, needs=ADAM)
    sgd_momentum: float = option(0.9, "momentum of SGD", at_least=0, below=1, needs=SGD)
    muon_momentum: float = option(0.9, "decay of Muon's momentum", at_least=0, below=1, needs=MUON)
    muon_nesterov: bool = option(
        False,
        "orthogonalize the mean of gradient and momentum (Nesterov's form)",
        needs=MUON,
        more_flags=(Flag("--muon-use-nesterov", True, help="same, as in Megatron before 0.18"),),
    )
    muon_coefficient_type: str = option(
        "quintic", "coefficients of Newton-Schulz", choices=tuple(NEWTON_SCHULZ), needs=MUON
    )
    muon_num_ns_steps: int = count(5, "steps of Newton-Schulz; quintic: a multiple of 5", "steps", needs=MUON)
    muon_scale_mode: str = option(
        "spectral",
        "factor of the update of a linear with m outputs and n inputs: sqrt(max(m, n)), sqrt(m / n) or "
        "sqrt(max(1, m / n))",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
        needs=MUON,
    )
    muon_extra_scale_factor: float = option(
        1.0, "another factor of the update; with spectral, 0.2 suits learning rates of AdamW", above=0, needs=MUON
    )
    muon_no_split_qkv: bool = option(
        False,
        "orthogonalize q, k and v of a layer as one matrix: another optimizer, with other results",
        off_flag="--muon-split-qkv",
        needs=MUON,
    )
    muon_tp_mode: str | None = option(
        None,
        "required with tensor parallelism, since Megatron's default has changed: duplicated and distributed are the "
        "update of one process; blockwise, which orthogonalizes each rank's slice, is refused",
        choices=("duplicated", "distributed", "blockwise"),
        needs=MUON,
    )
    muon_fp32_matmul_prec: str = option(
        "medium",
        "precision of Newton-Schulz in fp32 on GPUs (torch.set_float32_matmul_precision)",
        choices=("medium", "high", "highest"),
        needs=MUON,
    )
    freeze: tuple[str, ...] = option(
        (),
        "patterns of the names of parameters that are not trained, such as 'embedding.*' 'decoder.layers.0.*'; these "
        "have no gradients, master weights or moments",
    )
    optimizer_options: tuple[str, ...] = option((), "NAME=NUMBER for each option of an extension's update rule")
    optimizer_cpu_offload: bool = option(
        False,
        "keep master weights and moments in host memory and update them on the CPU; in each step gradients are "
        "copied to the host and new weights back",
    )
    use_precision_aware_optimizer: bool = option(
        False,
        "allow main gradients and moments narrower than fp32; see docs/memory.md",
    )
    main_grads_dtype: str = option(
        "fp32",
        "dtype in which gradients are accumulated over microbatches and, without --grad-reduce-in-bf16, reduced",
        choices=NARROWED_DTYPES,
        needs=PRECISION_AWARE,
        more_flags=(Flag("--accumulate-allreduce-grads-in-fp32", value="fp32"),),
    )
    exp_avg_dtype: str = option("fp32", "dtype of Adam's first moment", choices=NARROWED_DTYPES, needs=PRECISION_AWARE)
    exp_avg_sq_dtype: str = option(
        "fp32", "dtype of Adam's second moment", choices=NARROWED_DTYPES, needs=PRECISION_AWARE
    )
    decoupled_lr: float | None = option(
        None, "highest learning rate of embedding and output layer", above=0, derived="lr"
    )
    decoupled_min_lr: float | None = option(
        None, "lowest learning rate of embedding and output layer", at_least=0, derived="min-lr", needs=DECOUPLED_LR
    )
    override_opt_param_scheduler: bool = option(
        False, "on resuming, use the schedules of this configuration instead of the checkpoint's"
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False, "on resuming, use the schedules of the checkpoint instead of this configuration's"
    )
