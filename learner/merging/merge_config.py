"""Settings of a learner that merges, [learner.merge]: of the merge, and of serving contributors."""

from pydantic import Field

from learner.merging.merge_settings import MergeSettings
from node.config.settings import Address


class MergeConfig(MergeSettings):
    """Settings of a learner that takes no steps itself and merges what contributors trained."""

    listen: Address
    """Address on which contributors reach the learner, ``host:port``: it must be reachable for them. Port 0
    takes any free one."""

    member_timeout_s: float = Field(default=60.0, ge=1, le=86_400)
    """Seconds that a contributor may be gone before its groups are dealt to others. Shorter wastes the work
    of those that reconnect, longer holds a merge up for those that do not."""

    restart_wait_s: float = Field(default=10.0, ge=0, le=3600)
    """Seconds after its start in which the learner deals nothing, so that contributors can say what they
    hold. Groups of those that come later are dealt to others, and what they trained of them is lost."""

    @property
    def of_merge(self) -> MergeSettings:
        """Everything that a merge depends on, as the journal has it."""
        return MergeSettings.model_validate(
            {name: getattr(self, name) for name in MergeSettings.model_fields}
        )
