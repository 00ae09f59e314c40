"""The documents on which a step was trained, and the steps that saw a document, by the flags of the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megapipe.assembly.datasets import dataset_request, tokenizer_of, with_vocabulary
from megapipe.checkpoint.folder import Rollback, find_checkpoint, folder_name, open_folder, read_rollbacks, steps_in
from megapipe.config.load import load_config
from megapipe.data.blend import BlendedDataset
from megapipe.data.build_datasets import build_datasets
from megapipe.data.dataset import SkippedSamples, TokenDataset
from megapipe.data.gpt_dataset import GPTDataset
from megapipe.data.indexed_file import IndexedFile
from megapipe.errors import CheckpointError, ConfigError
from megapipe.plan.batch import BatchSchedule
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan


@dataclass(frozen=True)
class SampleSlot:
    """The step that takes a sample, counted from 1, and the microbatch of a data-parallel rank in it."""

    step: int
    microbatch: int
    dp_rank: int


@dataclass(frozen=True)
class SampleOrder:
    """The samples that the steps of a run take, and the step that takes a sample.

    anchors: samples consumed after some steps, from the checkpoints of the run; between them the batch schedule gives
    the rest. A run that changed its batch size on the way is thus described correctly wherever it has saved.
    """

    batch: BatchSchedule
    micro_batch_size: int
    skipped: SkippedSamples = field(default_factory=SkippedSamples)
    anchors: tuple[tuple[int, int], ...] = ()

    def consumed_before(self, step: int) -> int:
        """Return the number of samples trained on before a step."""
        at, consumed = max((anchor for anchor in ((0, 0), *self.anchors) if anchor[0] < step), default=(0, 0))
        if consumed == self.batch.samples_after(at):
            return self.batch.samples_after(step - 1)
        for _ in range(at, step - 1):
            consumed += self.batch.size_at(consumed)
        return consumed

    def samples(self, step: int) -> dict[SampleSlot, range]:
        """Return the numbers of the samples of a step, by microbatch; `place` gives their places in the data set."""
        first, micro = self.consumed_before(step), self.micro_batch_size
        dp = self.batch.samples_per_microbatch // micro
        starts = range(first, first + self.batch.size_at(first), micro)
        return {
            SampleSlot(step, part // dp, part % dp): range(start, start + micro) for part, start in enumerate(starts)
        }

    def place(self, number: int) -> int:
        return self.skipped.index(number)

    def turn(self, place: int) -> SampleSlot | None:
        """Return the step and rank that take the sample at a place of the data set; None if it is skipped."""
        if any(first <= place < past for first, past in self.skipped.windows):
            return None
        number = place - sum(past - first for first, past in self.skipped.windows if past <= place)
        low, high = 1, 2
        while self.consumed_before(high + 1) <= number:
            low, high = high, 2 * high
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.consumed_before(middle + 1) > number else (middle + 1, high)
        part = (number - self.consumed_before(low)) // self.micro_batch_size
        dp = self.batch.samples_per_microbatch // self.micro_batch_size
        return SampleSlot(low, part // dp, part % dp)


@dataclass(frozen=True)
class Piece:
    """Tokens [first_token, past_token) of a document of a file, at `position` of a sample.

    sequence: the file's sequence that holds them; a document has one or more.
    """

    prefix: str
    document: int
    sequence: int
    first_token: int
    past_token: int
    position: int


def pieces_of(dataset: TokenDataset, index: int) -> tuple[Piece, ...]:
    """Return the pieces of a sample in order, seq_length + 1 tokens in all; none for synthetic data."""
    if isinstance(dataset, BlendedDataset):
        return pieces_of(dataset.members[int(dataset.dataset_index[index])], int(dataset.sample_index[index]))
    if not isinstance(dataset, GPTDataset):
        return ()
    found: list[Piece] = []
    file = dataset.file
    place, offset = dataset.index.locate(int(dataset.index.shuffle[index]))
    position = 0
    while position <= dataset.seq_length:
        sequence = int(dataset.index.documents[place])
        count = min(int(file.lengths[sequence]) - offset, dataset.seq_length + 1 - position)
        if count:
            document = int(np.searchsorted(file.documents, sequence, side="right")) - 1
            before = int(file.lengths[int(file.documents[document]) : sequence].sum(dtype=np.int64))
            start = before + offset
            found.append(Piece(file.prefix, document, sequence, start, start + count, position))
        position, place, offset = position + count, place + 1, 0
    return tuple(found)


def samples_of(dataset: TokenDataset, prefix: str, document: int) -> list[int]:
    """Return all samples that hold a token of the document, ascending."""
    if isinstance(dataset, BlendedDataset):
        found: list[int] = []
        for number, member in enumerate(dataset.members):
            inside = samples_of(member, prefix, document)
            if inside:
                own = np.flatnonzero(dataset.dataset_index == number)
                found += own[np.isin(dataset.sample_index[own], inside)].tolist()
        return sorted(found)
    if not isinstance(dataset, GPTDataset) or dataset.file.prefix != prefix:
        return []
    in_stream = np.array(sorted(set(stream_samples_of(dataset, document))), dtype=np.int64)
    return np.flatnonzero(np.isin(dataset.index.shuffle, in_stream)).tolist()


def stream_samples_of(dataset: GPTDataset, document: int) -> Iterator[int]:
    """Yield the stream samples that hold a token of the document.

    Sample k holds tokens k seq .. k seq + seq of the stream, one of them shared with the next sample.
    """
    file, seq = dataset.file, dataset.seq_length
    sequences = np.arange(file.documents[document], file.documents[document + 1])
    for place in np.flatnonzero(np.isin(dataset.index.documents, sequences)).tolist():
        first = dataset.index.position(place, seq, file.lengths)
        past = first + int(file.lengths[dataset.index.documents[place]])
        if past > first:
            yield from range(max(0, -(-(first - seq) // seq)), min((past - 1) // seq, len(dataset) - 1) + 1)


def files_of(dataset: TokenDataset) -> dict[str, IndexedFile]:
    """Return the token files of a dataset by prefix."""
    members = dataset.members if isinstance(dataset, BlendedDataset) else (dataset,)
    return {member.file.prefix: member.file for member in members if isinstance(member, GPTDataset)}


@dataclass(frozen=True)
class Run:
    """The data of a run, by its flags and checkpoints."""

    plan: RunPlan
    course: SampleOrder
    rollbacks: tuple[Rollback, ...]

    @cached_property
    def dataset(self) -> TokenDataset:
        found = build_datasets(dataset_request(self.plan)).train
        if found is None:
            raise ConfigError("these flags have no training data (--skip-train, or a split without training data)")
        samples = self.plan.config.training.train_samples
        assert samples is not None
        found.grow(self.course.place(samples - 1) + 1)
        return found


def read_run(flags: Sequence[str]) -> Run:
    loaded = load_config(["--plan", *flags])
    parallel = loaded.config.parallel
    ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    plan = resolve(with_vocabulary(loaded.config), loaded.requests.world_size or ranks, loaded.requests.ranks_per_node)
    if plan.config.data.dataloader_type != "single":
        raise ConfigError("--dataloader-type cyclic: only the samples of --dataloader-type single can be looked up")
    roots = [Path(root) for root in (plan.config.checkpoint.save, plan.config.checkpoint.load) if root is not None]
    root = next((root for root in roots if any(steps_in(root))), None)
    micro = plan.config.training.micro_batch_size
    if root is None:
        return Run(plan, SampleOrder(plan.batch, micro), ())
    newest, rollbacks = find_checkpoint(root), read_rollbacks(root)
    assert newest is not None
    state = newest.manifest.state
    account = state.get("account") or {"skipped_samples": [], "rollbacks": 0}
    if rollbacks and rollbacks[-1].number > account["rollbacks"]:
        account = rollbacks[-1].account
    return Run(
        plan,
        SampleOrder(plan.batch, micro, SkippedSamples.of(account["skipped_samples"]), tuple(anchors(root))),
        rollbacks,
    )


def anchors(root: Path) -> Iterator[tuple[int, int]]:
    """Return (step, consumed samples) of every complete checkpoint."""
    for step in steps_in(root):
        try:
            training = open_folder(root / folder_name(step)).manifest.state["training"]
        except CheckpointError:
            continue
        yield int(training["step"]), int(training["consumed_samples"])


def of_step(run: Run, step: int) -> dict[str, Any]:
    last = run.plan.config.training.train_iters
    if step < 1 or (last is not None and step > last):
        raise ConfigError(f"--step {step}: the steps of this run are 1 to {last}")
    parts = [
        {
            "microbatch": turn.microbatch,
            "dp_rank": turn.dp_rank,
            "samples": [sample(run, run.course.place(number)) for number in numbers],
        }
        for turn, numbers in run.course.samples(step).items()
    ]
    return {
        "step": step,
        "consumed_samples": run.course.consumed_before(step),
        "microbatches": parts,
        "given_up": given_up(run, step),
    }


def sample(run: Run, place: int) -> dict[str, Any]:
    if not 0 <= place < len(run.dataset):
        raise ConfigError(f"sample {place}: the training data has {len(run.dataset)}")
    return {"sample": place, "pieces": [asdict(piece) for piece in pieces_of(run.dataset, place)]}


def given_up(run: Run, step: int) -> list[int]:
    """Return the numbers of the rollbacks that abandoned this step, which had used other samples."""
    return [rollback.number for rollback in run.rollbacks if rollback.to_step < step <= rollback.from_step]


def of_sample(run: Run, place: int) -> dict[str, Any]:
    return sample(run, place) | taken(run, place)


def taken(run: Run, place: int) -> dict[str, Any]:
    """Return which step and rank take a sample, if it is skipped, or if it is behind the end of the run."""
    turn: SampleSlot | None = run.course.turn(place)
    last = run.plan.config.training.train_iters
    if turn is None:
        number = next((r.number for r in run.rollbacks if r.first_sample <= place < r.past_sample), None)
        return {"skipped": True, "rollback": number}
    return (
        {"skipped": False, "not_reached": True}
        if last is not None and turn.step > last
        else {"skipped": False, **asdict(turn)}
    )


def of_document(run: Run, document: int, prefix: str | None) -> dict[str, Any]:
    files = files_of(run.dataset)
    if prefix is None and len(files) > 1:
        raise ConfigError(
            f"--document {document} belongs to several files: give --in PREFIX, one of  {', '.join(files)}"
        )
    chosen = prefix if prefix is not None else next(iter(files), None)
    if chosen not in files:
        raise ConfigError(f"--in {chosen}: the training data comes from {', '.join(files) or 'no files (--mock-data)'}")
    if not 0 <= document < files[chosen].num_documents:
        raise ConfigError(f"--document {document}: {chosen} has {files[chosen].num_documents}")
    found = samples_of(run.dataset, chosen, document)
    return {
        "document": document,
        "prefix": chosen,
        "samples": [{"sample": place, **taken(run, place)} for place in found],
    }


def lines(found: dict[str, Any], show: Any) -> Iterator[str]:
    """Yield the lines for a person. show: returns a piece's tokens as text, or None."""
    if "microbatches" in found:
        yield f"step {found['step']}, after {found['consumed_samples']:,} samples"
        for number in found["given_up"]:
            yield f"  (rollback {number} abandoned an earlier step of this number, whose samples are skipped now)"
        for part in found["microbatches"]:
            yield f"microbatch {part['microbatch']} of dp rank {part['dp_rank']}"
            for one in part["samples"]:
                yield from sample_lines(one, show)
    elif "pieces" in found:
        yield from sample_lines(found, show)
        yield f"  {whose(found)}"
    else:
        yield f"document {found['document']} of {found['prefix']} is in {len(found['samples'])} samples"
        for one in found["samples"]:
            yield f"  sample {one['sample']}: {whose(one)}"


def sample_lines(one: dict[str, Any], show: Any) -> Iterator[str]:
    yield f"  sample {one['sample']}"
    for piece in one["pieces"]:
        span = f"tokens {piece['first_token']} to {piece['past_token'] - 1} at {piece['position']}"
        yield f"    {piece['prefix']} document {piece['document']}, {span}{'' if show is None else ': ' + show(piece)}"
    if not one["pieces"]:
        yield "    synthetic (--mock-data)"


def whose(one: dict[str, Any]) -> str:
    if one["skipped"]:
        return "skipped" if one["rollback"] is None else f"skipped by rollback {one['rollback']}"
    if "not_reached" in one:
        return "not used in this run"
    return f"step {one['step']}, microbatch {one['microbatch']} of dp rank {one['dp_rank']}"


def reader(run: Run, num_tokens: int) -> Any:
    """Return a function from a piece as JSON to its first tokens as text, or as numbers without a tokenizer."""
    files, tokenizer = files_of(run.dataset), tokenizer_of(run.plan.config, is_resolved=True)

    def text(piece: dict[str, Any]) -> str:
        found = Piece(**piece)
        file = files[found.prefix]
        start = found.first_token - int(file.lengths[file.documents[found.document] : found.sequence].sum())
        tokens = file.read(found.sequence, start, min(num_tokens, found.past_token - found.first_token)).tolist()
        return repr(tokenizer.decode(tokens)) if tokenizer is not None else " ".join(map(str, tokens))

    return text
