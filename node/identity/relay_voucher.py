"""A sampler's word that one relay may speak for one of its processes, for some hours.

    sampler --voucher--> relay --voucher, once a session--> coordinator
                                    '-- of another relay or process, expired, forged: refused

With it, a relay joins, reports, leases and releases in the sampler's name. It cannot hand in a group: groups
are signed one by one.
"""

from dataclasses import dataclass, replace
from typing import Final

from node.clock import moment
from node.errors import Reason, RefusedError
from node.identity.certificates import read_curve_key
from node.identity.identity_store import Identity
from node.identity.own_identity import OwnIdentity
from node.identity.peer import Peer, is_name
from node.identity.sampler_signatures import ALGORITHM, SamplerSignatures

VOUCHER_S: Final = 6 * 3600
"""How long a relay may speak for a sampler that has left it unheard; also how often a sampler joins anew."""

CLOCK_ERROR_S: Final = 3600
"""How far a sampler's clock may be ahead of the coordinator's."""

_DOMAIN: Final = "heterorl.v1.RelayVoucher"


@dataclass(frozen=True, slots=True)
class RelayVoucher:
    """Fields as in membership.proto; without certificate and signature where TLS is off."""

    relay_id: str
    sampler_id: str
    not_after_s: int
    certificate: bytes = b""
    signature: bytes = b""


def vouch(caller: Identity | OwnIdentity | Peer, relay_id: str, *, instance: str, now: float) -> RelayVoucher:
    """Return a sampler's voucher for a relay; a caller without an identity has TLS off."""
    not_after_s = int(now) + VOUCHER_S
    if isinstance(caller, Peer):
        return RelayVoucher(relay_id, caller.node_id, not_after_s)
    identity = caller.current
    voucher = RelayVoucher(relay_id, identity.node_id, not_after_s)
    message = _message(identity.run_id, voucher, instance)
    signature = read_curve_key(identity.key_pem).sign(message, ALGORITHM)
    return replace(voucher, certificate=identity.certificate_pem, signature=signature)


class VoucherVerifier:
    """Checks the vouchers of one run."""

    def __init__(self, ca_pem: bytes | None, *, run_id: str) -> None:
        """Check by the run's authority; None: TLS is off, and nobody has a key."""
        self._run_id = run_id
        self._signatures = None if ca_pem is None else SamplerSignatures(ca_pem, run_id=run_id)

    def check(self, voucher: RelayVoucher, *, relay_id: str, instance: str, now: float) -> None:
        """Check that a relay may speak for a sampler's process.

        Raises RefusedError: BAD_SIGNATURE; NOT_JOINED, where it has expired: the sampler writes a new one.
        """
        if not is_name(voucher.sampler_id) or voucher.relay_id != relay_id or "\0" in instance:
            raise RefusedError(
                Reason.BAD_SIGNATURE,
                f"the voucher of {voucher.sampler_id[:100]!r} is for relay {voucher.relay_id[:100]!r}, "
                f"and {relay_id} presents it",
                fix="check the relay's machine",
            )
        if voucher.not_after_s > now + VOUCHER_S + CLOCK_ERROR_S:
            raise RefusedError(
                Reason.BAD_SIGNATURE,
                f"the voucher of {voucher.sampler_id} ends at {moment(voucher.not_after_s)}, more than "
                f"{VOUCHER_S} s ahead",
                fix="set the sampler's clock",
            )
        check_current(voucher.sampler_id, voucher.not_after_s, now=now)
        if self._signatures is not None:
            self._signatures.check(
                f"a voucher for {relay_id}",
                voucher.sampler_id,
                certificate=voucher.certificate,
                signature=voucher.signature,
                message=_message(self._run_id, voucher, instance),
                now=now,
            )


def check_current(sampler_id: str, not_after_s: float, *, now: float) -> None:
    """Check that a voucher still counts. Raises RefusedError: NOT_JOINED."""
    if now >= not_after_s:
        raise RefusedError(
            Reason.NOT_JOINED,
            f"the voucher of {sampler_id} for its relay expired at {moment(not_after_s)}",
            fix="join again",
        )


def _message(run_id: str, voucher: RelayVoucher, instance: str) -> bytes:
    # Names and instances have no NUL in them, and the number comes last: no two vouchers are one message.
    parts = (
        _DOMAIN,
        run_id,
        voucher.sampler_id,
        voucher.relay_id,
        instance,
        str(voucher.not_after_s),
    )
    return "\0".join(parts).encode()
