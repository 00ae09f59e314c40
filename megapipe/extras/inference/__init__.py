"""Generation with the trained stages, on any grid: the pipeline's forward rows, with a key/value cache.

- `sampling`: which token comes next: greedy, temperature, top-k, top-p
- `generate`: prompts through the stages once, then a token at a time
- `streaming`: tokens to text as they come
- `perplexity`: the loss of a text under a model, window by window
"""
