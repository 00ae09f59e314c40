"""`ReportingObserver`: what is said of kernels, profiles and slow ranks while a run trains. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megapipe.extras.report.kernels import kernel_lines
from megapipe.extras.report.profile_summary import profile_text, summarize
from megapipe.extras.report.stragglers import find_stragglers
from megapipe.extras.report.trace import profile_trace
from megapipe.gpu.kernels import Kernels
from megapipe.monitor.heartbeat import RankPace
from megapipe.plan.run_plan import RunPlan
from megapipe.profile.profile import Profile
from megapipe.train.metrics import Observer


class ReportingObserver(Observer):
    """An observer that names the kernels, compares profiles with their plan, and names what is slow."""

    def on_kernels(self, plan: RunPlan, kernels: Kernels, device: torch.device, backend: str) -> Sequence[str]:
        return kernel_lines(plan, kernels, device, backend)

    def on_profile(self, profile: Profile) -> tuple[str, str]:
        return profile_text(profile, summarize(profile)), profile_trace(profile)

    def on_paces(
        self, paces: Sequence[RankPace], groups: Mapping[str, Sequence[tuple[int, ...]]], names: Sequence[str]
    ) -> list[str]:
        return find_stragglers(paces, groups, names)
