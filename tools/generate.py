#!/usr/bin/env python3
"""Generate text with a trained model: `megapipe generate`, to be started on several ranks."""

import sys

from megapipe.extras.cli.generate import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
