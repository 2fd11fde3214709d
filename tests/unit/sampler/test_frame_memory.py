"""The server opens a file with frames of its own user's, in one directory, and nothing else."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from node.values.limits import FRAME_WORDS
from sampler.engines.words.frame_memory import (
    DIRECTORY_VARIABLE,
    make_frame_memory,
    open_frame_memory,
    remove_frame_memory,
)

NAME = "frames-0123abcd"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "weights"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(directory))
    return directory


def test_both_sides_see_the_same_frames_and_need_no_name_for_them(directory: Path) -> None:
    ours = make_frame_memory(directory, NAME, slots=2, workers=3)
    assert (directory / NAME).stat().st_mode & 0o777 == 0o600
    theirs = open_frame_memory(NAME, workers=3)
    remove_frame_memory(directory, NAME)
    assert os.listdir(directory) == []
    assert ours.shape == theirs.shape == (2, 3, FRAME_WORDS)
    ours[1, 2, :] = np.arange(FRAME_WORDS) % 65521
    np.testing.assert_array_equal(theirs[1, 2], ours[1, 2])


def test_a_file_that_is_there_already_is_not_taken(directory: Path) -> None:
    (directory / NAME).symlink_to("/dev/null")
    rooms = make_frame_memory(directory, NAME, slots=1, workers=1)
    assert not (directory / NAME).is_symlink()
    assert rooms.shape[0] == 1


@pytest.mark.parametrize(
    "name", ["", "../frames-01", "/etc/passwd", "frames-01/..", "frames-xy", "lock", "frames-01\n"]
)
def test_another_name_is_refused(directory: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not the name"):
        open_frame_memory(name, workers=1)


def linked(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / NAME).rename(directory / "frames-ff")
    (directory / NAME).symlink_to(directory / "frames-ff")


def linked_directory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory.parent / "link").symlink_to(directory)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(directory.parent / "link"))


def replaced_by_a_pipe(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / NAME).unlink()
    os.mkfifo(directory / NAME, 0o600)


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        (lambda _, patch: patch.delenv(DIRECTORY_VARIABLE), ValueError, "HETERORL_WEIGHTS_DIR is not set"),
        (lambda path, _: (path / NAME).chmod(0o640), PermissionError, "mode 0600.*mode 0640"),
        (lambda path, _: (path / NAME).chmod(0o606), PermissionError, "mode 0600.*mode 0606"),
        (lambda path, _: path.chmod(0o750), PermissionError, "mode 0700.*mode 0750"),
        (
            lambda _, patch: patch.setattr(os, "geteuid", lambda: os.getuid() + 1),
            PermissionError,
            "must have owner",
        ),
        (linked, OSError, "symbolic links"),
        (linked_directory, NotADirectoryError, "Not a directory"),
        (replaced_by_a_pipe, OSError, "not a file of"),
        *(
            (
                lambda path, _, size=size: os.truncate(path / NAME, size),
                PermissionError,
                f"it has {size} bytes",
            )
            for size in (0, 1, 2 * FRAME_WORDS - 1, 65 * 2 * FRAME_WORDS)
        ),
    ],
)
def test_a_file_or_a_directory_that_is_not_the_users_own_alone_is_refused(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    error: type[Exception],
    said: str,
) -> None:
    make_frame_memory(directory, NAME, slots=1, workers=1)
    open_frame_memory(NAME, workers=1)
    spoil(directory, monkeypatch)
    with pytest.raises(error, match=said):
        open_frame_memory(NAME, workers=1)
