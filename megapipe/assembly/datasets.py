"""The data sets of a run with their loaders; the length of the run gives the number of samples of each split. And the
plan of a run whose vocabulary is that of its tokenizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megapipe.config.config import Config
from megapipe.config.files import DataConfig, parse_blend
from megapipe.config.flags import normalised
from megapipe.config.load import LoadedConfig
from megapipe.config.options import number_in
from megapipe.config.rules.training import TOKENIZER_FILES
from megapipe.data.batch import DocumentRules, padding_remarks
from megapipe.data.build_datasets import DatasetRequest, build_datasets
from megapipe.data.chat_dataset import build_chat_datasets
from megapipe.data.cyclic_order import CyclicOrder
from megapipe.data.dataset import Array
from megapipe.data.fingerprint import files_in_use
from megapipe.data.indexed_file import made_with, tokenizer_path
from megapipe.data.loader import Loader
from megapipe.errors import ConfigError, DataError
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.tokenizers.chat import chat_tokenizer
from megapipe.tokenizers.tokenizer import (
    Fingerprint,
    Tokenizer,
    build_tokenizer,
    described,
    is_same,
    tokenizer_fingerprint,
)

DATA_FILES = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


@dataclass(frozen=True)
class RunData:
    """The loaders of a run by split, None for a split that it does not use."""

    train: Loader | None
    valid: Loader | None
    test: Loader | None
    tokenizer: Tokenizer | None
    remarks: tuple[str, ...] = ()  # on the data, for the log
    made_with: Fingerprint | None = None  # the fingerprint of the tokenizer
    files: tuple[Path, ...] = ()  # that the loaders read

    def close(self) -> None:
        for loader in (self.train, self.valid, self.test):
            if loader is not None:
                loader.close()


def tokenizer_of(config: Config, *, is_resolved: bool = False) -> Tokenizer | None:
    """Build the tokenizer that the data section names, or return None.

    is_resolved: model.vocab_size already includes the token that NullTokenizer adds.
    Raises ConfigError, DataError.
    """
    data, vocab_size = config.data, config.model.vocab_size
    if data.tokenizer_type is None:
        return None
    if data.tokenizer_type == "NullTokenizer" and is_resolved and vocab_size is not None:
        vocab_size -= 1
    return build_tokenizer(
        data.tokenizer_type,
        data.tokenizer_model,
        vocab_size=vocab_size,
        vocab_file=data.vocab_file,
        merge_file=data.merge_file,
    )


def missing_files(
    data: DataConfig, names: Sequence[str] = (*TOKENIZER_FILES, *DATA_FILES)
) -> Iterator[tuple[str, str]]:
    """Yield (flag, path) of the tokenizer and token files that do not exist. names: of the fields."""
    for name in names:
        value = getattr(data, name)
        paths = (
            [value] if isinstance(value, str) else [f"{path}.bin" for path in value or () if number_in(path) is None]
        )
        yield from ((f"--{normalised(name)}", path) for path in paths if not Path(path).exists())


def unread_remarks(data: DataConfig) -> tuple[str, ...]:
    """Return a remark for a plan on the tokenizer's files that do not exist: its vocabulary is not compared."""
    files = ", ".join(f"{flag} {path}" for flag, path in missing_files(data, TOKENIZER_FILES))
    return (f"not read: {files} (no such file here), so --vocab-size is taken as given",) if files else ()


def with_vocabulary(config: Config, needs_files: bool = False) -> Config:
    """Fill in the tokenizer's vocabulary size if it is not given. Raises ConfigError if the given size is too small.

    needs_files: False accepts a given size without a tokenizer whose files do not exist.
    """
    given = config.model.vocab_size
    if given is not None and not needs_files and any(missing_files(config.data, TOKENIZER_FILES)):
        return config
    tokenizer = tokenizer_of(config)
    if tokenizer is None:
        return config
    if config.data.tokenizer_type == "NullTokenizer":  # it is built from --vocab-size, and has one more token
        given = None
    if given is not None and given < tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {given} is smaller than the {tokenizer.vocab_size} tokens of the tokenizer "
            f"{config.data.tokenizer_model}; leave it out"
        )
    model = dataclasses.replace(config.model, vocab_size=given or tokenizer.vocab_size)
    return dataclasses.replace(config, model=model)


def planned(loaded: LoadedConfig, num_ranks: int, ranks_per_node: int | None) -> RunPlan:
    """Resolve a loaded configuration on that many ranks. Raises ConfigError.

    The tokenizer's files have to exist for a job: it needs them later.
    """
    config = with_vocabulary(loaded.config, needs_files=not loaded.requests.only_plans)
    return resolve(config, num_ranks, ranks_per_node)


def check_made_with(data: DataConfig, own: Fingerprint) -> tuple[str, ...]:
    """Return a remark on token files that do not say with which tokenizer they were made.

    Raises DataError for those that were made with another one than the run's.
    """
    blends = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    unknown = []
    for prefix in dict.fromkeys(name for words in blends if words for name in parse_blend(words, "")[0]):
        found = made_with(prefix)
        if found is None:
            unknown.append(prefix)
        elif not is_same(found, own):
            raise DataError(
                f"{prefix} was made with another tokenizer than this run has: {described(found)}, here "
                f"{described(own)}; give that tokenizer, or preprocess the text again ({tokenizer_path(prefix)} "
                "names it)"
            )
    others = f" and {len(unknown) - 1} others" if len(unknown) > 1 else ""
    rule = "no tokenizer is noted beside these token files, so it was not compared with the run's"
    return (f"{unknown[0]}{others}: {rule}",) if unknown else ()


def dataset_request(plan: RunPlan) -> DatasetRequest:
    """Return the data sets that the run needs, with the samples of the whole run by Megatron's rule.

    The run evaluates every eval_interval steps, and once at the end.
    """
    data, model, training = plan.config.data, plan.config.model, plan.config.training
    train = 0 if training.skip_train else training.train_samples
    evaluation = training.eval_iters * training.global_batch_size
    evaluations = training.train_iters // training.eval_interval + 1 if training.eval_interval else 1
    num_samples = (train, evaluations * evaluation, evaluation)
    return DatasetRequest(data, model.seq_length, training.seed, num_samples, model.vocab_size)


@lru_cache(maxsize=4)  # two epochs of training, and one of validation and of test
def permutation(size: int, seed: int) -> Array:
    """Return a permutation of 0 .. size - 1, the same as torch draws for Megatron-LM."""
    import torch  # here, since tools read data sets without it

    drawn: Array = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).numpy()
    return drawn


def build_data(plan: RunPlan) -> RunData:
    """Open the files, build the indices and start the loaders. Raises ConfigError, DataError."""
    data = plan.config.data
    tokenizer = tokenizer_of(plan.config, is_resolved=True)
    own = None if tokenizer is None else tokenizer_fingerprint(tokenizer, data.tokenizer_model or data.vocab_file)
    remarks: tuple[str, ...] = ()
    if data.sft:
        chats = tokenizer = chat_tokenizer(tokenizer, data.sft_tokenizer_prompt_format)
        datasets, remarks = build_chat_datasets(dataset_request(plan), chats)
        rules = DocumentRules()
    else:
        datasets = build_datasets(dataset_request(plan))
        compared = () if own is None or data.dataset is not None else check_made_with(data, own)
        rules = DocumentRules(
            None if tokenizer is None else tokenizer.eod,
            data.reset_position_ids,
            data.reset_attention_mask,
            data.eod_mask_loss,
        )
        if tokenizer is not None and datasets.train is not None and not data.mock_data:
            remarks = padding_remarks(datasets.train, tokenizer.pad, (tokenizer.eod, tokenizer.bos))
        remarks = (*compared, *remarks)
    order = CyclicOrder(data.data_sharding, permutation) if data.dataloader_type == "cyclic" else None
    train, valid, test = (
        None if dataset is None else Loader(dataset, rules, num_workers=data.num_workers, name=name, order=order)
        for name, dataset in (("train", datasets.train), ("validation", datasets.valid), ("test", datasets.test))
    )
    files = files_in_use((datasets.train, datasets.valid, datasets.test))
    return RunData(train, valid, test, tokenizer, remarks, own, files)
