"""Comparison of a grid with one plain process: `pretrain_gpt.py --verify-grid` and the parity tests.

- `fewer_layers`: a plan with fewer layers in its stages; also for the smallest step of `megapipe.extras.streams`
- `shrink`:  the user's configuration with small sizes; grid, chunks, partition, schedule and switches are kept
- `oracle`:  megapipe.extras.reference trained in one process in fp64, with the grid's dropout masks; random weights and
  batches, drawn in slices on the grid and whole for the oracle
- `compare`: each rank's pieces of gradients and weights against the oracle's whole tensors, and the experts that every
  token chose; tolerances
- `parity`:  the grid's training step and the oracle's, step by step; `verify`, which --verify-grid calls
- `report`:  the text that --verify-grid prints
- `conversion`: the logits of a converted model against those of transformers (`megapipe convert --check`)

Gradients are compared after the reduction and before clipping, in the buffers and shards from which the optimizer reads
them; weights after the update, as the next forward reads them. This finds a gradient that is wrong on one replica only,
and a shard that was not gathered. docs/verify.md says what the comparison proves and what it cannot.
"""
