"""pretrain_gpt.py with slower steps: PAUSE_SECONDS [flags of pretrain_gpt.py]."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megapipe.extras.cli.pretrain import main
from tests.faults.plants import pause

if __name__ == "__main__":
    seconds, *flags = sys.argv[1:]
    pause(float(seconds))
    sys.exit(main(flags))
