"""Doors for people: the `megapipe` command and what pretrain_gpt.py and tools/ call.

- `command`:    `megapipe SUBCOMMAND ...`; each subcommand below is a module with `main(arguments) -> exit code`
- `quickstart`: from text on this machine to a small trained GPT; `quickstart_corpus`: its data
- `pretrain`:   flags -> plan -> training, verification or just the plan; `samples`: what the trained model writes
- `launch`:     torchrun without its tracebacks
- `plan`:       the plan for any number of ranks, without starting one
- `preprocess`, `train_tokenizer`, `merge`: data
- `failure`:    one readable message from one rank, whatever went wrong
"""
