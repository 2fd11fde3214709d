"""Who is shown when there are more peers than places."""

from node.identity.peer import Peer
from node.run import Role
from node.telemetry.fleet_places import Answer, FleetPlaces

LEARNER, OPERATOR = Peer("run", Role.LEARNER, "l"), Peer("run", Role.OPERATOR, "o")
RELAYS = [Peer("run", Role.RELAY, f"r{number}") for number in range(3)]
SAMPLERS = [Peer("run", Role.SAMPLER, f"s{number}") for number in range(4)]


def placed(places: FleetPlaces) -> list[str]:
    return [peer.node_id for peer in (LEARNER, OPERATOR, *RELAYS, *SAMPLERS) if peer in places]


def test_samplers_wait_in_the_order_they_asked_and_inherit_the_places_of_those_that_go() -> None:
    places = FleetPlaces(capacity=2)
    assert [places.ask(sampler).has_place for sampler in SAMPLERS] == [True, True, False, False]
    assert places.ask(SAMPLERS[0]) == Answer(has_place=True)
    assert places.ask(SAMPLERS[2]) == Answer(has_place=False)
    assert (placed(places), places.waiting(Role.SAMPLER)) == (["s0", "s1"], 2)
    places.give_up(SAMPLERS[0])
    assert (placed(places), places.waiting(Role.SAMPLER)) == (["s1", "s2"], 1)
    places.give_up(SAMPLERS[3])
    places.give_up(SAMPLERS[1])
    assert (placed(places), places.waiting(Role.SAMPLER)) == (["s2"], 0)
    assert places.ask(SAMPLERS[0]).has_place


def test_a_better_rank_takes_the_place_of_the_newest_of_the_worst() -> None:
    places = FleetPlaces(capacity=3)
    for sampler in SAMPLERS:
        places.ask(sampler)
    assert places.ask(RELAYS[0]) == Answer(has_place=True, displaced=SAMPLERS[2])
    assert places.ask(LEARNER) == Answer(has_place=True, displaced=SAMPLERS[1])
    assert placed(places) == ["l", "r0", "s0"]
    # Who lost its place comes back before those that never had one.
    places.give_up(RELAYS[0])
    assert placed(places) == ["l", "s0", "s1"]
    places.give_up(SAMPLERS[0])
    assert placed(places) == ["l", "s1", "s2"]


def test_a_relay_is_displaced_where_there_is_no_sampler_and_by_nobody_of_its_own_rank() -> None:
    places = FleetPlaces(capacity=2)
    for relay in RELAYS:
        places.ask(relay)
    assert placed(places) == ["r0", "r1"]
    assert places.ask(SAMPLERS[0]) == Answer(has_place=False)
    assert places.ask(LEARNER) == Answer(has_place=True, displaced=RELAYS[1])
    assert places.ask(OPERATOR) == Answer(has_place=True, displaced=RELAYS[0])
    assert (places.waiting(Role.RELAY), places.waiting(Role.SAMPLER)) == (3, 1)
    assert places.ask(RELAYS[2]) == Answer(has_place=False)
    # A place that falls free goes to the best rank that waits.
    places.give_up(OPERATOR)
    assert placed(places) == ["l", "r0"]
    assert places.waiting(Role.RELAY) == 2


def test_a_peer_that_waited_and_then_displaces_another_waits_no_more() -> None:
    places = FleetPlaces(capacity=1)
    places.ask(LEARNER)
    places.ask(RELAYS[0])
    places.give_up(LEARNER)
    assert placed(places) == ["r0"]
    places.ask(LEARNER)
    assert places.waiting(Role.RELAY) == 1
    places.give_up(LEARNER)
    places.give_up(RELAYS[0])
    places.ask(SAMPLERS[0])
    assert places.ask(RELAYS[0]) == Answer(has_place=True, displaced=SAMPLERS[0])
    assert (places.waiting(Role.RELAY), places.waiting(Role.SAMPLER)) == (0, 1)
