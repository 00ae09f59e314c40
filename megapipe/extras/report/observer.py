"""What the reports say of a run while it trains: the profile of --profile-pipeline beside its plan. Imports torch."""

from __future__ import annotations

from megapipe.extras.report.profile_summary import profile_text, summarize
from megapipe.extras.report.trace import profile_trace
from megapipe.profile.profile import Profile
from megapipe.train.metrics import Observer


class ReportingObserver(Observer):
    """An observer that compares profiles with their plan."""

    def on_profile(self, profile: Profile) -> tuple[str, str]:
        return profile_text(profile, summarize(profile)), profile_trace(profile)
