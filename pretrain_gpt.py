#!/usr/bin/env python3
"""Pretrain a GPT: `torchrun ... pretrain_gpt.py [--config FILE.yaml] [flags]`; without torchrun, on one rank.

`--help` lists the flags. The same as `megapipe pretrain`.
"""

import sys

if __name__ == "__main__":
    try:
        from megapipe.extras.cli.command import main

        sys.exit(main(first=["pretrain"]))
    except KeyboardInterrupt:  # while modules were being imported
        sys.exit(130)
