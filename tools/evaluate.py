#!/usr/bin/env python3
"""Compute loss and perplexity of a trained model: `megapipe evaluate`, to be started on several ranks."""

import sys

from megapipe.extras.cli.inference import evaluate as main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
