"""Pipeline schedules as data: which rank computes, sends, receives and reduces what, in which order, fixed before
anything runs.

    action, placement    Op, Action ("2F0": stage 2, forward, microbatch 0); which pp_rank holds which stage
    schedule             Schedule: one row of actions per pp_rank, bubbles not stored; CSV; the grid of error messages
    dependencies         NEEDS and MAKES of each op, from which order, communication, proof and times are derived
    lifetimes            what each action creates and frees: peaks, CUDA-graph slots
    families, generate/  the table of names and builders; the generators of compute-only rows
    lower                adds SEND, RECV and REDUCE_GRAD; lets a step start before the last one ended
    recompute            adds RECOMPUTE to compute-only rows, where a rank waits for a gradient
    sharding, offload    add the gathers of sharded weights, the copies of offloaded activations, to lowered rows
    validate, machine    the proof (complete, ordered, no deadlock); the walk that proof and simulator share
    costs                Shape, Costs, AutoGoal: the arguments of generators and simulator
    simulate             Costs -> Timeline, bubbles
    stream               asynchronous schedules without an end, their proof, and the versions of the weights
    parts, experts       actions cut into parts of layers, all-to-alls on a second resource; what each schedule hides
    partition, balance   layers -> stages
"""
