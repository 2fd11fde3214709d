import pytest

from node.coordinator.work.slots.prompt_order import prompt_of_slot


@pytest.mark.parametrize("prompts", [1, 2, 3, 5, 64, 1000])
def test_every_epoch_asks_for_every_prompt_once(prompts: int) -> None:
    for epoch in range(3):
        slots = range(epoch * prompts, (epoch + 1) * prompts)
        assert sorted(prompt_of_slot(s, prompts=prompts, seed=7) for s in slots) == list(range(prompts))


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    def order(epoch: int, seed: int) -> list[int]:
        return [prompt_of_slot(epoch * 50 + place, prompts=50, seed=seed) for place in range(50)]

    orders = [order(0, 1), order(1, 1), order(0, 2), list(range(50))]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_the_order_is_the_same_on_every_machine_and_in_every_release() -> None:
    assert [prompt_of_slot(s, prompts=10, seed=0) for s in range(10)] == PINNED
    assert [prompt_of_slot(s, prompts=2, seed=1) for s in range(8)] == [0, 1, 1, 0, 1, 0, 1, 0]
    assert [prompt_of_slot(s, prompts=3, seed=5) for s in range(9)] == [1, 0, 2, 0, 1, 2, 1, 2, 0]
    assert [prompt_of_slot(s, prompts=1000, seed=7) for s in range(1000, 1005)] == [351, 483, 610, 841, 856]


def test_added_prompts_are_asked_for_in_a_new_epoch_and_what_is_held_out_never_is() -> None:
    order = [prompt_of_slot(s, prompts=12, seed=0, first_slot=7, held_out=range(8, 10)) for s in range(7, 31)]
    for epoch in (order[:12], order[12:]):
        assert sorted(epoch) == [*range(8), *range(10, 14)]
    assert order[:12] != order[12:]


PINNED = [8, 2, 0, 4, 9, 7, 6, 1, 3, 5]
"""A restarted coordinator must go on in the order it began with."""
