"""A tokenizer of your own: characters, with those of a text file as vocabulary.

megapipe preprocess --extension examples/extend_tokenizer.py --tokenizer-type characters \
    --tokenizer-model alphabet.txt --input corpus.jsonl --output-prefix data/corpus --append-eod
"""

from collections.abc import Sequence
from pathlib import Path

from megapipe.extend import register_tokenizer

FILE = "alphabet.txt"


@register_tokenizer("characters", needs_model=True)
class Characters:
    """One id for each character of the file, in its order; then one for all other characters, and one that ends a
    document.
    """

    def __init__(self, model: str) -> None:
        path = Path(model) / FILE if Path(model).is_dir() else Path(model)  # a checkpoint keeps it in a folder
        self.letters = sorted(set(path.read_text(encoding="utf-8")))
        self.ids = {letter: number for number, letter in enumerate(self.letters)}
        self.unknown = len(self.letters)
        self.eod = self.unknown + 1
        self.vocab_size = self.eod + 1

    def encode(self, text: str) -> list[int]:
        return [self.ids.get(letter, self.unknown) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(
            self.letters[number] if number < self.unknown else "\ufffd" for number in ids if number != self.eod
        )

    def save(self, folder: Path) -> None:
        """Write what `__init__` reads from a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text("".join(self.letters), encoding="utf-8")
