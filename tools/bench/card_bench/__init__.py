"""Parts of tools/bench/card.py: the report, jobs of one card, and the measurements.

- `report`:   figures with predictions and peers, bars, failures, the time limit, JSON and table
- `jobs`:     plans and jobs of flags, their predicted steps; `processes`: commands of megapipe and their metrics
- `layers`:   layers of Llama-3 8B in bf16 and fp8, beside peers; `megatron`: Megatron-Core's model
- `training`: whole training of 0.5B and 1.5B
- `features`: experts, latent attention, a ring, Muon, the optimizer's bytes per second
- `memory`:   planned, counted and allocated bytes
- `switches`: CUDA graphs, compiled blocks, offload, SM carve-out, each on and off
- `pipeline`: pipeline schedules with a core for each of 8 ranks
"""
