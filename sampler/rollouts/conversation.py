"""One completion in the making: what the policy wrote in each turn and what the task replied; pure."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from node.values.groups.rollout import Completion, Finish
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
        self._parts: list[Completion] = []
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
    def last_turn_ids(self) -> NDArray[np.int32]:
        """[n], of what the policy wrote last."""
        return self._parts[-1].token_ids

    @property
    def finish(self) -> Finish:
        """Why the last turn, or the conversation, ended."""
        return Finish.LENGTH if self._is_cut else self._parts[-1].finish

    def add_turn(self, drawn: Completion, text: str) -> None:
        """Add what the policy wrote, in ``text`` without end token and stop string.

        A turn that was cut at the limit is the last.
        """
        self._parts.append(drawn)
        self.messages.append({"role": "assistant", "content": text})
        self.is_over = drawn.finish is Finish.LENGTH

    def add_reply(self, token_ids: NDArray[np.int32], messages: Sequence[Message], *, max_tokens: int) -> int:
        """Add what the task said, unless that leaves no room for another turn, which ends the conversation.

        Args:
            token_ids: At least one. The first is left out if it is the end token that the policy has drawn.
            max_tokens: Of all turns and replies.
        Returns:
            How many tokens the next turn may have; 0: there is none.
        """
        last = self._parts[-1]
        if last.finish is Finish.END and token_ids[0] == last.token_ids[-1]:
            token_ids = token_ids[1:]
        n = len(token_ids)
        if (room := max_tokens - len(self.token_ids) - n) < 1:
            self.is_over = self._is_cut = True
            return 0
        self._parts.append(
            Completion(
                token_ids=token_ids,
                behaviour_logprob=np.zeros(n, np.float32),
                policy_version=np.full(n, last.policy_version[-1], np.int32),
                finish=last.finish,
                kept_mass=None if last.kept_mass is None else np.ones(n, np.float32),
            )
        )
        self.messages += messages
        return room

    def completion_text(self, *, has_replies: bool) -> CompletionText:
        """Return what a grader sees; ``has_replies``: whether the task may reply."""
        drawn = sum(len(part.token_ids) for part in self._parts[::2])
        conversation = tuple(self.messages) if has_replies else ()
        measured = self._parts[-1].reward
        return CompletionText(
            self.messages[-1]["content"],
            drawn,
            self.finish.value,
            conversation,
            None if math.isnan(measured) else measured,
        )

    def completion(self, *, reward: float) -> Completion:
        """Return the whole as the learner gets it."""
        parts = self._parts
        if len(parts) == 1:
            return replace(parts[0], reward=reward, finish=self.finish)
        kept_masses = [part.kept_mass for part in parts if part.kept_mass is not None]
        is_drawn = [np.full(len(part.token_ids), number % 2 == 0) for number, part in enumerate(parts)]
        return Completion(
            token_ids=self.token_ids,
            behaviour_logprob=np.concatenate([part.behaviour_logprob for part in parts]),
            policy_version=np.concatenate([part.policy_version for part in parts]),
            reward=reward,
            finish=self.finish,
            kept_mass=np.concatenate(kept_masses) if kept_masses else None,
            is_drawn=np.concatenate(is_drawn),
            actions=parts[0].actions,
        )
