"""The CUDA path without a GPU: whole training steps on a fake device `cuda:0`, with tensors that have shapes only.

- `device`:     builds the device (`guard.cpp`, against the installed torch) and loads it into a process before torch
- `steps`:      the program of such a process: two steps of each configuration that it is given, as a record
- `test_steps`, `test_budget`: what must hold of those records
- `recorder`, `ordered_steps`: streams, events, graphs and NCCL on that device, and a program that runs all ranks of a
  pipeline under them and looks for races
- `order`:      what is ordered and what is a race, on logs; `plants`: mistakes for `test_streams` to find
"""
