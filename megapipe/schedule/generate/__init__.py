"""One schedule family a file. A generator returns the compute-only rows for `Shape` (ranks, chunks, microbatches, group size);
`megapipe.schedule.build` gives it a name, states its limits and validates what it made.
"""
