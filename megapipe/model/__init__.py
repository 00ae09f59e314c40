"""The GPT, one pipeline stage at a time: GPT-2, Llama and shapes in between, all described by `ModelConfig`.

    stage               GPTStage, the part of one pipeline stage; Block, one layer, and a table of what it saves
    embedding_and_head  the first part of the model, and the last part with the loss
    microbatch          Microbatch, a stage's input besides the hidden states; StageLoss; KVCache
    attention           projections, q|k|v by query group, qk-norm, core attention by one of all kernels
    context             attention masks and rotary tables, built once per microbatch, shared by layers that are alike
    ring_attention      attention in blocks: rings of cp ranks (context_parallel), slices, sinks; partial_results sums
    segments            a layer as one list of segments and operators, which eager and compiled layers walk
    mlp, moe, norm      the MLP; mixtures: router, permutation, dispatch, experts; norms, also over all heads
    layer_factory       builds linears, norms and attention from the kernels that the configuration chose
    recompute           activations that the backward computes again

Activations are [s, b, h]: sequence, batch, hidden; with sequence parallelism [s / tp, b, h] between layers.
"""
