"""The facts of a run that must be the same on all ranks, and the one table of those that may differ.

Compared by `comm.meeting` before anything is built: the resolved configuration by key, versions of megapipe, torch and
the libraries that compute, contents of data, tokenizer and other files that are read, the checkpoint that is loaded,
the folder of --save, extensions, and variables of the environment that change results (docs/reliability.md).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from megapipe.checkpoint.folder import find_checkpoint
from megapipe.checkpoint.lock import SaveLock, has_lock
from megapipe.checkpoint.manifest import MANIFEST_NAME
from megapipe.comm.bootstrap import choose_backend
from megapipe.comm.meeting import Fact, Facts, Notes
from megapipe.comm.nccl import NcclSettings
from megapipe.config.config import Config, all_fields, value_of
from megapipe.config.fields import value_text
from megapipe.config.files import CheckpointConfig, is_hugging_face
from megapipe.data.fingerprint import blend_content, sampled_content, whole_content
from megapipe.environment import Environment, value_for_libraries
from megapipe.errors import CheckpointError
from megapipe.plan.run_plan import RunPlan
from megapipe.registry import EXTENSIONS
from megapipe.version import __version__

PACKAGE = Path(__file__).resolve().parents[1]
# field of the configuration or variable of NCCL -> why ranks may differ in it
MAY_DIFFER: Mapping[str, str] = {
    "data.data_cache_path": "an index cache, whose files say what they are made of",
    "data.num_workers": "threads of a rank, which change no batch",
    **dict.fromkeys(
        (
            *"logging.quiet logging.tensorboard_dir logging.wandb_project logging.wandb_entity".split(),
            *"logging.wandb_exp_name logging.wandb_save_dir logging.metrics_file".split(),
            *"gpu.memory_snapshot_path gpu.record_memory_history gpu.nvtx_ranges".split(),
            *"NCCL_DEBUG NCCL_DEBUG_FILE NCCL_DEBUG_SUBSYS".split(),
        ),
        "an output of rank 0, or of each rank on its own",
    ),
    **dict.fromkeys("NCCL_SOCKET_IFNAME NCCL_IB_HCA NCCL_NET_GDR_LEVEL".split(), "the name of a device of this node"),
    "NCCL_TOPO_FILE": "the topology of this node",
    "kind of GPU": "with --allow-mixed-hosts: a cluster of several kinds, whose kernels round differently",
}
LIBRARIES = ("numpy", "triton", "flash-attn", "transformer-engine", "apex", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
TEXT_LIBRARIES = ("tokenizers", "transformers", "sentencepiece", "Jinja2")  # used while training only by --sft
VARIABLES = (  # that change results, or which algorithm all ranks must run together
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_ALGO",
    "NCCL_PROTO",
)
FOLDER_SECONDS = 2.0  # for a file of rank 0 to become visible on a network file system
MANIFEST_BYTES = 4096  # of both ends of a manifest, whose head holds the checksum of the whole


def notes_of(lock: SaveLock | CheckpointError | None, flags: CheckpointConfig) -> dict[str, str]:
    """Return what other ranks look up in folders: the lock of --save, the checkpoint that is loaded. For rank 0.

    flags: with which the run resumes.
    """
    notes = {}
    if isinstance(lock, SaveLock):
        notes["save"] = lock.mark
    if flags.load is not None and not is_hugging_face(flags.load):
        found = None
        with suppress(CheckpointError):  # raised on all ranks when it is loaded
            found = find_checkpoint(Path(flags.load), flags.ckpt_step)
        notes["checkpoint"] = "" if found is None else found.path.name
        notes["is_restart"] = "yes" if flags.load == flags.save else ""
    return notes


def facts_of(plan: RunPlan, environment: Environment, notes: Notes) -> Facts:
    """Return the facts of this rank. notes: of rank 0."""
    config = plan.config
    facts = {}
    for one in all_fields():
        value = value_of(config, one)
        if one.key in MAY_DIFFER or one.key in FOLDERS:
            continue
        special = SPECIAL.get(one.key)
        if special is None or (value is None and special is not _nccl):
            facts[flag_of(one.name)] = Fact(value_text(value))
        else:
            facts[flag_of(one.name)] = special(config, value)
    facts |= {f"--{name}": FOLDERS[f"checkpoint.{name}"](config, notes) for name in ("save", "load")}
    facts |= {f"variable {name}": Fact(value_for_libraries(name) or "unset") for name in VARIABLES}
    facts |= {name: Fact(text) for name, text in _versions(config.data.sft)}
    facts["ranks per node"] = Fact(str(plan.topology.ranks_per_node))
    facts["device"] = _device(config, environment)
    return facts


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _blend(flag: str, config: Config, words: tuple[str, ...]) -> Fact:
    return Fact(*blend_content(words, flag, config.data.sft))


def _file(config: Config, path: str) -> Fact:
    """Compare a file, or the folder of a tokenizer, by content; a name of a hub as it is."""
    if not Path(path).exists():
        return Fact(path)
    content = whole_content(Path(path))
    return Fact(f"{path} ({content})", content)


def _extensions(*_: object) -> Fact:
    """Compare loaded extensions by content: the paths of their files may differ."""
    loaded = EXTENSIONS.loaded.values()
    shown = ", ".join(f"{one.name} (sha256 {one.sha256[:12]})" for one in loaded) or "none"
    return Fact(shown, " ".join(sorted(one.sha256 for one in loaded)))


def _nccl(config: Config, _: tuple[str, ...]) -> Fact:
    variables = NcclSettings.of(config.gpu).variables
    compared = [f"{name}={value}" for name, value in sorted(variables.items()) if name not in MAY_DIFFER]
    return Fact(" ".join(compared) or value_text(None))


def _save(config: Config, notes: Notes) -> Fact:
    """Look for rank 0's lock in --save: then it is the same folder, by whatever path and on whatever file system."""
    root = config.checkpoint.save
    if root is None:
        return Fact("unset")
    if "save" not in notes:  # rank 0 saves nothing, or another run has the folder
        return Fact(root, "set")
    deadline = time.monotonic() + FOLDER_SECONDS
    while not has_lock(Path(root), notes["save"]):
        if time.monotonic() > deadline:
            return Fact(f"{Path(root).resolve()}, a folder without rank 0's lock (another one, or a disk of this node)")
        time.sleep(0.1)
    return Fact(f"{Path(root).resolve()}, which holds rank 0's lock", "rank 0's")


def _load(config: Config, notes: Notes) -> Fact:
    """Return the checkpoint that rank 0 loads, as this rank finds it."""
    flags = config.checkpoint
    if is_hugging_face(flags.load):
        assert flags.load is not None
        files = sorted(path for path in Path(flags.load).iterdir() if path.is_file())
        content = "; ".join(f"{path.name} {sampled_content(path, 8)}" for path in files)
        return Fact(f"{flags.load} (sha256 {hashlib.sha256(content.encode()).hexdigest()[:16]})", content)
    root = flags.save if notes.get("is_restart") else flags.load
    if root is None:
        return Fact("unset")
    if not notes.get("checkpoint"):
        return Fact(root, "no checkpoint")
    path = Path(root) / notes["checkpoint"] / MANIFEST_NAME
    try:
        with open(path, "rb") as file:
            size = path.stat().st_size
            ends = file.read(MANIFEST_BYTES)
            file.seek(max(0, size - MANIFEST_BYTES))
            ends += file.read()
    except OSError as error:
        return Fact(f"{path}, which cannot be read ({error.strerror})")
    content = f"manifest of {size:,} bytes, sha256 {hashlib.sha256(ends).hexdigest()[:16]}"
    return Fact(f"{path.parent} ({content})", content)


def versions(config: Config) -> dict[str, str]:
    """Return the versions of megapipe and of the libraries that compute, by name."""
    return dict(_versions(config.data.sft))


def changed_versions(saved: Mapping[str, str] | None, own: Mapping[str, str]) -> str:
    """Return which versions are not those of a checkpoint, '' if none or if it does not say."""
    names = [name for name in {**(saved or {}), **own} if saved and saved.get(name) != own.get(name)]
    return ", ".join(f"{name} {(saved or {}).get(name, 'none')} then and {own.get(name, 'none')} now" for name in names)


def _device(config: Config, environment: Environment) -> Fact:
    backend, device = choose_backend(
        config.parallel.distributed_backend, config.training.device, environment.local_rank
    )
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    may_differ = device.type == "cuda" and config.parallel.allow_mixed_hosts
    way = "" if device.type == "cpu" or may_differ else "; --allow-mixed-hosts allows several kinds of GPU"
    return Fact(f"{kind} over {backend}{way}", f"{device.type if may_differ else kind} over {backend}")


@cache
def _versions(with_text: bool) -> tuple[tuple[str, str], ...]:
    """Return (name, version) of megapipe and what computes. megapipe: with a digest of its source."""
    source = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        source.update(path.read_bytes())
    found = [("megapipe", f"{__version__} (source {source.hexdigest()[:12]})"), ("torch", torch.__version__)]
    for name in (*LIBRARIES, *(TEXT_LIBRARIES if with_text else ())):
        with suppress(PackageNotFoundError):
            found.append((name, version(name)))
    if torch.backends.cudnn.is_available():
        found.append(("cuDNN", str(torch.backends.cudnn.version())))
    return tuple(found)


FOLDERS: Mapping[str, Callable[[Config, Notes], Fact]] = {"checkpoint.save": _save, "checkpoint.load": _load}
BLENDS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
# fields that are compared by what they name
SPECIAL: Mapping[str, Callable[[Config, Any], Fact]] = {
    **{f"data.{name}": partial(_blend, flag_of(name)) for name in BLENDS},
    **{f"data.{name}": _file for name in ("tokenizer_model", "vocab_file", "merge_file")},
    "parallel.pipeline_layer_times": _file,
    "gpu.tuned": _file,
    "gpu.nccl_communicator_config_path": _file,
    "gpu.nccl_settings": _nccl,
    "training.extension": _extensions,
}
