"""The settings, machines and links of a simulated run, as a TOML file names them."""

import tomllib
from pathlib import Path
from typing import Annotated, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from node.errors import StartupError
from node.identity.files import cannot_read

Positive: TypeAlias = Annotated[float, Field(gt=0)]
Seconds: TypeAlias = Annotated[float, Field(ge=0)]
Number: TypeAlias = Annotated[int, Field(ge=1, le=1 << 20)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Run(_Part):
    """As the coordinator is configured, whose keys these are; defaults are its own."""

    batch_groups: Number = 64
    max_staleness_versions: int = Field(default=8, ge=0, le=65_536)
    concurrency_groups: Number = 256
    buffer_groups: Number = 256
    buffer_bytes: int = Field(default=2 << 30, ge=1 << 20)
    lease_ttl_s: Positive = 120.0
    lease_max_s: Positive = 3600.0
    heartbeat_interval_s: Positive = 2.0


class Learner(_Part):
    step_s: Positive = 20.0
    """From a batch to a new version."""
    publish_s: Seconds = 0.0
    """From a new version to its first byte on the way: coded, signed, stored."""
    keyframe_every_versions: Number = 64
    keyframe_bytes: Positive = 10.9e9
    """.68 of a model of 8e9 parameters in bfloat16 (bench.sync)."""
    delta_bytes: Positive = 70e6
    """Size for one step: 1/227 of that model (bench.weights)."""
    merged_exponent: float = Field(default=0.77, gt=0, le=1)
    """A delta over k steps has k to this power as many bytes: two merged steps take .85 of both."""

    def size_bytes(self, steps: int | None) -> int:
        """Return the size of a delta over so many steps; None: of a keyframe, which no delta exceeds."""
        return int(min(self.keyframe_bytes, self.delta_bytes * (steps or 1e12) ** self.merged_exponent))


class Link(_Part):
    """A machine's link, and the way to its hub."""

    up_mbit: Positive = 1000.0
    down_mbit: Positive = 1000.0
    round_trip_s: Seconds = 0.1

    @property
    def up(self) -> float:
        """Bytes per second, as ``down``."""
        return self.up_mbit * 125e3

    @property
    def down(self) -> float:
        return self.down_mbit * 125e3


class Processor(_Part):
    """Seconds of one core that the coordinator takes for each heartbeat, request for leases, and group."""

    heartbeat_s: Seconds = 0.7e-3
    """All threads together: cpu_ms of bench.peers. A request for leases is taken to cost the same."""
    lease_s: Seconds = 0.7e-3
    group_s: Seconds = 1e-3
    """See bench.ingest."""


class Samplers(_Part):
    """Samplers of one kind."""

    name: str = Field(default="sampler", pattern="^[a-z0-9-]{1,30}$")
    part: Positive = 1.0
    """Part of all samplers, in proportion to the parts of the other kinds."""
    places: Number = 16
    """Groups at once: sampler.concurrency_groups."""
    group_s: Positive = 30.0
    """Mean time from a lease to its graded group, of prompts that are not long."""
    apply_s: Seconds = 0.0
    """From a version's last byte to its first token: verified, stored, applied."""
    spread: float = Field(default=0.5, ge=0, le=3)
    """Standard deviation of the logarithm of that time, and of the group's size."""
    group_bytes: Positive = 100e3
    link: Link = Link(up_mbit=50.0, down_mbit=100.0)


class Prompts(_Part):
    long_share: float = Field(default=0.0, ge=0, le=1)
    long_factor: float = Field(default=20.0, ge=1)
    """Times as long, in seconds and bytes."""


class Profile(_Part):
    """Everything that a simulated run depends on, besides how many samplers and relays there are."""

    seconds: Positive = 600.0
    """Virtual time that is simulated."""
    run: Run = Run()
    learner: Learner = Learner()
    learner_link: Link = Link()
    coordinator_link: Link = Link()
    relay_link: Link = Link()
    processor: Processor = Processor()
    samplers: tuple[Samplers, ...] = Field(default=(Samplers(),), min_length=1)
    prompts: Prompts = Prompts()

    @model_validator(mode="after")
    def _fills_batches(self) -> Self:
        if self.run.buffer_groups < self.run.batch_groups:
            raise ValueError("run.buffer_groups is below run.batch_groups: no batch would ever fill")
        return self

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a profile. Raises StartupError: it cannot be read, or a value breaks a rule."""
        try:
            return cls.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        except ValidationError as error:
            what = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        except OSError as error:
            raise cannot_read(path, error, fix="Check --profile.") from error
        except ValueError as error:
            what = str(error)
        raise StartupError(f"The profile {path} cannot be used: {what}", fix="docs/simulate.md has its keys.")
