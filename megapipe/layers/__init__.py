"""Descriptions of the layers of a model without torch.

Their parameters, and what they keep, multiply, attend to and send, are read from their modules (`trace`).

- `model`:  `ModelSpec` and `LayerSpec`: the layers of a model; the parameters of a stage; `rank_shape`: the shape that
  traces depend on, from a configuration
- `moe`:    rows of experts; `mixer`: what a token mixer of an extension declares; `ends`: a name and a size
- `linear`: the layers in 8 bits, and what casts to 8 bits move
- `table`:  `RankShape`: the microbatch and the options that a trace depends on; `Kept`
"""
