"""The CUDA path without a GPU, on the fake device of `megapipe.extras.streams`.

- `steps`:         the program of a process with the device: two steps of each configuration that it is given, as a
                   record of kernels, bytes and host reads
- `ordered_steps`: a program that looks for races in each configuration that it is given
- `mistakes`, `plants`: mistakes that the tests have to find, in steps and in the order of streams
"""
