"""The command line: the `megapipe` command, and what pretrain_gpt.py and the scripts in tools/ call.

- `command`: `megapipe SUBCOMMAND ...`; each subcommand below is a `frame.command` or a function that returns the code
- `frame`:   what all subcommands share: options as a table, one error message, Ctrl-C, exit codes, several ranks
- `pretrain`, `launch`, `plan`, `explain`: a run, from its flags; `quickstart`: one on text of this machine
- `data`:    text -> tokenizer -> token files
- `inference`, `convert`: trained models
- `report`, `schedule`, `calibrate`: what happens, and what could
"""
