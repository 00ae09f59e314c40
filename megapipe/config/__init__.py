"""What is wanted: frozen dataclasses, one section a file, filled from defaults < YAML files < flags.

config.py         Config: the twelve sections together
model.py parallel.py recompute.py offload.py training.py optimizer.py precision.py data.py checkpoint.py logging.py    one section each
option.py         how a field declares help, unit, choices, range and flags
fields.py         all_fields(): every field with its section, type and declaration
values.py         a field's value as text, both ways
yaml_file.py      the YAML form: read_entries, to_yaml
flags.py          the command line and --help
load.py           load_config(argv) -> LoadedConfig; from_yaml; with_checkpoint_model
rules/            what can be said to be impossible without the number of ranks
megatron_flags.py and .csv    every flag of Megatron: supported, already so here, or refused; deliberate differences
document.py       docs/flags.md

A new field is one declaration in its section: flag, YAML key, help, document and checks follow from it.
"""
