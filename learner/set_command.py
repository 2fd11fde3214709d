"""``heterorl-node set``: change a setting of a running learner."""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from learner.config import LearnerConfig
from learner.operator_orders import OPTIONS, SETTABLE, OperatorOrders, SetValue, check_settable, with_settings
from learner.state_argument import add_learner_state, learner_state, written
from node.clock import moment
from node.config.setting_sources import value_of_text
from node.errors import COMMAND_LINE, ConfigError, StartupError
from node.exit_code import ExitCode
from node.identity.files import cannot_read
from node.process.last_start import FILE_NAME as LAST_START

EXAMPLE: Final = f"""\
  heterorl-node set learner.learning_rate=5e-7 --state-dir runs/first --because "KL climbs"
  heterorl-node set learner.objective_options.clip_high=0.1 --state-dir runs/first
  heterorl-node set --undo learner.learning_rate --state-dir runs/first
  heterorl-node set --list --state-dir runs/first

Settable are {", ".join(SETTABLE)}, and {OPTIONS}.KEY.
A value holds in place of the configuration's, also after restarts, until it is undone. A running
learner takes its next step with it. That step's line in steps.jsonl names the change, and `heterorl-node
status` shows it for a day as unusual.
"""

_SECTION: Final = "learner."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node set``."""
    parser.add_argument("assignments", nargs="*", metavar="learner.KEY=VALUE", help="the new value of a key")
    add_learner_state(parser)
    parser.add_argument("--because", metavar="TEXT", default="", help="a remark, kept beside the value")
    parser.add_argument(
        "--undo",
        action="append",
        default=[],
        metavar="learner.KEY",
        help="let the configuration's value hold",
    )
    parser.add_argument("--list", action="store_true", help="show the values that hold, and since when")
    parser.add_argument("--json", action="store_true", help="the values that hold, as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Change settings; a running learner reads that by itself.

    Raises:
        ConfigError: a key cannot change in a run, or a value breaks its rule.
        StartupError: there is no learner's state, or it cannot be written.
    """
    if not (arguments.assignments or arguments.undo or arguments.list):
        raise _fault(
            "", None, "needs learner.KEY=VALUE, --undo or --list", fix="See heterorl-node set --help"
        )
    state = learner_state(arguments)
    orders = OperatorOrders(state)
    orders.check_readable()
    before = dict(orders.settings())
    settings, now = dict(before), time.time()
    for name in arguments.undo:
        if settings.pop(name.removeprefix(_SECTION), None) is None:
            raise _fault(name, None, "is not set", fix="`heterorl-node set --list` shows what is")
    for assignment in arguments.assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not text.strip():
            raise _fault(name, None, "needs a value", fix=f"Write {name.strip()}=VALUE.")
        key = name.strip().removeprefix(_SECTION)
        settings[key] = _checked(state, name.strip(), key, text, at_s=now, because=arguments.because)
    if settings != before:
        with written(state):
            orders.set(settings)
    _show(settings, as_json=arguments.json)
    return ExitCode.DRAINED


def _checked(state: Path, name: str, key: str, text: str, *, at_s: float, because: str) -> SetValue:
    """Return a value that its rule allows."""
    value = value_of_text(text, has_type=False)
    try:
        if not name.startswith(_SECTION):
            raise ValueError("only keys of [learner] can be set: learner.KEY=VALUE")
        check_settable(key)
        if not isinstance(value, bool | float | int | str):
            raise ValueError("must be a number, a truth value or a word")
        setting = SetValue(value, at_s, because)
        with_settings(_of_last_start(state), {key: setting})
    except ValidationError as error:
        rules = "; ".join(details["msg"] for details in error.errors(include_url=False))
        raise _fault(name, value, rules, fix="Give a value that its rule allows.") from error
    except ValueError as error:
        raise _fault(name, value, str(error), fix="See heterorl-node set --help") from error
    return setting


def _of_last_start(state: Path) -> LearnerConfig:
    """Return the configuration of the learner's last start, as far as a settable key's rule asks for it."""
    try:
        last = json.loads((state / LAST_START).read_bytes())
    except OSError as error:
        fix = "Start the learner once before changing its settings."
        raise cannot_read(state / LAST_START, error, fix=fix) from error
    except ValueError as error:
        raise StartupError(
            f"what the learner in {state} trains with is not known: {LAST_START}: {error}",
            fix="Remove the file, and start the learner once before changing its settings.",
        ) from error
    options = f"{_SECTION}{OPTIONS}."
    return LearnerConfig(
        model_dir=Path(),
        learning_rate=1e-6,
        objective=last[f"{_SECTION}objective"],
        objective_options={
            key.removeprefix(options): value for key, value in last.items() if key.startswith(options)
        },
    )


def _show(settings: Mapping[str, SetValue], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({_SECTION + key: asdict(one) for key, one in settings.items()}))
        return
    for key, one in settings.items():
        print(f"{_SECTION}{key} = {one.value}  since {moment(one.at_s)} {one.because}".rstrip())
    if not settings:
        print("no setting differs from the configuration")


def _fault(name: str, value: object, rule: str, *, fix: str) -> ConfigError:
    return ConfigError(key=name or "set", value=value, source=COMMAND_LINE, rule=rule, fix=fix)
