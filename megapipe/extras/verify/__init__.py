"""Does the grid compute the same numbers as one plain process? `pretrain_gpt.py --verify-grid` and the parity tests.

- `shrink`:   the given configuration made small: grid, chunks, cut, schedule, microbatches, head ratio and switches kept
- `weights`:  initial values in which nothing is 0 or 1, drawn in slices on the grid and whole for the oracle
- `batches`:  random tokens, with documents where the configuration masks them
- `masks`:    the dropout masks of a grid put together for the whole tensors of the reference
- `oracle`:   megapipe.extras.reference, trained for a few steps in one process, fp64
- `parity`:   the grid's own training step beside the oracle's, step by step
- `compare`:  each rank's pieces of gradients and weights against the oracle's whole tensors
- `tolerance`: how far they may be apart, in fp64 and in each native dtype
- `report`:   what a person reads; `run`: the request of the command line

Gradients are compared after the reduction and before clipping, in the buffers and shards from which the optimizer reads them; weights
after the update, as the next forward reads them. So a gradient that is right on one replica and wrong on another is seen, and so is a
shard that was not gathered. docs/verify.md says what this proves and what it cannot.
"""
