"""Packages that only some configurations need, each installed by an extra of this one."""

from dataclasses import dataclass
from importlib.util import find_spec

from node.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NeededPackage:
    """A package without which a configured value does not work."""

    key: str
    """As in ``learner.wandb_project``."""
    value: str
    package: str
    """As imported."""
    extra: str
    source: str = "the configuration"

    def check(self) -> None:
        """Look for the package without importing it.

        Raises:
            ConfigError: it is not installed.
        """
        if find_spec(self.package) is None:
            raise ConfigError(
                key=self.key,
                value=self.value,
                source=self.source,
                rule=f"needs the package {self.package}, which is not installed",
                fix=f"pip install 'heterorl-node[{self.extra}]', or change the setting.",
            )
