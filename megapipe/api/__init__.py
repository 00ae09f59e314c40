"""The public Python API of megapipe: `__all__` is the whole of it; docs/api.md describes it, with what stays stable.

`from megapipe import Trainer` gives the same. Names are imported when they are used, so that `import megapipe` is
instant and planning needs no torch. No name is that of a package of megapipe (plan, schedule, ...): else what
`megapipe.plan` is would depend on what was imported before. Hence `make_plan` and `make_schedule`.

config.py   Config                         pipeline.py         Pipeline, over split_backward.py
trainer.py  Trainer, Callback              language_model.py   load, LanguageModel
planning.py make_plan, make_schedule, PipelineSchedule
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megapipe.api.config import Config
    from megapipe.api.language_model import LanguageModel, load
    from megapipe.api.pipeline import Pipeline
    from megapipe.api.planning import PipelineSchedule, make_plan, make_schedule
    from megapipe.api.trainer import Callback, Trainer
    from megapipe.errors import (
        CheckpointError,
        CommunicationError,
        ConfigError,
        DataError,
        MegapipeError,
        ScheduleError,
        TrainingError,
    )
    from megapipe.plan.report import plan_text
    from megapipe.train.metrics import EvaluationMetrics
    from megapipe.train.observer import StepSummary, TrainingResult

__all__ = [
    "Callback",
    "CheckpointError",
    "CommunicationError",
    "Config",
    "ConfigError",
    "DataError",
    "EvaluationMetrics",
    "LanguageModel",
    "MegapipeError",
    "Pipeline",
    "PipelineSchedule",
    "ScheduleError",
    "StepSummary",
    "Trainer",
    "TrainingError",
    "TrainingResult",
    "load",
    "make_plan",
    "make_schedule",
    "plan_text",
]
_MODULES = {
    "api.config": ("Config",),
    "api.language_model": ("LanguageModel", "load"),
    "api.pipeline": ("Pipeline",),
    "api.planning": ("PipelineSchedule", "make_plan", "make_schedule"),
    "api.trainer": ("Callback", "Trainer"),
    "plan.report": ("plan_text",),
    "train.metrics": ("EvaluationMetrics",),
    "train.observer": ("StepSummary", "TrainingResult"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'megapipe' has no attribute {name!r}; public are {', '.join(__all__)}")
    module = next((module for module, names in _MODULES.items() if name in names), "errors")
    return getattr(import_module(f"megapipe.{module}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
