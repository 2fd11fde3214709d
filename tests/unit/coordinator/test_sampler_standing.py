"""How many leases a sampler may hold, by what became of those it had."""

from dataclasses import replace

import pytest

from node.coordinator.work.capacity import Bounds
from node.coordinator.work.decisions import judged_groups, trust
from node.coordinator.work.decisions.trust import Quarantine
from node.coordinator.work.samplers.sampler_standing import NEWCOMER_LEASES, STRIKES_OUT, Standing
from node.coordinator.work.samplers.standings import AGE_FACTOR, Standings
from node.coordinator.work.slots.slot import SlotState
from node.values.groups.failure import Failure
from node.values.groups.verdict import GroupVerdict, Verdict
from node.values.limits import PROBE_S
from support.coordinator import LEASE_MAX_S, NOW_S, TTL_S, Desk, make_accounts

WIDE = Bounds(
    concurrency_groups=72,
    buffer_groups=1000,
    batch_groups=24,
    max_staleness_versions=100,
    buffer_bytes=1 << 40,
)


def wide_desk() -> Desk:
    return Desk(make_accounts(prompts=1000), bounds=WIDE)


def keep(desk: Desk, sampler_id: str, lease_ids: list[str]) -> None:
    """Renew leases as heartbeats do."""
    desk.accounts.renew(sampler_id, lease_ids, now=desk.now)


def test_a_newcomer_holds_an_eighth_of_what_is_free_and_never_less_than_a_few() -> None:
    desk = wide_desk()
    assert len(desk.lease("hoarder", 256)) == 72 // 8
    assert desk.lease("hoarder", 256) == []
    assert len(Desk().lease("s1", 256)) == NEWCOMER_LEASES


def test_a_sampler_alone_has_all_the_room_after_a_few_rounds() -> None:
    desk, held = wide_desk(), []
    for _ in range(4):
        held.append(len(lease_ids := desk.lease("s1", 256)))
        for lease_id in lease_ids:
            desk.submit(lease_id, "s1")
        desk.now += 10
    assert held == [9, 19, 39, 72]


def test_a_sampler_with_few_leases_does_not_grow_by_delivering_often() -> None:
    desk = wide_desk()
    for _ in range(100):
        (lease_id,) = desk.lease("s1", 1)
        desk.submit(lease_id, "s1")
    assert desk.accounts.standings.of("s1").allowance <= 9


def test_a_killed_sampler_is_back_at_full_use_within_two_rounds() -> None:
    desk = wide_desk()
    desk.trust("s1")
    assert len(desk.lease("s1", 64)) == 64
    desk.expire(TTL_S)
    held = desk.lease("s1", 64)
    assert len(held) == 50
    for lease_id in held:
        desk.submit(lease_id, "s1")
    assert len(desk.lease("s1", 22)) == 22


def test_who_takes_leases_and_drops_them_comes_down_to_one_at_a_time() -> None:
    desk = wide_desk()
    taken = []
    for _ in range(8):
        taken.append(len(desk.lease("hoarder", 256)))
        desk.expire(TTL_S)
    assert taken == [9, 4, 2, 1, 1, 1, 1, 1]
    hoarder = desk.accounts.standings.of("hoarder")
    assert (hoarder.expired, hoarder.is_struck_out) == (20, True)
    assert desk.lease("hoarder", 256) == []


def test_nobody_takes_what_others_deliver_for_however_much_it_delivered() -> None:
    desk = wide_desk()
    desk.trust("s1", "s2")
    for sampler_id in ("s1", "s2"):
        for lease_id in desk.lease(sampler_id, 10):
            desk.submit(lease_id, sampler_id)
    assert len(desk.lease("s1", 256)) in (53, 54)  # three quarters: the other keeps half of its half
    assert len(desk.lease("s2", 256)) >= 18


def test_a_lease_ends_at_its_maximal_age_whatever_heartbeats_say_and_a_late_group_still_wins() -> None:
    desk = wide_desk()
    desk.trust("honest")
    hoarded = desk.lease("hoarder", 256)
    for _ in range(20):
        (lease_id,) = desk.lease("honest", 1)
        desk.now += 30
        keep(desk, "hoarder", hoarded)
        desk.submit(lease_id, "honest")
    assert desk.accounts.max_age_s("hoarder") == pytest.approx(AGE_FACTOR * 30, rel=0.05)
    assert desk.expire(0) == len(hoarded)
    assert desk.submit(hoarded[0], "hoarder").verdict is Verdict.SPOOLED
    assert desk.lease("honest", 1) == [hoarded[1].replace(".1", ".2")]
    assert desk.accounts.renew("hoarder", hoarded, now=desk.now)[0] == hoarded[0]


def test_before_the_first_group_a_lease_may_be_as_old_as_configured() -> None:
    desk = wide_desk()
    held = desk.lease("s1", 4)
    for _ in range(int(LEASE_MAX_S / 30)):
        assert desk.expire(0) == 0
        desk.now += 30
        keep(desk, "s1", held)
    assert desk.expire(TTL_S) == 4


def test_an_honest_sampler_that_is_slower_than_the_fleet_gets_more_time_at_each_try() -> None:
    standings = Standings()
    for _ in range(100):
        standings.note_delivery("fast", 10.0)
    ages = []
    for strikes in range(4):
        standings.apply(Standing("slow", strikes=strikes))
        ages.append(standings.max_age_s("slow", at_least_s=1, at_most_s=3600))
    assert ages == [pytest.approx(40 * 2**n, rel=0.1) for n in range(4)]
    standings.note_delivery("slow", 100.0)
    standings.apply(Standing("slow"))
    assert standings.max_age_s("slow", at_least_s=1, at_most_s=3600) == 400
    assert standings.max_age_s("fast", at_least_s=1, at_most_s=3600) < 50


def test_who_fails_every_prompt_gets_one_at_a_time_with_pauses_and_out_of_it_with_groups() -> None:
    desk = wide_desk()
    failed = 0
    while lease_ids := desk.lease("failer", 256):
        for lease_id in lease_ids:
            desk.fail(lease_id, "failer", fault=Failure.PROMPT_TOO_LONG)
        failed += len(lease_ids)
    assert STRIKES_OUT <= failed <= 2 * STRIKES_OUT
    taken = 0
    for _ in range(3600):
        desk.now += 1
        for lease_id in desk.lease("failer", 256):
            desk.fail(lease_id, "failer", fault=Failure.PROMPT_TOO_LONG)
            taken += 1
    assert 50 <= taken <= 70
    for _ in range(3):
        desk.now += 60
        for lease_id in desk.lease("failer", 256):
            desk.submit(lease_id, "failer")
    assert not desk.accounts.standings.of("failer").is_struck_out
    assert len(desk.lease("failer", 256)) > 1


def test_a_group_that_the_learner_refuses_takes_back_what_it_had_earned() -> None:
    desk = wide_desk()
    (lease_id, *_) = desk.lease("s1", 9)
    before = desk.accounts.standings.of("s1")
    desk.submit(lease_id, "s1")
    assert desk.accounts.standings.of("s1").allowance > before.allowance
    judged = GroupVerdict(lease_id, Verdict.SUSPECT)
    desk.settle(judged_groups.judgement(desk.accounts, judged, now=desk.now))
    after = desk.accounts.standings.of("s1")
    assert after.allowance < before.allowance
    assert after.strikes == 2


def test_a_quarantined_sampler_is_leased_a_probe_now_and_then_and_nothing_else() -> None:
    desk = wide_desk()
    desk.trust("s1")
    desk.settle(trust.quarantine(desk.accounts, Quarantine("s1", "0.9 nats off"), now=desk.now))
    assert desk.lease("s1", 64) == []
    desk.now += PROBE_S
    (probe,) = desk.lease("s1", 64)
    desk.submit(probe, "s1")
    assert desk.lease("s1", 64) == []
    desk.settle(trust.quarantine(desk.accounts, Quarantine("s1", ""), now=desk.now))
    assert len(desk.lease("s1", 64)) == 64
    desk.settle(trust.quarantine(desk.accounts, Quarantine("s1", "again"), now=desk.now))
    desk.now += PROBE_S
    assert desk.lease("s1", 64) == [], "the second one lasts twice as long"
    desk.now += PROBE_S
    assert len(desk.lease("s1", 8)) == 0, "it holds others yet"


def test_an_operator_pardons_a_sampler_and_its_prompts_are_asked_again() -> None:
    desk = wide_desk()
    for lease_id in desk.lease("s1", 9):
        desk.fail(lease_id, "s1", fault=Failure.GRADING_FAILED)
    desk.settle(trust.quarantine(desk.accounts, Quarantine("s1", "off"), now=desk.now))
    undone = desk.settle(trust.pardon(desk.accounts, None, now=desk.now))
    assert undone.prompts == 9
    assert not desk.accounts.standings.of("s1").quarantine
    assert len(desk.lease("s1", 9)) == 9


class Simulated:
    """Samplers with a place for so many leases each and a time per group, second by second."""

    def __init__(self, bounds: Bounds, samplers: dict[str, tuple[int, float]]) -> None:
        self.desk = Desk(make_accounts(prompts=1000), bounds=bounds)
        self.samplers = samplers
        self.begun: dict[str, dict[str, float]] = {name: {} for name in samplers}
        self.delivered = dict.fromkeys(samplers, 0)

    def run(self, seconds: int, *, hoarder: str = "", failer: str = "") -> int:
        """Return how many groups all samplers delivered."""
        desk, before = self.desk, sum(self.delivered.values())
        hoarded: list[str] = []
        for _ in range(seconds):
            desk.expire(1)
            version = desk.accounts.last_step
            if hoarder:
                hoarded += desk.lease(hoarder, 256, held=version)
                keep(desk, hoarder, hoarded)
            for lease_id in desk.lease(failer, 256, held=version) if failer else ():
                desk.fail(lease_id, failer, fault=Failure.PROMPT_TOO_LONG)
            for name, (places, group_s) in self.samplers.items():
                begun = self.begun[name]
                for lease_id in [i for i, at_s in begun.items() if at_s + group_s <= desk.now]:
                    del begun[lease_id]
                    if desk.submit(lease_id, name).verdict is Verdict.SPOOLED:
                        self.delivered[name] += 1
                for lost in desk.accounts.renew(name, list(begun), now=desk.now):
                    begun.pop(lost, None)
                if len(begun) < places:
                    begun |= dict.fromkeys(desk.lease(name, places - len(begun), held=version), desk.now)
            groups = [f"{slot.number}.{slot.winner}" for slot in desk.accounts.slots.open.untrained_slots()]
            if len(groups) >= desk.bounds.batch_groups:
                desk.train(version + 1, *groups[: desk.bounds.batch_groups])
        return sum(self.delivered.values()) - before


FLEET = {"near": (24, 4.0), "far": (24, 12.0)}


def test_a_hoarder_leaves_the_others_four_fifths_of_their_speed() -> None:
    simulated = Simulated(WIDE, FLEET)
    simulated.run(40)
    before = simulated.run(60)
    assert simulated.run(60, hoarder="hoarder") >= 0.8 * before


def test_a_sampler_that_fails_every_prompt_leaves_the_others_their_speed_and_their_prompts() -> None:
    simulated = Simulated(WIDE, FLEET)
    simulated.run(40)
    before = simulated.run(60)
    assert simulated.run(60, failer="failer") >= 0.9 * before
    assert len(simulated.desk.accounts.bad_prompts) <= 3
    failer = simulated.desk.accounts.standings.of("failer")
    assert failer.contradicted >= 0.5 * failer.faulted


@pytest.mark.parametrize("name", FLEET)
def test_honest_samplers_are_fully_used_soon_after_they_join(name: str) -> None:
    places, group_s = FLEET[name]
    simulated = Simulated(WIDE, {name: FLEET[name]})
    simulated.run(int(3 * group_s) + 3)
    assert len(simulated.begun[name]) == places


def test_a_big_sampler_that_joins_many_small_ones_gets_its_part() -> None:
    small = {f"small-{n}": (4, 5.0) for n in range(10)}
    bounds = replace(WIDE, concurrency_groups=120)
    simulated = Simulated(bounds, small)
    simulated.run(60)
    simulated.samplers = {"big": (64, 5.0), **small}
    simulated.begun["big"], simulated.delivered["big"] = {}, 0
    simulated.run(30)
    assert len(simulated.begun["big"]) == 64


def test_hundreds_of_newcomers_at_once_get_what_there_is() -> None:
    fleet = {f"s{n}": (4, 5.0) for n in range(300)}
    simulated = Simulated(WIDE, fleet)
    simulated.run(10)
    assert simulated.desk.accounts.load().running_groups == WIDE.concurrency_groups


def test_a_crowd_of_newcomers_that_never_deliver_leaves_three_quarters_to_those_who_have() -> None:
    desk = wide_desk()
    (lease_id,) = desk.lease("honest", 1)
    desk.submit(lease_id, "honest")
    hoarded = [lease for n in range(200) for lease in desk.lease(f"hoarder{n}", 16)]
    assert len(hoarded) == 72 // 4
    assert desk.accounts.load().running_groups == 72 // 4
    desk.submit(hoarded[0], "hoarder0")  # one that delivers is no newcomer, and makes room for others
    assert desk.lease("hoarder199", 16)


def test_a_crowd_of_honest_newcomers_gets_into_a_run_that_others_work_for() -> None:
    newcomers = [f"s{n}" for n in range(20)]
    simulated = Simulated(replace(WIDE, concurrency_groups=128), {"first": (32, 5.0)})
    simulated.run(30)
    simulated.samplers |= dict.fromkeys(newcomers, (4, 5.0))
    simulated.begun |= {name: {} for name in newcomers}
    simulated.delivered |= dict.fromkeys(newcomers, 0)
    simulated.run(60)
    assert all(simulated.delivered[name] for name in newcomers)


def test_a_restart_forgets_no_share() -> None:
    before = Standing("s1", allowance=40)
    standings = Standings.restored([before], {"s1": 3000, "s2": 1000})
    assert standings.of("s1") == before
    assert standings.recent_share("s1") == pytest.approx(0.75)
    assert standings.share("s1", held=0, free=72, fleet=0, newcomers=0, now=NOW_S).leases == 40


def test_slots_left_for_others_are_taken_by_others_first() -> None:
    desk = Desk(make_accounts(prompts=2))
    desk.fail(desk.lease("s1")[0], "s1", fault=Failure.PROMPT_TOO_LONG)
    desk.now += 1
    desk.lease("s2")
    desk.lease("s1", 3)
    assert desk.accounts.slots.counts()[SlotState.AVAILABLE] >= 1
    assert desk.lease("s2")[0].endswith(".1")
