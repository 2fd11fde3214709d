"""Settings of a relay."""

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, Field

from node.checks.check import Check, Surroundings
from node.checks.installed import packages_check
from node.config.settings import Address, BucketUrl, Target, bucket_packages
from node.system.extras import NeededPackage


class RelayConfig(BaseModel):
    """Section ``[relay]``."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    listen: Address = "127.0.0.1:7710"
    """Where samplers, and relays behind this one, connect: for weights, and on to the coordinator at
    ``node.coordinator``, which they name as the one they want. Port 0: any free one, printed at the start."""
    upstream: tuple[Target, ...] = ()
    """Relays to take policy versions from, ``host:port`` each; the coordinator is asked only when all of them
    are behind it. Empty: the coordinator. Never name a relay that takes them from this one."""
    retained_keyframes: int = Field(default=2, ge=1, le=64)
    """Keyframes kept on disk, with every delta after the oldest of them; as the coordinator's."""
    bucket: BucketUrl | None = None
    """Object store in which the relay puts the weights it serves: ``s3://NAME/PREFIX``, ``gs://`` or
    ``az://``. Peers read them there by signed addresses, so that its own link carries each once. Credentials
    come from the provider's environment variables or the machine's role. Unset: it serves them itself."""

    def checks(self, _: Surroundings) -> Iterator[Check]:
        """Yield the check of packages."""
        yield packages_check(self.needed_packages)

    @property
    def needed_packages(self) -> tuple[NeededPackage, ...]:
        """The package that fills the bucket."""
        return bucket_packages("relay.bucket", self.bucket)
