"""Tokenizers, under Megatron's type names, so that flags and token files mean the same in both. No torch.

- `tokenizer`      the interface of all tokenizers, two that need no files, `--tokenizer-type NAME` -> a tokenizer
- `hugging_face`   `tokenizer.json`, and GPT-2's vocabulary and merges
- `sentencepiece`  SentencePiece models: three ways to read one
- `chat`           chat templates: a conversation -> its tokens, and which of them are trained
- `rendering`      a template in a separate process, with limits of time and memory

Optional libraries are imported when they are used.
"""
