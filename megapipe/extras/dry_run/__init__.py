"""`--dry-run`: the real code of a rank with tensors that have shapes and no values, in one process, to count memory and
messages.

- `microbatches`: how many microbatches represent all others
- `rank`:       audit of every rank's place, groups and parameters; which ranks represent all others;
  `count_rank`: runtime, schedule row and one step of one rank on the meta device; `run_steps`, for `extras.streams` too
- `run`:        the request `--dry-run`, from the plan to the printed report
"""
