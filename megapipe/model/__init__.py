"""The GPT, one pipeline stage at a time: GPT-2 shape, Llama shape and what lies between from one definition (`ModelConfig`).

- `stage`:          `GPTStage`: embedding?, blocks a..b, head?; forward to the next stage's input or to the loss
- `microbatch`:     `Microbatch`: what a stage is called with besides the hidden states
- `embedding`, `head`: the first part and the last one
- `block`:          x + attention(norm(x)), then x + mlp(norm(x))
- `attention`:      the projections around attention, q|k|v by query group, qk-norm, rotation
- `core_attention`: softmax(q k^T) v: torch's fused kernels, or written out where those lack an option
- `context`:        which keys a query sees, and the rotary tables: made once a microbatch, shared by the layers
- `mlp`, `activation`, `norm`, `rotary`: the parts of a block
- `recompute`, `kept_attention`: what is made again in the backward instead of being kept; attention's results that are kept all the same
- `init`:           initial weights that do not depend on the grid

Activations are [s, b, h]: sequence, batch, hidden; under sequence parallelism those between blocks are [s / tp, b, h].

Kept for the backward: elements of the model's dtype unless said otherwise (fp32+: at least fp32), a layer, on one rank. T = b s tokens;
t = T, under sequence parallelism T / tp. H hidden; F, Q, K = ffn, heads x head_dim, key/value heads x head_dim, divided by tp (K: at least
one head). "not with x": not if --recompute-modules names x.
    2 t H                   residual stream, the inputs of the two norms
    2 t x (1 or 2) fp32+    their statistics: RMSNorm 1, LayerNorm 2                      (the second not with both layernorm and mlp)
    2 t H                   their outputs, the inputs of linear_qkv and linear_fc1        not with layernorm
    T (Q + 2 K)             q, k and v, one tensor
    T Q                     attention's output, the input of linear_proj                  not with core_attn
    T heads fp32+           log-sum-exp of the logits                                     not with core_attn
    T F, gated 2 T F        output of linear_fc1, the input of the activation             not with mlp; ReLU: never
    T F                     output of the activation, the input of linear_fc2             not with mlp, nor (but for ReLU) activation
    2 t H bytes             masks of hidden dropout
    qk-norm adds            T (Q + K), and statistics of each head
    explicit attention      (soft-cap, attention dropout, softmax in fp32) has, instead of the log-sum-exp and not with core_attn,
                            S2 fp32+ probabilities, S2 = b heads s^2; S2 fp32+ of tanh with a cap; with dropout S2 and S2 bytes of mask,
                            without it S2 in half types; T Q with grouped queries
    documents, grouped      q, k and v with k and v repeated for each query head: 3 T Q instead of T (Q + 2 K), with qk-norm + T (Q + 2 K)
Full recompute: t H for each checkpoint, and with --recompute-keep-attention T Q and the log-sum-exp of each of its layers.
Embedding: t H bytes of dropout mask. Head: 2 t H and statistics of the final norm,
logits T V / tp (with a soft-cap twice, fp32+), 2 fp32+ a token. A stage and microbatch: the mask of `context`, where there is one.
`tests/model/saved_bytes.py` counts, `tests/model/test_saved_bytes.py` compares.
"""
