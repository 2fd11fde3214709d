"""The configuration of a process: flags over environment over files over defaults.

    [node]          who this process is, where its run is            NodeSection
    [telemetry]     logs and metrics                                 TelemetrySection
    [coordinator]   [relay]   [learner]   ...                        beside each role, see node.values.roles

The model of a role is imported by name when its section is given or its role is started. None imports torch
or grpc, so a wrong value is reported before anything heavy is loaded.
"""

import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from node.config.setting_faults import faults_of, is_table, table_model, unknown_section
from node.config.setting_sources import (
    ENVIRONMENT_PREFIX,
    Reading,
    Setting,
    environment_name,
    read_environment,
    read_files,
    value_of_text,
)
from node.config.setting_table import SettingRow, rows_of
from node.errors import ConfigError, NotReadyError
from node.rpc.address import split_address, split_target, split_targets
from node.system.extras import NeededPackage
from node.values.limits import NAME_PATTERN
from node.values.roles import ROLES

RUN_FILE: Final = "run.json"

Section = TypeVar("Section", bound=BaseModel)


def _passing(split: Callable[[str], object]) -> AfterValidator:
    def check(address: str) -> str:
        split(address)
        return address

    return AfterValidator(check)


Address = Annotated[str, _passing(split_address)]
"""``host:port`` to listen on; port 0 takes any free one."""

Target = Annotated[str, _passing(split_target)]
"""``host:port`` to dial."""

Targets = Annotated[str, _passing(split_targets)]
"""The same, or several of them with commas between."""


def _check_bucket(url: str) -> None:
    if len(url) > 1000 or not re.fullmatch(r"(s3|gs|az|azure|abfs|abfss)://[^/?#\s]+(/[^?#\s]*)?", url):
        raise ValueError(
            f"{url[:100]!r} is not an object store that signs addresses: s3://NAME/PREFIX, gs:// or az://"
        )


BucketUrl = Annotated[str, _passing(_check_bucket)]
"""``scheme://bucket/prefix``; a disk cannot sign an address."""


def bucket_packages(key: str, url: str | None) -> tuple[NeededPackage, ...]:
    """Return the package that a hub with a bucket needs."""
    return () if url is None else (NeededPackage(key, url, "obstore", extra="objects"),)


def _beside_state(data: dict[str, Any]) -> Path:
    state_dir: Path = data["state_dir"]
    return state_dir / RUN_FILE


class NodeSection(BaseModel):
    """Settings of every process."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    state_dir: Path
    """Everything that must survive a restart, in one folder per role. A peer that loses it is a new peer."""

    run_file: Path = Field(default_factory=_beside_state)
    """The run's public description, made by ``heterorl-node init``: the keys to trust.
    Default: in ``state_dir``."""

    node_id: str | None = Field(default=None, pattern=NAME_PATTERN)
    """This peer's name in the run. Unset: the name in its certificate or token, else a random one.
    The coordinator's name comes from ``init``."""

    coordinator: Targets | None = None
    """The coordinator's members port as this peer reaches it, ``host:port``. Of a run with several
    coordinators all of them, with commas between: the peer finds the one that leads."""

    token_file: Path | None = None
    """A single-use token (``heterorl-node token``); read only while this peer has no certificate."""

    tls: bool = True
    """False is for tests on one machine: peers are then trusted without proof of who they are."""

    drain_timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """How long a stopping daemon may finish its work. A shorter time abandons groups in progress, which are
    sampled again. A supervisor must wait longer than this before it kills."""


class TelemetrySection(BaseModel):
    """Settings of logs and metrics."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    http_listen: Address | None = "127.0.0.1:9464"
    """Where /metrics, /healthz and /readyz are served, and at / the page of the run: what its coordinator
    knows, and a learner's completions. Where this is not set and another process of the machine has the port,
    a free one is taken; port 0 always takes one. The log says which. Empty: nowhere. Anyone who reaches
    it can read it. Heartbeats carry a peer's metrics either way."""

    log_format: Literal["auto", "json", "human"] = "auto"
    """``auto``: readable text on a terminal, one JSON object a line elsewhere."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """``info`` logs the course of a run; ``debug`` adds every group, every failed rpc and every retry."""


SECTIONS: Final = {
    "node": "node.config.settings:NodeSection",
    "telemetry": "node.config.settings:TelemetrySection",
    **{role.value: traits.config for role, traits in ROLES.items()},
}
"""Section -> its model, by name."""

_ALWAYS: Final = ("node", "telemetry")


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Every section that was given or is needed."""

    node: NodeSection
    telemetry: TelemetrySection
    roles: Mapping[str, BaseModel] = field(default_factory=dict)
    """By the role's name; a process that runs a role has its section."""

    def section(self, model: type[Section]) -> Section:
        """Return a role's section by its model. Raises LookupError: there is none."""
        for section in self.roles.values():
            if isinstance(section, model):
                return section
        raise LookupError(f"no section is a {model.__name__}")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A valid configuration, and each of its values with the source that set it."""

    config: NodeConfig
    values: tuple[SettingRow, ...]


@dataclass(frozen=True, slots=True)
class Survey:
    """All that sources say of a process's configuration, right or wrong."""

    rows: tuple[SettingRow, ...]
    config: NodeConfig | None
    """None exactly where there are faults."""
    faults: tuple[ConfigError, ...]


def load(
    *, roles: Iterable[str], files: Sequence[Path], environ: Mapping[str, str], flags: Reading = ()
) -> Resolved:
    """Resolve the configuration of a process that will run ``roles``.

    Raises NotReadyError: with every fault of every source and section.
    """
    found = survey(roles=roles, files=files, environ=environ, flags=flags)
    if found.config is None:
        raise NotReadyError(found.faults)
    return Resolved(found.config, found.rows)


def survey(
    *, roles: Iterable[str], files: Sequence[Path], environ: Mapping[str, str], flags: Reading = ()
) -> Survey:
    """Read every source and check every section of a process that would run ``roles``."""
    faults: list[ConfigError] = []
    every: dict[str, list[Setting]] = {}
    for found in (*read_files(files), *read_environment(environ), *flags):
        if isinstance(found, ConfigError):
            faults.append(found)
        elif found.section in SECTIONS:
            every.setdefault(found.section, []).append(found)
        else:
            faults.append(unknown_section(found, known=SECTIONS))
    given: dict[str, dict[str, Setting]] = {}
    sections: dict[str, BaseModel] = {}
    rows: list[SettingRow] = []
    wanted = {*_ALWAYS, *every, *roles}
    for section in (name for name in SECTIONS if name in wanted):
        model: type[BaseModel] = pkgutil.resolve_name(SECTIONS[section])
        settings = given[section] = _merged(every.get(section, ()), model=model)
        faults += _misspelt(environ, section=section, model=model)
        try:
            sections[section] = model.model_validate({key: one.value for key, one in settings.items()})
        except ValidationError as error:
            faults += faults_of(error, section=section, model=model, settings=settings)
        rows += rows_of(section, model, settings, sections.get(section))
    node, telemetry = sections.pop("node", None), sections.pop("telemetry", None)
    if isinstance(node, NodeSection):
        by_relay = {name for name, section in sections.items() if getattr(section, "relays", ())}
        faults += _faults_of_roles(node, frozenset(roles), given["node"], by_relay=by_relay)
    config = None
    if not faults and isinstance(node, NodeSection) and isinstance(telemetry, TelemetrySection):
        config = NodeConfig(node, telemetry, sections)
    return Survey(tuple(rows), config, tuple(faults))


def _merged(settings: Iterable[Setting], *, model: type[BaseModel]) -> dict[str, Setting]:
    """Return the parsed settings of a section by key; later ones win; ``table.key`` changes a table's key."""
    merged: dict[str, Setting] = {}
    for setting in settings:
        key, *path = setting.key.split(".")
        if path and is_table(model, key):
            before = merged.get(key)
            table = _with_inner(before and before.value, path, str(setting.value), table_model(model, key))
            source = f"{before.source}, {setting.source}" if before else setting.source
            merged[key] = Setting(setting.section, key, table, source)
        else:
            value = _parsed(str(setting.value), model, setting.key) if setting.is_text else setting.value
            merged[setting.key] = replace(setting, value=value, is_text=False)
    return merged


def _with_inner(
    table: object, path: Sequence[str], text: str, model: type[BaseModel] | None
) -> dict[str, object]:
    """Return a table with the value at ``path`` changed; tables on the way there are made."""
    changed = dict(table) if isinstance(table, dict) else {}
    key, *rest = path
    changed[key] = _with_inner(changed.get(key), rest, text, None) if rest else _parsed(text, model, key)
    return changed


def _parsed(text: str, model: type[BaseModel] | None, key: str) -> object:
    """Parse text as far as its key says; empty text unsets an optional key."""
    field = None if model is None else model.model_fields.get(key)
    if not text and field is not None and NoneType in get_args(field.annotation):
        return None
    return value_of_text(text, has_type=model is not None)


def _misspelt(environ: Mapping[str, str], *, section: str, model: type[BaseModel]) -> Iterator[ConfigError]:
    """Yield faults for variables that would set a key with one more underscore."""
    names = {f"{ENVIRONMENT_PREFIX}{section}_{key}".upper(): key for key in model.model_fields}
    for name in sorted(names.keys() & environ.keys()):
        yield ConfigError(
            key=f"{section}.{names[name]}",
            value=environ[name],
            source=f"environment {name}",
            rule="two underscores separate section and key",
            fix=f"Write {environment_name(section, names[name])}.",
        )


def _faults_of_roles(
    node: NodeSection, roles: frozenset[str], settings: Mapping[str, Setting], *, by_relay: Collection[str]
) -> Iterator[ConfigError]:
    """Yield faults of a process in ``roles``; those ``by_relay`` need not reach the coordinator."""
    joining = sorted(roles - {"coordinator"})
    dialling = [role for role in joining if role not in by_relay]
    if dialling and node.coordinator is None:
        yield ConfigError(
            key="node.coordinator",
            value=None,
            source=settings["coordinator"].source if "coordinator" in settings else "nowhere",
            rule=f"is required for the role {' and '.join(dialling)}",
            fix="Add the coordinator's address: --coordinator HOST:PORT.",
        )
    if len(joining) > 1 and node.node_id is not None:
        yield ConfigError(
            key="node.node_id",
            value=node.node_id,
            source=settings["node_id"].source,
            rule=f"names one peer, and this process is {len(joining)}: {' and '.join(joining)}",
            fix="Leave it out, and each role gets a name of its own, or start one process for each role.",
        )
