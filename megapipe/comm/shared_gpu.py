"""Several ranks on each GPU (`megapipe launch --ranks-per-gpu`): the environment of NCCL and each rank's memory.

NCCL refuses two ranks of a host on one GPU: "Duplicate GPU detected" in src/init.cc of NCCL 2.28.9, from 2.30.3 on
unless NCCL_MULTI_RANK_GPU_ENABLE=1, which older versions ignore and which NCCL's documentation calls experimental. It
takes ranks for ranks of different hosts if they have different NCCL_HOSTID (getHostHash in src/misc/utils.cc of 2.28.9
and 2.30.7), and connects these by its network, here sockets. NCCL's kernels then only wait for the host, so ranks can
take turns on the GPU. The variables are set on CPUs too, so that a run there covers this code.
"""

from __future__ import annotations

import torch

from megapipe.config.gpu import shared_bytes
from megapipe.environment import Environment, mps_control, set_for_libraries, value_for_libraries
from megapipe.errors import ConfigError
from megapipe.formatting import bytes_text

HOST_ID = "NCCL_HOSTID"
# sockets only, with few and small buffers; two CTAs a communicator leave SMs to the kernels of all ranks
OVER_SOCKETS = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
    "NCCL_MAX_CTAS": "2",
    "NCCL_NCHANNELS_PER_NET_PEER": "1",
    "NCCL_BUFFSIZE": "1048576",
}


def nccl_variables(environment: Environment) -> dict[str, str]:
    """Return the variables with which NCCL takes this rank for the only one of its host; {} if it shares no GPU."""
    if environment.ranks_per_gpu == 1:
        return {}
    loopback = {"NCCL_SOCKET_IFNAME": "lo"} if environment.num_nodes == 1 else {}
    return {HOST_ID: f"megapipe-rank-{environment.global_rank}", **OVER_SOCKETS, **loopback}


def share_gpu(environment: Environment, device: torch.device) -> tuple[str, ...]:
    """Set NCCL's variables and limit the memory of a rank that shares its GPU, and return lines that say so.

    Called before NCCL starts; another call changes nothing. Variables that the user has set are kept. Raises
    ConfigError if NCCL could not start with them, or if the GPU has no memory for so many ranks.
    """
    variables = nccl_variables(environment)
    if not variables:
        return ()
    given = {name: value_for_libraries(name) or value for name, value in variables.items()}
    if given[HOST_ID] != variables[HOST_ID]:
        raise ConfigError(
            f"{HOST_ID}={given[HOST_ID]} in the environment: NCCL refuses ranks of one host on one GPU, so "
            "--ranks-per-gpu gives each rank a host of its own; unset it"
        )
    set_for_libraries(**variables)
    kept = [f"{name}={value}" for name, value in given.items() if value != variables[name]]
    remarks = [f"kept from the environment, against --ranks-per-gpu: {', '.join(kept)}"] if kept else []
    ranks = environment.ranks_per_gpu
    if device.type != "cuda":
        return f"--ranks-per-gpu {ranks}: this run has no GPU; NCCL's variables are set as on one", *remarks
    total = torch.cuda.get_device_properties(device).total_memory
    share = shared_bytes(total, ranks)
    torch.cuda.set_per_process_memory_fraction(share / total, device)
    pipe = mps_control()
    how = "take turns on it" if pipe is None else f"run at once if MPS does (its control pipe is {pipe})"
    return (
        f"{ranks} ranks share each GPU and {how}, {bytes_text(share)} each, with NCCL over sockets: this checks that a "
        "grid is correct; its times, tokens/s, FLOP/s and MFU mean nothing",
        *remarks,
    )
