"""A vision transformer as a pipeline, on made-up images.

Start it alone, or with `megapipe launch --nproc-per-node 2 examples/vision_transformer.py`.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from megapipe.comm.channels import MessageSpec
from megapipe.pipeline.pipeline import Pipeline, pipeline_ranks

STAGES, BATCH, WIDTH, PATCHES, CLASSES = 2, 16, 64, 16, 4


class Stage(nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(stage)  # the same weights on any number of ranks
        self.patches = nn.Conv2d(3, WIDTH, kernel_size=8, stride=8) if stage == 0 else None
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES) if stage == STAGES - 1 else None

    def forward(self, *inputs):  # (images, labels) on the first stage; x, (images, labels) on the second
        x = inputs[0] if self.patches is None else self.patches(inputs[-1][0]).flatten(2).mT
        return self.blocks(x) if self.head is None else self.head(self.blocks(x).mean(1))


with pipeline_ranks() as (pp, device):
    message = [MessageSpec((BATCH, PATCHES, WIDTH), torch.float32)]
    pipeline = Pipeline(
        STAGES, Stage, message, lambda logits, batch: cross_entropy(logits, batch[1]), pp, device=device
    )
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
    for step in range(12):
        labels = torch.randint(
            CLASSES, (4, BATCH), generator=torch.manual_seed(step)
        )  # 4 microbatches; a class is a brightness
        images = torch.randn(4, BATCH, 3, 32, 32) + labels[:, :, None, None, None]
        losses = pipeline.train_step([(i.to(device), j.to(device)) for i, j in zip(images, labels, strict=True)])
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            print(f"step {step} loss {torch.stack(losses).mean():.6f}", flush=True)
