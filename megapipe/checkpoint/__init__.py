"""State on disk, independent of the grid that wrote it: complete or not there, every byte under a checksum, nothing pickled.

    ROOT/latest                              the newest step's folder name: a hint for people and scripts
    ROOT/step_00000100/manifest.json         tensors as boxes with place and checksums, position, sizes of all files; its own checksum
    ROOT/step_00000100/config.yaml           the resolved configuration of the run
    ROOT/step_00000100/rank_00003.safetensors  the boxes that rank 3 holds as first replica, named `key/parameter@offset`
    ROOT/step_00000100/tokenizer/            if there is one
    ROOT/.step_00000100.tmp-5f0c...          a save under way, or one that was interrupted: removed at the next start

A tensor's name is `key/parameter`: `master/` (fp32 or fp64), `exp_avg/`, `exp_avg_sq/`, `momentum/`, and `weights/` where masters were
left out. Vocabulary padding is not saved.

Reading order:
- `manifest`:      what is where, as dataclasses and JSON (no torch)
- `folder`:        names, which checkpoints of a root are complete, cleaning up (no torch)
- `configuration`: the configuration a checkpoint was written with (no torch)
- `tensor_box`:    a box of a global tensor and the memory that holds it
- `disk`:          every write, sync, rename and removal, observable
- `shard_file`:    one rank's safetensors file, written with checksums; `shard_reader`: read in the blocks that are needed
- `attempt`:       the steps of one save on a rank, in the order that survives a crash
- `save`, `load`:  the collectives; a save that training waits for, or beside it over copies in `staging`
- `verify`:        every checksum computed again (no torch); `compare`: two checkpoints tensor by tensor
- `retention`:     which checkpoints are kept (no torch)
"""
