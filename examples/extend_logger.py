"""A logger of your own: metrics as CSV, one file for each metric.

megapipe launch --nproc-per-node 4 pretrain --extension examples/extend_logger.py --logger csv --save runs/one \
    --config configs/quickstart.yaml --mock-data --vocab-size 1000
"""

from pathlib import Path
from typing import TextIO

from megapipe.extend import Config, register_logger


@register_logger("csv")
class CsvFiles:
    """Files such as csv/train_loss.csv in the run's folder, with lines step,value. Runs on rank 0 alone."""

    def __init__(self, config: Config) -> None:
        self.folder = Path(config.checkpoint.save or ".") / "csv"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.files: dict[str, TextIO] = {}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if name not in self.files:
                path = self.folder / f"{name.replace('/', '_')}.csv"
                self.files[name] = path.open("a", buffering=1, encoding="utf-8")
            self.files[name].write(f"{step},{value!r}\n")

    def close(self) -> None:
        for file in self.files.values():
            file.close()
