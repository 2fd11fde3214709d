"""Packages that only some configurations need, each installed by an extra of this one."""

import importlib.metadata
import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from node.errors import ConfigError

TORCH: Final = ("torch", "transformers")
"""Packages that every learner, sampler and verifier needs; a core install has neither."""


def install_line(extra: str) -> str:
    """Return the command that installs what an extra brings, beside this package as it is installed."""
    return f"pip install 'heterorl-node[{extra}]'"


def extra_of(package: str) -> str | None:
    """Return the first extra of this installation that brings a package; None: none does.

    Args:
        package: as imported.
    """
    for requirement in importlib.metadata.requires("heterorl-node") or ():
        found = re.fullmatch(r"([\w.-]+).*; extra == '([\w-]+)'", requirement.replace('"', "'"))
        if found and found[1].replace("-", "_").lower() == package.partition(".")[0].lower():
            return found[2]
    return None


@dataclass(frozen=True, slots=True)
class NeededPackage:
    """A package without which a configured value does not work."""

    key: str
    """As in ``learner.wandb_project``; or what else names the need, such as ``--role``."""
    value: str
    package: str
    """As imported."""
    extra: str
    source: str = "the configuration"

    @property
    def is_setting(self) -> bool:
        """Whether ``key`` is one of the configuration, rather than a role or a command."""
        return "." in self.key

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
                fix=install_line(self.extra) + (", or change the setting." if self.is_setting else "."),
            )
