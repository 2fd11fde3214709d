"""How long taking a new version holds generation up, and what memory it takes. One JSON line per case.

    python -m bench.swap                      two sizes of model, both ways, both types: two minutes
    python -m bench.swap --sizes small        one of them

    apply               spare: a second copy, then a change of pointers; in_place: over the only copy
    model_bytes         of the words; the model computes in compute_dtype
    stage_s             every payload verified, decoded and verified, by the clock, while generation goes on;
                        payloads are at hand: what the network costs is bench/sync.py's
    swap_s              generation held up, nothing running
    swap_running_s      the same while ``running_tokens`` are being completed; their caches are computed again
                        afterwards, between steps, which bench/sampler.py measures
    peak_extra_bytes    resident memory above that of the model while the first version is taken; Linux only

Real engine, real payloads on a real disk, a delta of ``--density`` from the exponent-conditioned codec. Each
case in a process of its own; times are the best of ``--versions`` versions after the first.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from bench.whole_versions import EncodedVersion, encode_version
from node.identity.signatures import SigningKey
from node.rollout import SamplingParameters
from node.weights.assembly.held import HeldPolicy
from node.weights.format.layout import Layout
from node.weights.format.manifest import sign
from sampler.engines.engine import GenerationRequest
from sampler.engines.model_words import ModelWords
from sampler.engines.torch_engine import TorchEngine
from sampler.versions.delta_log import DeltaLog
from sampler.versions.version_assembly import InPlaceAssembly, SpareAssembly, VersionAssembly

CORES: Final = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
RUN_ID: Final = "bench"
COMPLETIONS: Final = 16
RUNNING_STEPS: Final = 32
"""Tokens each of them has when the version arrives."""


@dataclass(frozen=True, slots=True)
class Size:
    """A model of the shape of the small ones people train."""

    hidden: int
    layers: int
    vocabulary: int


SIZES: Final = {"small": Size(384, 8, 49_152), "large": Size(576, 30, 49_152)}
"""33 million and 135 million parameters."""

APPLY: Final = ("spare", "in_place")
DTYPES: Final = ("float32", "bfloat16")


def main() -> None:
    """Measure every case that was asked for, each in a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--density", type=float, default=0.01, help="share of the words that change")
    parser.add_argument("--versions", type=int, default=5, help="timed; at least 1")
    parser.add_argument("--case", nargs=3, metavar=("SIZE", "APPLY", "DTYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        size, apply, dtype = arguments.case
        print(json.dumps(_measured(size, apply, dtype, arguments.density, arguments.versions)), flush=True)
        return
    common = ["--density", str(arguments.density), "--versions", str(arguments.versions)]
    for size in arguments.sizes:
        for apply in APPLY:
            for dtype in DTYPES:
                case = [sys.executable, "-m", "bench.swap", "--case", size, apply, dtype, *common]
                subprocess.run(case, check=True)


def _measured(size: str, apply: str, dtype: str, density: float, versions: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        case = _Case(Path(directory), SIZES[size], is_in_place=apply == "in_place", dtype=dtype)
        peak = case.take(case.encoded(1, density))
        idle = [case.take(case.encoded(number, density)) for number in range(2, 2 + versions)]
        running_tokens = case.run_some()
        running = [case.take(case.encoded(100 + number, density)) for number in range(versions)]
        return {
            "apply": apply,
            "compute_dtype": dtype,
            "words": case.layout.words,
            "model_bytes": 2 * case.layout.words,
            "density": density,
            "stage_s": _best(timing.stage_s for timing in idle),
            "swap_s": _best(timing.swap_s for timing in idle),
            "swap_running_s": _best(timing.swap_s for timing in running),
            "running_tokens": running_tokens,
            "peak_extra_bytes": peak.extra_bytes,
            "cores": CORES,
        }


def _best(seconds: Iterable[float]) -> float:
    return round(min(seconds), 5)


@dataclass(frozen=True, slots=True)
class _Timing:
    stage_s: float
    swap_s: float
    extra_bytes: int | None


class _Case:
    """One engine, and the learner whose versions it takes."""

    def __init__(self, directory: Path, size: Size, *, is_in_place: bool, dtype: str) -> None:
        self._key = SigningKey.generate()
        self._random = np.random.default_rng(0)
        self._is_in_place = is_in_place
        self._engine = TorchEngine(
            made_model(directory / "model", size),
            device="cpu",
            compute_dtype=getattr(torch, dtype),
            threads=CORES,
            seed=0,
        )
        self._log = DeltaLog(
            directory / "log", public_key=self._key.public_key, run_id=RUN_ID, count_refusal=lambda _: None
        )
        weights = self._engine.weights
        words = np.concatenate([weights.live.read(frame) for frame in self.layout.frames])
        self._held = HeldPolicy.of(0, words, layout=self.layout)
        self._spare: ModelWords | None = None

    @property
    def layout(self) -> Layout:
        return self._engine.layout

    def encoded(self, number: int, density: float) -> EncodedVersion:
        """Return the delta to the next version: one unit up or down, where an optimizer's step would go."""
        words = self._held.words.copy()
        # Not below zero, whose bits are those of a NaN.
        moved = np.flatnonzero((self._random.random(words.size, np.float32) < density) & (words & 0x7FFF > 0))
        words[moved] += self._random.choice([-1, 1], moved.size).astype(np.int16).view(np.uint16)
        encoded = encode_version(
            words,
            version=number,
            base=self._held,
            layout=self.layout,
            run_id=RUN_ID,
            learner_epoch=1,
            published_at_s=0.0,
        )
        self._base, self._held = self._held.version, HeldPolicy.of(number, words, layout=self.layout)
        return encoded

    def run_some(self) -> int:
        """Begin completions that are still running after all this; give the tokens they have."""
        prompt = np.arange(16, dtype=np.int32)
        sampling = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=10_000)
        self._engine.add(GenerationRequest("running", prompt, COMPLETIONS, sampling))
        for _ in range(RUNNING_STEPS):
            self._engine.step()
        return COMPLETIONS * (len(prompt) + RUNNING_STEPS)

    def take(self, encoded: EncodedVersion) -> _Timing:
        """Stage a version and swap to it."""
        signed = sign(encoded.manifest, self._key)
        gc.collect()
        before = _reset_peak()
        began = time.perf_counter()
        version = self._begun(encoded, signed)
        with ThreadPoolExecutor(CORES) as threads:
            version.take_held()
            list(threads.map(lambda frame: version.put(frame, encoded.payloads[frame]), version.missing()))
            version.finish()
        staged = time.perf_counter()
        version.apply()
        self._engine.serve(encoded.manifest.version)
        swapped = time.perf_counter()
        extra = None if before is None else _kibibytes("VmHWM") * 1024 - before
        self._check(encoded, version)
        return _Timing(staged - began, swapped - staged, extra)

    def _begun(self, encoded: EncodedVersion, signed: bytes) -> VersionAssembly:
        weights, payloads = self._engine.weights, self._log.begin(encoded.manifest, signed)
        if self._is_in_place:
            return InPlaceAssembly(
                encoded.manifest,
                layout=self.layout,
                base=weights.live,
                base_version=self._base,
                payloads=payloads,
                weights=weights,
            )
        return SpareAssembly(
            encoded.manifest,
            layout=self.layout,
            base=weights.live,
            base_version=self._base,
            payloads=payloads,
            spares=weights,
            spare=weights.new_spare() if self._spare is None else self._spare,
        )

    def _check(self, encoded: EncodedVersion, version: VersionAssembly) -> None:
        if isinstance(version, SpareAssembly):
            self._spare = version.spare
        self._log.drop(encoded.manifest.key)
        for frame in self.layout.frames:
            assert np.array_equal(self._engine.weights.live.read(frame), self._held.words[frame.slice])


def made_model(directory: Path, size: Size) -> Path:
    """Save a random model in bfloat16 with a tokenizer of as many words."""
    vocabulary = {str(number): number for number in range(size.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0", eos_token="1")  # type: ignore[no-untyped-call]
    saved.save_pretrained(directory)
    config = Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 8 // 3,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        num_key_value_heads=3,
        head_dim=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).bfloat16().save_pretrained(directory)
    return directory


def _reset_peak() -> int | None:
    """Start the high-water mark of resident memory anew, and give what it starts from; see proc(5)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _kibibytes("VmRSS") * 1024


def _kibibytes(field: str) -> int:
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")
    )
    return int(line.split()[1])


if __name__ == "__main__":
    main()
