#!/usr/bin/env python3
"""Convert text to token files: `megapipe preprocess` under the name of Megatron's tool."""

import sys

from megapipe.extras.cli.data import preprocess as main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
