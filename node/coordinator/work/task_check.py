"""Whether a sampler's task is the run's: its number of prompts and the code that grades; pure.

Both are the operator's word. What samplers say of them moves nothing, however many they are.

    number of prompts   the configuration's: ``coordinator.prompts``, the task's options or the rows of the
                        data; a sampler that found another number is refused when it joins
    grader code         ``coordinator.grader_digest``, or else what a verifier says; samplers with other code
                        are leased nothing, and verifiers with other code check nothing

Where neither says which code grades, none is refused: ``status`` shows in what the samplers differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from node.errors import Reason, RefusedError

DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class RunGrader:
    """The code that the run's groups are graded by."""

    digest: bytes = b""
    """Empty: no peer of the operator's has said yet."""
    said_by: str = ""

    def objection(self, digest: bytes) -> str:
        """Return how other grader code differs from the run's; empty where it does not."""
        if digest == self.digest or not self.digest:
            return ""
        return (
            f"grader code {digest.hex() or 'without a digest'} is not the run's {self.digest.hex()}, "
            f"as {self.said_by} said"
        )


UNSAID: Final = RunGrader()


def run_grader(before: RunGrader, *, configured: bytes, verifiers: Mapping[str, bytes]) -> RunGrader:
    """Return the code to grade by, where the verifiers present say ``verifiers``, by name.

    What was said before holds as long as a verifier present says so, or none says anything.
    """
    if configured:
        return RunGrader(configured, "the coordinator's configuration")
    agreeing = (name for name, digest in verifiers.items() if digest == before.digest)
    name = next(agreeing, None) or next(iter(verifiers), None)
    return before if name is None else RunGrader(verifiers[name], f"verifier {name}")


def check_prompts(found: int, *, runs: int, task: str, sampler_id: str) -> None:
    """Check that a sampler found as many prompts in its task as the run has, held-out ones included.

    Raises RefusedError: TASK_MISMATCH.
    """
    if found != runs:
        raise RefusedError(
            Reason.TASK_MISMATCH,
            f"task {task!r} of sampler {sampler_id} has {found} prompts, the run has {runs}",
            fix="give this sampler the run's task and data (sampler.custom_tasks), or set "
            f"coordinator.prompts = {found} and restart the coordinator",
        )
