"""The CUDA path without a GPU: whole training steps on a fake device `cuda:0`, with tensors that have shapes only.

- `device`:     builds the device (`guard.cpp`, against the installed torch) and loads it into a process before torch
- `steps`:      the program of such a process: two steps of each configuration that it is given, as a record
- `test_steps`, `test_budget`: what must hold of those records
"""
