"""Which grader code the run's groups are graded by; pure.

Each sampler says the digest of the code it has loaded. Only samplers can know it: the coordinator has no
grader.

    configured (coordinator.grader_digest): that one, whatever samplers say
    else: the one that most samplers present say; of equals the one that was the run's before

So one sampler alone decides only while it is alone, or the first of two; a third settles it. Those with other
code lease nothing and are shown. It is counted again whenever a sampler comes or falls silent.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class AgreedGrader:
    digest: bytes = b""
    """Empty: nobody has said yet."""
    said_by: str = ""

    def objection(self, digest: bytes) -> str:
        """Return how other grader code differs from the run's; empty where it does not."""
        if digest == self.digest or not self.digest:
            return ""
        return (
            f"grader code {digest.hex() or 'without a digest'} is not the run's {self.digest.hex()}, "
            f"as {self.said_by} said"
        )


NOT_AGREED: Final = AgreedGrader()


def agreed_grader(before: AgreedGrader, claims: Mapping[str, bytes], *, configured: bytes) -> AgreedGrader:
    if configured:
        return AgreedGrader(configured, "the coordinator's configuration")
    counts = Counter(claims.values())
    if not counts:
        return before
    digest = max(counts, key=lambda one: (counts[one], one == before.digest))
    return AgreedGrader(digest, f"{counts[digest]} of {counts.total()} samplers")
