"""Trains modules of plain PyTorch as a pipeline with a zero-bubble schedule. The argument is the number of replicas.

Start it alone, or with `megapipe launch --nproc-per-node 4 examples/pipeline_any_module.py 2`: two replicas of a
pipeline of two ranks. The losses are the same.
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from megapipe import Pipeline

torch.manual_seed(0)  # the same weights on every rank
hidden = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2)]
stages = [nn.Linear(8, 64), *hidden, nn.Linear(64, 4)]
replicas = int(sys.argv[1]) if len(sys.argv) > 1 else 1

with Pipeline(stages, loss=cross_entropy, microbatches=4, schedule="zb-h1", data_parallel=replicas) as pipeline:
    optimizer = torch.optim.AdamW(pipeline.model.parameters(), lr=1e-2)
    for step in range(20):
        inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
        labels = inputs[:, :4].argmax(1)  # the class is the place of the largest of four numbers
        mine = slice(pipeline.replica, None, pipeline.num_replicas)  # this replica's part of the batch
        loss = pipeline.step(inputs[mine], labels[mine])
        optimizer.step()
        optimizer.zero_grad()
        if pipeline.rank == 0:
            print(f"step {step} loss {loss.item():.6f}")
