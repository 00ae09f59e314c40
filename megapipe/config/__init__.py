"""What is wanted: frozen dataclasses, one section a file, filled from defaults < YAML < flags.

config.py        Config: the nine sections together
model.py ... logging.py   one section each
option.py        how a field declares help, unit, choices, range and flags
"""
