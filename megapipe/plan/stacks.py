"""Software stacks: how much longer than the sum of its kernels a step takes in each, and what its libraries do.

The overhead is what the model of single kernels leaves out: waits between kernels and between ranks, pointwise kernels
that are not fused. It is the mean over published sources of a stack (tools/fit_efficiency.py); megapipe has not run on
a GPU, and is planned as Megatron-Core, whose layers it has.

In Megatron-Core the host launches a layer with experts in 6.2 ms and 0.36 ms for each expert of a rank: six products of
60 us (Geodesic, docs/investigations of geodesic-megatron 0a1fa72), the rest fitted to Qwen3-30B on H100. Biases of
experts are fitted to GPT-OSS on H100. What both cost in megapipe on a GPU is unknown, and not in its seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.errors import ConfigError

# The host takes so many times as long where all-to-alls overlap: 13 to 16.5 ms a layer and microbatch in published
# steps of Qwen3 with one sequence a microbatch, 9 to 11.5 ms without overlap.
OVERLAP_LAUNCHES = 1.4
# Of the bytes of casts, mask, softmax and dropout, what one fused kernel moves, forward and backward: layers of
# Korthikanti et al. 2022, table 4, are within 6 % (tests/extras/search/test_published.py)
FUSED_SOFTMAX = (0.26, 0.75)


@dataclass(frozen=True)
class Stack:
    """A software stack that a step is predicted for."""

    name: str
    overhead: float  # of the seconds of a layer's kernels
    message_times: float = 1.0  # that tensor-parallel messages take what their links allow: waits for the slowest rank
    softmax_shares: tuple[float, float] = (1.0, 1.0)  # of the bytes of written-out attention, forward and backward
    # seconds that the host takes to launch a layer with experts for a microbatch, forward and backward: without its
    # experts, and for each expert of a rank
    launches: tuple[float, float] = (0.0, 0.0)
    bias_bytes: float = 0.0  # that biases of experts move, by element of their results, forward and backward
    pipelined_exchanges: bool = False  # DeepEP: tokens move between nodes and within them at the same time
    overlapped_instances: bool = False  # sums of HSDP over instances run under the backward

    def launch_seconds(self, experts: int, overlaps: bool) -> float:
        """Return the seconds in which the host launches a layer with so many experts on a rank."""
        return (self.launches[0] + experts * self.launches[1]) * (OVERLAP_LAUNCHES if overlaps else 1.0)


STACKS = {
    stack.name: stack
    for stack in (
        Stack("megapipe", 0.0),
        Stack(
            "megatron-core",
            0.0,
            softmax_shares=FUSED_SOFTMAX,
            launches=(6.2e-3, 0.36e-3),
            bias_bytes=275.0,
            pipelined_exchanges=True,
        ),
        Stack("megatron-deepspeed", 0.27, message_times=3.0, softmax_shares=FUSED_SOFTMAX),
        Stack("pytorch", 0.11, pipelined_exchanges=True, overlapped_instances=True),
    )
}


def stack_named(name: str) -> Stack:
    """Return a row of the table. Raises ConfigError for an unknown name."""
    if name not in STACKS:
        raise ConfigError(f"--stack {name} is not in the table: there are {', '.join(STACKS)}")
    return STACKS[name]
