"""`megapipe launch`: torchrun with its flags and without its tracebacks.

- `flags`:     torchrun's flags without torch, and the command of each node
- `preview`:   what would be started, for --dry-run and --slurm; `places`: its ranks and traffic
- `forwarder`: signals from the launcher to its ranks
- `torchrun`:  torchrun's agent, with the exit code of the first rank that failed
"""
