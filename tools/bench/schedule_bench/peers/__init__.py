"""Whom megapipe is measured against. They speak to torch.distributed themselves, as nothing else outside megapipe/comm does."""
