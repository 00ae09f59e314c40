"""An update rule of your own: Lion (Chen et al. 2023, arXiv:2302.06675).

megapipe launch --nproc-per-node 4 pretrain --extension examples/extend_update_rule.py --optimizer lion \
    --optimizer-options beta2=0.98 --config configs/quickstart.yaml --mock-data --vocab-size 1000 \
    --use-distributed-optimizer --lr 3e-4

Weights, gradient and states are flat parts of a parameter, so the rule is sharded, saved, resharded and planned like
Adam.
"""

from torch import Tensor

from megapipe.extend import UpdateStep, register_update_rule


@register_update_rule("lion", states=("momentum",), options={"beta1": 0.9, "beta2": 0.99}, temporaries=2)
def lion(weights: Tensor, gradient: Tensor, states: dict[str, Tensor], step: UpdateStep) -> None:
    """Move each weight by the learning rate, in the direction of the sign of the interpolated momentum."""
    momentum = states["momentum"]
    direction = momentum.lerp(gradient, 1.0 - step.options["beta1"]).sign_()
    weights.mul_(1.0 - step.lr * step.weight_decay).add_(direction, alpha=-step.lr)
    momentum.lerp_(gradient, 1.0 - step.options["beta2"])
