"""From what is asked to what will happen: `resolve` turns a Config and a number of ranks into a RunPlan.

Training, evaluation, the dry run, the search and `--verify-grid` all go through it.

- `resolve`:  cross rules, derived values, defaults -> RunPlan; every impossible wish is refused here, before any process group
- `run_plan`: RunPlan: topology, cut, parameters, schedules, batch sizes: all a rank needs to know
- `batch`:    the global batch over the run, with its ramp-up
- `flops`:    floating-point operations of layer, head, step; MFU
- `memory`:   bytes per rank, item by item
- `report`:   the plan as text
"""
