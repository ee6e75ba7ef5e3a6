"""What `syncline plan --tune` tries, and what it says (pure functions), and the defaults that the environment sets."""

from __future__ import annotations

import pytest
import torch

import syncline as sl
from syncline.tools.plan.cluster import Cluster
from syncline.tools.plan.job import job_of_size
from syncline.tools.plan.machine import UNMEASURED
from syncline.tools.plan.predict import Planner
from syncline.tools.tune.trials import Setting, Trial, combined, settings_to_try, trials_text, winner_of

CLUSTER = Cluster(hosts=1, ranks_per_host=2, cores_per_host=8, threads_per_rank=4)
PLANNER = Planner.of(job_of_size(10_000_000, compute=0.1), CLUSTER, UNMEASURED)


def trial(setting: Setting, *steps: float) -> Trial:
    return Trial(setting=setting, steps=steps)


def test_the_program_as_it_is_comes_first_and_the_best_bucket_sizes_follow() -> None:
    found = settings_to_try(PLANNER, num_cores=8, num_ranks=2, values=[32.0])
    assert found[0] == Setting()
    caps = [one.cap_mb for one in found if one.cap_mb is not None]
    assert len(caps) == 3
    assert len({len(PLANNER.buckets[cap]) for cap in caps}) == 3  # other buckets, not only another number
    assert Setting(value=32.0) in found
    assert {one.num_threads for one in found} == {None, 1, 2}


def test_the_best_of_each_kind_are_tried_together() -> None:
    assert settings_to_try(None, num_cores=2, num_ranks=2, values=[]) == [Setting()]
    trials = [
        trial(Setting(), 1.0, 1.1),
        trial(Setting(cap_mb=2.0), 0.8, 0.9),
        trial(Setting(cap_mb=4.0), 0.95),
        trial(Setting(num_threads=2), 0.7),
        trial(Setting(transport="c10d"), 3.0),
    ]
    assert combined(trials, None) == Setting(cap_mb=2.0, num_threads=2)
    assert combined(trials[:2], None) is None, "one better setting alone is not tried again"


def test_a_larger_batch_wins_by_the_work_that_it_does() -> None:
    trials = [trial(Setting(), 1.0), trial(Setting(value=32.0), 1.5)]
    assert winner_of(trials, 16.0) is trials[1]
    text = trials_text(trials, {}, "--batch-size", 16.0)
    assert "Won: --batch-size 32, 25% less time for the same work." in text


def test_what_is_not_clearly_faster_has_not_won() -> None:
    trials = [trial(Setting(), 1.0), trial(Setting(cap_mb=2.0), 0.99), trial(Setting(cap_mb=8.0))]
    assert winner_of(trials, None) is trials[0]
    text = trials_text(trials, {Setting(): 0.9}, "", None)
    assert "Nothing was clearly faster" in text
    assert "failed" in text


def test_what_has_won_can_be_set_outside_of_the_program() -> None:
    trials = [trial(Setting(), 1.0), trial(Setting(cap_mb=2.0, transport="c10d"), 0.5)]
    assert "SYNCLINE_BUCKET_CAP_MB=2 SYNCLINE_TRANSPORT=c10d" in trials_text(trials, {}, "", None)


# ---------------------------------------------------------------------- defaults from the environment


def num_buckets(**arguments: object) -> int:
    def program(transport: object) -> int:
        module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        ddp = sl.DistributedDataParallel(module, process_group=transport, **arguments)
        for _ in range(2):
            ddp(torch.ones(1, 64)).sum().backward()
        return len(ddp.last_step.buckets)

    (found, _) = sl.testing.run_ranks(2, program)
    return int(found)


def test_the_environment_sets_a_bucket_size_where_the_program_sets_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert num_buckets() == 1
    monkeypatch.setenv("SYNCLINE_BUCKET_CAP_MB", "0.02")
    assert num_buckets() == 8
    assert num_buckets(bucket_cap_mb=25) == 1
    assert num_buckets(bucket_cap_mb_list=[25]) == 1


def test_values_of_the_environment_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_BUCKET_CAP_MB", "much")
    with pytest.raises(ValueError, match="SYNCLINE_BUCKET_CAP_MB"):
        sl.DistributedDataParallel(torch.nn.Linear(2, 2))
    monkeypatch.setenv("SYNCLINE_TRANSPORT", "telepathy")
    with pytest.raises(ValueError, match="SYNCLINE_TRANSPORT"):
        sl.init()
