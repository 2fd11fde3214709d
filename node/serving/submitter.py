"""Which sampler a submitted group counts for."""

from node.errors import Reason, RefusedError
from node.identity.peer import Peer, is_name
from node.run import Role


def submitter(caller: Peer, named: str) -> str:
    """Return the node id of the sampler a submission counts for.

    A relay is believed, because the sampler's own TLS connection ends at the relay. What it could gain by
    lying is bounded by the lease: a group counts only for the sampler that holds the lease it answers.

    Args:
        caller: From its certificate.
        named: ``SubmitRolloutsRequest.sampler_id``.
    Raises:
        RefusedError: WRONG_ROLE, if anyone but a relay names somebody; MALFORMED, if a relay names nobody.
    """
    if caller.role is not Role.RELAY:
        if named:
            raise RefusedError(
                Reason.WRONG_ROLE,
                f"{caller.node_id} is a {caller.role} and submits for itself, not for {named[:100]!r}",
            )
        return caller.node_id
    if not is_name(named):
        raise RefusedError(Reason.MALFORMED, f"{named[:100]!r} is not the node id of a sampler to submit for")
    return named
