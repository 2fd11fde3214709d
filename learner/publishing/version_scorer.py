"""Scores groups by the words of the versions that they name, and of versions around these.

    group --a drawn token's version--> its words in the learner's store --masters--> logprobs of its tokens
                                             |                                            |
                                         gone: None             far from the group's own: versions around it

Blocking; for the thread that trains, between two steps: gradients and activations are not in memory then, and
the masters of one earlier version take the room of the gradients.
"""

import logging
import random as randomness
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call

from learner.intake.named_versions import LEAST_NATS, Scored, fits_better
from learner.model.micro_batches import collate, objective_batch
from learner.model.model import Policy
from learner.objective.formulas.divergence import kl_behaviour_learner
from learner.operator_orders import VersionGoneError
from learner.step.step_inputs import versions_of_tokens
from learner.step_settings import Packing
from node.values.groups.rollout import RolloutGroup

logger = logging.getLogger(__name__)

DISTANCES: Final = (1, 2, 4, 8, 16, 32)
"""Versions to each side at which another one is looked for; drift grows with distance, so that the nearest of
them leads to what drew the tokens."""

MOST_GROUPS: Final = 8
"""Groups that are scored with words that were read once: reading them is most of the work."""


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
        packing: Packing,
        random: Callable[[], float] = randomness.random,
    ) -> None:
        """Score with the policy's model and the words of ``versions``; ``random`` draws tokens.

        ``micro_batch_tokens`` and ``packing`` are those of a step.
        """
        self._versions = versions
        self._policy = policy
        self._micro_batch_tokens = micro_batch_tokens
        self._packing: Packing = packing
        self._random = random

    def score(self, groups: Sequence[RolloutGroup], newest: int) -> dict[int, Scored | None]:
        """Return how far groups are from a version that the first of them names, by their places.

        The first alone is there, with None, where the words of that version are not here any more. Others
        that do not name it are left out.

        Args:
            groups: of one sampler, that were trained on.
            newest: version of the learner; none that is newer drew a token.
        """
        of_first = versions_of_tokens(groups[0])
        version = int(of_first[int(self._random() * len(of_first))])
        naming = [place for place, one in enumerate(groups) if (versions_of_tokens(one) == version).any()]
        chosen = {place: groups[place] for place in naming[:MOST_GROUPS]}
        try:
            by_name = self._divergences(chosen, of=version, by=version)
            scored = {
                place: Scored(chosen[place].group_id, version, float(nats.mean()))
                for place, nats in by_name.items()
            }
            self._look_around(chosen, scored, by_name, version=version, newest=newest)
        except (VersionGoneError, torch.OutOfMemoryError, MemoryError) as error:
            logger.info(
                "group not scored again",
                extra={"group_id": groups[0].group_id, "version": version, "detail": str(error)},
            )
            return {0: None}
        for place, one in scored.items():
            _log(groups[place], one)
        return dict(scored)

    def _look_around(
        self,
        groups: Mapping[int, RolloutGroup],
        scored: dict[int, Scored],
        by_name: Mapping[int, NDArray[np.float64]],
        *,
        version: int,
        newest: int,
    ) -> None:
        """Look for the versions that drew groups that are far from their name: further off, then nearer."""
        published = [one for one in self._versions.published() if one <= newest]
        tried = {version}

        def look_at(others: Iterable[int]) -> None:
            for other in others:
                far = {
                    place: groups[place]
                    for place, one in scored.items()
                    if one.nats > LEAST_NATS and not one.is_misnamed
                }
                if other in tried or not far:
                    continue
                tried.add(other)
                try:
                    by_other = self._divergences(far, of=version, by=other)
                except VersionGoneError:
                    continue
                for place, kl in by_other.items():
                    scored[place] = _nearer(scored[place], by_name[place], kl, other=other)

        # Newer ones first: who names an older version than it draws from seems to need no correction.
        for sign in (1, -1):
            look_at(_nearest(version + sign * far, published) for far in DISTANCES)
        for far in reversed(DISTANCES[:-2]):
            nearest = min(scored.values(), key=lambda one: one.other_nats).other_version
            if nearest is not None:
                look_at(_nearest(nearest + sign * far, published) for sign in (1, -1))

    def _divergences(
        self, groups: Mapping[int, RolloutGroup], *, of: int, by: int
    ) -> dict[int, NDArray[np.float64]]:
        """Estimate KL(what drew them || version ``by``) of each token that names version ``of``."""
        device = self._policy.device
        masters = {f"model.{name}": tensor.to(device) for name, tensor in self._versions.read(by).items()}
        return {place: self._divergence(group, masters, of=of, by=by) for place, group in groups.items()}

    def _divergence(
        self, group: RolloutGroup, masters: Mapping[str, Tensor], *, of: int, by: int
    ) -> NDArray[np.float64]:
        device, dtype = self._policy.device, next(iter(self._policy.parameters.values())).dtype
        batch = objective_batch([group], version=by, discount=lambda _: 1.0, dtype=dtype, device=device)
        logprob = batch.behaviour_logprob.clone()
        scorer, width = self._policy.scorer, batch.mask.shape[1]
        rows = scorer.step_rows([group], packing=self._packing)
        [cut] = rows.share_out(shares=1, budget_tokens=self._micro_batch_tokens)
        for numbers in cut:
            part = collate([group], numbers, width=width, dtype=dtype, device=device, packed=rows.is_packed)
            given = (part.input_ids, *part.asked)
            with torch.no_grad():
                of_part: Tensor = functional_call(scorer, dict(masters), given)
            logprob.view(-1)[part.places] = of_part.to(dtype)
        kl = kl_behaviour_learner(logprob[batch.mask], batch.behaviour_logprob[batch.mask])
        is_named = torch.from_numpy(versions_of_tokens(group) == of)
        of_named: NDArray[np.float64] = kl.double().cpu()[is_named].numpy()
        return of_named


def _nearer(
    scored: Scored, by_name: NDArray[np.float64], by_other: NDArray[np.float64], *, other: int
) -> Scored:
    """Return a group's score with another version, where that one fits it better than those tried before."""
    is_misnamed, nats = fits_better(by_name, by_other), float(by_other.mean())
    if not is_misnamed and nats >= scored.other_nats:
        return scored
    return replace(scored, other_version=other, other_nats=nats, is_misnamed=is_misnamed)


def _log(group: RolloutGroup, scored: Scored) -> None:
    is_far = scored.other_version is not None
    logger.log(
        logging.INFO if is_far else logging.DEBUG,
        "group scored again",
        extra={
            "group_id": group.group_id,
            "sampler": group.sampler_id,
            "version": scored.version,
            "nats": scored.nats,
            "other_version": scored.other_version,
            "other_nats": scored.other_nats if is_far else None,
            "is_misnamed": scored.is_misnamed,
        },
    )


def _nearest(version: int, published: Sequence[int]) -> int:
    return min(published, key=lambda one: abs(one - version))
