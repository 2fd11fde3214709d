"""Facts of which a run has one each: the newest of a kind counts, and may have a line in `status`."""

from collections.abc import Iterable

from node.values.fact import Fact, OneFact
from node.values.run import StatusLine


class SingleFacts:
    """The newest fact of each such kind."""

    def __init__(self, facts: Iterable[Fact] = ()) -> None:
        self._by_kind: dict[type[Fact], Fact] = {type(fact): fact for fact in facts}

    def apply(self, fact: Fact) -> None:
        self._by_kind[type(fact)] = fact

    def of(self, kind: type[OneFact]) -> OneFact | None:
        """Return the fact of a kind, or None."""
        fact = self._by_kind.get(kind)
        assert fact is None or isinstance(fact, kind)
        return fact

    def told(self, now: float) -> tuple[StatusLine, ...]:
        """Return their lines for the state of the run; ``now``: Unix seconds."""
        lines = (StatusLine(fact.heading, fact.told(now)) for fact in self._by_kind.values())
        return tuple(line for line in lines if line.text)
