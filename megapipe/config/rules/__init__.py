"""Rules between fields: what is known to be impossible without knowing the number of ranks.

check.py       check(config): one ConfigError with a line for every rule that is broken
model.py context.py experts.py gpu.py training.py optimizer.py  generators that yield a message for each error
pairs.py       the table of pairs of options that exclude each other

`Need` declares that an option needs another one. Rules on ranks and schedules are in `plan.world_rules`.
"""
