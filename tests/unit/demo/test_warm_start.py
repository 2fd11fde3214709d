from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from deploy.demo.warm_start import WarmStart, make_base_model
from node.text.tokenizer import tokenizer_digest
from sampler.tasks.addition import AdditionTask


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WarmStart]:
    directory = tmp_path_factory.mktemp("warm") / "model"
    return directory, make_base_model(directory, accuracy=0.36, seed=0)


def _sampled_accuracy(directory: Path, *, completions: int, seed: int) -> float:
    """Sample every prompt as a sampler would, with the public API alone."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    task = AdditionTask()
    prompts = torch.tensor([tokenizer(task.prompt(index, None)).input_ids for index in range(task.prompts)])
    torch.manual_seed(seed)
    ids = model.generate(
        prompts.repeat_interleave(completions, dim=0), do_sample=True, top_k=0, max_new_tokens=4
    )
    texts = tokenizer.batch_decode(ids[:, prompts.shape[1] :], skip_special_tokens=True)
    return sum(text == task.answer(place // completions) for place, text in enumerate(texts)) / len(texts)


def test_the_saved_model_is_right_as_often_as_was_asked_for(base: tuple[Path, WarmStart]) -> None:
    directory, warm_start = base
    assert 0.36 <= warm_start.accuracy < 0.46
    sampled = _sampled_accuracy(directory, completions=20, seed=1)
    assert sampled == pytest.approx(warm_start.accuracy, abs=0.04)  # of 2000: standard deviation 0.011


def test_the_same_seed_makes_the_same_model_and_another_seed_another(tmp_path: Path) -> None:
    def words(name: str, seed: int) -> bytes:
        made = make_base_model(tmp_path / name, accuracy=0.005, seed=seed, width=16)
        assert made.steps > 0
        return (tmp_path / name / "model.safetensors").read_bytes()

    assert words("one", 0) == words("same", 0) != words("other", 1)


def test_the_tokenizer_takes_every_prompt_and_answer_apart_and_together_again(
    base: tuple[Path, WarmStart],
) -> None:
    directory, _ = base
    tokenizer = AutoTokenizer.from_pretrained(directory)
    task = AdditionTask()
    for index in range(task.prompts):
        text = task.prompt(index, None) + task.answer(index)
        ids = tokenizer(text).input_ids
        assert len(ids) == len(text)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
    assert len(tokenizer_digest(directory)) == 16


def test_an_accuracy_out_of_reach_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.demo.warm_start._STEPS", 3)
    with pytest.raises(RuntimeError, match="after 3 steps the base model is right"):
        make_base_model(tmp_path / "model", accuracy=0.9, seed=0)
