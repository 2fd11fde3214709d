import contextlib
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterorl.v1 import rollout_pb2
from node.errors import Reason, RefusedError
from node.values.groups.reward_finding import GroupGrades
from node.values.groups.rollout import EncodedGroup, Finish, RolloutGroup
from node.values.groups.well_formed import check_group
from node.wire.columns import read_columns
from node.wire.rollouts import graded, group_from_wire, group_to_wire, header_from_wire, largest_group_bytes
from support.groups import SAMPLING, make_completion, make_group, with_replies
from support.refusals import refused


def message_of(group: RolloutGroup) -> rollout_pb2.GroupColumns:
    return rollout_pb2.GroupColumns.FromString(group_to_wire(group).columns)


def read(message: rollout_pb2.GroupColumns, group: RolloutGroup | None = None) -> RolloutGroup:
    """Decode columns under the header of ``group``."""
    header = group_to_wire(group or make_group()).header
    return group_from_wire(EncodedGroup(header, message.SerializeToString()))


def assert_same_group(left: RolloutGroup, right: RolloutGroup) -> None:
    assert (left.run_id, left.group_id, left.task, left.prompt_index) == (
        right.run_id,
        right.group_id,
        right.task,
        right.prompt_index,
    )
    assert left.sampling == right.sampling
    np.testing.assert_array_equal(left.prompt_token_ids, right.prompt_token_ids)
    for a, b in zip(left.completions, right.completions, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_array_equal(a.behaviour_logprob, b.behaviour_logprob)
        np.testing.assert_array_equal(a.policy_version, b.policy_version)
        assert (a.kept_mass is None) == (b.kept_mass is None)
        if a.kept_mass is not None:
            np.testing.assert_array_equal(a.kept_mass, b.kept_mass)
        np.testing.assert_array_equal(a.drawn, b.drawn)
        assert (a.reward, a.finish) == (b.reward, b.finish)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.integers(0, 2**31 - 1),
    st.booleans(),
    st.booleans(),
)
def test_a_group_survives_the_wire_bit_for_bit(
    lengths: list[int], seed: int, is_truncated: bool, has_replies: bool
) -> None:
    rng = np.random.default_rng(seed)
    completions = tuple(
        make_completion(
            n,
            token_ids=rng.integers(0, 2**31 - 1, n, dtype=np.int32),
            behaviour_logprob=-rng.random(n, dtype=np.float32) * 100,
            policy_version=np.sort(rng.integers(0, 2**31 - 1, n, dtype=np.int32)),
            reward=float(np.float32(rng.normal())),
            finish=list(Finish)[rng.integers(3)],
            kept_mass=1 - rng.random(n, dtype=np.float32) if is_truncated else None,
        )
        for n in lengths
    )
    if has_replies:
        drawn = [rng.random(n) < 0.5 for n in lengths]
        drawn = [mask | (np.arange(len(mask)) % (len(mask) - 1 or 1) == 0) for mask in drawn]  # both ends
        completions = tuple(map(with_replies, completions, [mask.tolist() for mask in drawn]))
    sampling = replace(SAMPLING, top_k=5 if is_truncated else 0, min_p=0.125, stop=("\n\n", "日本"))
    group = make_group(completions=completions, sampling=sampling)
    received = group_from_wire(group_to_wire(group))
    assert_same_group(received, group)
    check_group(replace(received, sampling=sampling))


@st.composite
def groups(draw: st.DrawFn) -> RolloutGroup:
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    drawn = [[True, *draw(st.lists(st.booleans(), min_size=n, max_size=n)), True] for n in lengths]
    completions = tuple(
        with_replies(make_completion(len(one), reward=draw(st.sampled_from((0.5, math.nan)))), one)
        for one in drawn
    )
    metrics = {f"m{n}": np.full(len(lengths), n, np.float32) for n in range(draw(st.integers(0, 3)))}
    return make_group(completions=completions, metrics=metrics)


@given(groups())
def test_columns_are_the_message_that_protobuf_writes_and_are_read_where_they_lie(
    group: RolloutGroup,
) -> None:
    encoded = group_to_wire(group)
    message = rollout_pb2.GroupColumns.FromString(encoded.columns)
    assert encoded.columns == message.SerializeToString(deterministic=True)
    assert [(one.name, one.values) for one in message.metrics] == [
        (name, values.tobytes()) for name, values in group.metrics.items()
    ]
    received = group_from_wire(encoded)
    assert received.source is encoded
    whole = np.frombuffer(encoded.columns, np.uint8)
    assert all(np.shares_memory(one.token_ids, whole) for one in received.completions)
    assert np.shares_memory(received.prompt_token_ids, whole)


@given(groups(), st.data())
def test_columns_that_are_damaged_are_refused_or_read_as_protobuf_reads_them(
    group: RolloutGroup, data: st.DataObject
) -> None:
    columns = bytearray(group_to_wire(group).columns)
    for _ in range(data.draw(st.integers(1, 3))):
        columns[data.draw(st.integers(0, len(columns) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(columns[: data.draw(st.integers(0, len(columns)))])
    for damaged in (bytes(columns), cut):
        with contextlib.suppress(RefusedError):  # nothing else is raised
            read_columns(damaged)
            message = rollout_pb2.GroupColumns.FromString(damaged)
            assert sorted(message.SerializeToString()) == sorted(damaged)  # maybe in another order


def test_many_small_fields_are_refused_before_there_is_an_object_for_each() -> None:
    columns = group_to_wire(make_group()).columns
    with refused(Reason.OVER_LIMIT):
        read_columns(columns + b"\x4a\x02\x0a\x00" * 100_000)


REPLIES = [True, True, False, False, False, True, False, True, True, True]


def test_only_drawn_tokens_have_logprobs_and_versions_on_the_wire() -> None:
    versions = np.array([4, 4, 9, 9, 9, 5, 9, 6, 6, 6], np.int32)
    mixed = with_replies(make_completion(10, policy_version=versions), REPLIES)
    group = make_group(completions=(make_completion(3), mixed))
    message = message_of(group)
    assert message.drawn == bytes([0b00011111, 0b00011101])
    assert np.frombuffer(message.policy_versions, "<i4").tolist() == [0, 0, 0, 4, 4, 5, 6, 6, 6]
    assert len(message.behaviour_logprobs) == 9 * 4
    received = read(message, group).completions[1]
    assert received.policy_version.tolist() == [4, 4, 4, 4, 4, 5, 5, 6, 6, 6]
    assert received.behaviour_logprob[[2, 3, 4, 6]].tolist() == [0, 0, 0, 0]


def test_a_group_without_replies_has_no_column_for_them() -> None:
    group = make_group()
    all_drawn = replace(
        group, completions=tuple(with_replies(c, [True] * len(c.token_ids)) for c in group.completions)
    )
    assert group_to_wire(all_drawn) == group_to_wire(group)
    assert not message_of(group).drawn


def test_a_reader_that_does_not_know_replies_refuses_the_group() -> None:
    message = message_of(make_group(completions=(with_replies(make_completion(10), REPLIES),)))
    message.ClearField("drawn")
    with refused(Reason.MALFORMED, "behaviour_logprobs", "6", "10"):
        read(message)


@pytest.mark.parametrize("bits", [b"\0\0", b"\x9f\x5d", b"\x9f", b"\x9f\x1d\0", b"\x8f\x1d"])
def test_a_column_drawn_that_does_not_fit_is_refused(bits: bytes) -> None:
    message = message_of(make_group(completions=(with_replies(make_completion(10), REPLIES),)))
    message.drawn = bits
    with refused(Reason.MALFORMED):
        read(message)


def test_columns_are_little_endian_whatever_the_machine() -> None:
    message = message_of(make_group(prompt_token_ids=np.array([1, 258], np.int32)))
    assert message.prompt_token_ids == b"\x01\x00\x00\x00\x02\x01\x00\x00"


def test_a_finish_is_a_byte() -> None:
    completions = tuple(make_completion(finish=finish) for finish in (Finish.LENGTH, Finish.END, Finish.STOP))
    assert message_of(make_group(completions=completions)).finished == b"\0\1\2"


@pytest.mark.parametrize(
    "spare",
    [
        EncodedGroup(b"\xfa\x3f\x03new", b""),  # field 1023, length-delimited
        EncodedGroup(b"\x3a\x02\x78\x01", b""),  # a field of its sampling parameters that nobody knows
        EncodedGroup(b"", b"\xfa\x3f\x03new"),
        EncodedGroup(b"", b"\x1a\x04\0\0\0\0"),  # token_ids, a second time
    ],
)
def test_a_group_with_bytes_that_no_field_holds_is_refused(spare: EncodedGroup) -> None:
    header, columns = group_to_wire(make_group()).parts
    with refused(Reason.MALFORMED):
        group_from_wire(EncodedGroup(spare.header + header, spare.columns + columns))


@pytest.mark.parametrize(
    "damaged",
    [
        replace(group_to_wire(make_group()), header=b"group"),
        replace(group_to_wire(make_group()), columns=b"group"),
    ],
)
def test_bytes_that_are_not_a_group_are_refused(damaged: EncodedGroup) -> None:
    with refused(Reason.MALFORMED, "5 bytes"):
        group_from_wire(damaged)


def test_a_digest_of_the_prompt_is_stated_and_passed_over() -> None:
    encoded = group_to_wire(make_group())
    header = rollout_pb2.GroupHeader.FromString(encoded.header)
    assert len(header.prompt_digest) == 16  # learners of 0.3 compare it
    for digest in (b"", b"p" * 16):
        header.prompt_digest = digest
        assert header_from_wire(header.SerializeToString()) == header_from_wire(encoded.header)


def test_a_header_over_the_limit_is_refused_unread() -> None:
    with refused(Reason.OVER_LIMIT, "8193 bytes"):
        header_from_wire(b"x" * 8193)


@pytest.mark.parametrize(
    "other",
    [
        {"completions": (make_completion(3), make_completion(5))},
        {"completions": (make_completion(3), make_completion(4, reward=2.0))},
        {"completions": (make_completion(3), make_completion(4, version=1, reward=1.0))},
        {"prompt_token_ids": np.array([1, 2], np.int32)},
    ],
)
def test_columns_that_do_not_agree_with_their_header_are_refused(other: dict[str, Any]) -> None:
    columns = message_of(make_group(**other))
    with refused(Reason.MALFORMED, "header"):
        read(columns)


def test_a_metric_that_is_there_twice_is_refused() -> None:
    message = message_of(make_group(size=2, metrics={"words": np.zeros(2, np.float32)}))
    message.metrics.add(name="words", values=b"\0" * 8)
    with refused(Reason.MALFORMED, "metric"):
        read(message)


@given(
    size=st.integers(1, 5),
    tokens=st.integers(1, 40),
    prompt=st.integers(1, 50),
    metrics=st.integers(0, 16),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=50)
def test_no_group_is_larger_than_the_largest_and_the_largest_is_close(
    size: int, tokens: int, prompt: int, metrics: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    mask = np.ones(tokens, np.bool_)
    mask[1:-1] = rng.random(max(0, tokens - 2)) < 0.9
    group = make_group(
        completions=tuple(
            with_replies(make_completion(tokens, kept_mass=np.full(tokens, 0.5, np.float32)), mask.tolist())
            for _ in range(size)
        ),
        prompt_token_ids=np.zeros(prompt, np.int32),
        sampling=replace(SAMPLING, top_k=5, stop=("x" * 64,) * 16),
        metrics={f"{n:064d}": np.ones(size, np.float32) for n in range(metrics)},
    )
    largest = largest_group_bytes(group_size=size, max_new_tokens=tokens, prompt_tokens=prompt)
    assert group_to_wire(group).size_bytes <= largest
    assert largest <= 16 * size * tokens + 4 * prompt + 24 * 1024


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("token_ids", b"\0" * 4),
        ("token_ids", b"\0" * 27),
        ("behaviour_logprobs", b""),
        ("policy_versions", b"\0" * 32),
        ("rewards", b"\0" * 4),
        ("finished", b"\0"),
        ("finished", b"\1\3"),
        ("completion_lengths", b""),
        ("completion_lengths", np.array([7, 0], np.int32).tobytes()),
        ("completion_lengths", np.array([8, -1], np.int32).tobytes()),
        ("completion_lengths", b"\0" * 3),
        ("prompt_token_ids", b"\0" * 5),
        ("kept_masses", b"\0" * 4),
        ("kept_masses", b"\0" * 27),
        ("kept_masses", b"\0" * 32),
    ],
)
def test_columns_that_disagree_are_refused_by_name(column: str, value: bytes) -> None:
    message = message_of(make_group())
    setattr(message, column, value)
    with refused(Reason.MALFORMED):
        read(message)


def test_real_actions_travel_in_place_of_tokens_and_cells_are_counted_again() -> None:
    completions = tuple(
        make_completion(
            n, actions=np.linspace(0, 1, n, dtype=np.float32), behaviour_logprob=np.ones(n, np.float32)
        )
        for n in (2, 3)
    )
    group = make_group(completions=completions)
    message = message_of(group)
    assert message.token_ids == b""
    found = read(message, group)
    check_group(found)
    assert_same_group(group, found)
    for one, other in zip(group.completions, found.completions, strict=True):
        np.testing.assert_array_equal(one.actions, other.actions)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("actions", b"\0" * 16, ("actions", "4", "5")),
        ("actions", b"\0" * 21, ("actions", "21")),
        ("token_ids", b"\0" * 20, ("token_ids", "5", "0")),
    ],
)
def test_a_mask_of_the_wrong_size_and_one_with_tokens_beside_are_refused(
    column: str, value: bytes, said: tuple[str, ...]
) -> None:
    completions = tuple(make_completion(n, actions=np.zeros(n, np.float32)) for n in (2, 3))
    group = make_group(completions=completions)
    message = message_of(group)
    setattr(message, column, value)
    with refused(Reason.MALFORMED, *said):
        read(message, group)


def test_lengths_that_claim_gigabytes_are_refused_before_memory_is_spent() -> None:
    message = message_of(make_group())
    message.completion_lengths = np.full(1024, 2**31 - 1, np.int32).tobytes()
    with refused(Reason.OVER_LIMIT):
        read(message)


def test_too_many_completions_are_refused() -> None:
    message = message_of(make_group())
    message.completion_lengths = np.ones(1025, np.int32).tobytes()
    with refused(Reason.MALFORMED, "1025 completions"):
        read(message)


def test_what_graders_measure_survives_the_wire() -> None:
    values = np.array([0.5, np.nan], np.float32)
    message = message_of(make_group(size=2, metrics={"words": values}))
    np.testing.assert_array_equal(read(message).metrics["words"], values)
    message.metrics[0].values = b"\0" * 12
    with refused(Reason.MALFORMED, "metrics"):
        read(message)


def test_a_completion_whose_grader_abstained_survives_the_wire_without_a_reward() -> None:
    completions = (make_completion(reward=math.nan), make_completion(reward=0.5))
    sent = make_group(completions=completions)
    group = read(message_of(sent), sent)
    assert [one.has_reward for one in group.completions] == [False, True]
    assert group.header.least_reward == group.header.largest_reward == 0.5


def test_a_verifier_may_abstain_from_some_completions_and_not_from_all() -> None:
    ungraded = group_to_wire(make_group(completions=(make_completion(reward=math.nan),) * 2))
    some = GroupGrades(np.array([math.nan, 1.0], np.float32))
    header = header_from_wire(graded(ungraded, some, grader_digest=b"g" * 16, at_s=9.0).header)
    assert header.least_reward == header.largest_reward == 1.0
    with refused(Reason.NON_FINITE, "nan"):
        graded(ungraded, GroupGrades(np.full(2, math.nan, np.float32)), grader_digest=b"g" * 16, at_s=9.0)


def test_a_group_that_comes_under_another_name_than_its_own_is_refused() -> None:
    encoded = group_to_wire(make_group("1.1"))
    assert group_from_wire(replace(encoded, group_id="")).group_id == "1.1"  # from a journal
    with refused(Reason.MALFORMED, "2.1"):
        group_from_wire(replace(encoded, group_id="2.1"))
