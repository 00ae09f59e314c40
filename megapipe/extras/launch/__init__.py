"""`megapipe launch`: torchrun with its flags and without its tracebacks, and a preview of where each rank will run.

- `flags`:     torchrun's flags without torch, and the command of each node
- `forwarder`: signals from the launcher to its ranks
- `torchrun`:  torchrun's agent, with the exit code of the first rank that failed
- `places`:    rank -> host, device and grid position, and the traffic between nodes
"""
