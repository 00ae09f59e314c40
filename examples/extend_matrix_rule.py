"""A rule over whole matrices of your own: the orthogonal factor of the momentum, exactly, by its singular values.

megapipe pretrain --extension examples/extend_matrix_rule.py --optimizer polar --optimizer-options scale=0.1 \
    --config configs/quickstart.yaml --use-distributed-optimizer --lr 3e-3

Each matrix arrives whole on one rank, whatever the grid, and everything else is updated by AdamW, as with Muon.
"""

import math

import torch
from torch import Tensor

from megapipe.extend import UpdateStep, register_matrix_rule


@register_matrix_rule("polar", options={"momentum": 0.95, "scale": 0.2})
def polar(momentum: Tensor, step: UpdateStep) -> Tensor:
    """Return U V^T of momentum = U S V^T, as large as an update of AdamW."""
    u, _, vh = torch.linalg.svd(momentum, full_matrices=False)
    return step.options["scale"] * math.sqrt(max(momentum.shape)) * (u @ vh)
