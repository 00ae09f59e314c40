"""The loss of a token: cross entropy over the true vocabulary, with label smoothing and z-loss. Used by reference/gpt.py."""

import torch.nn.functional as F
from torch import Tensor

from megapipe.extras.reference.config import ReferenceConfig


def token_losses(config: ReferenceConfig, logits: Tensor, labels: Tensor) -> Tensor:
    """logits: [b, s, vocab_size], at least fp32; labels: [b, s]. Returns [b, s].

    Label smoothing a gives the label probability 1 - a and each of the other K - 1 ids a / (K - 1), as Megatron does. Its formula, with
    smoothing = a K / (K - 1), is (1 - smoothing) CE - smoothing mean_k log p_k: what torch calls label_smoothing = a K / (K - 1).
    z-loss (PaLM, arXiv:2204.02311) adds z_loss * logsumexp(logits)^2 to each token.
    """
    smoothing = config.label_smoothing * config.vocab_size / (config.vocab_size - 1)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing).view(
        labels.shape
    )
    if config.z_loss:
        losses = losses + config.z_loss * logits.logsumexp(dim=-1).square()
    return losses
