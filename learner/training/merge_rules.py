"""By what a learner deals and its contributors train, as both are configured."""

import json

from learner.config import LearnerConfig
from learner.merging.deals import DealRules
from learner.step_settings import StepSettings
from node.errors import StartupError
from node.values.contribution import MergeTerms
from node.values.run import RunSettings


def deal_rules(config: LearnerConfig, run: RunSettings) -> DealRules:
    """Return the sizes and times of deals at a learner that merges.

    Raises:
        StartupError: the buffer is too small for one contribution.
    """
    merge = config.merge
    assert merge is not None
    rules = DealRules(
        run.batch_groups,
        merge.local_steps,
        config.buffer_groups,
        member_timeout_s=merge.member_timeout_s,
        quorum=merge.quorum,
        max_staleness_versions=run.max_staleness_versions,
        restart_wait_s=merge.restart_wait_s,
    )
    if rules.most_contributors == 0:
        raise StartupError(
            f"learner.buffer_groups = {config.buffer_groups} never fills a contribution of "
            f"{merge.local_steps} steps of {run.batch_groups} groups",
            fix=f"Set learner.buffer_groups to {rules.hand_groups} times the number of contributors, or "
            "learner.merge.local_steps lower",
        )
    return rules


def merge_terms(config: LearnerConfig, rules: DealRules) -> MergeTerms:
    """Return what contributors are told."""
    assert config.merge is not None
    step, merge = StepSettings.of(config).model_dump(), config.merge.of_merge.model_dump()
    return MergeTerms(
        step_settings=json.dumps(step).encode(),
        merge_settings=json.dumps(merge).encode(),
        batch_groups=rules.batch_groups,
    )
