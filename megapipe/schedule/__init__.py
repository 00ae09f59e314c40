"""The pipeline as data: which rank computes, sends, receives and reduces what, and in which order, decided before anything runs.

    action         Op, Action ("2F0": stage 2, forward, microbatch 0) and its text form
    placement      which pp_rank holds which stage: linear, loop, V, two directions
    schedule       Schedule: one row of actions a pp_rank, no bubbles stored; CSV
    dependencies   needs and makes: the one rule that order, communication, proof, time and memory read
    generate/      one schedule family a file; `forward_only` makes the rows of evaluation
    build          the table of names; build_schedule (compute only), build_lowered (with messages and reductions)
    lower          compute-only -> with SEND, RECV and REDUCE_GRAD
    validate       complete, placed, ordered, first-in first-out, free of deadlock; the least send depth
    simulate       Costs -> Timeline: start and end of every action, idle, peaks
    memory         what a rank holds as time goes by: live chunks, inputs that wait
    flow           how many messages a channel has under way when no sender waits
    slots          which buffers of its stage a microbatch in flight has, where each needs its own (CUDA graphs)
    moves          when the activations of which layers leave the device and come back
    head_start     the forwards of a step that run before the verdict on the step before
    weight_versions  which weights each microbatch of an asynchronous schedule uses
    compare        all families side by side for one model: the table of `megapipe schedule compare`
    machine        the walk over all rows that validate and simulate share
    collector      the cycle collector waits while a schedule is made, proven or simulated
    partition      layers -> stages: by cost, by count, by Megatron's layout string
    grid           the rank x slot grid as text, shown in every ScheduleError

Passes are functions from Schedule to Schedule or to a report: generate -> validate -> lower -> validate -> (simulate | draw | run).
A new schedule is one file in generate/ and one row in build.SCHEDULES; engine, simulator, planner and drawings do not change.
"""
