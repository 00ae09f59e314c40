"""The peers that megapipe is compared with. They use torch.distributed directly, as nothing else outside
megapipe/comm does."""
