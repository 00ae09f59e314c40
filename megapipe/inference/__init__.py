"""Generation with the trained stages, on the grid they were trained on.

- `sample`: plain sampling without a cache: every token runs the whole sequence through the pipeline
"""
