"""pretrain_gpt.py with faults on request: FOLDER PAUSE_SECONDS [flags of pretrain_gpt.py]."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megapipe.environment import read_environment
from megapipe.extras.cli.pretrain import main
from tests.faults.plants import arm

if __name__ == "__main__":
    folder, pause, *flags = sys.argv[1:]
    arm(read_environment().global_rank, Path(folder), float(pause))
    sys.exit(main(flags))
