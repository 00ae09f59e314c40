#!/usr/bin/env python3
"""Show what a checkpoint holds: the same as `megapipe inspect checkpoint`."""

import sys

from megapipe.extras.cli.inspect import checkpoint as main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
