"""Conversion of checkpoints between formats, on the CPU, without process groups, one tensor in memory at a time.

Every format is read into a `Snapshot` and written from one. Tables, read in both directions, map names of tensors and
settings. A tensor or setting that the other side cannot express is an error that names it.

- `snapshot`: a run in any format: configuration, lazily read tensors under our names, run state; megapipe's checkpoints
- `tables`: rules for settings, rows for tensors (rows.csv)
- `families`, `layer_types`, `hugging_face`: architectures of Hugging Face (defaults.csv, missing.csv), their layers
  that differ; folders with config.json and safetensors files; `extend` adds architectures from outside
- `pickled`: pickled files and folders of torch.distributed.checkpoint, read without executing anything in them
- `megatron_args`: Megatron's args; `megatron`: names, order and cuts of its tensors; `megatron_legacy`,
  `megatron_dist`: its formats `torch` and `torch_dist`
- `dcp_files`: writes folders of torch.distributed.checkpoint
"""
