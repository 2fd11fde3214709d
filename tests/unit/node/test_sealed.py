"""A sealed file is read as it was written, or not at all."""

import math

import pytest

from node.system.sealed import sealed, unsealed

TEXT = '{"version": 12, "rate": 1e-05, "names": ["a b", "é"], "ratio": NaN}'


def test_a_sealed_object_is_what_was_sealed() -> None:
    value = unsealed(sealed(TEXT), must_be_sealed=True)
    assert math.isnan(value.pop("ratio"))
    assert value == {"version": 12, "rate": 1e-05, "names": ["a b", "é"]}
    assert unsealed(sealed('{\n "a": 1\n}\n')) == {"a": 1}
    assert unsealed(sealed("{}")) == {}


@pytest.mark.parametrize("text", ["null", "[1]", "3", ""])
def test_only_objects_are_sealed(text: str) -> None:
    with pytest.raises(ValueError, match="only a JSON object"):
        sealed(text)


def test_no_flipped_bit_is_read() -> None:
    whole = sealed(TEXT)
    for at in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << bit
            with pytest.raises(ValueError):  # noqa: PT011 - whichever: JSON's or ours
                unsealed(bytes(damaged), must_be_sealed=True)


def test_nothing_is_read_that_was_cut_short_or_has_more_at_its_end() -> None:
    whole = sealed(TEXT)
    for size in range(len(whole)):
        with pytest.raises(ValueError):  # noqa: PT011
            unsealed(whole[:size], must_be_sealed=True)
    for more in (b" ", b"\n", b"}"):
        with pytest.raises(ValueError):  # noqa: PT011
            unsealed(whole + more)


def test_what_older_software_wrote_has_no_digest() -> None:
    assert unsealed(b'{"version": 12}') == {"version": 12}
    with pytest.raises(ValueError, match="it has no digest"):
        unsealed(b'{"version": 12}', must_be_sealed=True)
