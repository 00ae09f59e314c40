#!/usr/bin/env python3
"""Draw the pipeline schedule of a configuration: `megapipe plan --schedule-svg FILE`, whose file is --output here.

python tools/draw_schedule.py --world-size 8 --output schedule.svg --config configs/quickstart.yaml --vocab-size 2048
"""

import sys

from megapipe.extras.cli.plan import main

if __name__ == "__main__":
    sys.exit(main([word.replace("--output", "--schedule-svg") for word in sys.argv[1:]]))
