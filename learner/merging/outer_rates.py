"""The outer rates in force: the configured ones, until merged changes grow as in divergence; pure.

    configured --norms grow--> lowered, without momentum --they grow again--> lowered further
        ^                             |
        '-- others are configured ----'

Lowered rates hold over restarts and rollbacks until ``outer_rate`` or ``outer_momentum`` is configured
otherwise: what made the run diverge is for people to find, and rates that went up by themselves would make it
diverge again.
"""

from dataclasses import dataclass, replace

from learner.merging.formulas.stability import NORMS_KEPT, grows, lowered_rate
from learner.merging.merge_settings import MergeSettings


@dataclass(frozen=True, slots=True)
class OuterRates:
    """Norms of the newest merges, and the rates that follow; part of a learner's progress."""

    norms: tuple[float, ...] = ()
    """Norms of the newest mean changes since rates were lowered, oldest first; at most ``NORMS_KEPT``."""
    newest_norm: float = 0.0
    lowered: float | None = None
    """The rate in force, without momentum; None: the configured ones are."""
    instead_of: tuple[float, float] = (0.0, 0.0)
    """Rate and momentum that were configured when it was lowered."""

    def of(self, configured: MergeSettings) -> MergeSettings:
        """Return the settings of the next merge."""
        if self.lowered is None or self.instead_of != _rates(configured):
            return configured
        return configured.model_copy(update={"outer_rate": self.lowered, "outer_momentum": 0.0})

    def are_lowered(self, configured: MergeSettings) -> bool:
        """Whether others than the configured rates are in force."""
        return self.of(configured) is not configured

    def after(self, norm: float, configured: MergeSettings) -> "OuterRates":
        """Return the rates after a merge by these, whose mean change had this norm."""
        now = self if self.are_lowered(configured) else OuterRates(self.norms)
        norms = (*self.norms, norm)[-NORMS_KEPT:]
        if not grows(norms):
            return replace(now, norms=norms, newest_norm=norm)
        used = self.of(configured)
        rate = lowered_rate(used.outer_rate, used.outer_momentum, overlap=used.overlap)
        return OuterRates((), norm, rate, _rates(configured))

    def rolled_back(self) -> "OuterRates":
        """Return the rates once a rollback has undone the newest merges."""
        return replace(self, norms=())


def _rates(settings: MergeSettings) -> tuple[float, float]:
    return settings.outer_rate, settings.outer_momentum
