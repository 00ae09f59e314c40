"""Checkpoints of other systems, read and written on the CPU, without a process group, one tensor in memory at a time.

Every format is read into a `Snapshot` and written from one, so that each converts into each other. What a format calls its tensors and
settings stands in tables that are read in both directions. What has no place on the other side is an error that names it.

Reading order:
- `snapshot`:      a whole run of any format: configuration, tensors under our names that are read when needed, position
- `layouts`:       how one of our tensors lies in theirs: renamed, transposed, q|k|v apart
- `names`:         tables of tensor names, and their use on one model
- `settings`:      tables of configuration keys; `rope` and `window` for those that hang together
- `families`:      the architectures of Hugging Face: names and settings of each, and those that cannot be expressed
- `safetensors_file`, `hugging_face`: a folder with config.json, safetensors files, tokenizer
- `own`:           megapipe's checkpoints
- `pickled`, `dcp_folder`: what Megatron's files and torch's are made of, read without running anything that is in them
- `megatron_settings`, `megatron_ranks`, `megatron_optimizer`: its args, the slices of its ranks, its optimizers' state
- `megatron_run`, `megatron_legacy`, `megatron_dist`, `megatron_write`: its checkpoints, `torch` and `torch_dist`, as runs that go on; back
- `dcp_run`:       runs as torch.distributed.checkpoint keeps them, of any program whose model has our parameter names
- `new_folder`:    what is written is complete or not there
- `formats`:       all of them by name
"""
