"""Training steps without a GPU on a fake device `cuda:0`, whose tensors have shapes only.

- `rows`: the numbers of rows of experts, which the host of a real run reads from the device
"""
