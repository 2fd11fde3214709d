"""No code of a model directory is run: it may come from a coordinator, or from anyone's repository."""

import ast
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.model.model import load_policy
from node.errors import StartupError
from sampler.engines.torch.live_model import LiveModel
from support.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
SHIPPED = ("node", "learner", "sampler", "deploy", "bench")
LOADING = {"from_pretrained", "from_config"}


def test_everything_that_loads_by_a_model_directory_says_that_it_trusts_no_code() -> None:
    silent, said = [], 0
    for path in (path for folder in SHIPPED for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text if any(name in text for name in LOADING) else "")
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            called = call.func
            if not isinstance(called, ast.Attribute) or called.attr not in LOADING:
                continue
            if ast.unparse(called.value).startswith("NoiseMask"):
                continue  # our own class: nothing in the directory names another
            trust = [ast.unparse(one.value) for one in call.keywords if one.arg == "trust_remote_code"]
            said += trust == ["False"]
            if trust != ["False"]:
                silent.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert not silent
    assert said > 10


def test_code_of_a_model_directory_is_not_run_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_tiny_model(tmp_path / "model", hidden=32, layers=1)
    ran = tmp_path / "ran"
    (directory / "modeling_own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    config = json.loads((directory / "config.json").read_text())
    config["model_type"] = "own"
    names = ("AutoConfig", "AutoModelForCausalLM")
    config["auto_map"] = {name: "modeling_own.Own" for name in names}
    (directory / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question to the terminal"))
    with pytest.raises(StartupError):
        LiveModel.load(
            AutoModelForCausalLM, directory, device="cpu", compute_dtype=torch.float32, threads=1, seed=0
        )
    with pytest.raises(StartupError):
        load_policy(directory, device="cpu")
    assert not ran.exists()
