"""What this machine does, measured for the planner.

- `layers`: seconds of embedding, layers and head of a configuration, for the cut (`megapipe profile-layers`)

and for a hardware file (`megapipe calibrate`):

- `stopwatch`, `rates`: what a rank's device reaches; `links`: between ranks, by the doctor's measurements; `measure`: both, on all ranks
- `machine`, `hardware_file`: what is written, whole or not at all; `words`: what is printed
"""
