"""A model directory says of which kind its policy is."""

import json
from pathlib import Path

import pytest

from node.errors import StartupError
from node.kinds import registry
from node.kinds.kind import Kind


def model_of(directory: Path, architecture: str) -> Path:
    (directory / "config.json").write_text(json.dumps({"architectures": [architecture], "num_labels": 1}))
    return directory


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("BertForSequenceClassification", "ranking"),
        ("NoiseMaskModel", "noise_mask"),
        ("Qwen3ForCausalLM", "causal_lm"),
    ],
)
def test_a_model_has_one_kind_by_its_class(tmp_path: Path, architecture: str, name: str) -> None:
    assert registry.kind_of(model_of(tmp_path, architecture)).name == name


def test_a_class_that_two_kinds_claim_is_refused_with_both_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rivals = tuple(Kind(name, lambda of: of == "BothModel", "x:Model") for name in ("bandit", "ranking"))
    monkeypatch.setattr(registry, "other_kinds", lambda: rivals)
    with pytest.raises(StartupError) as refused:
        registry.kind_of(model_of(tmp_path, "BothModel"))
    assert all(word in str(refused.value) for word in ("bandit", "ranking", "BothModel"))
    assert registry.kind_of(model_of(tmp_path, "OtherForCausalLM")) is registry.CAUSAL_LM
