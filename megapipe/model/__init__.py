"""The GPT, one pipeline stage at a time: GPT-2 shape, Llama shape and what lies between from one definition (`ModelConfig`).

- `stage`:          `GPTStage`: embedding?, blocks a..b, head?; forward to the next stage's input or to the loss
- `microbatch`:     `Microbatch`: what a stage is called with besides the hidden states
- `block`:          x + attention(norm(x)), then x + mlp(norm(x))
- `attention`:      the projections around attention, q|k|v by query group, qk-norm, rotation
- `core_attention`: softmax(q k^T) v: torch's fused kernels, or written out where those lack an option
- `masks`:          which keys a query sees, and the rotary tables: made once a microbatch, shared by the layers
- `mlp`, `activation`, `norm`, `rotary`: the parts of a block
- `recompute`:      what is made again in the backward instead of being kept
- `init`:           initial weights that do not depend on the grid

Activations are [s, b, h]: sequence, batch, hidden; under sequence parallelism those between blocks are [s / tp, b, h].

Bytes kept for the backward, in elements a layer, per rank: S = s / tp under sequence parallelism, else s; T = b s tokens, t = b S of them
on the slice; H, F, Q, K = hidden, ffn, query heads x head_dim, kv heads x head_dim, the last three divided by tp (K: at least one head).
    t H x 2                 the inputs of the two norms (residual stream)
    t x (1 or 2) x 2 fp32   their statistics: 1 / rms, for LayerNorm the mean too
    t H x 2                 their outputs, the inputs of linear_qkv and linear_fc1        not with `layernorm` recomputed
    T (Q + 2 K)             q, k and v, one tensor                                        (twice, less K, with qk-norm)
    T Q + T heads fp32      attention's output (input of linear_proj), log-sum-exp        not with `core_attn`
    T x (F or 2 F)          output of linear_fc1, kept by the activation                  not with `mlp`
    T F                     output of the activation, the input of linear_fc2             not with `activation` or `mlp`
ReLU keeps its output only. Full recompute keeps t H for each checkpoint. `tests/model/saved_bytes.py` counts them.
"""
