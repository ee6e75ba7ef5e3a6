"""The place of a process in its job, parsed from variables: pure, so tested without processes."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

from syncline import environment
from syncline.launchers import first_host, parse, tasks_per_node

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
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "prterun-head-77@1",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
MVAPICH = {
    name.replace("OMPI", "MV2"): value for name, value in OPEN_MPI.items() if not name.startswith("PMIX")
}
SUBMITIT = {
    "SUBMITIT_LOCAL_GLOBALID": "3",
    "SUBMITIT_LOCAL_NTASKS": "4",
    "SUBMITIT_LOCAL_LOCALID": "3",
    "SUBMITIT_LOCAL_JOB_ID": "4711",
}


Place = tuple[str, int, int, int, int]


def place(variables: Mapping[str, str]) -> Place:
    """The launcher, the rank, the size, the local rank and the local size."""
    found = parse(variables)
    return found.launcher, found.rank, found.size, found.local_rank, found.local_size


ALONE = ("alone", 0, 1, 0, 1)

BY_HAND = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}

BATCH = {"SLURM_NTASKS": "6", "SLURM_JOB_ID": "77", "SLURM_PROCID": "0"}

ONE_NODE = {**SLURM, "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "6", "SLURM_STEP_NODELIST": "node07"}

HETEROGENEOUS = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID": "5",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1,2",
    "SLURM_NTASKS_HET_GROUP_0": "1",
    "SLURM_NTASKS_HET_GROUP_1": "2",
}
"""A step has the variables of all its parts."""

PLACES: dict[str, tuple[dict[str, str], Place, str | None]] = {
    "no variables": ({"HOME": "/"}, ALONE, None),
    "torchrun": (TORCHRUN, ("torchrun", 3, 4, 1, 2), "head"),
    "by hand, all on this host": (BY_HAND, ("environment", 3, 4, 3, 4), "head"),
    "srun": (SLURM, ("slurm", 5, 6, 1, 2), "node07"),
    "srun on one node": (ONE_NODE, ("slurm", 5, 6, 1, 6), "127.0.0.1"),
    "srun, address given": ({**ONE_NODE, "MASTER_ADDR": "node07"}, ("slurm", 5, 6, 1, 6), "node07"),
    "srun, heterogeneous": (HETEROGENEOUS, ("slurm", 2, 3, 1, 2), "n1"),
    "srun --mpi=pmi2": ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "6"}, ("slurm", 5, 6, 1, 2), "node07"),
    "Open MPI": (OPEN_MPI, ("mpirun", 3, 4, 3, 4), "127.0.0.1"),
    "Hydra": (HYDRA, ("mpirun", 3, 4, 3, 4), "127.0.0.1"),
    "MVAPICH": (MVAPICH, ("mpirun", 3, 4, 3, 4), "127.0.0.1"),
    "submitit": (SUBMITIT, ("submitit", 3, 4, 3, 4), "127.0.0.1"),
    # The inner launcher wins. In a SLURM job, mpirun starts its daemons with srun, and ranks inherit its variables.
    "Open MPI in srun": ({**SLURM, **OPEN_MPI}, ("mpirun", 3, 4, 3, 4), "127.0.0.1"),
    "Hydra in srun": ({**SLURM, **HYDRA}, ("mpirun", 3, 4, 3, 4), "127.0.0.1"),
    "torchrun in srun": ({**SLURM, **TORCHRUN}, ("torchrun", 3, 4, 1, 2), "head"),
    "torchrun in Open MPI": ({**OPEN_MPI, **TORCHRUN}, ("torchrun", 3, 4, 1, 2), "head"),
    "torchrun in Hydra": ({**HYDRA, **TORCHRUN}, ("torchrun", 3, 4, 1, 2), "head"),
    "torchrun in submitit": ({**SUBMITIT, **TORCHRUN}, ("torchrun", 3, 4, 1, 2), "head"),
    "one rank of Open MPI": ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, ALONE, None),
    "one rank of Hydra": ({**HYDRA, "PMI_SIZE": "1"}, ALONE, None),
    "one rank of an MPI": ({"PMI_RANK": "0", "PMI_SIZE": "1"}, ALONE, None),
    "one task of SLURM": ({**BATCH, "SLURM_NTASKS": "1"}, ALONE, None),
    "an interactive step": ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ALONE, None),
    "a default of sbatch, set by a user": ({"SLURM_NTASKS": "6"}, ALONE, None),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_place_of_a_process(name: str) -> None:
    variables, expected, address = PLACES[name]
    found = parse(variables)
    assert (place(variables), found.master_addr, found.warning) == (expected, address, None)
    assert found.variables()["RANK"] == str(found.rank)
    assert found.ends_with_launcher == (found.launcher == "torchrun")
    if found.size > 1:
        given = parse({**variables, "MASTER_ADDR": "other", "MASTER_PORT": "3000"})
        assert (given.master_addr, given.master_port) == ("other", 3000)


def test_the_generation_and_the_ports_of_jobs() -> None:
    assert (parse(TORCHRUN).generation, parse(TORCHRUN).master_port) == (2, 29501)
    at = [divmod(rank, 2) for rank in range(6)]
    ranks = [
        parse({**SLURM, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)})
        for r, (node, local) in enumerate(at)
    ]
    (meeting,) = {(one.master_addr, one.master_port) for one in ranks}
    assert 20000 <= (meeting[1] or 0) < 32000
    assert parse({**SLURM, "SLURM_JOB_ID": "78"}).master_port != meeting[1]
    other = {**OPEN_MPI, "PMIX_NAMESPACE": "prterun-head-78@1"}
    assert parse(OPEN_MPI).master_port != parse(other).master_port
    assert parse({**HYDRA, "I_MPI_HYDRA_UUID": "a"}).master_port != parse(HYDRA).master_port == 29500


def test_a_batch_script_or_interactive_shell_under_slurm_is_alone_and_warned_of() -> None:
    for shell in (BATCH, {name: BATCH[name] for name in ("SLURM_NTASKS", "SLURM_JOB_ID")}):
        assert place(shell) == ALONE
        assert "SLURM_NTASKS=6, but srun did not start this process" in (parse(shell).warning or "")


def changed(variables: Mapping[str, str], **changes: str | None) -> dict[str, str]:
    return {name: value for name, value in {**variables, **changes}.items() if value is not None}


OPEN_MPI_ON_TWO = changed(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_RANK="1", OMPI_COMM_WORLD_LOCAL_SIZE="2")
HYDRA_ON_TWO = changed(HYDRA, MPI_LOCALRANKID="1", MPI_LOCALNRANKS="2")

REFUSED: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "no size": (changed(TORCHRUN, WORLD_SIZE=None), ("WORLD_SIZE", "RANK", "syncline run")),
    "no rank": (changed(TORCHRUN, RANK=None), ("RANK", "WORLD_SIZE", "syncline run")),
    "rank too large": (changed(TORCHRUN, RANK="4"), ("RANK='4'", "from 0 to 3 (WORLD_SIZE - 1)")),
    "rank in words": (changed(TORCHRUN, RANK="one"), ("RANK='one'", "whole number from 0 to 3")),
    "negative rank": (changed(TORCHRUN, RANK="-1"), ("RANK='-1'", "from 0 to 3")),
    "local rank": (changed(TORCHRUN, LOCAL_RANK="2"), ("LOCAL_RANK='2'", "to 1 (LOCAL_WORLD_SIZE - 1)")),
    "no address": (changed(TORCHRUN, MASTER_ADDR=None), ("MASTER_ADDR", "syncline run")),
    "port in words": (changed(TORCHRUN, MASTER_PORT="high"), ("MASTER_PORT='high'", "syncline run")),
    "Open MPI, two hosts": (
        OPEN_MPI_ON_TWO,
        ("4 ranks, of which 2 run on this host", "mpirun -x MASTER_ADDR"),
    ),
    "Hydra, two hosts": (HYDRA_ON_TWO, ("4 ranks, of which 2 run on this host", "mpirun -genv MASTER_ADDR")),
    "MPI without local ranks": ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ("PMI_RANK='1'", "LOCAL_WORLD_SIZE")),
    "another size: Open MPI": ({**OPEN_MPI, "WORLD_SIZE": "8"}, ("'8' contradicts mpirun", "4 tasks")),
    "another size: Hydra": ({**HYDRA, "WORLD_SIZE": "8"}, ("'8' contradicts mpirun", "4 tasks")),
    "another size: srun": ({**SLURM, "WORLD_SIZE": "8"}, ("'8' contradicts slurm", "6 tasks")),
    "tasks per node": ({**SLURM, "SLURM_TASKS_PER_NODE": "two"}, ("TASKS_PER_NODE='two'", "'2(x3),1'")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_contradictions_name_the_variable_its_value_and_the_remedy(name: str) -> None:
    variables, words = REFUSED[name]
    with pytest.raises(ValueError, match=r"[A-Z]+_[A-Z]+|RANK") as error:
        parse(variables)
    for word in words:
        assert word in str(error.value)
    if "two hosts" in name:
        assert parse({**variables, "MASTER_ADDR": "head"}).local_size == 2


def test_the_short_forms_of_slurm() -> None:
    for text, counts in (("4", [4]), ("2(x3)", [2, 2, 2]), ("2(x3),1", [2, 2, 2, 1]), ("1,3", [1, 3])):
        assert tasks_per_node(text) == counts, text
    for nodes, host in (
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[01-03,07],login1", "gpu01"),
        ("n[1-3]", "n1"),
        ("n[007,9]", "n007"),
        ("r[1-2]c[3-4],x", "r1c3"),
    ):
        assert first_host(nodes) == host, nodes


def test_exported_variables_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_TEST_KEPT", "mine")
    monkeypatch.delenv("SYNCLINE_TEST_NEW", raising=False)
    before = environment.export({"SYNCLINE_TEST_KEPT": "other", "SYNCLINE_TEST_NEW": "1"})
    assert os.environ["SYNCLINE_TEST_KEPT"] == "mine"
    assert os.environ["SYNCLINE_TEST_NEW"] == "1"
    environment.restore(before)
    assert "SYNCLINE_TEST_NEW" not in os.environ
