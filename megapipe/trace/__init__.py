"""Layers run once on tensors that have shapes and no values, to find what they keep and make.

- `layers`:    `trace_layers`, `trace_embedding`, `trace_head`, `trace_parts`
- `traced`:    `Traced`, what was counted, for any number of sequences
- `unit`:      `Unit`, a stage of a few layers on one rank of a grid
- `recorder`:  `Recorder`, live bytes by the element of a layer that has made them
- `libraries`: stand-ins for libraries that need not be installed where a plan is made
- `meta`:      `LiveBytes`, the bytes of all live storages; `MetaMode`, meta tensors in code that reads values, and the
  kernels that CUDA or a CPU would choose
"""
