"""Generators of schedules: each returns the compute-only rows for a `Shape` (ranks, chunks, microbatches, group size).

    whole_backward   naive, gpipe, 1f1b, interleaved, breadth-first, pipedream, pipedream-2bw
    split_backward   zb-h1, zb-h2: the backward split into input and weight gradients;
                     dualpipe, dualpipe-v: forwards overlapped with backwards
    v_shape          zb-v, v-half, v-min: split backwards on a V
    automatic        zb-auto: a search for given times and a memory limit

`megapipe.schedule.families` names them, states their limits and validates what they return.
"""
