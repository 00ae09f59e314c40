#!/usr/bin/env python3
"""Pretrain a GPT: `torchrun ... pretrain_gpt.py [--config FILE.yaml] [flags]`; without torchrun, on one rank.

`--help` lists the flags.
"""

import sys

if __name__ == "__main__":
    try:
        from megapipe.monitor.signals import ended_by_signals

        with ended_by_signals():
            from megapipe.extras.cli.pretrain import main

            sys.exit(main())
    except KeyboardInterrupt:  # while modules were being imported
        sys.exit(130)
