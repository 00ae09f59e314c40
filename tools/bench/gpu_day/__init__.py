"""What tools/bench/first_day.py is made of; nothing here imports torch.

parts    the parts of the day, the most valuable first: what each decides, its commands, seconds and GPUs
running  one command with a limit of time, ended with all of its processes
record   docs/gpu_record.tsv: what ran on which device, and how it ended
figures  numbers of a part, beside what the planner expects
summary  first_day.md, and the archive for a report
page     the table of docs/gpu.md and the sentences of pages, from the record
facts    the machine: GPU, compilers, libraries, limits (a script)
"""
