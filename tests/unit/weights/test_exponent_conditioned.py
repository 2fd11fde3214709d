"""The exponent-conditioned codec by hand, and every way a payload can be wrong."""

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from node.weights.codec import native
from node.weights.codec.exponent_conditioned import choice, reference
from node.weights.codec.exponent_conditioned import payload_format as format
from node.weights.codec.exponent_conditioned.choice import Implementation
from node.weights.codec.exponent_conditioned.payload_format import PayloadFault
from node.weights.codec.frame_codec import split_words
from node.weights.format.digests import Words, words_digest
from support.exponent_conditioned import (
    FAULTS,
    FAULTS_BASE,
    Fields,
    coded,
    fault_of,
    implementations,
    one_change,
    trained_step,
    trained_words,
    well_begun,
)
from support.present import present

IMPLEMENTATIONS = implementations()
each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda each: each.name)


def bit_string(payload: bytes) -> str:
    return "".join(f"{byte:08b}"[::-1] for byte in payload)


@pytest.mark.needs("kernel")
def test_the_compiler_of_this_machine_made_a_kernel() -> None:
    assert [implementation.name for implementation in IMPLEMENTATIONS][:2] == ["numpy", "C, portable"]
    assert choice.implementation().name.startswith("C, ")


@each
def test_the_payload_is_as_documented(implementation: Implementation) -> None:
    words = FAULTS_BASE.copy()
    words[[3, 7, 8]] += np.array([1, 0xFFFF, 5], np.uint16)
    delta = implementation.encode(words, base=FAULTS_BASE, limit_bytes=40)
    assert delta.payload is not None
    expected = [
        f"{120:08b}"[::-1],  # exponent of class 0
        "1" + "0" * 15,  # class 0 is there, no other
        "11111111100",  # width 2 where 7 was predicted: -5, zigzag 9 = 8 + 1: 9 ones, 1 low bit
        "1",  # 3 changes: the bit below the highest
        "1111111111011",  # mode 1, gaps with 1 low bit, where -6 was predicted: 7, zigzag 14 = 11 + 3
        "10110100",  # gaps 3 3 0
        "010",  # the second goes down
        "1111111111000",  # 1 of 3 is large: width 1 where 7 was predicted: -6, zigzag 11
        "1111111111011",  # mode 2 where -5 was predicted: 7, zigzag 14
        "001",  # gap 2
        "111110",  # 2 low bits where 5 were predicted: -3, zigzag 5
        "011",  # size 5 - 2
    ]
    bits = "".join(expected)
    assert bit_string(delta.payload) == bits + "0" * (-len(bits) % 8)
    assert (delta.changes, delta.digest, delta.is_finite) == (3, words_digest(words), True)
    assert fault_of(implementation, delta.payload, base=FAULTS_BASE) == (PayloadFault.NONE, words.tobytes())


@each
def test_a_class_that_changed_nearly_everywhere_is_coded_by_its_runs(implementation: Implementation) -> None:
    words = FAULTS_BASE + np.uint16(1)
    words[[5, 6]] = FAULTS_BASE[0]
    payload = implementation.encode(words, base=FAULTS_BASE, limit_bytes=40).payload
    # Runs of 5, 0 and 13: three numbers, not eighteen.
    fields = well_begun().surprise(5 - 7).bits(0b0010, 4).surprise(-4 - -6)
    for run in (5, 0, 13):
        fields.number(run, 3)
    assert payload == fields.bits(0, 18).surprise(0 - 7).to_bytes()
    assert fault_of(implementation, payload, base=FAULTS_BASE) == (PayloadFault.NONE, words.tobytes())


@cache
def largest_frame() -> tuple[Words, Words]:
    """Return a base and the words after a step, as many as a frame may have."""
    base = trained_words(1 << 20, seed=0)
    return base, trained_step(base, seed=1, step=1e-6)


@each
def test_the_largest_frame_comes_back(implementation: Implementation) -> None:
    base, words = largest_frame()
    payload = present(implementation.encode(words, base=base, limit_bytes=base.nbytes).payload)
    assert fault_of(implementation, payload, base=base) == (PayloadFault.NONE, words.tobytes())
    alone = base.copy()
    alone[-1] ^= 0x8000
    payload = present(implementation.encode(alone, base=base, limit_bytes=base.nbytes).payload)
    assert len(payload) < 20
    assert fault_of(implementation, payload, base=base) == (PayloadFault.NONE, alone.tobytes())


@each
def test_a_frame_is_coded_as_if_there_had_been_none_before(implementation: Implementation) -> None:
    before = np.full(5000, 120 << 7, np.uint16)
    after = before + np.uint16(1)
    # As many words of the class as its first rank says is before the change: there is none to change.
    base = np.where(np.arange(20) < 10, 120 << 7, 125 << 7).astype(np.uint16)
    past = well_begun().surprise(1 - 7).surprise(6).number(10, 0).bits(0, 1).surprise(-7).to_bytes()
    words = base.copy()
    words[9] += 1
    payload = present(implementation.encode(after, base=before, limit_bytes=5000).payload)
    assert fault_of(implementation, payload, base=before) == (PayloadFault.NONE, after.tobytes())
    delta = implementation.encode(words, base=base, limit_bytes=40)
    assert (delta.payload, delta.changes) == (coded(words, base=base), 1)
    assert fault_of(implementation, past, base=base)[0] is PayloadFault.POSITION


@each
@pytest.mark.parametrize(("class_", "exponent"), [(0, 200), (0, 250), (1, 251), (5, 255)])
def test_class_0_may_start_so_high_that_the_last_classes_have_no_exponent(
    implementation: Implementation, class_: int, exponent: int
) -> None:
    base = np.repeat(np.array([exponent, 100], np.uint16) << 7, 70)
    if class_ == 0:
        base[70:] = base[0]
    payload = Fields(250, 1 << class_).surprise(1 - 7).surprise(0 - -6).number(69, 0).bits(0, 1).surprise(-7)
    words = base.copy()
    words[69] += 1
    assert fault_of(implementation, payload.to_bytes(), base=base) == (PayloadFault.NONE, words.tobytes())
    missing = Fields(250, 1 << 6).surprise(1 - 7).surprise(0 - -6).number(0, 0).bits(0, 1).surprise(-7)
    assert fault_of(implementation, missing.to_bytes(), base=base)[0] is PayloadFault.POSITION


@each
def test_a_payload_over_the_limit_is_not_given(implementation: Implementation) -> None:
    base = trained_words(5000, seed=3)
    words = trained_step(base, seed=4, step=1e-4)
    size = len(coded(words, base=base))
    for limit in range(size - 5, size):
        assert implementation.encode(words, base=base, limit_bytes=limit).payload is None
    assert implementation.encode(words, base=base, limit_bytes=size).payload == coded(words, base=base)


@each
def test_every_step_a_word_can_take_comes_back(implementation: Implementation) -> None:
    base = np.full(1 << 16, 0x3C55, np.uint16)
    words = np.arange(1 << 16).astype(np.uint16)
    delta = implementation.encode(words, base=base, limit_bytes=1 << 20)
    assert delta.payload == coded(words, base=base)
    assert not delta.is_finite
    assert fault_of(implementation, delta.payload, base=base) == (PayloadFault.NONE, words.tobytes())


def test_every_fault_says_what_is_wrong() -> None:
    """Payloads of each are refused by every implementation in test_vectors.py."""
    assert {fault for _, fault in FAULTS.values()} == set(PayloadFault) - {PayloadFault.NONE}
    assert all(fault.meaning for fault in PayloadFault if fault is not PayloadFault.NONE)


@each
def test_what_is_just_within_bounds_is_taken(implementation: Implementation) -> None:
    sizes = one_change(sign=1).surprise(1 - 7).surprise(5).number(0, 0).surprise(14 - 5).number(32766, 14)
    fault, made = fault_of(implementation, sizes.to_bytes(), base=FAULTS_BASE)
    assert (fault, np.frombuffer(made, np.uint16)[0]) == (PayloadFault.NONE, FAULTS_BASE[0] ^ 0x8000)
    last = well_begun().surprise(1 - 7).surprise(6).number(19, 0).bits(0, 1).surprise(-7)
    fault, made = fault_of(implementation, last.to_bytes(), base=FAULTS_BASE)
    assert (fault, np.frombuffer(made, np.uint16)[19]) == (PayloadFault.NONE, FAULTS_BASE[0] + 1)


@each
def test_every_cut_of_a_payload_is_refused(implementation: Implementation) -> None:
    base = trained_words(2000, seed=7)
    payload = coded(trained_step(base, seed=8, step=1e-5), base=base)
    for size in range(len(payload)):
        assert fault_of(implementation, payload[:size], base=base)[0] is not PayloadFault.NONE


@cache
def few_large_steps(seed: int) -> tuple[Words, Words, bytes]:
    """Return the largest frame, the words after few steps of any size, and their payload."""
    base = np.full(1 << 20, 120 << 7, np.uint16)
    random = np.random.default_rng(seed)
    changed = random.choice(base.size, 40, replace=False)
    words = base.copy()
    words[changed] += random.integers(1, 1 << 15, changed.size, dtype=np.uint16)
    return base, words, coded(words, base=base)


@each
@pytest.mark.parametrize("seed", range(3))
def test_the_longest_codes_of_a_frame_are_written_alike(implementation: Implementation, seed: int) -> None:
    base, words, payload = few_large_steps(seed)
    assert implementation.encode(words, base=base, limit_bytes=999).payload == payload


@each
@pytest.mark.parametrize("size", [1, 31, 32, 120, 121, 4095, 4096, 4097, 70_001])
def test_the_words_of_a_keyframe_are_joined(implementation: Implementation, size: int) -> None:
    """Sizes are around what the kernel hashes and makes at a time."""
    words = np.random.default_rng(size).integers(0, 1 << 16, size).astype(np.uint16)
    made = np.zeros(size, np.uint16)
    assert implementation.join(*split_words(words), out=made) == words_digest(words)
    np.testing.assert_array_equal(made, words)


@pytest.mark.needs("kernel")
def test_the_kernel_reads_no_bytes_that_are_not_there() -> None:
    kernel = present(native.load())
    for rest, exponents in ((b"\0" * 4, b"\0" * 5), (b"\0" * 5, b"\0" * 4), (b"\0" * 6, b"\0" * 6)):
        with pytest.raises(ValueError, match="5 words"):
            kernel.join(rest, exponents, out=np.zeros(5, np.uint16))


def test_the_kernel_has_the_numbers_of_the_format() -> None:
    header = (Path(native.__file__).parent / "format.h").read_text()
    numbers = {
        name: eval(value)
        for name, value in re.findall(r"^    ([A-Z_]+) = ([-0-9a-fxA-F <]+),$", header, re.M)
    }
    expected = {name: getattr(format, name) for name in numbers if hasattr(format, name)}
    width, mode = format.FIRST_POSITIONS
    expected |= {"FIRST_POSITIONS_WIDTH": width, "FIRST_POSITIONS_MODE": mode}
    width, mode = format.FIRST_LARGE
    expected |= {"FIRST_LARGE_WIDTH": width, "FIRST_LARGE_MODE": mode}
    assert numbers == expected
    faults = present(re.search(r"enum fault \{ (.*) \}", header))
    assert faults[1].split(", ") == [fault.name for fault in PayloadFault]


@pytest.mark.needs("kernel")
def test_the_kernel_takes_only_what_it_can_address() -> None:
    kernel = present(native.load())
    strided = np.zeros(40, np.uint16)[::2]
    for words, base in (
        (strided, FAULTS_BASE),
        (FAULTS_BASE, strided),
        (FAULTS_BASE, FAULTS_BASE[:-1]),
        (FAULTS_BASE.view(np.int16), FAULTS_BASE),
    ):
        with pytest.raises(ValueError, match="contiguous uint16"):
            kernel.encode(words, base=base, limit_bytes=40)  # type: ignore[arg-type]


def test_a_path_the_machine_does_not_have_is_not_taken() -> None:
    assert native.load(len(native.PATHS)) is None


@pytest.mark.needs("kernel")
def test_the_best_path_is_taken_and_the_reference_only_without_a_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose = choice.implementation.__wrapped__
    assert choose().name == IMPLEMENTATIONS[-1].name
    monkeypatch.setattr(native, "load", lambda: None)
    assert choose() is reference
