"""Who a process is, read from variables: pure, so tested without processes."""

from __future__ import annotations

import os

import pytest

from syncline import environment
from syncline.environment import first_host, parse, tasks_per_node

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29501",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "node[07-09]",
}


def test_no_variables_mean_alone() -> None:
    found = parse({"HOME": "/"})
    assert (found.launcher, found.rank, found.size, found.variables()["WORLD_SIZE"]) == ("alone", 0, 1, "1")


def test_torchruns_variables() -> None:
    found = parse(TORCHRUN)
    assert found.launcher == "torchrun"
    assert (found.rank, found.size, found.local_rank, found.local_size) == (3, 4, 1, 2)
    assert (found.master_addr, found.master_port, found.generation) == ("head", 29501, 2)


def test_variables_set_by_hand_put_all_ranks_on_this_host() -> None:
    by_hand = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    found = parse(by_hand)
    assert (found.launcher, found.local_rank, found.local_size) == ("environment", 3, 4)


def test_sruns_variables() -> None:
    found = parse(SLURM)
    assert found.launcher == "slurm"
    assert (found.rank, found.size, found.local_rank, found.local_size) == (5, 6, 1, 2)
    assert found.master_addr == "node07"
    assert 20000 <= (found.master_port or 0) < 32000


def test_every_rank_of_a_slurm_step_derives_the_same_meeting_point() -> None:
    ranks = [
        parse({**SLURM, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r % 2), "SLURM_NODEID": str(r // 2)})
        for r in range(6)
    ]
    assert len({(r.master_addr, r.master_port) for r in ranks}) == 1
    other = parse({**SLURM, "SLURM_JOB_ID": "78"})
    assert other.master_port != ranks[0].master_port


def test_a_batch_script_or_interactive_shell_under_slurm_is_alone() -> None:
    shell = {"SLURM_NTASKS": "6", "SLURM_JOB_ID": "77", "SLURM_PROCID": "0"}
    assert parse(shell).launcher == "alone"


def test_torchrun_inside_of_srun_wins() -> None:
    assert parse({**SLURM, **TORCHRUN}).launcher == "torchrun"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"WORLD_SIZE": None}, ["WORLD_SIZE", "RANK"]),
        ({"RANK": None}, ["RANK", "WORLD_SIZE"]),
        ({"RANK": "4"}, ["RANK='4'", "from 0 to 3 (WORLD_SIZE - 1)"]),
        ({"RANK": "one"}, ["RANK='one'", "whole number from 0 to 3"]),
        ({"RANK": "-1"}, ["RANK='-1'", "from 0 to 3"]),
        ({"LOCAL_RANK": "2"}, ["LOCAL_RANK='2'", "from 0 to 1 (LOCAL_WORLD_SIZE - 1)"]),
        ({"MASTER_ADDR": None}, ["MASTER_ADDR"]),
        ({"MASTER_PORT": "high"}, ["MASTER_PORT='high'"]),
    ],
)
def test_contradictions_name_the_variable_its_value_and_the_remedy(
    changes: dict[str, str | None], words: list[str]
) -> None:
    variables = {name: value for name, value in {**TORCHRUN, **changes}.items() if value is not None}
    with pytest.raises(ValueError, match="syncline run") as error:
        parse(variables)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3)", [2, 2, 2]), ("2(x3),1", [2, 2, 2, 1]), ("1,3", [1, 3])]
)
def test_tasks_per_node_in_slurms_form(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


def test_tasks_per_node_in_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected the form '2\(x3\),1'"):
        tasks_per_node("two")


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a", "a"), ("a,b", "a"), ("n[1-3]", "n1"), ("n[007,9]", "n007"), ("r[1-2]c[3-4],x", "r1c3")],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_exported_variables_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_TEST_KEPT", "mine")
    monkeypatch.delenv("SYNCLINE_TEST_NEW", raising=False)
    before = environment.export({"SYNCLINE_TEST_KEPT": "other", "SYNCLINE_TEST_NEW": "1"})
    assert os.environ["SYNCLINE_TEST_KEPT"] == "mine"
    assert os.environ["SYNCLINE_TEST_NEW"] == "1"
    environment.restore(before)
    assert "SYNCLINE_TEST_NEW" not in os.environ
