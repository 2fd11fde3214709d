"""The files of a peer that joins: where they are, and the configuration that `join` writes once."""

import argparse
import contextlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.config.setting_sources import Setting, read_flags, value_of_text
from node.errors import StartupError
from node.identity.run_description import FILE_NAME as RUN_FILE
from node.identity.run_description import RunDescription
from node.system.device import AUTO
from node.values.roles import Role

_RELAY_LISTEN: Final = "0.0.0.0:7710"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a peer that joins keeps things."""

    role: Role
    state_dir: Path
    """``node.state_dir``."""
    config_dir: Path

    @property
    def role_dir(self) -> Path:
        return self.state_dir / self.role

    @property
    def config_file(self) -> Path:
        return self.config_dir / f"{self.role}.toml"

    @property
    def run_file(self) -> Path:
        return self.config_dir / RUN_FILE


def check_other_run(run_file: Path, run: RunDescription) -> None:
    """Raise StartupError if peers of another run have their run description where this one's would be."""
    if not run_file.exists():
        return
    other = RunDescription.load(run_file)
    if (other.run_id, other.learner_public_key) != (run.run_id, run.learner_public_key):
        raise StartupError(
            f"{run_file} is read by peers of run {other.run_id!r}; the token is of {run.run_id!r}",
            fix="Join from another machine; or name another --state-dir, without --systemd.",
        )


def model_dir_of(arguments: argparse.Namespace, place: Place) -> Path:
    """Return where the base model is or goes: as a flag says, else the configuration of an earlier start."""
    if arguments.model_dir is not None:
        return Path(arguments.model_dir)
    for setting in read_flags({}, arguments.assignments):
        if isinstance(setting, Setting) and (setting.section, setting.key) == ("sampler", "model_dir"):
            return Path(str(setting.value))
    if place.config_file.exists():
        with contextlib.suppress(tomllib.TOMLDecodeError):  # the daemon says what is wrong with it
            written = tomllib.loads(place.config_file.read_text(encoding="utf-8"))
            return Path(written.get("sampler", {}).get("model_dir", place.role_dir / "model"))
    return place.role_dir / "model"


def settings_of(role: Role, place: Place, *, hub: str, model_dir: Path, given: list[str]) -> str:
    """Return the configuration file. Raises ConfigError: a setting in ``given`` is not one."""
    sections: dict[str, dict[str, object]] = {
        "node": {
            "state_dir": str(place.state_dir.absolute()),
            "run_file": str(place.run_file.absolute()),
            "coordinator": hub,
        },
        role.value: (
            {"model_dir": str(model_dir.absolute()), "device": AUTO, "engine": AUTO}
            if role is Role.SAMPLER
            else {"listen": _RELAY_LISTEN}
        ),
    }
    for setting in read_flags({}, given):
        if not isinstance(setting, Setting):
            raise setting
        table = sections.setdefault(setting.section, {})
        table[setting.key] = value_of_text(str(setting.value), has_type=False)
    lines = [
        "# Written by `heterorl-node join`, which does not change it again: it is yours. All keys:",
        f"# heterorl-node config --role {role} --config {place.config_file}",
    ]
    for section, table in sections.items():
        lines += ["", f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, default=str)
