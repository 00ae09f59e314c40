#!/usr/bin/env python3
"""Generate text with a trained model: `megapipe generate`, to be started on several ranks."""

import sys

from megapipe.extras.cli.inference import generate as main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
