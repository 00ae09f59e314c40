"""The dtypes of a parameter's training state: main gradient, master weight and moments.

Read by the plan, which counts their bytes, and by the buffers and the optimizer, which allocate them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.model import PrecisionConfig
from megapipe.config.training import OPTIMIZERS, OptimizerConfig
from megapipe.dtypes import ELEMENT_BYTES

MASTER = "master"
LAST_CHANGE = "last_change"  # of the masters by the last update, for --delay-error-feedback
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
        return ELEMENT_BYTES[self.gradient]

    def moments(self, of_matrix: bool = False) -> tuple[str, ...]:
        """Return the names of a parameter's moments."""
        return tuple(name for name in (self.matrix_states if of_matrix else self.states) if name != MASTER)

    def state_bytes(self, of_matrix: bool = False) -> int:
        """Bytes of master weight and moments of one parameter."""
        return sum(ELEMENT_BYTES[dtype] for dtype in (self.matrix_states if of_matrix else self.states).values())

    @property
    def update_bytes(self) -> int:
        """Bytes that an update makes and frees for each element of a chunk: copies in fp32 of what is narrow, or what
        an extension's rule makes.
        """
        return self.rule_bytes or 4 * (len(self.narrow) + (self.gradient_bytes < 4))

    @property
    def narrow(self) -> tuple[str, ...]:
        """The moments that are narrower than fp32: in bf16."""
        return tuple(state for state, dtype in self.states.items() if dtype == "bf16")

    @property
    def is_narrow(self) -> bool:
        """True if anything is narrower than fp32."""
        return bool(self.narrow) or self.gradient_bytes < 4


def state_dtypes(
    optimizer: OptimizerConfig, precision: PrecisionConfig, changes_in_flight: bool = False
) -> StateDtypes:
    """Return the dtypes of a rank. changes_in_flight: its weights are updated while microbatches are in flight
    (asynchronous schedules), so that they are copies of their masters.

    Everything has at least fp32, but for gradients and moments that --use-precision-aware-optimizer narrows.
    """
    wide, kind = "fp64" if precision.dtype == "fp64" else "fp32", OPTIMIZERS[optimizer.optimizer]
    moments = () if optimizer.optimizer == "sgd" and not optimizer.sgd_momentum else kind.states
    gradient, states = wide, dict.fromkeys(moments, wide)
    of_matrix = states if kind.matrix_states is None else dict.fromkeys(kind.matrix_states, wide)
    if optimizer.use_precision_aware_optimizer:
        gradient = optimizer.main_grads_dtype
        states = of_matrix = {"exp_avg": optimizer.exp_avg_dtype, "exp_avg_sq": optimizer.exp_avg_sq_dtype}
    if precision.dtype != wide or changes_in_flight:
        states, of_matrix = {MASTER: wide, **states}, {MASTER: wide, **of_matrix}
    if optimizer.delay_error_feedback:
        states, of_matrix = {**states, LAST_CHANGE: wide}, {**of_matrix, LAST_CHANGE: wide}
    return StateDtypes(gradient, states, of_matrix, kind.temporaries * ELEMENT_BYTES[wide])
