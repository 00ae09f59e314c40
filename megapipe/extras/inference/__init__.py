"""Inference with trained stages on any grid: the pipeline's forward rows, with a key/value cache.

saved_model the model of a checkpoint on these ranks; the tokens that it is scored on
generate    prompts through the pipeline once, then one token at a time: greedy, temperature, top-k, top-p; streaming;
            perplexity: the loss of a text under a model, window by window
dialog      a conversation in a terminal
"""
