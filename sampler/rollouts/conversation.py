"""One completion in the making: what the policy wrote in each turn and what the task replied; pure."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from node.rollout import Completion, Finish
from sampler.engines.engine import SampledCompletion
from sampler.tasks.task import CompletionText, Message


class Conversation:
    """Turns and replies by turns, the first and the last of them a turn.

    Attributes:
        messages: What was said since the prompt; the policy's have the role ``assistant``.
        is_over: Whether there will be no other turn.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.is_over = False
        self._parts: list[SampledCompletion] = []
        self._is_cut = False

    @property
    def turns(self) -> int:
        """How many turns there were."""
        return (len(self._parts) + 1) // 2

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[n], of all turns and replies."""
        return np.concatenate([part.token_ids for part in self._parts])

    @property
    def finish(self) -> Finish:
        """Why the last turn, or the conversation, ended."""
        return Finish.LENGTH if self._is_cut else self._parts[-1].finish

    def add_turn(self, drawn: SampledCompletion, text: str) -> None:
        """Add what the policy wrote, in ``text`` without special tokens and stop string.

        A turn that was cut at the limit is the last.
        """
        self._parts.append(drawn)
        self.messages.append({"role": "assistant", "content": text})
        self.is_over = drawn.finish is Finish.LENGTH

    def end(self, *, is_cut: bool) -> None:
        """End after the newest turn; ``is_cut`` if there is no room for another."""
        self.is_over, self._is_cut = True, is_cut

    def to_append(self, reply_token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return a reply's tokens, at least one, without the end token if the policy has drawn that one."""
        last = self._parts[-1]
        has_end = last.finish is Finish.END and reply_token_ids[0] == last.token_ids[-1]
        return reply_token_ids[1:] if has_end else reply_token_ids

    def add_reply(self, token_ids: NDArray[np.int32], messages: Sequence[Message]) -> None:
        """Add what the task said: ``to_append`` returned the tokens."""
        last, n = self._parts[-1], len(token_ids)
        self._parts.append(
            SampledCompletion(
                token_ids=token_ids,
                behaviour_logprob=np.zeros(n, np.float32),
                policy_version=np.full(n, last.policy_version[-1], np.int32),
                finish=last.finish,
                kept_mass=None if last.kept_mass is None else np.ones(n, np.float32),
            )
        )
        self.messages += messages

    def completion_text(self, *, has_replies: bool) -> CompletionText:
        """Return what a grader sees; ``has_replies``: whether the task may reply."""
        drawn = sum(len(part.token_ids) for part in self._parts[::2])
        conversation = tuple(self.messages) if has_replies else ()
        return CompletionText(self.messages[-1]["content"], drawn, self.finish.value, conversation)

    def completion(self, *, reward: float) -> Completion:
        """Return the whole as the learner gets it."""
        parts = self._parts
        kept_masses = [part.kept_mass for part in parts if part.kept_mass is not None]
        is_drawn = [np.full(len(part.token_ids), number % 2 == 0) for number, part in enumerate(parts)]
        return Completion(
            token_ids=self.token_ids,
            behaviour_logprob=np.concatenate([part.behaviour_logprob for part in parts]),
            policy_version=np.concatenate([part.policy_version for part in parts]),
            reward=reward,
            finish=self.finish,
            kept_mass=np.concatenate(kept_masses) if kept_masses else None,
            is_drawn=np.concatenate(is_drawn) if len(parts) > 1 else None,
        )
