"""Descriptions of the layers of a model without torch: their parts, and how attention and experts divide work.

Their parameters, and what they keep, multiply and send, are read from their modules (`trace`).

- `model`:     `ModelSpec`: the parts of a model, one `LayerSpec` a transformer layer; the parameters of a stage;
               `rank_shape`: the shape that traces depend on, from a configuration
- `branch`:    `Branch`: what every part of a layer says of itself; its norms are part of it
- `attention`, `latent_attention`, `mixer`, `mlp`, `moe`, `ends`: the parts
- `linear`:    the layers in 8 bits, and what casts to 8 bits move
- `table`:     `RankShape`: the microbatch and the options that a trace depends on; `Kept`
"""
