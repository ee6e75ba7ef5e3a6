"""The place of a process in its job, parsed from variables: pure, so tested without processes."""

from __future__ import annotations

import os

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


def test_no_variables_mean_alone() -> None:
    found = parse({"HOME": "/"})
    assert (found.launcher, found.rank, found.size, found.variables()["WORLD_SIZE"]) == ("alone", 0, 1, "1")


def test_the_variables_of_explain() -> None:
    found = parse(environment.explained(64))
    assert (found.launcher, found.rank, found.size, found.local_size) == ("syncline explain", 0, 64, 64)
    assert not found.ends_with_launcher
    assert found.master_addr is not None


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


@pytest.mark.parametrize(
    "shell",
    [
        {"SLURM_NTASKS": "6", "SLURM_JOB_ID": "77", "SLURM_PROCID": "0"},  # a batch script
        {"SLURM_NTASKS": "6", "SLURM_JOB_ID": "77"},  # a shell of salloc
    ],
)
def test_a_batch_script_or_interactive_shell_under_slurm_is_alone_and_warned_of(
    shell: dict[str, str],
) -> None:
    found = parse(shell)
    assert found.launcher == "alone"
    assert "SLURM_NTASKS=6, but srun did not start this process" in (found.warning or "")


@pytest.mark.parametrize(
    "shell",
    [
        {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "77", "SLURM_PROCID": "0"},  # one task was asked for
        {
            **SLURM,
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_PROCID": "0",
        },  # srun --ntasks=1, or an interactive step
        {"SLURM_NTASKS": "6"},  # a default for sbatch, which a user has set, outside of a job
    ],
)
def test_one_task_of_slurm_is_alone(shell: dict[str, str]) -> None:
    found = parse(shell)
    assert (found.launcher, found.warning) == ("alone", None)


def test_sruns_tasks_on_one_node_meet_on_the_loopback() -> None:
    one_node = {**SLURM, "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "6", "SLURM_STEP_NODELIST": "node07"}
    assert parse(one_node).master_addr == "127.0.0.1"
    assert parse({**one_node, "MASTER_ADDR": "node07"}).master_addr == "node07"


def test_a_heterogeneous_step_has_the_variables_of_all_its_parts() -> None:
    step = {
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
    found = parse(step)
    assert (found.rank, found.size, found.local_rank, found.local_size) == (2, 3, 1, 2)
    assert found.master_addr == "n1"


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [(OPEN_MPI, "mpirun"), (HYDRA, "mpirun"), (MVAPICH, "mpirun"), (SUBMITIT, "submitit")],
)
def test_launchers_with_names_of_their_own(variables: dict[str, str], launcher: str) -> None:
    found = parse(variables)
    assert found.launcher == launcher
    assert (found.rank, found.size, found.local_rank, found.local_size) == (3, 4, 3, 4)
    assert found.master_addr == "127.0.0.1"
    assert found.variables()["RANK"] == "3"
    given = parse({**variables, "MASTER_ADDR": "head", "MASTER_PORT": "3000"})
    assert (given.master_addr, given.master_port) == ("head", 3000)


def test_jobs_of_launchers_that_name_them_meet_at_different_ports() -> None:
    other = {**OPEN_MPI, "PMIX_NAMESPACE": "prterun-head-78@1"}
    assert parse(OPEN_MPI).master_port != parse(other).master_port
    assert parse({**HYDRA, "I_MPI_HYDRA_UUID": "a"}).master_port != parse(HYDRA).master_port == 29500


@pytest.mark.parametrize(("variables", "size"), [(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), (HYDRA, "PMI_SIZE")])
def test_one_rank_of_mpirun_is_alone(variables: dict[str, str], size: str) -> None:
    assert parse({**variables, size: "1"}).launcher == "alone"


@pytest.mark.parametrize(
    ("variables", "local", "option"),
    [
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL", "mpirun -x MASTER_ADDR=HOST"),
        (HYDRA, "MPI_LOCAL", "mpirun -genv MASTER_ADDR HOST"),
    ],
)
def test_mpirun_on_several_hosts_needs_an_address(variables: dict[str, str], local: str, option: str) -> None:
    changes = {"OMPI_COMM_WORLD_LOCAL": ("_RANK", "_SIZE"), "MPI_LOCAL": ("RANKID", "NRANKS")}[local]
    two_hosts = {**variables, local + changes[0]: "1", local + changes[1]: "2"}
    with pytest.raises(ValueError, match="4 ranks, of which 2 run on this host") as error:
        parse(two_hosts)
    assert option in str(error.value)
    assert parse({**two_hosts, "MASTER_ADDR": "head"}).local_size == 2


def test_an_mpi_launcher_that_does_not_say_which_ranks_share_a_host_is_refused() -> None:
    with pytest.raises(ValueError, match=r"PMI_RANK='1' says that an MPI launcher.*LOCAL_WORLD_SIZE"):
        parse({"PMI_RANK": "1", "PMI_SIZE": "2"})
    assert parse({"PMI_RANK": "0", "PMI_SIZE": "1"}).launcher == "alone"
    assert parse({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "6"}).launcher == "slurm"  # srun --mpi=pmi2


@pytest.mark.parametrize("variables", [OPEN_MPI, HYDRA, SLURM])
def test_a_world_size_that_contradicts_the_launcher_is_refused(variables: dict[str, str]) -> None:
    with pytest.raises(
        ValueError, match=r"WORLD_SIZE='8' contradicts (mpirun|srun), which started [46] tasks"
    ):
        parse({**variables, "WORLD_SIZE": "8"})


@pytest.mark.parametrize("outer", [SLURM, OPEN_MPI, HYDRA, SUBMITIT])
def test_torchrun_inside_of_another_launcher_wins(outer: dict[str, str]) -> None:
    assert parse({**outer, **TORCHRUN}).launcher == "torchrun"


@pytest.mark.parametrize("inner", [OPEN_MPI, HYDRA])
def test_mpirun_inside_of_srun_wins(inner: dict[str, str]) -> None:
    """Within a SLURM job, `mpirun` uses srun to start its daemons, whose variables the ranks inherit."""
    assert parse({**SLURM, **inner}).launcher == "mpirun"


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
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[01-03,07],login1", "gpu01"),
        ("n[1-3]", "n1"),
        ("n[007,9]", "n007"),
        ("r[1-2]c[3-4],x", "r1c3"),
    ],
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
