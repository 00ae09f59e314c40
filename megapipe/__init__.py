"""megapipe: pretraining of GPT models with tensor, pipeline and data parallelism, from a laptop CPU to a GPU cluster.

A run has three stages. The configuration (`config`) holds the options of the user. The plan (`plan`, with `topology`,
`layers`, `sharding` and `schedule`; no torch) computes the grid, the stages, the schedule and the memory of every rank.
`assembly` builds model, optimizer, pipeline and communicators from the plan, and `train` runs the steps.
`extras` holds the command line and the tools around training, such as conversion, inference, reports and verification.
"""

__version__ = "0.1.0"
