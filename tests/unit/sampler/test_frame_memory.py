"""The server opens a file with frames of its own user's, in one directory, and nothing else."""

import os
from pathlib import Path

import numpy as np
import pytest

from node.limits import FRAME_WORDS
from sampler.engines.frame_memory import (
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


def test_without_a_directory_of_the_servers_nothing_is_opened(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_frame_memory(directory, NAME, slots=1, workers=1)
    monkeypatch.delenv(DIRECTORY_VARIABLE)
    with pytest.raises(ValueError, match="HETERORL_WEIGHTS_DIR is not set"):
        open_frame_memory(NAME, workers=1)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o606])
def test_a_file_that_others_may_open_is_refused(directory: Path, mode: int) -> None:
    make_frame_memory(directory, NAME, slots=1, workers=1)
    (directory / NAME).chmod(mode)
    if mode == 0o600:
        open_frame_memory(NAME, workers=1)
        return
    with pytest.raises(PermissionError, match=f"mode 0600.*mode {mode:04o}"):
        open_frame_memory(NAME, workers=1)


def test_a_directory_that_others_may_enter_is_refused(directory: Path) -> None:
    make_frame_memory(directory, NAME, slots=1, workers=1)
    directory.chmod(0o750)
    with pytest.raises(PermissionError, match=r"mode 0700.*mode 0750"):
        open_frame_memory(NAME, workers=1)


def test_what_another_user_made_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_frame_memory(directory, NAME, slots=1, workers=1)
    monkeypatch.setattr(os, "geteuid", lambda: directory.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="must have owner"):
        open_frame_memory(NAME, workers=1)


def test_a_link_to_a_file_or_to_the_directory_is_refused(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_frame_memory(directory, NAME, slots=1, workers=1)
    (directory / "frames-ff").symlink_to(directory / NAME)
    with pytest.raises(OSError, match="symbolic links"):
        open_frame_memory("frames-ff", workers=1)
    (tmp_path / "link").symlink_to(directory)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "link"))
    with pytest.raises(NotADirectoryError):
        open_frame_memory(NAME, workers=1)


@pytest.mark.parametrize("size", [0, 1, 2 * FRAME_WORDS - 1, 65 * 2 * FRAME_WORDS])
def test_a_file_of_another_size_is_refused(directory: Path, size: int) -> None:
    make_frame_memory(directory, NAME, slots=1, workers=1)
    os.truncate(directory / NAME, size)
    with pytest.raises(PermissionError, match=f"it has {size} bytes"):
        open_frame_memory(NAME, workers=1)


def test_what_is_no_file_is_refused(directory: Path) -> None:
    os.mkfifo(directory / NAME, 0o600)
    with pytest.raises(OSError, match="not a file of"):
        open_frame_memory(NAME, workers=1)
