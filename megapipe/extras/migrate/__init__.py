"""`megapipe migrate`: what every flag of a Megatron-LM launch script does here. The script is parsed, never executed.

shell_syntax.py   text -> commands and words, unexpanded
shell_script.py   a walk through the commands of a script with its variables, up to its calls of pretrain_gpt.py
judge.py          flags -> what happens to each, by the functions that read the real command line
report.py         the table, as text and as JSON
"""
