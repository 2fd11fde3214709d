"""Settings of a contributor ([contributor] in the configuration file)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from learner.config import Rematerialise
from node.checks.check import Check, Surroundings
from node.checks.installed import model_check, packages_check
from node.config.settings import Target
from node.errors import COMMAND_LINE
from node.system.device import AUTO, Device
from node.system.extras import TORCH, NeededPackage


class ContributorConfig(BaseModel):
    """Section ``[contributor]``: this machine's settings. The learner tells how to take and merge steps."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    learner: Target
    """Where the run's learner serves contributors (its ``learner.merge.listen``), as this machine reaches it,
    ``host:port``."""

    model_dir: Path
    """Directory of the model that the learner began with: version 0 of the run."""

    relays: tuple[Target, ...] = ()
    """Relays to take policy versions from, ``host:port`` each; the coordinator is asked only when all of them
    are behind it. Empty: the coordinator."""

    device: Device = Field(default=AUTO, validate_default=True)
    """Device to train on. ``auto`` is cuda where there are a GPU and a torch built for it, else cpu."""

    threads: int = Field(default=0, ge=0)
    """CPU threads for tensor work; 0 leaves the choice to torch."""

    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """As of the learner: precision of matrix products; masters are float32 either way."""

    rematerialise: Rematerialise = "none"
    """As of the learner: what is computed again in the backward pass, to leave memory for more tokens."""

    def checks(self, surroundings: Surroundings) -> Iterator[Check]:
        """Yield the checks of packages, model and learner."""
        # Only here: what calls somebody takes as long to import as all the rest.
        from node.checks.learner_check import learner_check

        yield packages_check(self.needed_packages)
        yield model_check(self.model_dir, key="contributor.model_dir")
        yield learner_check(self.learner, surroundings.state_dir)

    @property
    def needed_packages(self) -> tuple[NeededPackage, ...]:
        """The packages of a learner."""
        role = ("--role", "contributor")
        return tuple(NeededPackage(*role, package, "learner", COMMAND_LINE) for package in TORCH)
