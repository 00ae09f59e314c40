#!/usr/bin/env python3
"""Merge several token files into one: `megapipe merge` under the name of Megatron's tool."""

import sys

from megapipe.extras.cli.data import merge as main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
