"""Agreement of samplers on things only they know: a prompt's tokens, the code that grades; pure.

The coordinator has neither tokenizer nor grader. What most samplers say holds, so nobody's word is final. Two
that lie together cost the first honest one a group, until as many honest ones have spoken.

    tokens of a prompt      a group is refused once two others agree on other tokens and are more than those
                            that agree with it; in memory only, as tasks and templates may change
    grader code             coordinator.grader_digest where it is set, or else what most verifiers present
                            say, or without verifiers most samplers; samplers with other code lease
                            nothing, and verifiers with other code check nothing
    prompts of the task     see ``task_size``

Of equals, what was agreed before stays: the first of two decides until a third settles it.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

Word = TypeVar("Word", int, bytes)

PROMPTS: Final = 65_536
"""Prompts remembered, those answered last: at most 60 MB."""

SAMPLERS: Final = 8
"""How many of each prompt's latest samplers are remembered."""

DIGEST_BYTES: Final = 16

_AGREEING: Final = 2


def most_said(words: Collection[Word], before: Word) -> Word:
    """Return what most say; ``before`` where others say nothing more often."""
    counts = Counter(words)
    return max(counts, key=lambda word: (counts[word], word == before), default=before)


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


def agreed_grader(
    before: AgreedGrader,
    claims: Mapping[str, bytes],
    *,
    configured: bytes,
    verifiers: Mapping[str, bytes],
) -> AgreedGrader:
    """Return the code to grade by, where samplers claim ``claims`` and verifiers ``verifiers``, by name.

    Samplers that cheat could outvote the honest ones, whose groups nobody could check then.
    """
    if configured:
        return AgreedGrader(configured, "the coordinator's configuration")
    role, said = ("verifiers", verifiers) if verifiers else ("samplers", claims)
    if not said:
        return before
    digest = most_said(said.values(), before.digest)
    agreeing = sum(one == digest for one in said.values())
    return AgreedGrader(digest, f"{agreeing} of {len(said)} {role}")


@dataclass(frozen=True, slots=True)
class PromptSaid:
    prompt_index: int
    sampler_id: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class Dissent:
    """The most samplers that say the same other thing of a prompt."""

    others: tuple[str, ...]
    """None: nobody says another thing."""
    is_outvoted: bool


class PromptAgreement:
    def __init__(self) -> None:
        self._said: OrderedDict[int, dict[str, bytes]] = OrderedDict()

    def dissent(self, said: PromptSaid) -> Dissent:
        """Compare with what others say; this sampler's newest word is its only one."""
        camps: dict[bytes, list[str]] = {said.digest: [said.sampler_id]}
        for sampler_id, digest in self._said.get(said.prompt_index, {}).items():
            if sampler_id != said.sampler_id:
                camps.setdefault(digest, []).append(sampler_id)
        own = camps.pop(said.digest)
        others = max(camps.values(), key=len, default=[])
        return Dissent(tuple(others), _AGREEING <= len(others) > len(own))

    def add(self, said: PromptSaid) -> None:
        """Remember what a sampler says, whether or not its group is taken."""
        words = self._said.setdefault(said.prompt_index, {})
        self._said.move_to_end(said.prompt_index)
        words.pop(said.sampler_id, None)
        words[said.sampler_id] = said.digest
        if len(words) > SAMPLERS:
            del words[next(iter(words))]
        if len(self._said) > PROMPTS:
            self._said.popitem(last=False)

    def forget(self, sampler_ids: frozenset[str]) -> None:
        for words in self._said.values():
            for sampler_id in sampler_ids & words.keys():
                del words[sampler_id]

    def clear(self) -> None:
        self._said.clear()
