"""A group counts for a sampler only if that sampler's own key signed these bytes for this lease."""

from dataclasses import replace
from typing import Any

import pytest

from node.errors import Reason, RefusedError
from node.identity.group_proof import GroupSigner, GroupVerifier
from node.identity.identity_store import Identity
from node.rollout import EncodedGroup
from support.identity import NOW_S, MadeRun, make_run

GROUP = EncodedGroup(b"a header", b"columns", "3.1")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    return make_run(tmp_path_factory.mktemp("run"), now=NOW_S)


def prove(identity: Identity) -> EncodedGroup:
    return GroupSigner(identity).signed(GROUP)


def check(made: MadeRun, group: EncodedGroup, **changes: Any) -> None:
    verifier = GroupVerifier(made.coordinator.ca_pem, run_id=made.run_id)
    verifier.check(replace(group, **({"sampler_id": "sampler-1"} | changes)), now=NOW_S)


def test_a_sampler_proves_its_own_group_also_to_a_hub_that_has_just_started(made: MadeRun) -> None:
    check(made, prove(made.sampler))


def test_nobody_proves_a_group_for_another_lease_or_with_other_bytes_or_for_another_sampler(
    made: MadeRun,
) -> None:
    proof = prove(made.sampler)
    with pytest.raises(RefusedError, match=r"group '3\.2' is not proved") as refused:
        check(made, proof, group_id="3.2")
    assert refused.value.reason is Reason.BAD_SIGNATURE
    with pytest.raises(RefusedError, match="with these bytes"):
        check(made, proof, columns=b"others")
    with pytest.raises(RefusedError, match="came as sampler-2's"):
        check(made, proof, sampler_id="sampler-2")


def test_ids_that_run_into_each_other_are_not_one_message(made: MadeRun) -> None:
    proof = prove(made.sampler)
    with pytest.raises(RefusedError, match="did not sign"):
        check(made, proof, group_id="3", header=b".1" + GROUP.header)
    with pytest.raises(RefusedError, match="did not sign"):
        check(made, proof, header=GROUP.header + b"c", columns=GROUP.columns[1:])


def test_only_a_samplers_certificate_of_the_runs_authority_proves_anything(made: MadeRun) -> None:
    for identity, why in (
        (made.foreign, "not of the run's authority"),
        (made.relay, "spiffe://example/relay/relay-1"),
        (made.expired, "expired at"),
    ):
        with pytest.raises(RefusedError, match=why) as refused:
            check(made, prove(identity), sampler_id=identity.node_id)
        assert refused.value.reason is Reason.BAD_SIGNATURE


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("certificate", b""),
        ("certificate", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
        ("certificate", b"x" * 5000),
        ("signature", b""),
        ("signature", b"x" * 70),
    ],
)
def test_what_is_no_proof_is_refused_by_name(made: MadeRun, part: str, value: bytes) -> None:
    with pytest.raises(RefusedError, match="not proved") as refused:
        check(made, prove(made.sampler), **{part: value})
    assert refused.value.reason is Reason.BAD_SIGNATURE
