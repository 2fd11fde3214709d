"""Scores groups by the words of the versions that they name, and of versions around these.

    group --a drawn token's version--> its words in the learner's store --masters--> logprobs of its tokens
                                             |                                            |
                                         gone: None             far from the group's own: versions around it

Blocking; for the thread that trains, between two steps: gradients and activations are not in memory then, and
the masters of one earlier version take the room of the gradients.
"""

import logging
import random as randomness
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call

from learner.intake.named_versions import LEAST_NATS, Scored, fits_better
from learner.objective.divergence import kl_behaviour_learner
from learner.operator_orders import VersionGoneError
from learner.training.gradient_steps import versions_of_tokens
from learner.training.micro_batches import collate, micro_batches, objective_batch
from learner.training.model import Policy
from node.rollout import RolloutGroup

logger = logging.getLogger(__name__)

DISTANCES: Final = (1, 2, 4, 8, 16, 32)
"""Versions to each side at which another one is looked for; drift grows with distance, so that the nearest of
them leads to what drew the tokens."""


class Versions(Protocol):
    """The versions whose words a learner has: ``EarlierVersions``."""

    def read(self, version: int) -> dict[str, Tensor]:
        """Return a version's masters by name. Raises VersionGoneError: they are not there any more."""
        ...

    def published(self) -> list[int]:
        """Return the versions that ``read`` may find, ascending."""
        ...


class VersionScorer:
    """Scores groups of one learner that is one process."""

    def __init__(
        self,
        versions: Versions,
        policy: Policy,
        *,
        micro_batch_tokens: int,
        random: Callable[[], float] = randomness.random,
    ) -> None:
        """Score with the policy's model and the words of ``versions``; ``random`` draws tokens."""
        self._versions = versions
        self._policy = policy
        self._micro_batch_tokens = micro_batch_tokens
        self._random = random

    def score(self, group: RolloutGroup, newest: int) -> Scored | None:
        """Return how far a group is from a version that it names; None: its words are not here any more.

        Args:
            group: that was trained on.
            newest: version of the learner; none that is newer drew a token.
        """
        of_tokens = versions_of_tokens(group)
        version = int(of_tokens[int(self._random() * len(of_tokens))])
        try:
            of_name = self._divergence(group, of=version, by=version)
            named = Scored(group.group_id, version, float(of_name.mean()))
            if named.nats > LEAST_NATS:
                named = self._compared(group, named, of_name, newest=newest)
        except (VersionGoneError, torch.OutOfMemoryError, MemoryError) as error:
            logger.info(
                "group not scored again",
                extra={"group_id": group.group_id, "version": version, "detail": str(error)},
            )
            return None
        is_far = named.other_version is not None
        logger.log(
            logging.INFO if is_far else logging.DEBUG,
            "group scored again",
            extra={
                "group_id": group.group_id,
                "sampler": group.sampler_id,
                "version": version,
                "nats": named.nats,
                "other_version": named.other_version,
                "other_nats": named.other_nats if is_far else None,
                "is_misnamed": named.is_misnamed,
            },
        )
        return named

    def _compared(
        self, group: RolloutGroup, named: Scored, of_name: NDArray[np.float64], *, newest: int
    ) -> Scored:
        """Look for the version that drew the tokens: at growing distances, then around the nearest."""
        published = [version for version in self._versions.published() if version <= newest]
        tried = {named.version}

        def nearer(found: Scored, others: Iterable[int]) -> Scored:
            for other in others:
                if found.is_misnamed or other in tried:
                    continue
                tried.add(other)
                try:
                    of_other = self._divergence(group, of=named.version, by=other)
                except VersionGoneError:
                    continue
                is_misnamed, nats = fits_better(of_name, of_other), float(of_other.mean())
                if is_misnamed or nats < found.other_nats:
                    found = replace(found, other_version=other, other_nats=nats, is_misnamed=is_misnamed)
            return found

        # Newer ones first: who names an older version than it draws from seems to need no correction.
        for sign in (1, -1):
            named = nearer(named, (_nearest(named.version + sign * far, published) for far in DISTANCES))
        for far in reversed(DISTANCES[:-2]):
            if named.other_version is not None:
                around = (named.other_version + far, named.other_version - far)
                named = nearer(named, (_nearest(one, published) for one in around))
        return named

    def _divergence(self, group: RolloutGroup, *, of: int, by: int) -> NDArray[np.float64]:
        """Estimate KL(what drew them || version ``by``) of each token that names version ``of``."""
        device = self._policy.device
        masters = {f"model.{name}": tensor.to(device) for name, tensor in self._versions.read(by).items()}
        dtype = next(iter(self._policy.parameters.values())).dtype
        batch = objective_batch([group], version=by, discount=lambda _: 1.0, dtype=dtype, device=device)
        logprob = batch.behaviour_logprob.clone()
        lengths = self._policy.scorer.row_tokens([group])
        for rows in micro_batches(
            range(len(lengths)), lengths=lengths, budget_tokens=self._micro_batch_tokens
        ):
            part = collate([group], rows, width=batch.mask.shape[1], dtype=dtype, device=device)
            given = (part.input_ids, part.positions, part.target_ids, part.temperature)
            with torch.no_grad():
                of_part: Tensor = functional_call(self._policy.scorer, masters, given)
            logprob.view(-1)[part.places] = of_part.to(dtype)
        kl = kl_behaviour_learner(logprob[batch.mask], batch.behaviour_logprob[batch.mask])
        is_named = torch.from_numpy(versions_of_tokens(group) == of)
        of_named: NDArray[np.float64] = kl.double().cpu()[is_named].numpy()
        return of_named


def _nearest(version: int, published: Sequence[int]) -> int:
    return min(published, key=lambda one: abs(one - version))
