"""`Snapshot`: a model or a whole run, which every format is read into and written from; megapipe's own checkpoints."""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megapipe.checkpoint.disk import Disk, reason
from megapipe.checkpoint.folder import (
    TOKENIZER_NAME,
    CheckpointFolder,
    account_of,
    find_checkpoint,
    folder_name,
    open_folder,
    read_newest,
    read_rollbacks,
    saved_config,
)
from megapipe.checkpoint.load import load_tensors
from megapipe.checkpoint.manifest import MANIFEST_NAME, SavedTensor
from megapipe.checkpoint.save import Extras, SaveReport, save_checkpoint
from megapipe.checkpoint.shard import DTYPES as SAVED_DTYPES
from megapipe.checkpoint.shard import TensorBox
from megapipe.comm.groups import Group
from megapipe.config.config import Config, resolve_model
from megapipe.config.rules.check import check
from megapipe.config.yaml_file import to_yaml
from megapipe.dtypes import TENSOR_DTYPES
from megapipe.errors import CheckpointError, MegapipeError
from megapipe.input_files import parse_json
from megapipe.sharding.boxes import Box
from megapipe.tokenizers.tokenizer import Fingerprint, build_tokenizer, tokenizer_fingerprint
from megapipe.trace.parameters import model_states

DTYPES = {dtype.name: getattr(torch, dtype.torch_name) for dtype in TENSOR_DTYPES.values()}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# keys of config.json without effect on the model: copied, not read
INERT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures attn_implementation auto_map
    bad_words_ids bos_token_id cache_implementation chunk_size_feed_forward cls_token_id decoder_start_token_id
    do_sample dtype eod_token_id early_stopping eos_token_id finetuning_task gradient_checkpointing id2label is_decoder
    is_encoder_decoder label2id length_penalty max_length min_length model_type num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_router_logits output_scores pad_token_id prefix
    pretraining_tp problem_type reorder_and_upcast_attn repetition_penalty return_dict return_dict_in_generate
    router_aux_loss_coef sep_token_id
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj task_specific_params
    temperature tokenizer_class top_k top_p torch_dtype torchscript transformers_version unk_token_id unsloth_fixed
    unsloth_version use_cache
    """.split()
)
INTERLEAVE = "rope_interleave"  # how rotary channels of weights are stored; kept, so that an export stores them alike
# tokenizer files -> (--tokenizer-type, the file for --tokenizer-model, '' for the folder)
TOKENIZERS = {
    ("tokenizer.json",): ("HuggingFaceTokenizer", ""),
    ("tokenizer.model",): ("Llama2Tokenizer", "tokenizer.model"),
    ("vocab.json", "merges.txt"): ("GPT2BPETokenizer", ""),
}


EXPERT_BIAS = ".router.expert_bias"  # the end of its name: a state of the model, always fp32


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read from disk when needed. read: returns it as [shape] on the CPU and keeps nothing.

    Has the few methods of a Tensor that megapipe's writers call; only `detach` reads.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_contiguous(self) -> bool:
        return True

    def detach(self) -> Tensor:
        values = self.read()
        if tuple(values.shape) != self.shape or values.dtype != self.dtype:
            raise ValueError(f"read {values.dtype} {list(values.shape)}, expected {self.dtype} {list(self.shape)}")
        return values.contiguous()

    def to(self, dtype: torch.dtype) -> LazyTensor:
        """Return the tensor in another dtype, still unread."""
        return self if dtype == self.dtype else LazyTensor(self.shape, dtype, lambda: self.read().to(dtype))

    def map(self, function: Callable[[Tensor], Tensor], shape: tuple[int, ...] | None = None) -> LazyTensor:
        """Return a function of the tensor, still unread. shape: of the result, by default unchanged."""
        return LazyTensor(self.shape if shape is None else shape, self.dtype, lambda: function(self.detach()))


@dataclass(frozen=True)
class Snapshot:
    """A run in megapipe's terms."""

    config: Config  # its model section has vocab_size
    # by `key/parameter`, without vocabulary padding: 'master/' always, optimizer state if there is any
    tensors: Mapping[str, LazyTensor]
    state: dict[str, Any]  # as in a manifest
    files: tuple[Path, ...] = ()  # tokenizer and other files to copy
    extra_settings: dict[str, Any] = field(default_factory=dict)  # of config.json, without effect on the model
    remarks: tuple[str, ...] = ()  # for the user

    @property
    def step(self) -> int:
        return int(self.state["training"]["step"])

    @property
    def weights(self) -> dict[str, LazyTensor]:
        """The weights by parameter name."""
        masters = ((name, tensor) for name, tensor in self.tensors.items() if name.startswith("master/"))
        return {name.removeprefix("master/"): tensor for name, tensor in masters}

    @property
    def tokenizer(self) -> tuple[str, str] | None:
        """The --tokenizer-type of the files, and the one for --tokenizer-model ('' for their folder); None without."""
        names = {path.name for path in self.files}
        return next((found for needed, found in TOKENIZERS.items() if names >= set(needed)), None)

    def cast(self, dtype: torch.dtype) -> Snapshot:
        """Return the snapshot with weights in another dtype; optimizer state and model states keep theirs."""
        states = {state.name for state in model_states(resolve_model(self.config.model, 1))}
        cast = {f"master/{name}": tensor.to(dtype) for name, tensor in self.weights.items() if name not in states}
        tensors = dict(self.tensors) | cast
        name = DTYPE_NAMES[dtype]
        config = dataclasses.replace(self.config, precision=dataclasses.replace(self.config.precision, dtype=name))
        return dataclasses.replace(self, tensors=tensors, config=config, state=self.state | {"precision": name})

    def with_seq_length(self, seq_length: int) -> Snapshot:
        """Set the sequence length to train with. Raises ConfigError if it exceeds the model's positions."""
        config = dataclasses.replace(self.config, model=dataclasses.replace(self.config.model, seq_length=seq_length))
        check(config)
        return dataclasses.replace(self, config=config)


def fresh_state(precision: str) -> dict[str, Any]:
    """Return the manifest state of weights at step 0."""
    return {
        "training": {"step": 0, "consumed_samples": 0, "consumed_tokens": 0, "skipped_steps": 0},
        "optimizer": None,
        "random": None,
        "schedules": None,
        "precision": precision,
        "grid": {"tp": 1, "cp": 1, "pp": 1, "dp": 1, "chunks": 1},
    }


# ------------------------------------------------------------------------------------- megapipe's checkpoints


def read_checkpoint(path: Path, step: int | None = None) -> Snapshot:
    """Read a checkpoint of any grid: of a step, or the newest complete one. Raises CheckpointError.

    path: a directory given to --save, or the folder of one step.
    """
    is_one_step = step is None and (path / MANIFEST_NAME).exists()
    return read_newest(lambda: open_folder(path) if is_one_step else find_checkpoint(path, step), partial(_read, path))


def _read(root: Path, folder: CheckpointFolder | None) -> Snapshot:
    if folder is None:
        raise CheckpointError(f"{root} holds no megapipe checkpoint")
    tensors = {}
    for name, saved in folder.manifest.tensors.items():
        key, parameter = name.split("/", 1)
        key = "master" if key == "weights" else key  # weights saved without masters are the best masters available
        reader = partial(_read_tensor, folder, name, saved)
        tensors[f"{key}/{parameter}"] = LazyTensor(saved.shape, SAVED_DTYPES[saved.dtype], reader)
    state = folder.manifest.state
    account = account_of(state, read_rollbacks(folder.path.parent))
    if account is not None:
        state = state | {"account": account}
    files, settings = tokenizer_files(folder.path)
    return Snapshot(saved_config(folder), tensors, state, files, settings, folder.remarks)


def _read_tensor(folder: CheckpointFolder, name: str, saved: SavedTensor) -> Tensor:
    values = torch.empty(saved.shape, dtype=SAVED_DTYPES[saved.dtype])
    box = TensorBox(name, saved.shape, Box((0,) * len(saved.shape), saved.shape), values.view(-1))
    load_tensors(folder, [box], Group.alone("world"))
    return values


def tokenizer_files(folder: Path) -> tuple[tuple[Path, ...], dict[str, Any]]:
    """Return the tokenizer files of a checkpoint and the inert settings of a config.json among them, if it is valid."""
    tokenizer = folder / TOKENIZER_NAME
    files = tuple(sorted(path for path in tokenizer.iterdir() if path.is_file())) if tokenizer.is_dir() else ()
    try:
        content = parse_json((tokenizer / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return files, {}
    return files, inert(content) if isinstance(content, dict) else {}


def inert(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a config.json that have no effect on our model section."""
    return {key: value for key, value in config.items() if key in INERT or key == INTERLEAVE}


def trained_with(snapshot: Snapshot) -> Fingerprint | None:
    """Return the fingerprint of the tokenizer among the files; None if there is none that can be read here."""
    if snapshot.tokenizer is None:
        return None
    kind, file = snapshot.tokenizer
    path = str(snapshot.files[0].parent / file)
    try:
        return tokenizer_fingerprint(build_tokenizer(kind, path), path)
    except MegapipeError:  # a package is missing, or the file is another library's
        return None


def write_checkpoint(snapshot: Snapshot, root: Path) -> SaveReport:
    """Write a checkpoint for `--load root` with any grid. Raises CheckpointError."""
    folder = root / folder_name(snapshot.step)
    if folder.exists():
        raise CheckpointError(f"{folder} already exists; converting never overwrites: choose another target")
    boxes = [
        TensorBox(name, tensor.shape, Box((0,) * len(tensor.shape), tensor.shape), cast(Tensor, tensor))
        for name, tensor in snapshot.tensors.items()
    ]
    fingerprint = trained_with(snapshot)
    known = {} if fingerprint is None and snapshot.tokenizer is not None else {"tokenizer": fingerprint}
    state = json.loads(json.dumps(known | snapshot.state))
    config = snapshot.config
    if snapshot.tokenizer is not None:
        kind, file = snapshot.tokenizer
        model = str(root.resolve() / folder.name / TOKENIZER_NAME / file)
        data = dataclasses.replace(config.data, tokenizer_type=kind, tokenizer_model=model)
        config = dataclasses.replace(config, data=data)
    tokenizer = {path.name: path.read_bytes() for path in snapshot.files}
    return save_checkpoint(root, snapshot.step, boxes, Extras(state, to_yaml(config), tokenizer), Group.alone("world"))


# -------------------------------------------------------------------------------- common to the other formats


def are_equal(one: LazyTensor, other: LazyTensor) -> bool:
    """Return True for tensors of the same shape, dtype and values."""
    is_alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return is_alike and torch.equal(one.detach(), other.detach())


def check_tied(where: Path, name: str, head: LazyTensor, embedding: LazyTensor) -> None:
    """Raise CheckpointError unless the head, stored as `name`, equals the embedding to which it is tied."""
    if not are_equal(head, embedding):
        raise CheckpointError(f"{where}: {name} differs from the word embedding, but the configuration ties them")


def check_nothing_left(where: Path, names: Sequence[str], model: str) -> None:
    """Raise CheckpointError if tensors of a checkpoint have no counterpart in the model. model: how to call it."""
    if names:
        raise CheckpointError(f"{where}: the tensor {first_of(names)} has no place in {model}")


def first_of(names: Sequence[str]) -> str:
    """Return the first name and how many follow."""
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def one_step(where: Path, steps: set[int]) -> int:
    """Return the number of updates. Raises CheckpointError if it is not the same for all parameters."""
    if len(steps) != 1:
        raise CheckpointError(f"{where}: the optimizer has made different numbers of updates: {sorted(steps)}")
    return steps.pop()


@contextmanager
def new_folder(folder: Path) -> Iterator[tuple[Disk, Path]]:
    """Create a folder atomically: yield a temporary one to write into, renamed at the end or removed on failure.

    Raises CheckpointError if `folder` exists or cannot be written.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} already exists; converting never overwrites: choose another target")
    disk, temporary = Disk(), folder.with_name(f".{folder.name}.tmp-{secrets.token_hex(4)}")
    try:
        disk.make_folder(temporary)
        try:
            yield disk, temporary
            disk.sync_folder(temporary)
            disk.rename(temporary, folder)
        except BaseException:
            with suppress(OSError):  # report the first failure
                disk.remove(temporary)
            raise
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {reason(error)}") from None
