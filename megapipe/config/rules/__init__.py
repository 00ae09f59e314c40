"""Rules inside the configuration: what can be said to be impossible without knowing the number of ranks.

check.py      check(config) and check_job(config); the table of all rules
model.py parallel.py training.py data.py asynchronous.py kernels.py graphs.py    the rules, each a function from a Config to a message, or
              None where it holds
wording.py    words that messages share: the nearest divisors and multiples

Rules that need the world (world size, data-parallel size, layers against stages, KV heads against tp) are the planner's.
"""
