"""`megapipe launch`: torchrun with its flags and without its tracebacks.

- `flags`:     torchrun's flags without torch, and the command of each node
- `forwarder`: signals from the launcher to its ranks
- `torchrun`:  torchrun's agent, with the exit code of the first rank that failed
"""
