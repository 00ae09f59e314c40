"""The facts of a run that must be the same on all ranks, and the one table of those that may differ.

Compared by `comm.meeting` before anything is built: the resolved configuration by key, versions of megapipe, torch and
the libraries that compute, contents of data, tokenizer and other files that are read, the checkpoint that is loaded,
the folder of --save, extensions, and variables of the environment that change results (docs/reliability.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
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
from megapipe.data.fingerprint import TOKENIZER_SUFFIXES, blend_content, sampled_content, whole_content
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
TENSOR_BLOCK_BYTES = 4096  # read in the middle and at the end of each tensor of a Hugging Face folder
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
    """Return the facts of this rank in a run. notes: of rank 0."""
    config, parallel = plan.config, plan.config.parallel
    processes = process_facts(
        environment, parallel.distributed_backend, config.training.device, not parallel.allow_mixed_hosts
    )
    return {**config_facts(config, notes), **software_facts(config.data.sft), **processes}


def config_facts(config: Config, notes: Notes) -> Facts:
    """Return the settings of a configuration, with the contents of the files that it names."""
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
    return facts


def software_facts(with_text: bool) -> Facts:
    """Return versions and variables that change results. with_text: also versions of the libraries that read text."""
    facts = {f"variable {name}": Fact(value_for_libraries(name) or "unset") for name in VARIABLES}
    return facts | {name: Fact(text) for name, text in _versions(with_text)}


def process_facts(environment: Environment, backend: str, device: str, compares_kinds: bool = False) -> Facts:
    """Return place and device of this process. backend, device: see `choose_backend`. compares_kinds: of GPU."""
    nodes, gpus = Fact(str(environment.local_world_size)), Fact(str(environment.ranks_per_gpu))
    chosen = _device(environment, backend, device, compares_kinds)
    return {"ranks per node": nodes, "ranks per GPU": gpus, "device": chosen}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _blend(flag: str, config: Config, words: tuple[str, ...]) -> Fact:
    return Fact(*blend_content(words, flag, config.data.sft))


def file_fact(path: str) -> Fact:
    """Return the content of a file, or of the folder of a tokenizer; a name of a hub as it is."""
    if not Path(path).exists():
        return Fact(path)
    content = whole_content(Path(path))
    return Fact(f"{path} ({content})", content)


def extensions_fact(*_: object) -> Fact:
    """Return the contents of loaded extensions: the paths of their files may differ."""
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
        # others, such as pickled weights, are not read
        readers = dict.fromkeys(TOKENIZER_SUFFIXES, whole_content) | {".safetensors": _sampled_weights}
        content = "; ".join(f"{path.name} {readers[path.suffix](path)}" for path in files if path.suffix in readers)
        return Fact(f"{flags.load} (sha256 {hashlib.sha256(content.encode()).hexdigest()[:16]})", content)
    root = flags.save if notes.get("is_restart") else flags.load
    if root is None:
        return Fact("unset")
    if not notes.get("checkpoint"):
        return Fact(root, "no checkpoint")
    return checkpoint_fact(Path(root) / notes["checkpoint"])


def _sampled_weights(path: Path) -> str:
    """Return size and checksum of a safetensors file: of its header, and the middle and end of each tensor.

    What is damaged is reported when it is loaded.
    """
    damage = OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError
    with suppress(*damage), open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        start = 8 + min(size, int.from_bytes(file.read(8), "little"))
        header = file.read(start - 8)
        found, entries = zlib.crc32(header), json.loads(header)
        for first, past in sorted(entries[name]["data_offsets"] for name in entries.keys() - {"__metadata__"}):
            last = max(first, past - TENSOR_BLOCK_BYTES)
            for position in ((first + last) // 2, last):
                found = zlib.crc32(os.pread(file.fileno(), TENSOR_BLOCK_BYTES, start + position), found)
        return f"{size:,} bytes, checksum {found:08x}"
    return sampled_content(path, 8)


def checkpoint_fact(folder: Path) -> Fact:
    """Return the identity of a checkpoint, by its manifest, which has the checksums of the weights."""
    path = folder / MANIFEST_NAME
    try:
        with open(path, "rb") as file:
            size = path.stat().st_size
            ends = file.read(MANIFEST_BYTES)
            file.seek(max(0, size - MANIFEST_BYTES))
            ends += file.read()
    except OSError as error:
        return Fact(f"{path}, which cannot be read ({error.strerror})")
    content = f"manifest of {size:,} bytes, sha256 {hashlib.sha256(ends).hexdigest()[:16]}"
    return Fact(f"{folder} ({content})", content)


def versions(config: Config) -> dict[str, str]:
    """Return the versions of megapipe and of the libraries that compute, by name."""
    return dict(_versions(config.data.sft))


def changed_versions(saved: Mapping[str, str] | None, own: Mapping[str, str]) -> str:
    """Return which versions are not those of a checkpoint, '' if none or if it does not say."""
    names = [name for name in {**(saved or {}), **own} if saved and saved.get(name) != own.get(name)]
    return ", ".join(f"{name} {(saved or {}).get(name, 'none')} then and {own.get(name, 'none')} now" for name in names)


def _device(environment: Environment, backend: str, device: str, compares_kinds: bool) -> Fact:
    backend, chosen = choose_backend(backend, device, environment.gpu_index)
    if chosen.type == "cpu":
        return Fact(f"cpu over {backend}")
    kind = f"{torch.cuda.get_device_name(chosen)} over {backend}"
    way = "; --allow-mixed-hosts allows several kinds of GPU"
    return Fact(kind + way, kind) if compares_kinds else Fact(kind, f"{chosen.type} over {backend}")


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
FILES = (
    *(f"data.{name}" for name in ("tokenizer_model", "vocab_file", "merge_file")),
    *("parallel.pipeline_layer_times", "gpu.tuned", "gpu.nccl_communicator_config_path"),
)
# fields that are compared by what they name
SPECIAL: Mapping[str, Callable[[Config, Any], Fact]] = {
    **{f"data.{name}": partial(_blend, flag_of(name)) for name in BLENDS},
    **dict.fromkeys(FILES, lambda _, path: file_fact(path)),
    "gpu.nccl_settings": _nccl,
    "training.extension": extensions_fact,
}
