import sys
from pathlib import Path

import pytest

from node.system.device import chosen_device

TORCH = "__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = {hip}\n"


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:1"])
def test_a_device_that_is_named_is_taken_whatever_is_there(tmp_path: Path, name: str) -> None:
    assert chosen_device(name, nodes=tmp_path) == name


@pytest.mark.parametrize(
    ("node", "cuda", "hip", "visible", "expected"),
    [
        ("nvidia0", "'12.8'", "None", None, "cuda"),
        ("nvidia0", "'12.8'", "None", "1", "cuda"),
        ("kfd", "None", "'6.4'", None, "cuda"),
        ("nvidia0", "None", "None", None, "cpu"),  # torch's CPU build
        ("nvidiactl", "'12.8'", "None", None, "cpu"),  # the driver without a card
        ("nvidia0", "'12.8'", "None", "", "cpu"),
        ("null", "'12.8'", "None", None, "cpu"),
    ],
)
def test_auto_takes_a_gpu_that_is_there_and_that_torch_was_built_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    node: str,
    cuda: str,
    hip: str,
    visible: str | None,
    expected: str,
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(TORCH.format(cuda=cuda, hip=hip))
    (tmp_path / node).touch()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "path", [str(tmp_path)])
        patched.delitem(sys.modules, "torch", raising=False)
        environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        assert chosen_device("auto", nodes=tmp_path, environ=environ) == expected
