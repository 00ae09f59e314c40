"""The door to kernels of other libraries: each is imported in one file, inside a function, and only when the configuration names it.

- `choose`:              what the configuration chose -> `Kernels`, and what to say about it at the start
- `installed`:           the libraries, how each is installed, and the one error where one is missing
- `transformer_engine`:  linears, norms, attention and Adam of NVIDIA's Transformer Engine
- `apex`:                Adam, norms and the accumulating weight gradient of NVIDIA's apex
- `flash`:               attention of flash-attn
- `compiled`:            torch.compile for pointwise functions

Nobody else imports these libraries (tests/test_walls.py). The CPU tests run the adapters against small stand-ins with the libraries'
signatures (tests/gpu/stand_ins); docs/gpu.md says what has run on a card.
"""
