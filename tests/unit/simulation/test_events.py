"""Virtual time jumps from event to event, and transfers share a link equally."""

from node.simulation.events import Events, Link


def test_events_happen_in_the_order_of_their_times_and_then_as_they_were_set() -> None:
    clock, seen = Events(), list[str]()
    clock.after(2.0, lambda: seen.append("c"))
    clock.after(1.0, lambda: seen.append("a"))
    clock.after(1.0, lambda: seen.append("b"))
    clock.after(4.0, lambda: seen.append("late"))
    clock.run(until_s=3.0)
    assert (seen, clock.now) == (["a", "b", "c"], 3.0)


def test_transfers_share_a_link_equally_and_one_that_is_slow_elsewhere_arrives_later() -> None:
    clock, arrived = Events(), dict[str, float]()
    link = Link(clock, bytes_per_s=10.0)

    def send(name: str, size_bytes: int, other_end: float = 1e9) -> None:
        link.send(size_bytes, lambda: arrived.update({name: clock.now}), other_end=other_end)

    send("first", 60)
    clock.after(2.0, lambda: send("second", 20))  # 40 bytes of the first are left: 5 bytes/s each until 6 s
    clock.after(20.0, lambda: send("slow", 10, other_end=2.0))
    clock.run(until_s=40.0)
    link.settle()
    assert arrived == {"second": 6.0, "first": 8.0, "slow": 25.0}
    assert (link.carried_bytes, link.busy_s) == (90, 9.0)
