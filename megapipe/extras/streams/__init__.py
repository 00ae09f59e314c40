"""Training steps without a GPU, on a fake device `cuda:0` whose tensors have shapes only; the order of their streams.

- `device`:   builds the device (`guard.cpp`, against the installed torch) and loads it into a process before torch
- `shapes`:   tensors without values, and the answers to what needs values or a driver
- `rows`:     the numbers of rows of experts, which the host of a real run reads from the device
- `recorder`: streams, events, graphs and NCCL on that device, as a log
- `order`:    what is ordered, what is a race, and what is computed during a message, on logs
- `ranks`:    steps of all ranks of a pipeline under the recorder; `megapipe verify --streams`
- `count`:    kernels, bytes, FLOPs, collectives and host waits of a step; `compiled`: blocks that are compiled there
- `launches`, `timeline`: the seconds of each, and what nothing hides; `roofline`: all for `megapipe plan --roofline`
"""
