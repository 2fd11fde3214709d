"""``heterorl-node export``: a version as a model directory, with the base model's names and files.

    published words, from the learner's store or its kept/ --.
    a checkpoint's float32 masters, rounded ------------------'--> the base model's own file names

The export is what samplers compute with: it is read back before it gets its name, and must have the
root that the learner signs. Names, tied weights, tokenizer, chat template and generation settings are
the base model's.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from learner.journal.progress import BestVersion
from learner.publishing.kept_versions import published_versions, read_published
from learner.training.checkpoint import CheckpointGoneError, read_masters, versions_in
from learner.training.master_words import MasterWords, root_of
from learner.training.model import Policy, load_policy
from learner.training.training_state import CHECKPOINTS, progress_in
from node.errors import RefusedError, StartupError
from node.exit_code import ExitCode
from node.run import Role
from node.weights.format.digests import Words
from node.weights.format.model_files import StoredDtypes

EXAMPLE: Final = """\
  heterorl-node export runs/hand/exported --state-dir runs/hand/learner --model-dir runs/hand/model

The newest version, unless --version names another that the learner still has: those published lately, its
last two checkpoints, the best, and every learner.keep_every_versions-th. --best is the version that did best
in evaluations; without any, the newest one when the mean training reward over learner.stop_window_versions
was highest. The learner may be running.
"""

READS: Final = 10
"""Tries to read a version before the learner removes it."""

LISTED: Final = 20
"""Newest versions that a message lists."""

_WEIGHT_FILES: Final = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "config.json",
)
"""Files that the export writes; all others are copied from the base model."""


_CHAT_TEMPLATES: Final = "additional_chat_templates"
"""Directory where transformers keeps the templates that have names."""


@dataclass(frozen=True, slots=True)
class Export:
    """Result of an export."""

    directory: str
    version: int
    root: str
    """Hex; as in the signed manifest and in ``heterorl-node status``."""
    files: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="made by the export; must not exist yet")
    parser.add_argument("--state-dir", type=Path, required=True, help="the learner's node.state_dir")
    parser.add_argument(
        "--model-dir", type=Path, required=True, help="the run's base model: learner.model_dir"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--version", type=int, help="which version; default: the newest")
    which.add_argument("--best", action="store_true", help="the best version that the learner knows of")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def run(arguments: argparse.Namespace) -> int:
    """Export a version.

    Raises:
        StartupError: the version is not there, a file is damaged, or the directory cannot be written.
    """
    state = arguments.state_dir / Role.LEARNER
    version = _best(state) if arguments.best else arguments.version
    export = export_version(arguments.directory, state=state, model_dir=arguments.model_dir, version=version)
    if arguments.json:
        print(json.dumps(asdict(export)))
    else:
        print(f"version {export.version}, root {export.root}, is in {export.directory}")
    return ExitCode.DRAINED


def best_in(state: Path) -> BestVersion | None:
    """Return the best version that a learner has written down, from its state directory.

    Raises:
        StartupError: checkpoint or journal are damaged.
    """
    for _ in range(READS - 1):
        with suppress(OSError):
            return progress_in(state).best
    return progress_in(state).best


def export_version(directory: Path, *, state: Path, model_dir: Path, version: int | None) -> Export:
    """Write a version into ``directory``, which appears only when it is whole.

    Args:
        state: the learner's state directory; the learner may be running.
        version: None: the newest.
    Raises:
        StartupError: as ``run``.
    """
    if directory.exists():
        raise StartupError(f"{directory} is there already", fix="Name a directory that does not exist yet.")
    _chosen(state, version)
    policy = load_policy(model_dir, device="cpu")
    version = _load(policy, state, version)
    root = root_of(policy.master_words)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    except OSError as error:
        raise StartupError(
            f"{directory} cannot be made: {error.strerror}", fix="Choose another place."
        ) from error
    try:
        _save(policy, staged, model_dir=model_dir)
        again = load_policy(staged, device="cpu")
        if (again.layout.digest, root_of(again.master_words)) != (policy.layout.digest, root):
            raise StartupError(
                f"version {version} as written to {directory} is not what samplers compute with",
                fix="Report this with the model's config.json: transformers renames its tensors.",
            )
        staged.chmod(0o755)
        staged.rename(directory)
    except OSError as error:
        raise StartupError(
            f"{directory} cannot be written: {error.strerror}", fix="Make room, or choose another place."
        ) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    files = tuple(sorted(path.name for path in directory.iterdir()))
    return Export(str(directory), version, root.hex(), files)


def _best(state: Path) -> int:
    _there(state)
    best = best_in(state)
    if best is None:
        raise StartupError(
            "no version is known to be the best yet",
            fix="Without evaluations one is after learner.stop_window_versions steps; with "
            "[coordinator.evaluation], once `heterorl-node status` says that `export --best` takes it.",
        )
    if best.version == 0:
        raise StartupError(
            "the best version so far is the base model",
            fix="It is in --model-dir. Where `heterorl-node status` names another one, wait until it says "
            "that `export --best` takes it: within a heartbeat and a step.",
        )
    if best.version not in (there := _there(state)):
        raise StartupError(
            f"the words of the best version, {best.version}, are gone: it was told of too late, or another "
            f"was the best before; there are {_list(there)}",
            fix="Export one of these with --version; learner.keep_every_versions keeps more of them.",
        )
    return best.version


def _there(state: Path) -> list[int]:
    there = sorted({*published_versions(state), *versions_in(state / CHECKPOINTS)})
    if not there:
        raise StartupError(
            f"there is no version in {state}",
            fix="--state-dir is the learner's node.state_dir; versions come with steps.",
        )
    return there


def _list(versions: list[int]) -> str:
    return ", ".join(map(str, versions[-LISTED:]))


def _chosen(state: Path, version: int | None) -> int:
    there = _there(state)
    if version is None:
        return there[-1]
    if version not in there:
        raise StartupError(
            f"version {version} is not there; there are {_list(there)}",
            fix="Set learner.keep_every_versions to keep more of them.",
        )
    return version


def _load(policy: Policy, state: Path, wanted: int | None) -> int:
    """Load a version, by default the newest there is by then, from under a learner that goes on."""
    for left in reversed(range(READS)):
        version = _chosen(state, wanted)
        try:
            words = read_published(
                state, version, layout=policy.layout, base=MasterWords(policy.tensors, policy.layout).frame
            )
            if words is None:
                read_masters(state / CHECKPOINTS, version, policy)
            else:
                _take_words(policy, words)
        except (OSError, CheckpointGoneError):
            if not left:
                raise
        except (RefusedError, ValueError) as error:
            raise StartupError(
                f"version {version} in {state} cannot be read: {error}",
                fix="Export another version with --version, and --model-dir as the run began with.",
            ) from error
        else:
            break
    return version


def _take_words(policy: Policy, words: Words) -> None:
    with torch.no_grad():
        for span in policy.layout.tensors:
            part = torch.from_numpy(words[span.start_word : span.start_word + span.words])
            elements = part.view(getattr(torch, span.dtype.name))[: span.elements]
            policy.tensors[span.name].copy_(elements.view(span.shape))


def _save(policy: Policy, directory: Path, *, model_dir: Path) -> None:
    model = policy.model
    _round(
        model, {span.name: getattr(torch, span.dtype.name) for span in policy.layout.tensors}, policy.tensors
    )
    model.config.dtype = getattr(torch, StoredDtypes.of(model_dir).most)
    model.save_pretrained(directory)
    written_anew = {path.name for pattern in _WEIGHT_FILES for path in model_dir.glob(pattern)}
    for path in model_dir.iterdir():
        if path.is_file() and path.name not in written_anew:
            shutil.copyfile(path, directory / path.name)
        elif path.is_dir() and path.name == _CHAT_TEMPLATES:
            shutil.copytree(path, directory / path.name)


def _round(model: PreTrainedModel, dtypes: Mapping[str, torch.dtype], tensors: Mapping[str, Tensor]) -> None:
    """Round every tensor of the model to its published dtype; tied ones stay tied."""
    rounded = {tensor.data_ptr(): tensor.detach().to(dtypes[name]) for name, tensor in tensors.items()}
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.data_ptr() in rounded:
            tensor.data = rounded[tensor.data_ptr()]
