"""The status of a run with several coordinators: whoever leads answers, wherever it stands in the list."""

import pytest

from node.commands.status.status_command import fetch_status
from node.errors import Reason, RefusedError
from node.rpc.call_ends import ConnectionLost
from support.hub import running_hub
from support.identity import MadeRun
from support.refusals import refused
from support.rpc import rpcs, serving

GONE = "127.0.0.1:1"


def refusing(reason: Reason) -> object:
    async def refuse(request: object, context: object) -> None:
        raise RefusedError(reason, "another one leads")

    return rpcs({"/heterorl.v1.MembershipService/GetStatus": refuse})


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_the_one_that_leads_is_asked_wherever_it_stands(made: MadeRun, place: int) -> None:
    async with running_hub(made) as hub, serving(made, refusing(Reason.STANDBY)) as standby:  # type: ignore[arg-type]
        addresses = [GONE, standby.address]
        addresses.insert(place, hub.address)
        status = await fetch_status(",".join(addresses), made.operator)
        assert status.run_id == made.run_id


async def test_where_none_leads_each_is_named_with_what_it_said(made: MadeRun) -> None:
    async with serving(made, refusing(Reason.STANDBY)) as standby:  # type: ignore[arg-type]
        with pytest.raises(ConnectionLost) as error:
            await fetch_status(f"{GONE},{standby.address}", made.operator)
    assert f"{GONE}: UNAVAILABLE" in str(error.value)
    assert f"{standby.address}: another one leads" in str(error.value)


async def test_a_decision_of_one_is_not_hidden_by_the_next(made: MadeRun) -> None:
    async with running_hub(made) as hub, serving(made, refusing(Reason.UNAUTHENTICATED)) as other:  # type: ignore[arg-type]
        with refused(Reason.UNAUTHENTICATED):
            await fetch_status(f"{other.address},{hub.address}", made.operator)
