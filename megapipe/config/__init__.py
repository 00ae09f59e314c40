"""The configuration: frozen dataclasses, one for each section, filled from defaults < YAML files < flags.

options.py fields.py    the declaration of a field: help, unit, choices, range, flags, needed option; its values as text
model.py parallel.py training.py gpu.py files.py    the sections
config.py       Config: the twelve sections; ResolvedConfig: with everything derived filled in; all_fields()
yaml_file.py    read_entries and to_yaml: the YAML form
changes.py      the class of every field: what its change means for a run that resumes
flags.py        the command line and --help
load.py         load_config(argv) -> LoadedConfig; from_yaml; with_checkpoint_model
rules/          rules between fields that do not depend on the number of ranks
megatron_flags.py, .csv    every flag of Megatron in a class: supported, already so here, neutral, refused
problems.py     all that is wrong with a command line and its files, reported at once; values that would work instead

A new field is a declaration in its section, from which flag, YAML key and checks follow, and a row in changes.csv if
its class is not that of `section.*` there.
"""
