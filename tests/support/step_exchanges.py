"""The other end of an engine's steps, as a script."""

from collections.abc import Sequence

from sampler.engines.stepping import RequestChange, StepResults


class Scripted:
    """The other end: changes by turn, then none while anything runs."""

    def __init__(self, *changes: Sequence[RequestChange] | None) -> None:
        self.script = [*changes]
        self.told: list[StepResults] = []

    def changes(self, *, running: int) -> Sequence[RequestChange] | None:
        return self.script.pop(0) if self.script else (() if running else None)

    def tell(self, results: StepResults) -> None:
        self.told.append(results)

    @property
    def finished(self) -> list[str]:
        return [one.request_id for results in self.told for one in results.finished]
