#!/usr/bin/env python3
"""Convert checkpoints from and to Hugging Face and Megatron: `megapipe convert` as a script."""

import sys

from megapipe.extras.cli.convert import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
