"""Measurements of this machine for planning.

- `layers`:  seconds of embedding, layers and head of a configuration, which balance the partition (`megapipe
             profile-layers`)

and for a hardware file (`megapipe calibrate`):

- `rates`:   FLOP/s and bytes/s of a rank's device
- `measure`: the rates and the links between ranks, on all ranks at the same time
- `hardware_file`: the file, written whole or not at all, and the text and JSON that are printed
"""
