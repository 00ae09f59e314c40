"""Checkpoints: independent of the grid that wrote them, complete or absent, all bytes checksummed, nothing pickled.

    ROOT/latest                                newest step's folder, a hint for people and scripts
    ROOT/step_00000100/manifest.json           places and checksums of all tensors, run state, sizes of all files
    ROOT/step_00000100/config.yaml             resolved configuration of the run; tokenizer/: its files, if any
    ROOT/step_00000100/rank_00003.safetensors  boxes of which rank 3 holds the first replica: `key/parameter@offset`
    ROOT/.step_00000100.tmp-5f0c...            a save in progress or an interrupted one, removed at the next start

`key` is `master` (fp32 or fp64), `exp_avg`, `exp_avg_sq`, `momentum`, or `weights` if masters were not saved.
Vocabulary padding is never saved. Reading order: `manifest`, `folder` (a root, its checkpoints and rollbacks),
`changes`, `starts` and `lock`, none of which imports torch; `disk`, `shard`; then the collectives `save` and `load`.
"""
