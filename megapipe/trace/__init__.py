"""Layers built and run once on tensors that have shapes and no values, to find their parameters, and what they keep and
make.

- `layers`:    `trace_layers`, `trace_embedding`, `trace_head`, `trace_parts`
- `traced`:    `TracedLayer`, and `Traced`, what was counted, for any number of sequences
- `parameters`: `model_parameters`, `model_states`, from what `modules`, each built once, declare
- `store`:     traces and declarations of earlier processes, in the user's cache folder
- `unit`:      `Unit`, a stage of a few layers on one rank of a grid
- `recorder`:  `Recorder`, live bytes, products and messages by the element of a layer that they are of
- `attention`: `CoreAttention`, the operations that compute core attention
- `libraries`: stand-ins for libraries that need not be installed where a plan is made
- `meta`:      `LiveBytes`, the bytes of all live storages; `WithoutValues` and `MetaMode`, tensors without values in
  code that reads them, with the kernels that CUDA or a CPU would choose
"""
