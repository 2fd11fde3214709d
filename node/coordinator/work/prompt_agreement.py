"""Whether samplers agree on the tokens of each prompt; pure.

The coordinator has no tokenizer, so it cannot say what a prompt's tokens are. Samplers can: those of one
prompt are the same on all of them. A sampler whose tokens differ is refused once two others agree and are
more than those that agree with it. So nobody's word is final: not the first sampler's, and two that lie
together cost the first honest one a group, until as many honest ones have answered the prompt.

In memory only: after a restart agreement is found anew, as tasks and templates may have changed meanwhile.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

PROMPTS: Final = 65_536
"""Prompts remembered, those answered last: at most 60 MB."""

SAMPLERS: Final = 8
"""Of each prompt, those that answered it last."""

_AGREEING: Final = 2


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
