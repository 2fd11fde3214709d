"""The package builds with and without a C compiler, and says which."""

import shutil
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the sources, so that no kernel in use is replaced."""
    copy = tmp_path_factory.mktemp("project")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in ("node", "learner", "sampler", "proto", "deploy"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return copy


def built_wheel(project: Path) -> Path:
    (wheel,) = WheelBuilder(str(project)).build(directory=str(project / "dist"), versions=["standard"])
    return Path(wheel)


def kernels_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if name.endswith(".so")]


@pytest.mark.needs("gcc")
def test_a_wheel_carries_the_kernel_and_is_of_its_platform(project: Path) -> None:
    wheel = built_wheel(project)
    assert kernels_in(wheel) == ["node/weights/codec/native/kernel.so"]
    assert wheel.name.startswith("heterorl_node-")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")


@pytest.mark.parametrize("obstacle", ["no compiler", "broken compiler", "not wanted"])
def test_without_a_compiler_the_wheel_has_no_kernel_and_the_reason_is_told(
    project: Path, obstacle: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A kernel left over from an earlier build must not get in: it may be of another platform.
    (project / "node/weights/codec/native/kernel.so").write_bytes(b"stale")
    told = {
        "no compiler": "there is no C compiler",
        "broken compiler": "false failed",
        "not wanted": "is set",
    }
    match obstacle:
        case "no compiler":
            monkeypatch.setenv("PATH", "/nonexistent")
            monkeypatch.delenv("CC", raising=False)
        case "broken compiler":
            monkeypatch.setenv("CC", "false")
        case "not wanted":
            monkeypatch.setenv("HETERORL_NO_KERNEL", "1")
    wheel = built_wheel(project)
    assert kernels_in(wheel) == []
    assert wheel.name.endswith("-py3-none-any.whl")
    assert told[obstacle] in "".join(capsys.readouterr())
