"""Errors of predicted differences between two layouts of one model, in published sweeps.

Written by `python -m tools.accuracy --write`. By what the two differ in: the rms of the logarithm of predicted over
measured ratios of their times, and the number of pairs; of other differences there are too few.
"""

SPREAD = {
    "microbatch": (0.070, 216),
    "recompute": (0.080, 25),
    "several": (0.129, 2133),
    "the pipeline": (0.105, 236),
    "tp": (0.085, 269),
}
