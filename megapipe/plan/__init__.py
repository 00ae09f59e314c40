"""A Config and a number of ranks become a `RunPlan`, or one ConfigError that names the rule and a way out.

- `resolve`:     fills in and checks what follows from several sections: grid, batch, cut of the layers, schedule
- `run_plan`:    `RunPlan`: grid, stages, parameters, buffers and schedules of every rank
- `activations`, `temporaries`, `offload`, `memory`: bytes of each rank
- `layer_time`, `step_time`, `traffic`, `flops`, `hardware`: seconds of a step, and what it sends and computes
- `layer_costs`, `measured_layers`, `rank_bytes`, `balance`, `bubble`: costs of stages and the cut into stages
- `report`:      the plan as text
"""
