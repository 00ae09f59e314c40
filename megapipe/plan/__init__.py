"""From what is asked to what will happen: `resolve` turns a Config and a number of ranks into a RunPlan.

Training, evaluation, the dry run, the search and `--verify-grid` all go through it.

- `resolve`:  cross rules, derived values, defaults -> RunPlan; every impossible wish is refused here, before any process group
- `run_plan`: RunPlan: topology, cut, parameters, schedules, batch sizes: all a rank needs to know
- `batch`:    the global batch over the run, with its ramp-up
- `cut`:      which layers each stage gets, by hand, in equal numbers or stage by stage; `balance`: for the busiest rank, `rank_bytes`: what
              a rank needs with so many layers
- `chunks`:   which schedule runs, and how many model chunks a rank then holds
- `costs`:    seconds of every op of every stage, from `layer_costs`: those of embedding, layers and head, by FLOPs or as measured in a
              file (`measured_layers`)
- `flops`:    floating-point operations of layer, head, step
- `hardware`: what accelerators and their links can do: a table, or a file
- `fp8`:      the layers whose linears multiply in 8 bits, their copies of weights, what casts move; `linears`: shapes of a layer's linears
- `layer_time`: seconds of a layer and of the head on such hardware; `step_time`: those of a step of a plan
- `layout`:   what a search varies; `bounds`: what no plan of a layout can go below; `short_step`: a step of some fills for a whole one
- `search`:   the fastest layouts that fit; `objective`: the fewest accelerators, the cheapest tokens; `reasons`: why, in words
- `search_report`: what was found, as text or data
- `published`: runs of others, to hold predictions against; `megatron_memory`: Megatron-LM's own estimate
- `shelf`:    what the plans of a search share
- `bubble`:   the step simulated on FLOPs
- `activations`: what a layer and a stage keep for their backward, for every recompute option; equal to what autograd saves
- `memory`:   bytes of each rank, item by item, at the peak of a step
- `offload`:  which storages of layers wait on the host, when; `residence`: what is on the device meanwhile
- `graph_memory`: what CUDA graphs hold for the whole run
- `report`:   the plan as text
"""
