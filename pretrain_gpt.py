#!/usr/bin/env python3
"""Pretrain a GPT: `torchrun ... pretrain_gpt.py [--config FILE.yaml] [flags]`; without torchrun, on one rank. `--help` lists the flags."""

import sys

from megapipe.cli.pretrain import main

if __name__ == "__main__":
    sys.exit(main())
