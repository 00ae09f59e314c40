"""Rank, world and node of this process, from the variables of torchrun, SLURM, or neither."""

from __future__ import annotations

import os

import pytest

from megapipe.environment import first_node, read_environment, read_meeting_place, set_for_libraries, tasks_on_node
from megapipe.errors import ConfigError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "r",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "OMP_NUM_THREADS": "3",
}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_JOB_ID": "123456",
}


def test_the_launcher_announces_its_process_id() -> None:
    assert read_environment(TORCHRUN).launcher_pid is None
    assert read_environment(TORCHRUN | {"MEGAPIPE_LAUNCHER_PID": "17"}).launcher_pid == 17


def test_torchrun() -> None:
    found = read_environment(TORCHRUN)
    assert (found.global_rank, found.world_size, found.local_rank, found.local_world_size) == (5, 8, 1, 4)
    assert (found.num_nodes, found.node_rank, found.master_addr, found.master_port) == (2, 1, "head", 29500)
    assert (found.launcher, found.run_id, found.restart_count, found.num_threads) == ("torchrun", "r", 2, 3)
    assert found.is_distributed


@pytest.mark.parametrize(("local_rank", "gpu"), [(0, 0), (1, 0), (2, 1), (3, 1)])
@pytest.mark.parametrize(
    ("launcher", "name"),
    [(TORCHRUN, "LOCAL_RANK"), ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, "SLURM_LOCALID")],
    ids=["torchrun", "slurm"],
)
def test_ranks_share_a_gpu_with_their_neighbours(
    launcher: dict[str, str], name: str, local_rank: int, gpu: int
) -> None:
    launched = {**launcher, name: str(local_rank)}
    alone = read_environment(launched)
    assert (alone.ranks_per_gpu, alone.gpu_index) == (1, local_rank)
    shared = read_environment({**launched, "MEGAPIPE_RANKS_PER_GPU": "2"})
    assert (shared.ranks_per_gpu, shared.gpu_index) == (2, gpu)


@pytest.mark.parametrize("text", ["3", "8", "0", "-2", "two", "2.0", "4 ", "9" * 5000])
def test_a_number_of_ranks_on_a_gpu_that_does_not_divide_those_of_the_node_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--ranks-per-gpu"):
        read_environment({**TORCHRUN, "MEGAPIPE_RANKS_PER_GPU": text})


def test_nodes_are_derived_from_ranks_per_node_where_torchrun_sets_no_group() -> None:
    found = read_environment({name: value for name, value in TORCHRUN.items() if not name.startswith("GROUP")})
    assert (found.num_nodes, found.node_rank) == (2, 1)


def test_slurm() -> None:
    found = read_environment(SLURM)
    assert (found.global_rank, found.world_size, found.local_rank, found.local_world_size) == (6, 7, 2, 3)
    assert (found.num_nodes, found.node_rank, found.master_addr, found.launcher) == (2, 1, "gpu07", "slurm")
    assert 20000 <= found.master_port < 40000
    assert (
        found.master_port
        == read_environment({**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}).master_port
    )


@pytest.mark.parametrize("port", ["99999", "65536", "0", "-1", "abc", "29500 ", "9" * 5000])
@pytest.mark.parametrize("launcher", [TORCHRUN, SLURM], ids=["torchrun", "slurm"])
def test_a_master_port_that_is_none_is_refused_by_every_rank(launcher: dict[str, str], port: str) -> None:
    with pytest.raises(ConfigError, match=r"MASTER_PORT is '?" + port):
        read_environment({**launcher, "MASTER_PORT": port})


def test_nobody_is_waited_for_at_a_port_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "MASTER_PORT": "65536"}.items():
        monkeypatch.setenv(name, value)
    assert read_meeting_place() is None
    monkeypatch.setenv("MASTER_PORT", "65535")
    assert read_meeting_place() is not None


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"])
def test_processes_of_mpirun_are_refused_unless_they_are_ranks_of_srun_or_torchrun(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 7 .*RANK, WORLD_SIZE"):
        read_environment({name: "7"})
    assert read_environment({name: "1"}).launcher == "single"
    assert read_environment({**SLURM, name: "7"}).launcher == "slurm"  # srun --mpi=pmi2
    assert read_environment({**TORCHRUN, name: "7"}).launcher == "torchrun"
    with pytest.raises(ConfigError, match=name):  # mpirun, whose daemons srun has started on each node
        read_environment({**SLURM, name: "14"})


def test_slurm_rendezvous_can_be_set() -> None:
    found = read_environment({**SLURM, "MASTER_ADDR": "other", "MASTER_PORT": "1234"})
    assert (found.master_addr, found.master_port) == ("other", 1234)


def test_torchrun_inside_slurm_is_torchrun() -> None:
    assert read_environment({**SLURM, **TORCHRUN}).launcher == "torchrun"


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"},
        {"MASTER_ADDR": "left-over"},
    ],
    ids=["nothing", "one task", "batch script of a job of 8", "address"],
)
def test_without_a_launcher_there_is_one_rank(variables: dict[str, str]) -> None:
    found = read_environment(variables)
    assert (found.launcher, found.global_rank, found.world_size, found.is_distributed) == ("single", 0, 1, False)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_missing_variables_are_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"not {name}; start with torchrun"):
        read_environment({key: value for key, value in TORCHRUN.items() if key != name})


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({**TORCHRUN, "RANK": "x"}, "RANK is 'x' in the environment; expected a whole number"),
        ({**TORCHRUN, "RANK": "8"}, r"the global rank is 8, but it must be in 0 .. 7"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, r"the local rank is 4, but it must be in 0 .. 3"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is 0"),
        ({**TORCHRUN, "OMP_NUM_THREADS": "many"}, "OMP_NUM_THREADS is 'many'"),
        ({key: value for key, value in SLURM.items() if key != "SLURM_LOCALID"}, "not SLURM_LOCALID"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "no SLURM_STEP_NODELIST; set MASTER_ADDR"),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[07-08"}, r"SLURM_STEP_NODELIST is 'gpu\[07-08' in the environment"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "many"}, "expected something like"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "7"}, "lists 1 nodes"),
        ({key: value for key, value in SLURM.items() if "TASKS_PER" not in key}, "use --ntasks-per-node"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_inconsistent_variables_are_refused(variables: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_environment(variables)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("node[03-05,9],login", "node03"),
        ("a[1-2]b[07-08]", "a1b07"),
        ("n-[12]", "n-12"),
        ("x.y.z,b", "x.y.z"),
        ("", ""),
    ],
    ids=lambda value: value or "none",
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize("nodes", ["node[03-05", "node03-05],b", "a[1-2]b[07-08", "n[1[2]]", "n[],b", "n[1,2"])
def test_a_list_of_nodes_with_a_broken_bracket_is_refused(nodes: str) -> None:
    with pytest.raises(ConfigError, match=r"SLURM_STEP_NODELIST .*MASTER_ADDR"):
        first_node(nodes)


@pytest.mark.parametrize(
    ("tasks", "counts"), [("4", [4]), ("4(x2),3", [4, 4, 3]), ("1,2(x2)", [1, 2, 2])], ids=lambda value: str(value)
)
def test_tasks_per_node(tasks: str, counts: list[int]) -> None:
    assert [tasks_on_node(tasks, node) for node in range(len(counts))] == counts


def test_a_library_variable_that_the_user_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "mine")
    monkeypatch.delenv("MEGAPIPE_TEST_ONLY", raising=False)
    set_for_libraries(CUBLAS_WORKSPACE_CONFIG=":4096:8", MEGAPIPE_TEST_ONLY=1)
    changed = dict(os.environ)
    monkeypatch.setenv("MEGAPIPE_TEST_ONLY", "1")  # registers the variable for removal after the test
    assert (changed["CUBLAS_WORKSPACE_CONFIG"], changed["MEGAPIPE_TEST_ONLY"]) == ("mine", "1")
