"""Measurements of this machine for planning.

- `rates`:         FLOP/s and bytes/s of the ranks' devices and of the links between them (`megapipe calibrate`)
- `layer_times`:   seconds of embedding, layers and head of a configuration, which balance stages (`profile-layers`)
- `tune`:          the settings that make a run fastest (`megapipe calibrate --tune`)
- `hardware_file`: the hardware file with these, written whole or not at all, and the text and JSON that are printed
- `hardware_reader`: reads such a file, for all commands that take --hardware
"""
