"""Text to numbers and back. No torch; optional libraries are imported where they are used.

- `tokenizer.py`      the Protocol that all of them follow
- `build.py`          `--tokenizer-type NAME` -> a tokenizer
- `byte.py`           UTF-8 bytes: no file needed
- `null.py`           numbers already, separated by spaces
- `sentencepiece.py`  SentencePiece models, three readings of them, as Megatron has
- `hugging_face.py`   `tokenizer.json`, GPT-2's vocabulary and merges
- `train.py`          a SentencePiece model from a corpus, lossless for code

Names of types are Megatron's, so that token files and flags mean the same there and here.
"""
