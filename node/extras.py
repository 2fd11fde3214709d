"""Packages that only some configurations need, each installed by an extra of this one."""

from dataclasses import dataclass
from importlib.util import find_spec

from node.errors import StartupError


@dataclass(frozen=True, slots=True)
class NeededPackage:
    """A package without which a configured value does not work."""

    setting: str
    """The key and its value, as in ``learner.wandb_project = 'mine'``."""
    package: str
    """As imported."""
    extra: str

    def check(self) -> None:
        """Look for the package without importing it.

        Raises:
            StartupError: it is not installed.
        """
        if find_spec(self.package) is None:
            raise StartupError(
                f"{self.setting} needs the package {self.package}, which is not installed",
                fix=f"pip install 'heterorl-node[{self.extra}]', or change the setting.",
            )
