"""Payloads from strangers: every implementation refuses the same ones for the same reason.

FUZZ_FRAMES: frames that the sanitized kernel is run on; each is mutated 40 times.
"""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.weights.format.digests import Words
from support.exponent_conditioned import coded, fault_of, implementations, trained_step, trained_words

IMPLEMENTATIONS = implementations()

BASE = trained_words(700, seed=1)
GOOD = [coded(trained_step(BASE, seed=2, step=step), base=BASE) for step in (2e-6, 2e-5, 1e-3)] + [
    coded(BASE ^ np.uint16(0x8000), base=BASE)
]


def check_agreement(payload: bytes, base: Words) -> None:
    answers = [fault_of(each, payload, base=base) for each in IMPLEMENTATIONS]
    assert all(answer == answers[0] for answer in answers)


@settings(max_examples=400)
@given(payload=st.binary(max_size=60), size=st.sampled_from([1, 9, 700]))
def test_any_bytes_are_answered_alike(payload: bytes, size: int) -> None:
    check_agreement(payload, BASE[:size])


@settings(max_examples=400)
@given(
    good=st.sampled_from(GOOD),
    flips=st.lists(st.integers(0, 1 << 16), min_size=1, max_size=4),
    early=st.booleans(),
    cut=st.integers(0, 1 << 12),
)
def test_damaged_payloads_are_answered_alike(good: bytes, flips: list[int], early: bool, cut: int) -> None:
    payload = bytearray(good)
    for flip in flips:
        bit = flip % (200 if early else 8 * len(payload))
        payload[bit // 8 % len(payload)] ^= 1 << bit % 8
    check_agreement(bytes(payload), BASE)
    check_agreement(bytes(payload[: len(payload) - cut % len(payload)]), BASE)


@pytest.mark.needs("gcc")
def test_the_kernel_keeps_within_its_memory_and_needs_no_instruction_of_one_processor(tmp_path: Path) -> None:
    digests = set()
    source = str(Path(__file__).with_name("kernel_asan.c"))
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    frames = os.environ.get("FUZZ_FRAMES", "100")
    for name, definitions in {"vectors": [], "plain": ["-DHETERORL_PLAIN"]}.items():
        program = tmp_path / name
        command = ["gcc", "-g1", "-O0", "-std=c11", *sanitizers, *definitions, source]
        subprocess.run([*command, "-o", program], check=True)
        result = subprocess.run([program, "1", frames], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        refused, tried, digest, _ = result.stdout.split()
        assert 0 < int(refused) < int(tried)
        digests.add(digest)
    assert len(digests) == 1
