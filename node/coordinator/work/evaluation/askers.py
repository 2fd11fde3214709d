"""The samplers that ask for leases while an evaluation is due or under way: who may still answer; pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class _Asker:
    at_s: float
    held_version: int
    is_able: bool
    """Whether it held the version under evaluation, or an older one, while the evaluation lasted."""


class Askers:
    """In memory only, as deadlines are. A sampler counts for one term of a lease after it last asked."""

    def __init__(self, *, lease_ttl_s: float) -> None:
        self._lease_ttl_s = lease_ttl_s
        self._askers: dict[str, _Asker] = {}

    def __len__(self) -> int:
        return len(self._askers)

    def ask(self, name: str, *, held_version: int, version: int | None, now: float) -> None:
        """Note that a sampler asks; ``version`` is under evaluation, None: none is."""
        known = self._askers.get(name)
        is_able = version is None or held_version <= version or (known is not None and known.is_able)
        self._askers[name] = _Asker(now, held_version, is_able)

    def begin(self, version: int, *, now: float) -> None:
        """Start over with an evaluation, from those that are active."""
        self._askers = {
            name: replace(asker, is_able=asker.held_version <= version) for name, asker in self._active(now)
        }

    def bound_times(self, now: float) -> None:
        """Let nobody have asked later than now: the clock was set back."""
        self._askers = {
            name: replace(asker, at_s=min(asker.at_s, now)) for name, asker in self._askers.items()
        }

    def remove(self, gone: frozenset[str]) -> None:
        self._askers = {name: asker for name, asker in self._askers.items() if name not in gone}

    def able(self, now: float) -> set[str]:
        """Return the active samplers that could have answered since the evaluation began."""
        return {name for name, asker in self._active(now) if asker.is_able}

    def at_or_before(self, version: int, now: float) -> Iterator[str]:
        """Yield the active samplers that have not passed a version."""
        return (name for name, asker in self._active(now) if asker.held_version <= version)

    def _active(self, now: float) -> Iterator[tuple[str, _Asker]]:
        return (item for item in self._askers.items() if now - item[1].at_s <= self._lease_ttl_s)
