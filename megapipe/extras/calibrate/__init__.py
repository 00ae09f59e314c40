"""Measurements of this machine for planning.

- `layers`:        seconds of embedding, layers and head of a configuration, which balance the partition (`megapipe
                   profile-layers`)
- `rates`:         FLOP/s and bytes/s of the ranks' devices and of the links between them (`megapipe calibrate`)
- `hardware_file`: the hardware file with these, written whole or not at all, and the text and JSON that are printed
"""
