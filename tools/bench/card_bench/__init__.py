"""Parts of tools/bench/card.py: the report, jobs of one card, their peers, and the measurements.

- `report`:     figures with predictions and peers, bars, failures, the time limit, JSON and table
- `jobs`:       plans of flags, their predicted steps; `processes`: commands of megapipe and their metrics
- `contenders`: a plan on one rank, and its peers; `plain`: a Llama in PyTorch; `megatron`: Megatron-Core's model
- `agreement`:  the check that contenders train the same model
- `turns`:      contenders that take turns; `timing`: clocks, rates of GEMMs, peaks of memory, profiles
- `layers`:     layers of Llama-3 8B's sizes in bf16 and fp8, beside peers
- `training`:   whole training of 0.5B and 1.5B
- `features`:   experts, latent attention, a ring, Muon, the optimizer's bytes per second
- `memory`:     planned, counted and allocated bytes; one rank of a grid
- `calibrate`:  rates of the machine beside those of plans
- `primitives`: what megapipe asks of a GPU, one after another
- `switches`:   CUDA graphs, compiled blocks, offload, each on and off
"""
