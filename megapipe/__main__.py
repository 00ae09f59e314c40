"""`python -m megapipe`: the megapipe command."""

import sys

from megapipe.extras.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
