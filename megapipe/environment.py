"""The only file that reads and writes environment variables; above all the ranks as torchrun or SLURM sets them.

torchrun: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT.
SLURM (srun, one task a rank): SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM_NODES,
SLURM_STEP_NODELIST (the first node is the rendezvous), SLURM_JOB_ID (which spreads ports). These are the step's
variables, not the job's: a batch script has the job's SLURM_NTASKS, and SLURM_PROCID 0 too, but is one process.
Neither launcher: one process; those of mpirun are refused. torchrun wins where both are set, since srun often starts
torchrun.
TORCHELASTIC_RESTART_COUNT and SLURM_RESTART_COUNT give how often the job has been started again.
MEGAPIPE_RANKS_PER_GPU, which `megapipe launch --ranks-per-gpu` sets, lets so many ranks share each GPU.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from megapipe.errors import ConfigError

TORCHRUN_NEEDS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM_NEEDS = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_NODES")
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
LAUNCHER_PID = "MEGAPIPE_LAUNCHER_PID"  # from `megapipe launch` to its ranks
RANKS_PER_GPU = "MEGAPIPE_RANKS_PER_GPU"
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")  # Open MPI, MPICH and Intel MPI, MVAPICH2
PORTS = range(1, 1 << 16)
SLURM_FIRST_PORT, SLURM_NUM_PORTS = 20000, 20000
LIBRARY_PREFIXES = ("NCCL_", "GLOO_", "OMP_", "MKL_", "CUDA_", "TORCH_", "PYTORCH_", "UCX_", "NVIDIA_")
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "AUTH")


@dataclass(frozen=True)
class Environment:
    """This process among all ranks. `local` is within its node."""

    global_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    num_nodes: int
    node_rank: int
    master_addr: str
    master_port: int
    launcher: str  # 'torchrun', 'slurm' or 'single'
    num_threads: int | None = None  # OMP_NUM_THREADS
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES
    run_id: str | None = None  # torchrun's or SLURM's name for the job
    restart_count: int = 0  # how often torchrun has restarted its ranks, and SLURM has requeued the job
    job: str | None = None  # one name for all starts of a job that its launcher restarts; None if unknown
    launcher_pid: int | None = None  # process of `megapipe launch`; None under torchrun itself
    has_agent_store: bool = False  # torchrun's agent hosts the store at master_addr; else rank 0 does
    ranks_per_gpu: int = 1  # neighbouring ranks of a node that share a GPU

    @property
    def gpu_index(self) -> int:
        """This rank's GPU, numbered within its node."""
        return self.local_rank // self.ranks_per_gpu

    @property
    def is_distributed(self) -> bool:
        """True if there are other ranks."""
        return self.world_size > 1

    @property
    def ends_together(self) -> bool:
        """True if a launcher ends all other ranks when this one has failed: an agent that has started all of them."""
        return self.has_agent_store and self.num_nodes == 1


def cache_folder() -> Path | None:
    """Return the folder of megapipe in the user's cache ($XDG_CACHE_HOME, else ~/.cache). None without a home, and in a
    rank of a job, all of which would write there at once.
    """
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        return None
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (given if given.is_absolute() else Path.home() / ".cache") / "megapipe"
    except RuntimeError:
        return None


def set_tokenizer_threads(num_threads: int) -> None:
    """Set the threads of the tokenizers library in this process; it reads the variables when it first encodes."""
    os.environ["RAYON_NUM_THREADS"] = str(num_threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read the environment of this process. Raises ConfigError if a launcher's variables are incomplete or wrong."""
    variables = os.environ if environ is None else environ
    found = _of_launcher(variables)
    for name, index, count in (
        ("global rank", found.global_rank, found.world_size),
        ("local rank", found.local_rank, found.local_world_size),
        ("node rank", found.node_rank, found.num_nodes),
    ):
        if not 0 <= index < count:
            rule = f"it must be in 0 .. {count - 1} ({found.launcher} set the environment)"
            raise ConfigError(f"the {name} is {index}, but {rule}")
    # torchrun's name for the job (--rdzv-id; its default is not a name) is the same for all starts, also for those
    # caused by a new node, which are not counted; SLURM counts its requeues, and one allocation may run many jobs
    run_id = variables.get("TORCHELASTIC_RUN_ID", "none")
    restarts = [whole_number(variables, f"{launcher}_RESTART_COUNT", "0") for launcher in ("TORCHELASTIC", "SLURM")]
    return dataclasses.replace(
        found,
        restart_count=sum(restarts),
        job=None if run_id in ("none", "standalone") else f"torchrun {run_id}",
        num_threads=whole_number(variables, "OMP_NUM_THREADS") if variables.get("OMP_NUM_THREADS") else None,
        visible_devices=variables.get("CUDA_VISIBLE_DEVICES"),
        ranks_per_gpu=read_ranks_per_gpu(variables.get(RANKS_PER_GPU) or "1", found.local_world_size),
    )


def read_ranks_per_gpu(text: str, ranks_per_node: int) -> int:
    """Read --ranks-per-gpu or its variable. Raises ConfigError unless it is a number that divides a node's ranks."""
    name = f"--ranks-per-gpu {text} (the variable {RANKS_PER_GPU})"
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", text):
        raise ConfigError(f"{name}: expected the number of ranks that share each GPU, at least 1")
    if ranks_per_node % int(text):
        divisors = ", ".join(str(n) for n in range(1, ranks_per_node + 1) if ranks_per_node % n == 0)
        raise ConfigError(f"{name} does not divide the {ranks_per_node} rank(s) of the node; use one of {divisors}")
    return int(text)


def read_meeting_place() -> Environment | None:
    """Return the part of a wrong environment that says where the other ranks meet, with rank -1 if it is unknown.

    None if it does not say, or there are no others.
    """
    variables = os.environ

    def number(name: str, default: int) -> int:
        try:
            return whole_number(variables, name)
        except ConfigError:
            return default

    with suppress(ConfigError):
        found = _of_launcher(variables)
        return found if found.is_distributed else None
    address, port, world_size = variables.get("MASTER_ADDR"), number("MASTER_PORT", -1), number("WORLD_SIZE", 2)
    if not address or port not in PORTS or world_size < 2:
        return None
    has_store = variables.get(AGENT_STORE) == "True"
    return Environment(number("RANK", -1), world_size, 0, 1, 1, 0, address, port, "torchrun", has_agent_store=has_store)


def _of_launcher(variables: Mapping[str, str]) -> Environment:
    if "TORCHELASTIC_RUN_ID" in variables or any(name in variables for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return from_torchrun(variables)
    num_tasks = whole_number(variables, "SLURM_STEP_NUM_TASKS", "1")
    for name in MPI_SIZES:
        if (size := whole_number(variables, name, "1")) > 1 and size != num_tasks:  # srun --mpi=pmi2 sets PMI_SIZE too
            raise ConfigError(
                f"{name} is {size} in the environment: mpirun started {size} processes, which would each train alone; "
                "start the ranks with torchrun, srun or megapipe launch, or set RANK, WORLD_SIZE, LOCAL_RANK, "
                "MASTER_ADDR and MASTER_PORT for each of them"
            )
    if num_tasks > 1:
        return from_slurm(variables)
    return Environment(0, 1, 0, 1, 1, 0, master_addr="127.0.0.1", master_port=0, launcher="single")


def from_torchrun(variables: Mapping[str, str]) -> Environment:
    """Read torchrun's variables. All nodes have the same number of ranks, so GROUP_WORLD_SIZE may be missing."""
    way = "start with torchrun, which sets them all, or set none of them for a single rank"
    require(variables, TORCHRUN_NEEDS, way)
    global_rank, world_size = whole_number(variables, "RANK"), whole_number(variables, "WORLD_SIZE")
    local_world_size = whole_number(variables, "LOCAL_WORLD_SIZE", str(world_size))
    if local_world_size < 1:
        raise ConfigError(f"LOCAL_WORLD_SIZE is {local_world_size} in the environment; expected at least 1")
    return Environment(
        global_rank=global_rank,
        world_size=world_size,
        local_rank=whole_number(variables, "LOCAL_RANK"),
        local_world_size=local_world_size,
        num_nodes=whole_number(variables, "GROUP_WORLD_SIZE", str(max(1, -(-world_size // local_world_size)))),
        node_rank=whole_number(variables, "GROUP_RANK", str(max(0, global_rank) // local_world_size)),
        master_addr=variables["MASTER_ADDR"],
        master_port=port_number(variables),
        launcher="torchrun",
        run_id=variables.get("TORCHELASTIC_RUN_ID"),
        launcher_pid=whole_number(variables, LAUNCHER_PID) if variables.get(LAUNCHER_PID) else None,
        has_agent_store=variables.get(AGENT_STORE) == "True",
    )


def from_slurm(variables: Mapping[str, str]) -> Environment:
    """Read srun's variables. The first node of the step is the rendezvous unless MASTER_ADDR is set."""
    require(variables, SLURM_NEEDS, "start each rank as a task of srun")
    world_size = whole_number(variables, "SLURM_STEP_NUM_TASKS")
    num_nodes = whole_number(variables, "SLURM_STEP_NUM_NODES")
    node_rank = whole_number(variables, "SLURM_NODEID")
    node_list, tasks = variables.get("SLURM_STEP_NODELIST", ""), variables.get("SLURM_STEP_TASKS_PER_NODE")
    address = variables.get("MASTER_ADDR") or ("127.0.0.1" if num_nodes == 1 else first_node(node_list))
    if not address:
        raise ConfigError("the environment has no SLURM_STEP_NODELIST; set MASTER_ADDR to the name of the first node")
    if tasks is None and world_size % max(1, num_nodes):
        rule = f"does not divide over SLURM_STEP_NUM_NODES {num_nodes}; use --ntasks-per-node"
        raise ConfigError(f"SLURM_STEP_NUM_TASKS {world_size} {rule}")
    port = SLURM_FIRST_PORT + whole_number(variables, "SLURM_JOB_ID", "0") % SLURM_NUM_PORTS
    return Environment(
        global_rank=whole_number(variables, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=whole_number(variables, "SLURM_LOCALID"),
        local_world_size=world_size // max(1, num_nodes) if tasks is None else tasks_on_node(tasks, node_rank),
        num_nodes=num_nodes,
        node_rank=node_rank,
        master_addr=address,
        master_port=port_number(variables, str(port)),
        launcher="slurm",
        run_id=variables.get("SLURM_JOB_ID"),
    )


def require(variables: Mapping[str, str], names: tuple[str, ...], way_out: str) -> None:
    """Raise ConfigError if some of a launcher's variables are missing."""
    missing = [name for name in names if not variables.get(name)]
    if missing:
        found = ", ".join(name for name in names if name not in missing) or "a launcher"
        raise ConfigError(f"the environment sets {found} but not {', '.join(missing)}; {way_out}")


def whole_number(variables: Mapping[str, str], name: str, default: str | None = None) -> int:
    """Read a variable as a whole number. Raises ConfigError with name and text if it is not one."""
    text = variables.get(name) or default or ""
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise ConfigError(f"{name} is {text!r} in the environment; expected a whole number")
    return int(text)


def port_number(variables: Mapping[str, str], default: str | None = None) -> int:
    """Read MASTER_PORT. Raises ConfigError if it is not a port."""
    port = whole_number(variables, "MASTER_PORT", default)
    if port not in PORTS:
        raise ConfigError(f"MASTER_PORT is {port} in the environment; expected a port, 1 to 65535")
    return port


def first_node(node_list: str) -> str:
    """Return the first host of SLURM's compressed list: 'node[03-05,9],login' is node03, 'a[1-2]b[07-08]' is a1b07.

    Raises ConfigError if its brackets are not in pairs, or one is empty.
    """
    match = re.match(r"((?:[^,\[\]]|\[\w[^\[\]]*\])*)(?:,|$)", node_list)  # up to the first comma outside brackets
    if match is None:
        expected = "expected something like node[03-05,9],login; or set MASTER_ADDR to the name of the first node"
        raise ConfigError(f"SLURM_STEP_NODELIST is {node_list!r} in the environment; {expected}")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[1])


def tasks_on_node(tasks: str, node_rank: int) -> int:
    """Return the number of ranks of a node in SLURM's list: '4(x2),3' is 4, 4, 3."""
    counts: list[int] = []
    for part in tasks.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE is {tasks!r}; expected something like 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    if node_rank >= len(counts) or node_rank < 0:
        listed = f"SLURM_STEP_TASKS_PER_NODE {tasks} lists {len(counts)} nodes"
        raise ConfigError(f"SLURM_NODEID is {node_rank}, but {listed}")
    return counts[node_rank]


def prefixed(prefix: str) -> dict[str, str]:
    """Return the variables with a prefix, without it: torchrun uses PET_NNODES for --nnodes."""
    return {name.removeprefix(prefix): value for name, value in os.environ.items() if name.startswith(prefix)}


def set_for_libraries(**settings: str | int) -> None:
    """Set variables that libraries read in this process (such as CUBLAS_WORKSPACE_CONFIG), unless they are set."""
    for name, value in settings.items():
        os.environ.setdefault(name, str(value))


@contextmanager
def set_meanwhile(**settings: str) -> Iterator[None]:
    """Set variables that libraries read in this process, unless they are set, and remove them at the end."""
    added = settings.keys() - os.environ.keys()
    set_for_libraries(**settings)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def replace_for_libraries(name: str, value: str) -> None:
    """Set a variable that libraries read in this process, also if it is set to something else."""
    os.environ[name] = value


def sees_gpu() -> bool:
    """Return True if the driver of a GPU is there and CUDA_VISIBLE_DEVICES does not hide all; torch is not asked."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return not is_hidden and any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def missing_for_triton() -> str | None:
    """Return what torch.compile lacks on this machine to make kernels for GPUs; None if nothing."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "TORCHDYNAMO_DISABLE=1 is set, with which torch.compile compiles nothing"
    if find_spec("triton") is None:
        return "torch.compile needs the package triton, not installed here"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler, and found none (gcc, clang, or the one named by CC)"
    headers = sysconfig.get_path("include", "posix_prefix")
    if not os.path.exists(os.path.join(headers, "Python.h")):
        return f"Triton compiles against Python's headers, and {headers} has none (apt-get install python3-dev)"
    return None


def value_for_libraries(name: str) -> str | None:
    """Return a variable that libraries read, None if it is not set."""
    return os.environ.get(name)


def allows_colour() -> bool:
    """Return False if the user wants no colours (NO_COLOR, https://no-color.org) or the terminal has none."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def announce_launcher(ranks_per_gpu: int) -> None:
    """Set the variables from which the ranks that this process starts know their launcher and who shares a GPU."""
    os.environ[LAUNCHER_PID] = str(os.getpid())
    os.environ[RANKS_PER_GPU] = str(ranks_per_gpu)


def mps_control() -> str | None:
    """Return the path of the control pipe of NVIDIA's Multi-Process Service (MPS), None if there is none."""
    path = os.path.join(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps", "control")
    return path if os.path.exists(path) else None


def library_settings(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that torch and its libraries read, for reports; none whose name suggests a secret."""
    variables = os.environ if environ is None else environ
    return {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(LIBRARY_PREFIXES) and not any(word in name.upper() for word in SECRET_WORDS)
    }
