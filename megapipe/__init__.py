"""megapipe: pretraining of GPT models with tensor, pipeline and data parallelism, from a laptop CPU to a GPU cluster.

A run has three stages. The configuration (`config`) holds the options of the user. The plan (`plan`, with `topology`,
`layers`, `sharding` and `schedule`) computes the grid, the stages, the schedule and the memory of every rank.
`assembly` builds model, optimizer, pipeline and communicators from the plan, and `train` runs the steps.
`extras` holds the command line and the tools around training, such as conversion, inference, reports and verification.

The public Python API is `__all__` (docs/api.md); all else is internal. Its names are imported when they are used,
so that `import megapipe` is instant. None of them is that of a package of megapipe (plan, schedule, ...): what
`megapipe.plan` is would then depend on what was imported before. Hence `make_plan` and `make_schedule`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megapipe.version import __version__ as __version__

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
    from megapipe.train.metrics import EvaluationMetrics, StepSummary, TrainingResult

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
    "train.metrics": ("EvaluationMetrics", "StepSummary", "TrainingResult"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'megapipe' has no attribute {name!r}; public are {', '.join(__all__)}")
    module = next((module for module, names in _MODULES.items() if name in names), "errors")
    return getattr(import_module(f"megapipe.{module}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
