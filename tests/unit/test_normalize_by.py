from __future__ import annotations

import pytest
import torch

from syncline.gradients.riders.items import MAX_ITEMS, ItemCount, checked_num_items


def test_integers_of_any_kind_are_accepted() -> None:
    assert checked_num_items(3) == 3
    assert checked_num_items(torch.tensor(4)) == 4
    assert checked_num_items(torch.ones(5).bool().sum()) == 5


@pytest.mark.parametrize("value", [1.5, "3", None, True, torch.tensor(2.0)])
def test_anything_but_an_integer_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="expected num_items to be an integer"):
        checked_num_items(value)


@pytest.mark.parametrize("value", [-1, MAX_ITEMS + 1])
def test_counts_that_cannot_be_sent_are_refused(value: int) -> None:
    with pytest.raises(ValueError, match="expected num_items to be an integer from 0 to"):
        checked_num_items(value)


def test_items_of_a_block_count_once_however_many_backwards_it_holds() -> None:
    items = ItemCount()
    items.open(5)
    items.backward_begins()
    items.backward_begins()
    items.close()
    assert items.take_for_reduction() == 5
    assert items.take_for_reduction() is None


def test_micro_batches_add_up() -> None:
    items = ItemCount()
    for n in (5, 0, 2):
        items.open(n)
        items.backward_begins()
        items.close()
    assert items.take_for_reduction() == 7


def test_a_block_without_backward_counts_nothing() -> None:
    items = ItemCount()
    items.open(5)
    items.close()
    assert items.take_for_reduction() is None


def test_counted_and_uncounted_micro_batches_do_not_mix() -> None:
    items = ItemCount()
    items.backward_begins()
    items.open(5)
    items.backward_begins()
    with pytest.raises(ValueError, match="inside of normalize_by, or none"):
        items.take_for_reduction()


def test_blocks_do_not_nest() -> None:
    items = ItemCount()
    items.open(1)
    with pytest.raises(ValueError, match="inside of another normalize_by block"):
        items.open(2)


def test_a_carried_mean_counts_again_in_the_next_reduction() -> None:
    items = ItemCount()
    assert items.reduced(10) == 10
    assert items.carry(num_ranks=2) == 5.0
    assert items.reduced(6) == 16
    assert items.reduced_total == 16
    assert items.carry(num_ranks=2) == 8.0
    assert items.uncarry(num_ranks=2) == 8.0
    assert items.reduced_total == 16
