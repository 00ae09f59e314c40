"""Tokenizers, under Megatron's type names, so that flags and token files mean the same in both. No torch.

- `build`          `--tokenizer-type NAME` and its files -> a tokenizer
- `tokenizer`      the interface of all tokenizers; `ByteTokenizer` and `NullTokenizer`, which need no files
- `hugging_face`   `tokenizer.json`, and GPT-2's vocabulary and merges
- `sentencepiece`  SentencePiece models: three ways to read one, and training one from a corpus

Optional libraries are imported when they are used.
"""
