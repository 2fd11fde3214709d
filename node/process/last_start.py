"""A role's settings at its last start, compared with those of this one.

A learning rate or staleness bound that changed between two starts explains a curve that bends, and nobody
remembers it. The settings of a run's two authorities, coordinator and learner, are kept beside their state.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from node.system import durable
from node.values.roles import Role

logger = logging.getLogger(__name__)

FILE_NAME: Final = "last_start.json"

KEPT_ROLES: Final = frozenset({Role.COORDINATOR, Role.LEARNER})

_SECRET: Final = re.compile(
    r"(^|_)(secrets?|passwords?|credentials?|token|key|keys|authorization)($|_)", re.I
)
"""Names whose values are neither kept nor shown: tables such as task_options hold anything."""

_SECRET_IN_ADDRESS: Final = re.compile(r"//[^/@\s]*@")

_SHOWN_CHARACTERS: Final = 200


def note_settings(state_dir: Path, *, role: Role, settings: Mapping[str, object]) -> None:
    """Log each setting of a role that differs from its last start, and keep those of this one."""
    if role not in KEPT_ROLES:
        return
    path = state_dir / FILE_NAME
    now = dict(flattened(settings, prefix=role))
    try:
        before = json.loads(path.read_text()) if path.exists() else now
        for key, was, is_ in differences(before, now):
            logger.warning("setting differs from the last start", extra={"key": key, "was": was, "is": is_})
        if before != now or not path.exists():
            durable.write(path, json.dumps(now, indent=1).encode(), mode=0o600)
    except (OSError, ValueError) as error:
        detail = f"{path} cannot be read or written: {error}; remove it if it is damaged"
        logger.warning("settings not compared with the last start", extra={"detail": detail})


def flattened(table: Mapping[str, object], *, prefix: str) -> Iterator[tuple[str, object]]:
    """Yield each value under its dotted name, as JSON has it; but for secrets."""
    for key, value in table.items():
        name = f"{prefix}.{key}"
        if isinstance(value, Mapping):
            yield from flattened(value, prefix=name)
        elif not _SECRET.search(key) and not _SECRET_IN_ADDRESS.search(str(value)):
            yield name, json.loads(json.dumps(value, default=str))


def differences(before: Mapping[str, object], now: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Return the name of each value that differs, what it was and what it is, by name."""
    changed = (key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key))
    return [(key, _shown(before, key), _shown(now, key)) for key in changed]


def _shown(values: Mapping[str, object], key: str) -> str:
    return json.dumps(values[key])[:_SHOWN_CHARACTERS] if key in values else "not set"
