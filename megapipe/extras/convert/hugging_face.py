"""Hugging Face folders: config.json, one or more safetensors files with an index, tokenizer files; `--load` of one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megapipe.assembly.datasets import tokenizer_of
from megapipe.checkpoint.changes import check_tokenizer
from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.manifest import is_inside
from megapipe.checkpoint.shard import BLOCK_BYTES, byte_blocks, safetensors_header
from megapipe.checkpoint.shard import DTYPES as SAFETENSORS_DTYPES
from megapipe.config.config import Config
from megapipe.config.load import LoadedConfig, with_checkpoint_model, with_tokenizer
from megapipe.config.model import ModelConfig, PrecisionConfig
from megapipe.config.rules.check import Rule
from megapipe.errors import CheckpointError, ConfigError
from megapipe.extras.convert.experts import PREDICTED, QUANTIZATION
from megapipe.extras.convert.families import choose_family, family_of, text_family_of
from megapipe.extras.convert.snapshot import (
    DTYPE_NAMES,
    INERT,
    INTERLEAVE,
    LazyTensor,
    Snapshot,
    are_equal,
    check_nothing_left,
    check_tied,
    first_of,
    fresh_state,
    inert,
    new_folder,
    trained_with,
)
from megapipe.extras.convert.special_tokens import exported_files, json_bytes
from megapipe.extras.convert.tables import MappedTensor, check_kinds, map_tensors, unpadded
from megapipe.input_files import MOST_BYTES, parse_json, regular
from megapipe.layers.ends import WORD_EMBEDDING
from megapipe.tokenizers.tokenizer import tokenizer_fingerprint
from megapipe.trace.parameters import model_states
from megapipe.train.loading import Weights

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
HEAD = "lm_head.weight"
SCALES = "_scale_inv"  # after the name of a weight in 8 bits
# files other than weights that are copied
COMPANIONS = tuple(
    """
    tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json
    merges.txt chat_template.json chat_template.jinja generation_config.json config.json
    """.split()
)


def read(folder: Path, ignored: frozenset[str] = frozenset(), text_only: bool = False) -> Snapshot:
    """Read a folder. ignored: unknown keys of config.json that the user declares to be without effect. text_only: leave
    out all but the text model of a model with images, sound or video.

    Raises ConfigError naming the key, CheckpointError naming the tensor or file, that cannot be converted.
    """
    config = _json(folder / CONFIG)
    try:
        check_kinds(config)
        config = text_settings(config) if text_only else config
        family = text_family_of(config) if text_only else family_of(config)
        model = family.read(config, ignored)
    except ConfigError as error:
        raise ConfigError(f"{folder / CONFIG}: {error}{_text_hint(config)}") from None
    found, remarks = dequantized(folder, stored_tensors(folder), config.get(QUANTIZATION)), tuple[str, ...]()
    if text_only:
        found, remarks = text_tensors(found)
    if not any(name.startswith(family.prefix) for name in found):  # the base model was saved without its head
        whole = map_tensors(family.rows, unpadded(model), family.architecture)
        known = {HEAD, *(name for entry in whole for name in entry.theirs)}
        found = {name if name in known else family.prefix + name: tensor for name, tensor in found.items()}
    # of modules after the last layer of the model
    modules = tuple(f"model.layers.{model.num_layers + number}." for number in range(model.mtp_num_layers or 0))
    further = {name for name in found if name.startswith(modules)} if modules else set()
    left_out = further if PREDICTED in ignored else set()
    if PREDICTED in ignored or not further:  # transformers stores no such module, but keeps their number
        model = replace(model, mtp_num_layers=None)
    mapped = map_tensors(family.rows, unpadded(model), family.architecture)
    wanted = {name for entry in mapped for name in entry.theirs}
    is_tied = not model.untie_embeddings_and_output_weights
    missing = sorted(wanted - found.keys())
    if missing:
        raise CheckpointError(f"{folder} lacks the tensor {first_of(missing)}, which its {CONFIG} requires")
    for entry in mapped:  # some tensors may be stored transposed
        for name, shape in zip(entry.theirs, entry.layout.shapes(entry.spec.shape), strict=True):
            if name.endswith(family.either_way) and found[name].shape == (*shape[:-2], *shape[:-3:-1]) != shape:
                found[name] = found[name].map(lambda tensor: tensor.transpose(-2, -1), shape)
    extra = found.keys() - wanted - left_out - copies(model).keys() - ({HEAD} if is_tied else set())
    left = sorted(name for name in extra if not name.endswith(family.buffers))
    check_nothing_left(folder, left, f"{family.architecture} as {CONFIG} describes it")
    tensors = {f"master/{entry.spec.name}": _join(folder, entry, found) for entry in mapped}
    for state in model_states(unpadded(model)):
        tensors[f"master/{state.name}"] = tensors[f"master/{state.name}"].to(torch.float32)
    embedding = tensors[f"master/{WORD_EMBEDDING}"]
    if is_tied and HEAD in found:
        check_tied(folder, HEAD, found[HEAD], embedding)
    for name, original in copies(model).items():
        if name in found and not are_equal(found[name], tensors[f"master/{original}"]):
            raise CheckpointError(
                f"{folder}: {name} differs from the model's own, {original}, which multi-token prediction shares "
                f"here; to leave the modules out give --ignore-key {PREDICTED}"
            )
    precision = DTYPE_NAMES[embedding.dtype]
    settings = {key: value for key, value in config.items() if key in INERT | ignored | {INTERLEAVE}}
    ours = Config(model=model, precision=PrecisionConfig(dtype=precision))
    return Snapshot(ours, tensors, fresh_state(precision), _companions(folder), settings, remarks)


TEXT, TIED = "text_config", "tie_word_embeddings"
TEXT_PREFIXES = ("model.language_model.", "language_model.model.")  # of a text model's tensors, here model.


def text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the text model of a model with several parts. Raises ConfigError if it has one part."""
    text = config.get(TEXT)
    if not isinstance(text, Mapping):
        raise ConfigError(f"it has no {TEXT}: the model is a text model; leave --text-only out")
    outer = {name: value for name, value in config.items() if name in INERT or name == TIED}  # tied as the whole is
    settings = {**text, **outer, "model_type": text.get("model_type")}
    return {name: value for name, value in settings.items() if name != "architectures"}


def text_tensors(found: Mapping[str, LazyTensor]) -> tuple[dict[str, LazyTensor], tuple[str, ...]]:
    """Return the tensors of the text model by the names that it has alone, and what is left out, for the user."""
    kept: dict[str, LazyTensor] = {}
    others: dict[str, list[LazyTensor]] = {}
    for name, tensor in found.items():
        prefix = next((prefix for prefix in TEXT_PREFIXES if name.startswith(prefix)), None)
        if prefix is not None:
            kept["model." + name.removeprefix(prefix)] = tensor
        elif name.removeprefix("language_model.") == HEAD:
            kept[HEAD] = tensor
        else:
            others.setdefault(".".join(name.split(".")[:3]), []).append(tensor)
    sizes = {name: sum(tensor.numel() for tensor in tensors) for name, tensors in sorted(others.items())}
    return kept, tuple(
        f"left out (--text-only): {name}, {size:,} parameters in {len(others[name])} tensors"
        for name, size in sizes.items()
    )


def _text_hint(config: Mapping[str, Any]) -> str:
    """Return how to convert a part of a model that is refused as a whole."""
    text = config.get(TEXT)
    try:
        known = isinstance(text, Mapping) and text_family_of(text) is not None
    except ConfigError:
        return ""
    return "; --text-only converts its text model" if known else ""


def copies(model: ModelConfig) -> dict[str, str]:
    """Return the names of the modules' copies of embedding and output layer, with ours of what they copy."""
    head = "output_layer.weight" if model.untie_embeddings_and_output_weights else WORD_EMBEDDING
    found: dict[str, str] = {}
    for number in range(model.mtp_num_layers or 0):
        module = f"model.layers.{model.num_layers + number}"
        found |= {f"{module}.embed_tokens.weight": WORD_EMBEDDING, f"{module}.shared_head.head.weight": head}
    return found


def dequantized(folder: Path, found: Mapping[str, LazyTensor], quantization: Any) -> dict[str, LazyTensor]:
    """Return the tensors with weights in fp8 as bf16, unread: the products with the scales of their blocks.

    quantization: of config.json: weights [out, in] in e4m3 with a tensor NAME_scale_inv, one scale for each block of
    weight_block_size. Raises ConfigError for another kind of quantization, CheckpointError for scales that do not fit.
    """
    if not quantization:
        return dict(found)
    kind, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if kind != "fp8" or not block or len(block) != 2 or min(block) < 1:
        raise ConfigError(
            f"{folder / CONFIG}: {QUANTIZATION} {kind} cannot be read; it can be fp8 with weight_block_size [M, N], or "
            "convert unquantized weights"
        )
    tensors = {name: tensor for name, tensor in found.items() if not name.endswith(SCALES)}
    for name in found.keys() - tensors.keys():
        weight, scales = found.get(name.removesuffix(SCALES)), found[name]
        sizes = () if weight is None else weight.shape
        blocks = tuple(-(-size // one) for size, one in zip(sizes, block, strict=False))
        if weight is None or blocks != scales.shape:
            of = "no weight" if weight is None else f"a weight {list(weight.shape)} in blocks of {block}"
            raise CheckpointError(f"{folder}: {name} has shape {list(scales.shape)}, for {of}")
        reader = partial(_product, weight, scales, tuple(block))
        tensors[name.removesuffix(SCALES)] = LazyTensor(weight.shape, torch.bfloat16, reader)
    return tensors


def _product(weight: LazyTensor, scales: LazyTensor, block: tuple[int, int]) -> Tensor:
    """Return a weight times the scales of its blocks, in bf16."""
    rows, columns = weight.shape
    factors = scales.detach().float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (weight.read().float() * factors).to(torch.bfloat16)


def _join(folder: Path, entry: MappedTensor, found: Mapping[str, LazyTensor]) -> LazyTensor:
    """Return one of our tensors, unread, from their parts."""
    parts = [found[name] for name in entry.theirs]
    for name, part, shape in zip(entry.theirs, parts, entry.layout.shapes(entry.spec.shape), strict=True):
        if part.shape != shape:
            raise CheckpointError(f"{folder}: {name} has shape {list(part.shape)}, {CONFIG} requires {list(shape)}")
        if part.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{folder}: {name} is quantized or of an integer dtype; convert unquantized weights")
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1:
        names = ", ".join(entry.theirs)
        raise CheckpointError(f"{folder}: {names} become one tensor, {entry.spec.name}, but have several dtypes")
    return LazyTensor(entry.spec.shape, dtypes.pop(), lambda: entry.layout.join([part.detach() for part in parts]))


def with_settings_of(snapshot: Snapshot, folder: Path) -> Snapshot:
    """Return the snapshot with tokenizer files and inert settings of another Hugging Face folder."""
    data = replace(snapshot.config.data, tokenizer_type=None, tokenizer_model=None, vocab_file=None, merge_file=None)
    config = replace(snapshot.config, data=data)
    return replace(snapshot, config=config, files=_companions(folder), extra_settings=inert(_json(folder / CONFIG)))


def _companions(folder: Path) -> tuple[Path, ...]:
    return tuple(folder / name for name in COMPANIONS if (folder / name).is_file())


def _json(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(regular(path, MOST_BYTES).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file, so this is not a Hugging Face folder") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content


def stored_tensors(folder: Path) -> dict[str, LazyTensor]:
    """Return the tensors of all weight files, unread. Raises CheckpointError naming the file."""
    if (folder / INDEX).is_file():
        index = _json(folder / INDEX).get("weight_map", {})
        if not isinstance(index, dict) or not all(isinstance(name, str) and is_inside(name) for name in index.values()):
            raise CheckpointError(f"{folder / INDEX}: weight_map must give each tensor a file inside the folder")
        files = {name: read_tensors(folder / name) for name in sorted(set(index.values()))}
        for tensor, name in index.items():
            if tensor not in files[name]:
                raise CheckpointError(f"{folder / name} lacks the tensor {tensor}, which {INDEX} places there")
        return {tensor: files[name][tensor] for tensor, name in index.items()}
    if (folder / SINGLE).is_file():
        return read_tensors(folder / SINGLE)
    other = next((path.name for path in sorted(folder.glob("*.bin"))), None)
    hint = f"; {other} is pickled: save it as safetensors with transformers (save_pretrained)" if other else ""
    raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}{hint}")


def read_tensors(path: Path) -> dict[str, LazyTensor]:
    """Return all tensors of a safetensors file, unread. Raises CheckpointError naming the file."""
    found: dict[str, LazyTensor] = {}
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                part = file.get_slice(name)
                # a dtype that weights cannot have becomes uint8, which `_join` and `check_tied` reject
                dtype = SAFETENSORS_DTYPES.get(part.get_dtype(), torch.uint8)
                found[name] = LazyTensor(tuple(part.get_shape()), dtype, partial(_read_tensor, path, name))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a safetensors file, or damaged: {error}") from None
    return found


def _read_tensor(path: Path, name: str) -> Tensor:
    try:
        with safe_open(path, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}") from None


def write(snapshot: Snapshot, folder: Path, architecture: str | None = None, max_bytes: int = 5 * 10**9) -> str:
    """Write a new folder atomically and return the architecture. max_bytes: of one weight file.

    Raises ConfigError naming what no architecture can express, CheckpointError.
    """
    original = snapshot.extra_settings.get("architectures") or [None]
    family, config = choose_family(snapshot.config.model, architecture, original[0])
    if family.halves is not None and snapshot.extra_settings.get(INTERLEAVE) is False:  # as it was read
        family = family.halves
        config = family.write(snapshot.config.model)
    weights = snapshot.weights
    copied = {key: value for key, value in snapshot.extra_settings.items() if key not in config}
    dtype_key = "dtype" if "dtype" in copied else "torch_dtype"
    copied = {key: value for key, value in copied.items() if key not in ("dtype", "torch_dtype")}
    dtype = str(weights[WORD_EMBEDDING].dtype).removeprefix("torch.")
    special, files = exported_files(snapshot)
    config = copied | config | special | {dtype_key: dtype}

    @lru_cache(maxsize=1)  # the parts of a tensor are written one after the other
    def parts(entry: MappedTensor) -> tuple[Tensor, ...]:
        return entry.layout.split(weights[entry.spec.name].detach())

    def part(entry: MappedTensor, index: int) -> Tensor:
        return parts(entry)[index]

    written: dict[str, LazyTensor] = {}  # in order
    for entry in map_tensors(family.rows, unpadded(snapshot.config.model), family.architecture):
        for index, (name, shape) in enumerate(zip(entry.theirs, entry.layout.shapes(entry.spec.shape), strict=True)):
            written[name] = LazyTensor(shape, weights[entry.spec.name].dtype, partial(part, entry, index))
    written |= {name: weights[ours] for name, ours in copies(snapshot.config.model).items()}
    groups: list[dict[str, LazyTensor]] = [{}]  # each file below max_bytes, a larger tensor alone
    size = total = 0
    for name, tensor in written.items():
        num_bytes = tensor.numel() * tensor.dtype.itemsize
        if groups[-1] and size + num_bytes > max_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += num_bytes
        total += num_bytes
    count = len(groups)  # file names as transformers chooses them
    names = [SINGLE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    with new_folder(folder) as (disk, temporary):
        for name, group in zip(names, groups, strict=True):
            write_tensors(disk, temporary / name, group)
        if count > 1:
            weight_map = {tensor: name for name, group in zip(names, groups, strict=True) for tensor in group}
            disk.write_file(
                temporary / INDEX, json_bytes({"metadata": {"total_size": total}, "weight_map": weight_map})
            )
        disk.write_file(temporary / CONFIG, json_bytes(config))
        for name, content in files.items():
            disk.write_file(temporary / name, content)
    return family.architecture


def write_tensors(disk: Disk, path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Write and sync a safetensors file, one tensor in memory at a time. Raises OSError."""
    shapes = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    with disk.create(path) as file:
        file.write(safetensors_header(shapes, 8, {"format": "pt"}))  # transformers requires this entry
        for tensor in tensors.values():
            for block in byte_blocks(tensor.detach(), BLOCK_BYTES):
                file.write(block)


# ------------------------------------------------------------------------------------- a run that starts from a folder


def start_from(loaded: LoadedConfig, rules: Sequence[Rule] = ()) -> tuple[LoadedConfig, Weights]:
    """Return the run with the folder's model section, and its tokenizer unless one is given; and the weights, unread.

    rules: of the run's ranks, checked with all others. Raises ConfigError for a flag that contradicts the folder,
    CheckpointError for a folder that cannot be converted.
    """
    folder = Path(str(loaded.config.checkpoint.load))
    if not loaded.config.checkpoint.finetune:
        rule = "is a Hugging Face folder: weights without a step, an optimizer or random state"
        raise ConfigError(f"--load {folder} {rule}; add --finetune to start at step 0 from these weights")
    snapshot = read(folder)
    data = loaded.config.data
    is_given = data.tokenizer_type is not None and not data.mock_data
    tokenizer, theirs = (tokenizer_of(loaded.config), trained_with(snapshot)) if is_given else (None, None)
    if tokenizer is not None and theirs is not None:
        own = tokenizer_fingerprint(tokenizer, data.tokenizer_model or data.vocab_file)
        beside = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in snapshot.files}
        # another of the folder's tokenizers, such as tokenizer.model for tokenizer.json, is the same
        if not own["files"] or not own["files"].items() <= beside.items():
            may_differ = loaded.config.checkpoint.allow_changed_data
            check_tokenizer({"tokenizer": theirs}, own, str(folder), is_finetuning=True, may_differ=may_differ)
    if snapshot.tokenizer is not None:
        kind, file = snapshot.tokenizer
        found = {"tokenizer_type": kind, "tokenizer_model": str(folder / file)}
        loaded = with_tokenizer(loaded, found, str(folder))
    return with_checkpoint_model(loaded, snapshot.config, str(folder), rules, "--load"), snapshot.tensors
