"""A Config and a number of ranks become a `RunPlan`, or one ConfigError that names the rule and a way out.

- `resolve`:     fills in and checks what follows from several sections: grid, batch, cut of the layers, schedule
- `run_plan`:    `RunPlan`: grid, stages, parameters, buffers and schedules of every rank
- `batch`, `schedule_choice`, `cut`: the batch over the run, the schedule and its chunks, the layers of each stage
- `activations`, `memory`: bytes of each stage and of each rank
- `layer_costs`: FLOPs of layers, and their costs relative or measured
- `layer_time`, `step_time`, `traffic`, `hardware`: seconds of a step and its bubble, and what it sends
- `report`:      the plan as text
"""
