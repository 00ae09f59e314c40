"""From a RunPlan to the live objects of one rank: the only room that knows all machines. Training, inference and verification use it.

- `precision`: the dtypes of a run
- `loss`:      what the last stage's output means, and the denominators of the average
- `machines`:  `Machines`: stages, buffers, reducer, gather, optimizer, engines of this rank
- `updates`:   `RowUpdates`: weight versions and optimizer steps inside a row (asynchronous schedules)
- `datasets`:  the data sets and tokenizer a configuration names
"""
