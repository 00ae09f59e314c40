"""Tools around a training run: search, verification, conversion, inference, reports, diagnosis and the command line.

The core, everything else in `megapipe`, never imports this package.
"""
