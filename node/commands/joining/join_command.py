"""``heterorl-node join TOKEN``: from a token to a peer that works, on a machine that has only the package.

    token -> certificate -> model (samplers) -> configuration file -> the daemon, here or under systemd

Each step leaves its result in the state directory and is skipped where that is there: the same command goes
on after any end, and starts the peer again later, when the token is long spent.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from node.commands.joining.joined_files import Place, check_other_run, model_dir_of, settings_of
from node.commands.joining.systemd_unit import (
    CONFIG_DIRECTORY,
    STATE_DIRECTORY,
    check_installable,
    install_unit,
)
from node.commands.status.status_command import fetch_status
from node.commands.terminal import name, target
from node.enrolment.enrolment_client import obtain_identity
from node.enrolment.tokens import JOINING_ROLES, Token, how_to_get_a_token, write_token_file
from node.errors import COMMAND_LINE, ConfigError, Reason, RefusedError, StartupError
from node.identity.files import cannot_make, cannot_read, make_private_directory
from node.identity.identity_store import IDENTITY_DIRECTORY, Identity
from node.rpc.address import MEMBERS_PORT
from node.rpc.call_ends import ConnectionLost
from node.rpc.hub import Hub
from node.system import durable
from node.system.device import AUTO, chosen_device
from node.system.extras import NeededPackage
from node.text.visible_text import visible
from node.values.groups.verdict import Verdict
from node.values.limits import TOKEN_BYTES
from node.values.roles import Role
from node.values.run import PeerQuery
from node.weights.transfer.model_download import Progress as Show
from node.weights.transfer.model_download import download_model

EXAMPLE: Final = """\
  heterorl-node join TOKEN                        # a sampler here, in the foreground, until Ctrl-C
  sudo heterorl-node join TOKEN --systemd         # the same as a service that starts with the machine
  heterorl-node join relay.token --set relay.listen=0.0.0.0:7710
  heterorl-node join - < sampler.token            # where others use this machine
TOKEN is the line that `heterorl-node token` printed, a file that holds it, or - for standard input. In the
command line it stands in the list of processes until the model is here, and in the shell's history; anyone
who reads it there before it is spent may join in its place. The same command starts the peer again later;
its token is spent by then, and its certificate is used.
"""

_LOOK_EVERY_S: Final = 2.0
_PATIENCE_S: Final = 900.0
"""How long --systemd waits for the first group that is trained on: the model loads, a batch fills, a step."""

_BEGINNING: Final = "eyJ"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node join``."""
    parser.add_argument(
        "token",
        metavar="TOKEN",
        help="a token, or, so that other users of this machine cannot read it in the list of processes, a "
        "file that holds it, or - for standard input",
    )
    parser.add_argument(
        "--role",
        choices=[role.value for role in JOINING_ROLES],
        help="checked; default: what the token is for",
    )
    parser.add_argument(
        "--state-dir", type=Path, metavar="DIR",
        help=f"where everything of this peer is kept; default: ~/.local/state/heterorl-node/RUN, or "
        f"{STATE_DIRECTORY} with --systemd",
    )  # fmt: skip
    parser.add_argument(
        "--coordinator", type=target(MEMBERS_PORT, or_several=True), metavar="HOST:PORT",
        help="the members port as it is reached from here; default: as the token says",
    )  # fmt: skip
    parser.add_argument(
        "--node-id", type=name, metavar="ID", help="this peer's name; default: the token's, or random"
    )
    parser.add_argument(
        "--model-dir", type=Path, metavar="DIR",
        help="the run's base model, where this machine has it already; default: fetched from the coordinator",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="assignments",
        help="a setting to write into the configuration file; may be repeated",
    )  # fmt: skip
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--systemd", action="store_true", help="install and start a service; needs root")
    how.add_argument("--no-start", action="store_true", help="get everything ready and start nothing")


def run(arguments: argparse.Namespace) -> int:
    """Make this machine a peer and start it; this process becomes the daemon unless systemd runs it."""
    text, where = _token_text(arguments.token)
    token = _parsed(text, where)
    if arguments.role not in (None, token.role):
        raise _bad("--role", arguments.role, f"the token is for a {token.role}")
    place = _place(arguments, token)
    if token.role is Role.SAMPLER:
        NeededPackage("join", "a sampler", "torch", extra="sampler", source="the token").check()
    if arguments.systemd:
        check_installable(token.role, device=chosen_device(AUTO))  # before the token is spent
    check_other_run(place.run_file, token.run)
    try:
        identity = asyncio.run(_ready(arguments, text, token, place))
    except OSError as error:
        raise cannot_make(place.state_dir, error, fix="Choose another --state-dir.") from error
    except (RefusedError, ConnectionLost) as error:
        raise StartupError(f"The coordinator does not serve this peer: {error}", fix="Try again.") from error
    # Over a file of an earlier start, flags win.
    settings = [f"--set={assignment}" for assignment in arguments.assignments]
    if arguments.coordinator is not None:
        settings.append(f"--coordinator={arguments.coordinator}")
    if arguments.model_dir is not None:
        settings.append(f"--set=sampler.model_dir={arguments.model_dir.absolute()}")
    daemon = ["--role", token.role.value, "--config", str(place.config_file), *settings]
    if arguments.no_start:
        _say(f"ready; start it with: heterorl-node {' '.join(daemon)}")
    elif arguments.systemd:
        for line in install_unit(token.role, device=chosen_device(AUTO)):
            _say(line)
        if token.role is Role.SAMPLER:
            asyncio.run(_wait_for_first_group(_coordinator(arguments, token), identity))
    else:
        _say(f"starting {identity.node_id}; `first group trained` in its log says that it contributes")
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, "-m", "node", *daemon])
    return 0


async def _ready(arguments: argparse.Namespace, text: str, token: Token, place: Place) -> Identity:
    """Obtain what is not there yet: certificate, run description, model, configuration file."""
    make_private_directory(place.role_dir)
    durable.make_directory(place.config_dir)
    run, token_file = token.run, place.role_dir / "token"
    directory = place.role_dir / IDENTITY_DIRECTORY
    is_new = not (directory / "certificate.pem").exists()
    if is_new:
        write_token_file(token_file, text)
    identity = await obtain_identity(
        directory,
        run=run,
        role=token.role,
        node_id=arguments.node_id,
        token_file=token_file,
        now=time.time(),
        warn=_say,
    )
    token_file.unlink(missing_ok=True)
    run.save(place.run_file)
    _say(f"{'let into' if is_new else 'known in'} run {run.run_id} as {token.role} {identity.node_id}")
    hub, model_dir = _coordinator(arguments, token), model_dir_of(arguments, place)
    if token.role is Role.SAMPLER and not model_dir.exists():
        if model_dir != place.role_dir / "model":
            raise _bad("--model-dir", str(model_dir), "there is no such directory")
        with _progress() as show:
            await download_model(Hub(hub), identity, model_dir, now=time.time(), progress=show)
        _say(f"the base model is in {model_dir}")
    settings = settings_of(token.role, place, hub=hub, model_dir=model_dir, given=arguments.assignments)
    if not place.config_file.exists():
        durable.write(place.config_file, settings.encode(), mode=0o644)
        _say(f"wrote {place.config_file}; the device is {chosen_device(AUTO)}")
    elif arguments.systemd and place.config_file.read_text(encoding="utf-8") != settings:
        flags = {"--set": arguments.assignments, "--coordinator": arguments.coordinator}
        for flag, value in (flags | {"--model-dir": arguments.model_dir}).items():
            if value:
                raise _bad(flag, str(value), f"{place.config_file} is there and says otherwise")
    return identity


def _token_text(given: str) -> tuple[str, str]:
    """Return a token's text, and where it is from. Raises StartupError: the file cannot be read."""
    if given == "-":
        return sys.stdin.readline(TOKEN_BYTES + 1).strip(), "on standard input"
    # Every token begins as its header does, in base64url.
    if not given or given.startswith(_BEGINNING):
        return given.strip(), "on the command line"
    path = Path(given)
    try:
        return path.read_text(encoding="ascii", errors="replace").strip(), f"in {path}"
    except OSError as error:
        fix = "TOKEN is the whole line that `heterorl-node token` printed, the path of a file with it, or -."
        raise cannot_read(path, error, fix=fix) from error


def _parsed(text: str, where: str) -> Token:
    try:
        if not text:
            raise RefusedError(Reason.TOKEN_REFUSED, "there is none")
        token = Token.parse(text)
    except RefusedError as error:
        fix = "Copy the whole line that `heterorl-node token` printed."
        raise StartupError(f"The token {where} cannot be used: {error.what}", fix=fix) from error
    if token.role not in JOINING_ROLES:
        fix = "An operator's is for `heterorl-node status --token-file`, a learner's for node.token_file."
        raise StartupError(f"The token is for a {token.role}, which does not join this way", fix=fix)
    if token.learner_public_key is None:
        what = "The token does not say the learner's key: it was made where run.json is not, or long ago"
        raise StartupError(what, fix=f"{how_to_get_a_token(token.role)}, with --run-file run.json.")
    return token


def _coordinator(arguments: argparse.Namespace, token: Token) -> str:
    hub: str | None = arguments.coordinator or token.coordinator
    if hub is None:
        what = f"The token says only where to enrol ({token.address}), not the coordinator's members port"
        raise StartupError(what, fix="Add --coordinator HOST:PORT (coordinator.listen).")
    return hub


def _place(arguments: argparse.Namespace, token: Token) -> Place:
    _coordinator(arguments, token)  # before anything is written
    if arguments.systemd:
        os.umask(0o022)  # the service's own user passes these folders and reads the configuration
        if arguments.state_dir is not None:
            raise _bad(
                "--state-dir", str(arguments.state_dir), f"a service keeps its state in {STATE_DIRECTORY}"
            )
        return Place(token.role, STATE_DIRECTORY, CONFIG_DIRECTORY)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    state_dir = arguments.state_dir or Path(base) / "heterorl-node" / token.run_id
    return Place(token.role, state_dir, state_dir)


async def _wait_for_first_group(coordinator: str, identity: Identity) -> None:
    """Say which service contributes, once the run has trained on a group of it."""
    hub, query = Hub(coordinator), PeerQuery(name=identity.node_id)
    give_up_at_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < give_up_at_s:
        try:
            status = await fetch_status(hub.address, identity, query=query)
        except (ConnectionLost, RefusedError) as error:
            hub.move_on_after(error)
            status = None
        for peer in () if status is None else status.peers:
            if peer.node_id == identity.node_id and peer.verdicts.get(Verdict.TRAINED):
                _say(f"{identity.node_id} contributes: the run has trained on its first group")
                return
        await asyncio.sleep(_LOOK_EVERY_S)
    _say("no group of it was trained on yet: see `heterorl-node status` and the service's log")


@contextmanager
def _progress() -> Iterator[Show]:
    """Yield a function that shows how much of the model is there: a bar, or a line for each tenth."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Tenths()
        return
    columns = ("base model", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("model", total=None)
        yield lambda here, whole: bar.update(task, completed=here, total=whole)


class _Tenths:
    def __init__(self) -> None:
        self._said = 0

    def __call__(self, here_bytes: int, all_bytes: int) -> None:
        if (tenths := 10 * here_bytes // all_bytes) > self._said:
            self._said = tenths
            _say(f"{tenths}0 % of {all_bytes / 1e6:.0f} MB of the base model")


def _bad(key: str, value: str, rule: str) -> ConfigError:
    return ConfigError(key=key, value=value, source=COMMAND_LINE, rule=rule, fix="Correct it.")


def _say(sentence: str) -> None:
    print(f"heterorl-node: {visible(sentence)}", file=sys.stderr)
