"""`megapipe migrate`: what every flag of a Megatron-LM launch script does here. The script is parsed, never executed.

shell_script.py   text -> commands -> a walk through them with their variables, up to the calls of pretrain_gpt.py
yaml_script.py    YAML of launchers around Megatron-LM -> the arguments of pretrain_gpt.py
judge.py          flags -> what happens to each, by the functions that read the real command line; the report as text
script_report.py  script -> its judgement, the grid, its memory, and ways to make an impossible grid possible
"""
