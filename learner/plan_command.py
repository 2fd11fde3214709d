"""``heterorl-node plan``: which layouts of ranks fit, how long a step takes, how far a sampler lags.

With ``--sites``, too: what contributors cost by each method of merging, and which of them suits their line.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from learner.merging.merge_settings import MergeSettings
from learner.merging.round_costs import (
    RoundCosts,
    Sites,
    costs_of_methods,
    kept_bytes,
    learner_memory,
    recommended,
)
from learner.sizing.devices import DEVICES, Interval
from learner.sizing.layouts import Planned, plan_layouts
from learner.sizing.model_shape import ModelShape, UnknownModelError
from learner.sizing.rank_costs import Lag, lag, words_bytes
from node.commands.terminal import console, table
from node.errors import StartupError
from node.exit_code import ExitCode
from node.identity.files import cannot_read

SHOWN: Final = 8

_HEAVIEST: Final = MergeSettings(method="eager")
"""None of the methods keeps more for each parameter."""

EXAMPLE: Final = """\
  heterorl-node plan 8B --gpus 8 --memory 80 --link 100
  heterorl-node plan runs/own/model --gpus 4 --memory 4 --device core --json
  heterorl-node plan 1.7B --gpus 1 --memory 80 --sites 3 --line 100 --round-trip 150
Arithmetic alone: no weights are read, nothing is started. Bounds are in brackets.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node plan``."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a directory with config.json, or a size such as 8B or 135M")
    add("--gpus", type=_count(4096), required=True, metavar="N", help="ranks: GPUs, or cores")
    add("--memory", type=_amount, required=True, metavar="GB", help="of each, in 10^9 bytes")
    add("--device", choices=sorted(DEVICES), default="h100", help="default: %(default)s")
    add(
        "--link",
        type=_amount,
        default=100.0,
        metavar="MBIT",
        help="a sampler's, Mbit/s; default: %(default)s",
    )
    add("--tokens", type=_count(1 << 40), default=1 << 18, help="of a step; default: %(default)s")
    add("--row", type=_count(1 << 24), default=2048, help="tokens of the longest row; default: %(default)s")
    add("--prompt", type=_count(1 << 24), default=1, help="tokens of it that a group's rows share")
    add("--completions", type=_count(4096), default=8, help="of a group; default: %(default)s")
    add("--json", action="store_true", help="print every layout, with all figures")
    sites = parser.add_argument_group(
        "several sites ([learner.merge]); ranks and memory are each contributor's"
    )
    add = sites.add_argument
    add("--sites", type=_count(1024), metavar="N", help="contributors")
    add(
        "--line",
        type=_amount,
        default=100.0,
        metavar="MBIT",
        help="each site's, Mbit/s in each direction; default: %(default)s",
    )
    add("--round-trip", type=_amount, default=100.0, metavar="MS", help="default: %(default)s")
    add("--groups", type=_count(65_536), default=8, help="coordinator.batch_groups; default: %(default)s")
    add("--local-steps", type=_count(1000), metavar="H", help="default: each method's own")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; exit 1 where nothing fits.

    Raises:
        StartupError: the model's sizes cannot be told.
    """
    shape, device = _shape(arguments.model), DEVICES[arguments.device]
    on_device, _ = kept_bytes(_HEAVIEST) if arguments.sites else (0.0, 0.0)
    planned = plan_layouts(
        shape,
        device,
        ranks=arguments.gpus,
        memory_bytes=arguments.memory * 1e9,
        tokens=max(arguments.tokens, arguments.row),
        row_tokens=arguments.row,
        keys_a_token=_keys_a_token(arguments.row, arguments.prompt, rows=arguments.completions),
        kept_bytes=on_device,
    )
    behind = lag(shape, link_mbit_s=arguments.link, step_s=planned[0].step_s.middle)
    rounds = _rounds(shape, planned[0].step_s.middle, arguments) if arguments.sites else []
    if arguments.json:
        layouts = [asdict(one) | {"keys": one.layout.keys} for one in planned]
        model = {**asdict(shape), "parameters": shape.parameters}
        told = {"model": model, "device": asdict(device), "lag": asdict(behind), "layouts": layouts}
        if rounds:
            told |= {"rounds": list(map(asdict, rounds)), "recommended": recommended(rounds).method}
        print(json.dumps(told, indent=1))
    else:
        _show(shape, planned, behind, arguments)
        if rounds:
            _show_rounds(shape, rounds, arguments)
    return ExitCode.DRAINED if planned[0].fits else ExitCode.FAILED


def _keys_a_token(row: int, prompt: int, *, rows: int) -> float:
    """Return the tokens of a group's rows over those that the model reads, which has their prompt once."""
    shared = min(prompt, row - 1)
    return rows * row / (shared + rows * (row - shared))


def _show(shape: ModelShape, planned: Sequence[Planned], behind: Lag, arguments: argparse.Namespace) -> None:
    fitting = [one for one in planned if one.fits]
    rows = table("GB a rank", *planned[0].memory, "step, s", right=True)
    rows.add_column("set", no_wrap=True)
    for one in (fitting or planned)[:SHOWN]:
        sizes = [f"{size / 1e9:.2f}" for size in (one.needed_bytes, *one.memory.values())]
        settings = (f"{key} = {json.dumps(value)}" for key, value in one.layout.keys.items())
        rows.add_row(*sizes, _bounded(one.step_s), "  ".join(settings) or "nothing")
    out, memory = console(), arguments.memory
    out.print(f"{shape.name}: {shape.parameters:,} parameters; {len(fitting)} of {len(planned)} layouts fit")
    out.print(rows)
    if not fitting:
        out.print(f"None fits {memory:g} GB. Take more ranks or memory, or a shorter --row.", style="bold")
    megabytes = Interval(*(size / 1e6 for size in behind.delta_bytes))
    out.print(
        f"a version: delta {_bounded(megabytes)} MB, keyframe {behind.keyframe_bytes / 1e6:.4g} MB\n"
        f"a sampler at {arguments.link:g} Mbit/s: a delta takes {_bounded(behind.delta_s)} s, a keyframe "
        f"{behind.keyframe_s:.3g} s; by its link it lags at most {_bounded(behind.versions)} versions\n"
        f"{_words(shape, arguments.gpus, planned[0])}{arguments.device}: {DEVICES[arguments.device].source}"
    )


def _rounds(shape: ModelShape, step_s: float, arguments: argparse.Namespace) -> list[RoundCosts]:
    sites = Sites(
        arguments.sites,
        line_mbit_s=arguments.line,
        round_trip_s=arguments.round_trip / 1e3,
        batch_groups=arguments.groups,
        tokens=max(arguments.tokens, arguments.row),
        step_s=step_s,
    )
    return costs_of_methods(shape, sites, local_steps=arguments.local_steps)


def _show_rounds(shape: ModelShape, rounds: Sequence[RoundCosts], arguments: argparse.Namespace) -> None:
    titles = (
        *("local_steps", "hands in, MB", "fetches, MB", "round, s", "line, %", "pace"),
        *("samplers lag, versions", "buffer_groups"),
    )
    rows = table("learner.merge.method", *titles, right=True)
    for one in rounds:
        up, down = (
            Interval(*(size / 1e6 for size in sizes)) for sizes in (one.payload_bytes, one.version_bytes)
        )
        lags = f"{one.sampler_lag_versions:.2g} + {one.merge_lag_versions}"
        figures = (f"{one.round_s:.3g}", f"{100 * one.line_share:.0f}", f"{one.speedup:.2g}", lags)
        rows.add_row(
            one.method, f"{one.local_steps}", _bounded(up), _bounded(down), *figures, f"{one.buffer_groups}"
        )
    best = recommended(rounds)
    merges = MergeSettings(method=best.method, local_steps=best.local_steps)
    memory = learner_memory(shape, merges, contributors=arguments.sites)
    parts = ", ".join(f"{name} {size / 1e9:.3g}" for name, size in memory.items())
    _, in_host = kept_bytes(merges)
    out = console()
    out.print(
        f"{arguments.sites} contributors as above, every site at {arguments.line:g} Mbit/s and "
        f"{arguments.round_trip:g} ms; pace: over that of one of them as a learner"
    )
    out.print(rows)
    lag_versions = math.ceil(best.sampler_lag_versions) + best.merge_lag_versions
    out.print(
        f"take {best.method}: the line costs {100 * best.line_share:.0f} % of the time; "
        f"coordinator.max_staleness_versions {lag_versions} or more",
        style="bold",
    )
    journal_mb = arguments.sites * best.payload_bytes.middle / 1e6
    out.print(
        f"the learner needs no GPU then, and {sum(memory.values()) / 1e9:.3g} GB ({parts}); its journal "
        f"grows by {journal_mb:.3g} MB a version\n"
        f"a contributor needs {in_host * shape.parameters / 1e9:.3g} GB of its host, and is sent "
        f"{best.dealt_bytes / 1e6:.3g} MB of groups a round"
    )


def _words(shape: ModelShape, ranks: int, one: Planned) -> str:
    """Return a line on words that are not in the device's memory; empty: they are, and in the table."""
    if "words" in one.memory:
        return ""
    size = words_bytes(shape, ranks=ranks) / 1e9
    return f"words of two versions, published and being made, take {size:.3g} GB of the host for each rank\n"


def _bounded(one: Interval) -> str:
    return f"{one.middle:.3g} ({one.low:.3g}-{one.high:.3g})"


def _shape(text: str) -> ModelShape:
    path = Path(text) / "config.json"
    try:
        if not path.parent.is_dir():
            return ModelShape.of_size(text)
        return ModelShape.of_config(json.loads(path.read_text(encoding="utf-8")), name=text)
    except OSError as error:
        raise cannot_read(
            path, error, fix="MODEL is a directory with it, or a size such as 8B or 135M."
        ) from error
    except (ValueError, TypeError, AttributeError) as error:
        what = error if isinstance(error, UnknownModelError) else f"{path} cannot be read: {error}"
        raise StartupError(
            f"the size of {text!r} cannot be told: {what}",
            fix="Name a directory with the config.json of such a model, or a size such as 8B or 135M.",
        ) from error


def _count(most: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not (text.isdecimal() and 1 <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {most}")
        return int(text)

    return count


def _amount(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number
