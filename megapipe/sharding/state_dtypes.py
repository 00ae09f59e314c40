"""The dtypes of a parameter's training state: main gradient, master weight and moments.

Read by the plan, which counts their bytes, and by the buffers and the optimizer, which allocate them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.model import PrecisionConfig
from megapipe.config.training import OPTIMIZERS, OptimizerConfig
from megapipe.dtypes import ELEMENT_BYTES

MASTER = "master"
REMAINDER = "remainder"  # of a master weight: the 16 bits of an fp32 number that its bf16 parameter does not hold
BYTES = {**ELEMENT_BYTES, REMAINDER: 2}
CHUNK = 1 << 22  # elements that an update widens to fp32 at a time, a multiple of sharding.buffers.ALIGNMENT
NORM_CHUNK = 1 << 20  # elements of a gradient that are widened at a time for its norm


@dataclass(frozen=True)
class StateDtypes:
    """Names of dtypes (`dtypes`).

    states: of the tensors that the optimizer keeps: the master weight, unless the parameter itself is one, then the
    moments. matrix_states: the same of matrices of hidden layers.
    """

    gradient: str
    states: dict[str, str]
    matrix_states: dict[str, str]
    rule_bytes: int = 0  # that the update rule of an extension makes and frees for each element of a chunk

    @property
    def gradient_bytes(self) -> int:
        return BYTES[self.gradient]

    def moments(self, of_matrix: bool = False) -> tuple[str, ...]:
        """Return the names of a parameter's moments."""
        return tuple(name for name in (self.matrix_states if of_matrix else self.states) if name != MASTER)

    def state_bytes(self, of_matrix: bool = False) -> int:
        """Bytes of master weight and moments of one parameter."""
        return sum(BYTES[dtype] for dtype in (self.matrix_states if of_matrix else self.states).values())

    @property
    def update_bytes(self) -> int:
        """Bytes that an update makes and frees for each element of a chunk: copies in fp32 of what is narrow, or of
        everything where scales are found first; for a remainder, where it is NaN; what an extension's rule makes.
        """
        if self.rule_bytes:
            return self.rule_bytes
        widened = 4 if self.scaled else len(self.narrow) + (self.gradient_bytes < 4)
        return max(4 * widened, 4 * len(self.narrow) + (self.states.get(MASTER) == REMAINDER))

    @property
    def narrow(self) -> dict[str, str]:
        """The states that are narrower than fp32."""
        return {state: dtype for state, dtype in self.states.items() if BYTES[dtype] < 4}

    @property
    def is_narrow(self) -> bool:
        """True if anything is narrower than fp32."""
        return bool(self.narrow) or self.gradient_bytes < 4

    @property
    def scaled(self) -> tuple[str, ...]:
        """The states whose range is so small that they are stored with a scale."""
        return tuple(state for state, dtype in self.states.items() if dtype in ("fp16", "fp8"))


def state_dtypes(optimizer: OptimizerConfig, precision: PrecisionConfig, num_versions: int = 1) -> StateDtypes:
    """Return the dtypes of a rank that holds num_versions of its weights at once (asynchronous schedules).

    Everything has at least fp32 unless --use-precision-aware-optimizer narrows it. With it, the fp32 master weights of
    bf16 parameters are kept as remainders, which needs the parameters of the last update: with several versions of
    the weights they are kept whole.
    """
    wide, kind = "fp64" if precision.dtype == "fp64" else "fp32", OPTIMIZERS[optimizer.optimizer]
    moments = () if optimizer.optimizer == "sgd" and not optimizer.sgd_momentum else kind.states
    gradient, master, states = wide, wide, dict.fromkeys(moments, wide)
    of_matrix = states if kind.matrix_states is None else dict.fromkeys(kind.matrix_states, wide)
    if optimizer.use_precision_aware_optimizer:
        gradient, master = optimizer.main_grads_dtype, optimizer.main_params_dtype
        states = of_matrix = {"exp_avg": optimizer.exp_avg_dtype, "exp_avg_sq": optimizer.exp_avg_sq_dtype}
        if (master, precision.dtype, num_versions) == ("fp32", "bf16", 1):
            master = REMAINDER
    has_master = master != precision.dtype or master != wide or num_versions > 1
    if has_master:
        states, of_matrix = {MASTER: master, **states}, {MASTER: master, **of_matrix}
    return StateDtypes(gradient, states, of_matrix, kind.temporaries * BYTES[wide])
