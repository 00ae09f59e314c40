"""A vision transformer as a pipeline, on made-up images.

Start it alone, or with `megapipe launch --nproc-per-node 2 examples/vision_transformer.py`.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megapipe import Pipeline

BATCH, WIDTH, CLASSES = 64, 64, 4


class Patches(nn.Conv2d):
    def forward(self, images: Tensor) -> Tensor:  # [b, 3, 32, 32] -> [b, 16, WIDTH]
        return super().forward(images).flatten(2).mT


class Head(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean(1))


def blocks() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)


torch.manual_seed(0)  # the same weights on any number of ranks
stages = [Patches(3, WIDTH, kernel_size=8, stride=8), blocks(), blocks(), Head(WIDTH, CLASSES)]
with Pipeline(stages, loss=cross_entropy, microbatches=4) as pipeline:
    optimizer = torch.optim.AdamW(pipeline.model.parameters(), lr=1e-3)
    for step in range(12):
        labels = torch.randint(CLASSES, (BATCH,), generator=torch.manual_seed(step))  # a class is a brightness
        images = torch.randn(BATCH, 3, 32, 32) + labels[:, None, None, None]
        loss = pipeline.step(images, labels)
        optimizer.step()
        optimizer.zero_grad()
        if pipeline.rank == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
