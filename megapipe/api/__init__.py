"""The implementation of the public Python API, whose names `megapipe/__init__.py` lists and docs/api.md describes.

- `config`:   `Config`: the configuration of a run from keyword arguments, flags or YAML files
- `trainer`:  `Trainer` and `Callback`: pretraining from a script
- `planning`: `make_plan`; `make_schedule` and `PipelineSchedule`
- `language_model`: `load` and `LanguageModel`: a trained model in one process
- `pipeline`: `Pipeline`: any modules as stages, over `split_backward`, which splits the backward of any module
"""
