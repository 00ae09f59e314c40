"""megapipe: pretraining of GPT models with tensor, pipeline and data parallelism, from a laptop CPU to a cluster.

Three words carry it: ask, plan, run. `config` says what is wanted; the plan half (topology, sharding, schedule, planner; no torch)
says what will happen; the machines (comm, tensor_parallel, model, pipeline, data_parallel, optimizer, checkpoint) carry it out.
`build` puts them together for training, inference and verification alike.
"""

__version__ = "0.1.0"
