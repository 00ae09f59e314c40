"""A rule over whole matrices of your own: (M M^T + d I)^(-1/2) M for the momentum M, by eigenvalues, as in Shampoo
(Gupta et al. 2018, arXiv:1802.09568).

megapipe launch --nproc-per-node 4 pretrain --extension examples/extend_matrix_rule.py --optimizer whitened \
    --optimizer-options scale=0.1 --config configs/quickstart.yaml --mock-data --vocab-size 1000 \
    --use-distributed-optimizer --lr 3e-3

Each matrix arrives whole on one rank, whatever the grid, and everything else is updated by AdamW, as with Muon.
"""

import math

import torch
from torch import Tensor

from megapipe.extend import UpdateStep, register_matrix_rule


@register_matrix_rule("whitened", options={"momentum": 0.95, "scale": 0.2, "damping": 0.01})
def whitened(momentum: Tensor, step: UpdateStep) -> Tensor:
    """Return the momentum with its singular values brought near each other, about as large as an update of AdamW."""
    values, vectors = torch.linalg.eigh(momentum @ momentum.T)
    roots = torch.rsqrt(values + step.options["damping"] * values.mean() + 1e-30)
    scale = step.options["scale"] * math.sqrt(max(momentum.shape))
    return scale * (vectors * roots) @ (vectors.T @ momentum)
