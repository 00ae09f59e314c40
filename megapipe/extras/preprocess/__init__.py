"""Text to token files, before a run: preprocessing, training of a tokenizer, merging. No torch; formats are Megatron's.

- `preprocess`          text -> token files, in several threads or processes; `partial_output`: its progress
- `text_source`         documents from JSON lines, plain text, directory trees, pipes; `tables`: parquet, Arrow, zstd
- `corpus`              the files that a user names, and how documents are read from them
- `tokenizer_training`  text -> a folder with a tokenizer.json, special tokens and a chat template
- `merge`               several token files -> one
- `indexed_writer`      the index of token files, and their names
"""
