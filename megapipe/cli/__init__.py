"""Doors for people: the `megapipe` command and what pretrain_gpt.py and tools/ call.

- `command`:  `megapipe SUBCOMMAND ...`
- `pretrain`: pretraining: flags -> plan -> training, verification or just the plan
- `launch`:   torchrun without its tracebacks
- `failure`:  one readable message from one rank, whatever went wrong
"""
