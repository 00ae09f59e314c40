"""`SavedModel`: the model of a checkpoint on a grid of ranks, and the tokens that it is scored on."""

from __future__ import annotations

import functools
import json
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megapipe.assembly.datasets import tokenizer_of
from megapipe.checkpoint.changes import check_tokenizer
from megapipe.checkpoint.folder import (
    LATEST_NAME,
    STEP_FOLDER,
    CheckpointFolder,
    find_checkpoint,
    open_folder,
    read_newest,
    saved_config,
    saved_tokenizer,
    step_of_folder,
    steps_in,
)
from megapipe.config.config import Config
from megapipe.config.files import DataConfig, is_hugging_face
from megapipe.config.model import PrecisionConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.training import TrainingConfig
from megapipe.data.indexed_file import IndexedFile, bin_path, idx_path, made_with
from megapipe.environment import Environment
from megapipe.errors import CheckpointError, ConfigError, DataError
from megapipe.extras.preprocess.text_source import TEXT_KEY, find_files, read_records
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.tokenizers.chat import ChatTokenizer
from megapipe.tokenizers.hugging_face import HuggingFaceTokenizer
from megapipe.tokenizers.tokenizer import Fingerprint, Tokenizer, described, is_same, tokenizer_fingerprint

if TYPE_CHECKING:
    from megapipe.assembly.runtime import InferenceRuntime
    from megapipe.comm.meeting import Fact, Facts


@dataclass(frozen=True)
class ModelRequest:
    """A saved model that is asked for, and how. None: as it was trained."""

    load: Path  # the folder of a run, of its checkpoints, or one of these
    step: int | None  # None: the newest
    dtype: str | None
    device: str  # one of DEVICES
    tokenizer_type: str | None
    tokenizer_model: str | None
    grid: Mapping[str, Any]  # fields of the section 'parallel'
    facts_on: Callable[[str], Facts]  # device -> what ranks compare besides the checkpoint and the tokenizer


@dataclass
class SavedModel:
    """The model of a checkpoint, planned on the ranks of this process. folder: of the checkpoint."""

    folder: Path
    plan: RunPlan
    tokenizer: Tokenizer | None
    environment: Environment
    request: ModelRequest
    trained_with: Fingerprint | None = None  # that tokenizer
    is_trained_on_text: bool = False  # the run trained it on text, not on conversations
    is_step_given: bool = False  # by the user, so that no other step may be read

    def required_tokenizer(self, instead: str = "") -> Tokenizer:
        """Return the tokenizer. instead: what could be given in place of one. Raises ConfigError without one."""
        if self.tokenizer is None:
            flags = f"--tokenizer-type and --tokenizer-model{instead}"
            raise ConfigError(f"{self.folder} was trained without a tokenizer: give {flags}")
        return self.tokenizer

    def chat_tokenizer(self) -> tuple[ChatTokenizer | None, str]:
        """Return the tokenizer with the chat template that the model was trained with, or None and the reason."""
        tokenizer = self.required_tokenizer()
        if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer.chat_template() is None:
            return None, "its tokenizer has no chat template"
        if self.is_trained_on_text:
            return None, "it was trained on text, not yet on conversations (--sft)"
        return ChatTokenizer(tokenizer), ""

    def runtime(self, data_facts: Callable[[], Facts] = dict) -> InferenceRuntime:
        """Join the other ranks, build the stages and load the weights.

        data_facts: returns what the command has read, compared in place of its options of the same names. Raises
        DisagreementError on all ranks if options, data, checkpoint, tokenizer or versions differ.
        """
        from megapipe.assembly.runtime import InferenceRuntime
        from megapipe.comm.bootstrap import start
        from megapipe.comm.groups import build_process_groups
        from megapipe.train.state import on_rank_0

        device = self.plan.config.training.device
        world = start(self.environment, device=device, facts_of=lambda _: {**self.facts(), **data_facts()})
        groups = build_process_groups(self.plan.topology, world.global_rank, world.backend, world.timeout_seconds)
        runtime = InferenceRuntime(self.plan, groups, world.device)
        read_newest(lambda: on_rank_0(self._found, groups.world), functools.partial(load_weights, runtime))
        return runtime

    def facts(self) -> Facts:
        """Return what the ranks compare before they load: options, checkpoint, tokenizer, versions and device."""
        from megapipe.comm.meeting import Fact
        from megapipe.train.facts import checkpoint_fact

        facts = dict(self.request.facts_on(self.plan.config.training.device))
        facts["--load" if "--load" in facts else "load"] = checkpoint_fact(self.folder)
        if self.tokenizer is not None:
            used = tokenizer_fingerprint(self.tokenizer, self.plan.config.data.tokenizer_model)
            facts["tokenizer"] = Fact(described(used), json.dumps(used | {"source": None}, sort_keys=True))
        return facts

    def _found(self) -> CheckpointFolder:
        """Open the checkpoint, or the newest one if that was removed by a run that saves and prunes there."""
        try:
            return open_folder(self.folder)
        except CheckpointError:
            if self.is_step_given or self.folder.exists():
                raise
        newer = find_checkpoint(self.folder.parent)
        if newer is None:
            raise CheckpointError(f"{self.folder} was removed, and {self.folder.parent} holds no other checkpoint")
        print(f"{self.folder} was removed meanwhile; {newer.path.name} is read instead", file=sys.stderr)
        self.folder = newer.path
        return newer

    def tell_copies(self) -> None:
        """Say on rank 0 if there are more ranks than the model needs."""
        ranks = self.plan.topology
        num_copies = min(ranks.dp, ranks.edp) if self.plan.model.has_experts else ranks.dp
        if num_copies > 1 and self.environment.global_rank == 0:
            copies = f"{ranks.world_size} ranks hold {num_copies} copies of the model, which write the same text"
            remark = f"{copies}: {ranks.world_size // num_copies} generate as fast"
            print(remark, file=sys.stderr)


def load_weights(runtime: InferenceRuntime, folder: CheckpointFolder) -> int:
    """Fill the parameters from a checkpoint of any grid, and return the bytes filled on this rank. A collective.

    Takes the master weights where the checkpoint holds them, rounded as the optimizer rounds them. Vocabulary
    padding becomes zero. Raises CheckpointError on all ranks.
    """
    from megapipe.checkpoint.load import load_tensors

    key = "master" if folder.manifest.holds("master") else "weights"
    for stage_buffers in runtime.buffers.values():
        for buffer in stage_buffers.buffers:
            for kept in buffer.kept_parameters:
                kept.zero_()
    return load_tensors(folder, (box for _, box in runtime.held_weights(key)), runtime.groups.world, may_round=True)


def located(run: Path, step: int | None) -> tuple[Path, int | None]:
    """Return the folder of checkpoints and the step of a run's folder, its `checkpoints`, or one of the checkpoints."""
    if STEP_FOLDER.fullmatch(run.name) and step is None:
        return run.parent, step_of_folder(run)
    return (run / "checkpoints" if (run / "checkpoints").is_dir() else run), step


def newest_below(run: Path) -> Path:
    """Return the folder itself, or if it has no checkpoint that of those below it which was saved to last."""
    if STEP_FOLDER.fullmatch(run.name) or steps_in(located(run, None)[0]):
        return run
    below = [path for depth in ("*", "*/*", "*/*/*") for path in run.glob(f"{depth}/{LATEST_NAME}")]
    return max(below, key=lambda path: path.stat().st_mtime).parent if below else run


def open_model(
    request: ModelRequest,
    environment: Environment,
    micro_batch_size: int,
    seq_length: int | None = None,
    takes_newest: bool = False,
) -> SavedModel:
    """Plan a saved model on these ranks. Raises ConfigError, CheckpointError, DataError.

    seq_length: instead of the one that it was trained with. takes_newest: a folder of runs may be asked for.
    """
    run = newest_below(request.load) if takes_newest else request.load
    root, step = located(run, request.step)
    planned = functools.partial(_planned, request, environment, micro_batch_size, seq_length, step is not None)
    return read_newest(lambda: find_checkpoint(root, step), planned)


def _planned(
    request: ModelRequest,
    environment: Environment,
    micro_batch_size: int,
    seq_length: int | None,
    is_step_given: bool,
    found: CheckpointFolder | None,
) -> SavedModel:
    if found is None:
        load = request.load
        what = "holds no checkpoint" if load.exists() else "does not exist"
        if is_hugging_face(str(load)):
            raise CheckpointError(f"{load} is a Hugging Face folder; first megapipe convert {load} NEW_FOLDER")
        raise CheckpointError(f"{load} {what}; give the folder that --save wrote checkpoints to")
    saved = saved_config(found)
    model = saved.model
    if seq_length is not None:
        positions = model.max_position_embeddings or model.seq_length
        if not 1 <= seq_length <= positions:
            raise ConfigError(f"--seq-length {seq_length} must be in 1 .. {positions}, the trained model's positions")
        model = replace(model, seq_length=seq_length, max_position_embeddings=positions)
    parallel = ParallelConfig(**request.grid)
    sequence_parallel = parallel.tensor_model_parallel_size > 1 and model.num_experts is not None
    config = Config(
        model=model,
        parallel=replace(parallel, sequence_parallel=sequence_parallel),
        training=TrainingConfig(micro_batch_size=micro_batch_size, train_iters=1, device=request.device),
        precision=PrecisionConfig(dtype=request.dtype or saved.precision.dtype),
        data=_tokenizer_files(request, saved.data, found.path),
    )
    tokenizer = tokenizer_of(config, is_resolved=True)
    if tokenizer is not None and tokenizer.vocab_size > (model.vocab_size or 0):
        raise ConfigError(
            f"--tokenizer-type {tokenizer.name} has {tokenizer.vocab_size} tokens, the model {found.path} only "
            f"{model.vocab_size}; give the tokenizer that it was trained with"
        )
    trained_with = found.manifest.state.get("tokenizer")
    if tokenizer is not None and trained_with is not None:
        given = tokenizer_fingerprint(tokenizer, request.tokenizer_model)
        check_tokenizer(found.manifest.state, given, str(found.path), is_finetuning=True)
    plan = resolve(config, environment.world_size, environment.local_world_size)
    on_text = not saved.data.sft and (saved.data.data_path or saved.data.train_data_path) is not None
    return SavedModel(found.path, plan, tokenizer, environment, request, trained_with, on_text, is_step_given)


def _tokenizer_files(request: ModelRequest, saved: DataConfig, folder: Path) -> DataConfig:
    """Return the tokenizer's files: from the flags, else the copy in the checkpoint, else those of the training run."""
    if request.tokenizer_type is not None:
        return DataConfig(tokenizer_type=request.tokenizer_type, tokenizer_model=request.tokenizer_model)
    found = saved_tokenizer(folder, saved)
    if request.tokenizer_model is not None:
        found = {"tokenizer_type": saved.tokenizer_type, "tokenizer_model": request.tokenizer_model}
    return DataConfig(**found)


def data_fact(paths: Sequence[str], tokens: Any) -> Fact:
    """Return the tokens that are scored, whole, whatever files they come from."""
    from megapipe.comm.meeting import Fact

    content = f"{len(tokens):,} tokens, checksum {zlib.crc32(np.ascontiguousarray(tokens).data):08x}"
    return Fact(f"{' '.join(paths)} ({content})", content)


def tokens_of(model: SavedModel, paths: Sequence[str]) -> tuple[Any, int | None]:
    """Return (one stream of tokens, bytes of the text or None for token files)."""
    if any(idx_path(path).is_file() for path in paths):
        for path, found in ((path, made_with(path)) for path in paths):
            if found is not None and model.trained_with is not None and not is_same(found, model.trained_with):
                both = f"{described(found)}; the model was trained with {described(model.trained_with)}"
                raise DataError(f"--data {path} was made with another tokenizer: {both}")
        tokens = np.concatenate([_stream(IndexedFile(path)) for path in paths])
        vocab_size = model.plan.config.model.vocab_size
        if len(tokens) and int(tokens.max()) >= vocab_size:
            raise DataError(
                f"--data holds token {tokens.max()}, the model's vocabulary has {vocab_size}: the file was made with "
                "another tokenizer"
            )
        return tokens, None
    tokenizer = model.required_tokenizer(", or a token file")
    ids: list[int] = []
    num_bytes = 0
    for record in read_records(find_files(paths)):
        for text in record.texts([TEXT_KEY]):
            num_bytes += len(text.encode())
            ids += tokenizer.encode(text)
            if tokenizer.eod is not None:
                ids.append(tokenizer.eod)
    return np.array(ids, dtype=np.int64), num_bytes


def _stream(file: IndexedFile) -> Any:
    if file.is_contiguous():
        return np.memmap(bin_path(file.prefix), file.dtype, "r", shape=(file.num_tokens,))
    return np.concatenate([file.read(number) for number in range(len(file))])
