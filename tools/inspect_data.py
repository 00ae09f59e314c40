#!/usr/bin/env python3
"""Show which documents a step was trained on: the same as `megapipe inspect data`."""

import sys

from megapipe.extras.cli.inspect import data as main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
