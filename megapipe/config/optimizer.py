"""The optimizer section: AdamW or SGD, learning rate and weight decay over time, clipping."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.option import Flag, Need, option

OPTIMIZERS = ("adam", "sgd")
LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")

WSD = Need("optimizer.lr_decay_style", "--lr-decay-style WSD", ("WSD",))
DECOUPLED_LR = Need("optimizer.decoupled_lr", "--decoupled-lr")


@dataclass(frozen=True)
class OptimizerConfig:
    """Update rule and its schedules. Lengths in samples count the sequences consumed before a step."""

    optimizer: str = option("adam", "update rule (adam decouples weight decay: AdamW)", choices=OPTIMIZERS)
    lr: float | None = option(None, "highest learning rate", above=0, required=True)
    min_lr: float = option(0.0, "lowest learning rate after warm-up", at_least=0)
    lr_decay_style: str = option("linear", "shape of the decay", choices=LR_DECAY_STYLES)
    lr_decay_iters: int | None = option(
        None, "steps over which it decays", unit="steps", at_least=1, derived="train-iters"
    )
    lr_decay_samples: int | None = option(
        None, "sequences over which it decays", unit="sequences", at_least=1, derived="train-samples"
    )
    lr_warmup_fraction: float | None = option(None, "warm-up as a share of the decay length", at_least=0, at_most=1)
    lr_warmup_iters: int = option(0, "steps of linear warm-up", unit="steps", at_least=0)
    lr_warmup_samples: int = option(0, "sequences of linear warm-up", unit="sequences", at_least=0)
    lr_warmup_init: float = option(0.0, "learning rate at which warm-up starts", at_least=0)
    lr_wsd_decay_style: str = option("exponential", "WSD: shape of the last phase", choices=WSD_DECAY_STYLES)
    lr_wsd_decay_iters: int | None = option(None, "WSD: steps of the last phase", unit="steps", at_least=1, needs=WSD)
    lr_wsd_decay_samples: int | None = option(
        None, "WSD: sequences of the last phase", unit="sequences", at_least=1, needs=WSD
    )
    weight_decay: float = option(0.01, "decoupled weight decay of matrices (none on vectors and biases)", at_least=0)
    start_weight_decay: float | None = option(
        None, "weight decay at the first step of a ramp", at_least=0, derived="weight-decay"
    )
    end_weight_decay: float | None = option(
        None, "weight decay at the last step of a ramp", at_least=0, derived="weight-decay"
    )
    weight_decay_incr_style: str = option("constant", "shape of the weight-decay ramp", choices=WEIGHT_DECAY_STYLES)
    clip_grad: float = option(1.0, "largest global gradient norm; 0: no clipping", at_least=0)
    adam_beta1: float = option(0.9, "decay of the first moment", at_least=0, below=1)
    adam_beta2: float = option(0.999, "decay of the second moment", at_least=0, below=1)
    adam_eps: float = option(1e-8, "added to the root of the second moment", above=0)
    sgd_momentum: float = option(0.9, "momentum of SGD", at_least=0, below=1)
    optimizer_post_validation: bool = option(
        False,
        "pipelines: no barrier between steps; each rank updates at once, and rolls the update back and repeats it, "
        "with bit-identical results, if gradients turn out to need clipping or to have overflowed. Keeps a copy of "
        "gradients, master weights and moments of each rank's shards",
        more_flags=(
            Flag("--enable-optimizer-post-validation", value=True, help="same, as in the zero-bubble fork of Megatron"),
        ),
    )
    optimizer_cpu_offload: bool = option(
        False,
        "keep master weights and moments in host memory and update them on the CPU; in each step gradients are "
        "copied to the host and new weights back",
    )
    decoupled_lr: float | None = option(
        None, "highest learning rate of embedding and output layer", above=0, derived="lr"
    )
    decoupled_min_lr: float | None = option(
        None,
        "lowest learning rate of embedding and output layer",
        at_least=0,
        derived="min-lr",
        needs=DECOUPLED_LR,
    )
    override_opt_param_scheduler: bool = option(
        False,
        "on resuming, use the schedules of this configuration instead of the checkpoint's",
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        "on resuming, use the schedules of the checkpoint instead of this configuration's",
    )
