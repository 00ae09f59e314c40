"""Inference with trained stages on any grid: the pipeline's forward rows, with a key/value cache.

generate    prompts through the pipeline once, then one token at a time; streaming of the text
sampling    the choice of the next token: greedy, temperature, top-k, top-p
perplexity  the loss of a text under a model, window by window
"""
