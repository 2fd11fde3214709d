"""Settings of a contributor ([contributor] in the configuration file)."""

from collections.abc import Iterator
from typing import ClassVar

from learner.config import RanksConfig
from node.checks.check import Check, Surroundings
from node.config.settings import Target


class ContributorConfig(RanksConfig):
    """Section ``[contributor]``: this site's settings. The learner tells how to take and merge steps."""

    section: ClassVar[str] = "contributor"

    learner: Target
    """Where the run's learner serves contributors (its ``learner.merge.listen``), as this machine reaches it,
    ``host:port``."""

    relays: tuple[Target, ...] = ()
    """Relays to take policy versions from, ``host:port`` each; the coordinator is asked only when all of them
    are behind it. Empty: the coordinator."""

    def checks(self, surroundings: Surroundings) -> Iterator[Check]:
        """Yield the checks of packages, model and learner."""
        # Only here: what calls somebody takes as long to import as all the rest.
        from node.checks.learner_check import learner_check

        yield from super().checks(surroundings)
        yield learner_check(self.learner, surroundings.state_dir)
