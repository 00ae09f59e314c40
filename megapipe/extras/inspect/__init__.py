"""`megapipe inspect`: what a checkpoint holds, and what a step was trained on.

- `checkpoint`: step, files and tensors; damage; the difference of two checkpoints
- `data`:       the documents of a step or sample, and the steps that saw a document
"""
