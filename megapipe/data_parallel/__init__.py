"""Data parallelism: what the replicas of a stage do together.

- `store`:   `Store`: one flat buffer: what of it this rank keeps (nothing divided, ZeRO-1, 2, 3), and its collectives
- `buffers`: `StageBuffers`: the stores of a stage; its parameters and main gradients are views of them
- `stores`:  `Stores`: all of a rank, during a step: reductions while the backward runs, gathers during the next forward
- `copies`:  `Copies`: compares parameters that several ranks hold, bit by bit, through checksums
"""
