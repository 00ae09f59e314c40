"""What describes the layers of a model without torch: their parameters, and how attention and experts divide work.

What a layer keeps, multiplies and sends is traced from its module (`trace`).

- `model`:     `ModelSpec`: the parts of a model, one `LayerSpec` a transformer layer; its parameters in model order;
               `rank_shape`: the shape that traces depend on, from a configuration
- `branch`:    `Branch`: what every part of a layer says of itself; its norms are part of it
- `attention`, `latent_attention`, `mixer`, `mlp`, `moe`, `ends`: the parts
- `norm`, `linear`: what parts are made of, and what casts to 8 bits move
- `table`:     `RankShape`: the microbatch and the options that a trace depends on; `Kept`, `AttentionWork`
"""
