"""The offload section: which activations wait for their backward in the host's memory."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.option import option


@dataclass(frozen=True)
class OffloadConfig:
    """Activations that travel to the host after their forward and come back before their backward; parameters never do."""

    cpu_offloading_num_layers: int = option(
        0,
        "the activations of the first N layers of every stage wait for their backward in the host's memory",
        unit="layers",
        at_least=0,
    )
    min_offloaded_tensor_size: int = option(1048576, "smaller tensors stay on the device", unit="elements", at_least=1)
