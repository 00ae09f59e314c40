"""The real code of a rank with tensors that have shapes and no values, in a world that nobody has started: memory and messages, counted.

- `grid`:       every rank's place, groups and parameters audited in plain Python; which ranks differ in nothing that matters
- `rank`:       `count_rank`: runtime, row and one step of one rank on the meta device
- `live_bytes`: `LiveBytes`: bytes of all living storages and their peak, of tensors on paper as of real ones
- `meta`:       what tensors without values need: answers for whoever asks for values, and the kernels that CUDA would choose
- `report`:     planned beside counted, as text
- `run`:        the request `--dry-run`, from the plan to the exit code
"""
