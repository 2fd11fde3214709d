import errno
import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from bench.forked_context import forked_context
from bench.held_policy import HeldPolicy
from learner.export import Export, export_version
from learner.journal import checkpoint
from learner.journal.checkpoint_index import CheckpointIndex, index_in, versions_in
from learner.journal.progress import BestVersion, Progress
from learner.model.model import Policy, load_policy
from learner.publishing.model_copy import ModelCopy
from learner.step.train_step import train_step
from node.commands.cli import main
from node.identity.signatures import SigningKey
from node.values.groups.rollout import RolloutGroup
from node.weights.store.artifact_store import ArtifactStore
from sampler.engines.torch.torch_engine import TorchEngine
from sampler.engines.words.model_words import version_of
from support.checkpoints import open_checkpoints, save
from support.export_memory import rise_in_export
from support.groups import make_completion, make_group
from support.refusals import cannot_start
from support.step_settings import make_step_settings
from support.tiny_model import VOCABULARY_SIZE, make_tiny_model
from support.weights import flip_bit, put_words

EMBEDDING = "model.embed_tokens.weight"
SETTINGS = make_step_settings(staleness_half_life_versions=4.0, micro_batch_tokens=64)


Exporting = Callable[..., Export]


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def exported(model_dir: Path, state_dir: Path, tmp_path: Path) -> Exporting:
    """Export a version, the newest unless said otherwise, into a directory that is not there yet."""

    def export(
        version: int | None = None, *, out: Path = tmp_path / "out", model_dir: Path = model_dir
    ) -> Export:
        return export_version(out, state=state_dir / "learner", model_dir=model_dir, version=version)

    return export


def train(
    model_dir: Path,
    state_dir: Path,
    *,
    versions: int,
    keep_every_versions: int = 0,
    best: BestVersion | None = None,
) -> Policy:
    """Take steps, each with a checkpoint, and return the policy after the last."""
    policy = load_policy(model_dir, device="cpu")
    optimizer = torch.optim.AdamW(policy.parameters.values(), lr=1e-2, fused=True)
    checkpoints = open_checkpoints(
        state_dir / "learner/checkpoints", policy, keep_every_versions=keep_every_versions
    )
    for version in range(versions):
        completions = (make_completion(3, reward=1.0), make_completion(4))
        groups: Sequence[RolloutGroup] = [make_group(completions=completions)]
        assert train_step(policy, optimizer, groups, version=version, settings=SETTINGS).is_applied
        save(checkpoints, policy, optimizer, Progress(version=version + 1, best=best))
    return policy


def root_of(policy: Policy, version: int) -> bytes:
    """Return the root that the learner signs."""
    words = np.empty(policy.layout.words, np.uint16)
    policy.snapshot(words)
    return HeldPolicy.of(version, words, layout=policy.layout).version.root


def test_an_export_has_the_names_dtypes_and_files_of_the_base_model_and_the_words_signed(
    model_dir: Path, state_dir: Path, tmp_path: Path, exported: Exporting
) -> None:
    (model_dir / "chat_template.jinja").write_text("{{ messages }}")
    (model_dir / "additional_chat_templates").mkdir()
    (model_dir / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    policy = train(model_dir, state_dir, versions=2)
    signed = root_of(policy, 2)
    out = tmp_path / "deep" / "out"
    export = exported(out=out)
    assert (export.version, export.root) == (2, signed.hex())
    base, written = load_file(model_dir / "model.safetensors"), load_file(out / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in written.items()} == {
        name: tensor.dtype for name, tensor in base.items()
    }
    assert any(not torch.equal(written[name], base[name]) for name in base)
    assert {path.name for path in model_dir.iterdir()} <= {path.name for path in out.iterdir()}
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (out / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    # What a sampler would hold, had it this version.
    engine = TorchEngine(out, device="cpu", compute_dtype=torch.float32, threads=0, seed=0)
    assert version_of(2, engine.weights.live, layout=engine.layout).root == signed


def test_an_export_of_a_model_in_several_files_has_the_same_ones(
    model_dir: Path, state_dir: Path, tmp_path: Path, exported: Exporting
) -> None:
    """Among them a tied tensor under both of its names, and one that the model does not have."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    base = shutil.copytree(model_dir, tmp_path / "base")
    (base / "model.safetensors").unlink()
    model.save_pretrained(base, max_shard_size="5KB")
    index = json.loads((base / "model.safetensors.index.json").read_text())
    beside = {"lm_head.weight": load_file(model_dir / "model.safetensors")[EMBEDDING], "other": torch.ones(3)}
    save_file(beside, base / "model-beside.safetensors", metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(beside, "model-beside.safetensors")
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    policy = train(base, state_dir, versions=1)
    out = tmp_path / "out"
    export = exported(out=out, model_dir=base)
    assert export.root == root_of(policy, 1).hex()
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in base.iterdir())
    assert len(set(index["weight_map"].values())) > 3
    for name, file in index["weight_map"].items():
        written = load_file(out / file)[name]
        trained = beside[name] if name == "other" else policy.model.state_dict()[name].to(written.dtype)
        assert torch.equal(written, trained), name


def test_an_export_holds_a_few_tensors_at_a_time(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path / "model", hidden=256, layers=24)
    policy, key = load_policy(model_dir, device="cpu"), SigningKey.generate()
    with torch.no_grad():
        for tensor in policy.tensors.values():
            tensor.mul_(1.5)
    optimizer = torch.optim.AdamW(policy.parameters.values(), lr=1e-2, fused=True)
    norm = policy.parameters["model.norm.weight"]
    optimizer.state[norm]["exp_avg"] = torch.zeros_like(norm)
    masters, published = tmp_path / "masters", tmp_path / "published"
    save(open_checkpoints(masters / "checkpoints", policy), policy, optimizer, Progress(version=1))
    words = np.empty(policy.layout.words, np.uint16)
    policy.snapshot(words)
    put_words(store_of(published, key), key, words, version=1, base=None, layout=policy.layout)
    with ProcessPoolExecutor(1, forked_context("support.export_memory")) as pool:
        for state in (masters, published):
            rise = pool.submit(rise_in_export, state / "out", state, model_dir, 1).result()
            assert rise < 4 * policy.layout.words / 3, state.name
    assert 4 * policy.layout.words > 50e6


def test_a_family_whose_tensors_are_renamed_is_exported_whole(
    state_dir: Path, tmp_path: Path, exported: Exporting
) -> None:
    config = MixtralConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    MixtralForCausalLM(config).bfloat16().save_pretrained(tmp_path / "model")
    policy = train(tmp_path / "model", state_dir, versions=1)
    export = exported(model_dir=tmp_path / "model")
    assert export.root == root_of(policy, 1).hex()
    base, written = (load_file(tmp_path / one / "model.safetensors") for one in ("model", "out"))
    assert {name: one.shape for name, one in base.items()} == {n: one.shape for n, one in written.items()}


def test_every_nth_version_is_kept_without_its_optimizer_and_can_be_exported(
    model_dir: Path, state_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(model_dir, state_dir, versions=5, keep_every_versions=2)
    checkpoints = state_dir / "learner/checkpoints"
    assert versions_in(checkpoints) == [2, 4, 5]
    assert sorted(path.name for path in (checkpoints / "000000000002").iterdir()) == [
        "index.json",
        "masters",
    ]
    flags = ("--state-dir", state_dir, "--model-dir", model_dir)
    argv = ["export", tmp_path / "two", *flags, "--version", 2, "--json"]
    assert main([str(argument) for argument in argv]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["version"] == 2
    assert "model.safetensors" in said["files"]
    argv = ["export", tmp_path / "three", *flags, "--version", 3]
    assert main([str(argument) for argument in argv]) == 3
    assert "version 3 is not there; there are 2, 4, 5" in capsys.readouterr().err


def test_an_export_takes_the_next_version_where_the_newest_was_removed_while_it_was_read(
    model_dir: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch, exported: Exporting
) -> None:
    train(model_dir, state_dir, versions=2)
    checkpoints = state_dir / "learner/checkpoints"

    def removed_after(path: Path) -> CheckpointIndex:
        index = index_in(path)
        shutil.rmtree(checkpoints / "000000000002", ignore_errors=True)
        return index

    monkeypatch.setattr(checkpoint, "index_in", removed_after)
    with cannot_start("version 2"):
        exported(2)
    export = exported()
    assert export.version == 1


def store_of(state: Path, key: SigningKey) -> ArtifactStore:
    return ArtifactStore(state / "published", public_key=key.public_key, run_id="run", retained_keyframes=1)


def test_published_words_are_exported_by_number_and_a_damaged_frame_is_found(
    model_dir: Path, state_dir: Path, tmp_path: Path, exported: Exporting
) -> None:
    key, policy = SigningKey.generate(), load_policy(model_dir, device="cpu")
    store, words = store_of(state_dir / "learner", key), np.empty(policy.layout.words, np.uint16)
    policy.snapshot(words)
    base = HeldPolicy.of(0, words.copy(), layout=policy.layout)
    roots = {}
    for version in (1, 2, 3):
        words[version] = 0x3F80
        held = HeldPolicy.of(version, words.copy(), layout=policy.layout)
        put_words(store, key, held.words, version=version, base=base, layout=policy.layout)
        base, roots[version] = held, held.version.root.hex()
    for asked in (1, 2, None):
        export = exported(asked, out=tmp_path / f"{asked}")
        assert export.root == roots[export.version]
        assert export.version == (asked or 3)
    flip_bit(state_dir / "learner/published/complete/1-0/frames", 0)
    with cannot_start("version 2"):
        exported(2, out=tmp_path / "damaged")


def test_a_disk_that_is_full_is_told_and_leaves_nothing(
    model_dir: Path, state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exported: Exporting
) -> None:
    train(model_dir, state_dir, versions=1)

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ModelCopy, "take", no_room)
    with cannot_start("out", "No space left on device"):
        exported()
    assert {path.name for path in tmp_path.iterdir()} == {"state"}


def test_the_best_version_is_exported_by_name_and_its_absence_is_explained(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def export(state: str) -> int:
        flags = ("--best", "--state-dir", tmp_path / state, "--model-dir", model_dir)
        return main([str(argument) for argument in ("export", tmp_path / f"{state}-exported", *flags)])

    assert export("nowhere") == 3
    assert "There is no learner's state in" in capsys.readouterr().err
    (tmp_path / "empty/learner").mkdir(parents=True)
    assert export("empty") == 3
    assert "no version in" in capsys.readouterr().err
    train(model_dir, tmp_path / "known", versions=2, best=BestVersion(1, 0.9))
    assert export("known") == 0
    assert capsys.readouterr().out.startswith("version 1, root ")
    train(model_dir, tmp_path / "gone", versions=2, best=BestVersion(9))
    assert export("gone") == 3
    assert (
        "the words of the best version, 9, are gone: it was told of too late, or another was the best "
        "before; there are 1, 2" in capsys.readouterr().err
    )
    train(model_dir, tmp_path / "base", versions=1, best=BestVersion(0))
    assert export("base") == 3
    told = capsys.readouterr().err
    assert "the best version so far is the base model" in told
    assert "wait until it says that `export --best` takes it" in told
    train(model_dir, tmp_path / "unknown", versions=1)
    assert export("unknown") == 3
    assert "no version is known to be the best yet" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [Path.unlink, partial(flip_bit, byte=-1)], ids=["missing", "damaged"])
def test_a_checkpoint_that_is_not_whole_is_refused_by_its_file(
    model_dir: Path, state_dir: Path, tmp_path: Path, exported: Exporting, damage: Callable[[Path], None]
) -> None:
    train(model_dir, state_dir, versions=1)
    [path] = (state_dir / "learner/checkpoints/000000000001/masters").iterdir()
    damage(path)
    for version in (None, 1):
        with cannot_start("000000000001", "masters"):
            exported(version)
    assert not (tmp_path / "out").exists()


def test_a_missing_checkpoint_and_a_directory_that_exists_are_refused(
    model_dir: Path, state_dir: Path, tmp_path: Path, exported: Exporting
) -> None:
    with cannot_start(str(state_dir)):
        exported()
    train(model_dir, state_dir, versions=1)
    with cannot_start(str(tmp_path)):
        exported(out=tmp_path)
