"""Rules between fields: what is known to be impossible without knowing the number of ranks.

check.py       check(config), check_job(config): one ConfigError with a line for every rule that is broken
model.py gpu.py training.py optimizer.py  the rules: generators that yield a message for each error
proposals.py   values that would work instead, and the flags that were given

`Need` declares that an option needs another one. Rules on the number of ranks or the schedule are in `plan.resolve`.
"""
