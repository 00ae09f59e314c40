"""Convert checkpoints on the CPU: Hugging Face <-> megapipe, Megatron -> megapipe, megapipe -> Megatron (torch format).

megapipe convert Llama-3.2-1B checkpoints/llama               a Hugging Face folder, to --load and train on
megapipe convert checkpoints/llama export --to hugging-face   back, or after training
megapipe convert megatron_run checkpoints/run                 a Megatron run: weights, moments, step, samples, schedules
megapipe convert checkpoints/run out --to dcp                 for torch.distributed.checkpoint, and --from dcp back
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from megapipe.config.yaml_file import to_yaml
from megapipe.errors import CheckpointError, ConfigError, MegapipeError
from megapipe.extras.convert import formats, hugging_face
from megapipe.extras.convert.formats import ConversionOptions
from megapipe.extras.convert.snapshot import DTYPES, Snapshot

HUGGING_FACE, OWN, MEGATRON, DCP = "hugging-face", "megapipe", "megatron", "dcp"
# flags that mean something for some formats alone: argument -> (its side, formats)
CONCERNS = {
    "ignore_key": ("from", HUGGING_FACE),
    "vocab_size": ("from", MEGATRON),
    "weights_only": ("from", MEGATRON, DCP),
    "config": ("from", DCP),
    "architecture": ("to", HUGGING_FACE),
    "max_shard_size": ("to", HUGGING_FACE),
    "like": ("to", HUGGING_FACE, OWN, DCP),
    "tensor_model_parallel_size": ("to", MEGATRON),
    "pipeline_model_parallel_size": ("to", MEGATRON),
    "transformer_impl": ("to", MEGATRON),
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megapipe convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("source", type=Path, help="folder to read")
    add("target", type=Path, nargs="?", help="folder to write: a new one, for megapipe a directory to --load")
    add("--from", dest="source_format", choices=formats.NAMES, help="format of the source (default: detected)")
    add(
        "--to",
        dest="target_format",
        choices=formats.NAMES,
        help="format to write (default: megapipe, or hugging-face if the source is megapipe)",
    )
    add("--step", type=int, help="step of the source (default: the newest)")
    add("--dtype", choices=DTYPES, help="dtype of the weights (default: unchanged)")
    add(
        "--check",
        action=argparse.BooleanOptionalAction,
        help="run both models and compare logits (default: if transformers is installed)",
    )
    add("--print-config", action="store_true", help="print the source's configuration as YAML; convert nothing")
    _add_reading(parser.add_argument_group("reading"))
    _add_writing(parser.add_argument_group("writing"))
    return parser


def _add_reading(reading: argparse._ArgumentGroup) -> None:
    """Add the flags that concern the source."""
    reading.add_argument(
        "--ignore-key",
        action="append",
        default=[],
        metavar="KEY",
        help="ignore this key of config.json",
    )
    reading.add_argument(
        "--seq-length",
        type=int,
        help="training sequence length of a converted model (default: its number of positions, at most 4096)",
    )
    reading.add_argument(
        "--vocab-size",
        type=int,
        help="true size of the vocabulary, if a Megatron checkpoint only has the padded one",
    )
    reading.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML configuration of the model, if a dcp folder has none"
    )
    reading.add_argument("--weights-only", action="store_true", help="leave out optimizer state, step and schedules")


def _add_writing(writing: argparse._ArgumentGroup) -> None:
    """Add the flags that concern the target."""
    writing.add_argument(
        "--like",
        type=Path,
        metavar="FOLDER",
        help="take tokenizer files and ids of special tokens from a Hugging Face folder",
    )
    writing.add_argument(
        "--architecture",
        help="Hugging Face architecture to write (default: that of the source, or the first that fits)",
    )
    writing.add_argument(
        "--max-shard-size", type=float, default=5.0, metavar="GB", help="largest safetensors file, in GB (default: 5)"
    )
    writing.add_argument(
        "--tensor-model-parallel-size", type=int, default=1, help="Megatron: tp of the ranks to write for"
    )
    writing.add_argument(
        "--pipeline-model-parallel-size", type=int, default=1, help="Megatron: pp of the ranks to write for"
    )
    writing.add_argument(
        "--transformer-impl",
        choices=("transformer_engine", "local"),
        default="transformer_engine",
        help="Megatron: naming scheme of the norms (default: transformer_engine)",
    )


def main(argv: Sequence[str]) -> int:
    """Convert and return the exit code, which is 1 if the check finds that the models differ."""
    arguments = build_parser().parse_args(argv)
    try:
        return _convert(arguments)
    except MegapipeError as error:
        print(f"convert: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"convert: {error.filename or arguments.source}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nconvert: interrupted; no checkpoint was written", file=sys.stderr)
        return 130


def _convert(arguments: argparse.Namespace) -> int:
    source_format = arguments.source_format or formats.guess(arguments.source)
    target_format = arguments.target_format or (HUGGING_FACE if source_format == OWN else OWN)
    if target_format == source_format:
        raise ConfigError(f"{arguments.source} is already {source_format}; give the format to write with --to")
    _refuse_idle_flags(arguments, {"from": source_format, "to": target_format})
    options = ConversionOptions(
        arguments.step,
        frozenset(arguments.ignore_key),
        arguments.vocab_size,
        arguments.weights_only,
        arguments.architecture,
        int(arguments.max_shard_size * 1e9),
        arguments.tensor_model_parallel_size,
        arguments.pipeline_model_parallel_size,
        arguments.transformer_impl == "transformer_engine",
        arguments.config,
    )
    snapshot = formats.read(source_format, arguments.source, options)
    if arguments.like is not None:
        snapshot = hugging_face.with_settings_of(snapshot, arguments.like)
    if arguments.seq_length is not None:
        snapshot = snapshot.with_seq_length(arguments.seq_length)
    if arguments.dtype is not None:
        snapshot = snapshot.cast(DTYPES[arguments.dtype])
    if arguments.print_config:
        print(to_yaml(snapshot.config), end="")
        return 0
    if arguments.target is None:
        raise ConfigError("give a folder to write, or --print-config")
    check = _shall_check(arguments, (source_format, target_format))
    for remark in snapshot.remarks:
        print(remark)
    written = formats.write(target_format, snapshot, arguments.target, options)
    print(f"{arguments.source} ({source_format}) -> {written}")
    return _compare(snapshot, arguments, source_format, target_format) if check else 0


def _refuse_idle_flags(arguments: argparse.Namespace, formats_by_side: dict[str, str]) -> None:
    """Raise ConfigError for a flag that does not apply to these formats."""
    parser = build_parser()
    for name, (side, *meant) in CONCERNS.items():
        if getattr(arguments, name) != parser.get_default(name) and formats_by_side[side] not in meant:
            raise ConfigError(
                f"--{name.replace('_', '-')} applies only to a conversion {side} {' or '.join(meant)}, this one is "
                f"{side} {formats_by_side[side]}"
            )


def _shall_check(arguments: argparse.Namespace, pair: tuple[str, str]) -> bool:
    if arguments.check is False:
        return False
    if HUGGING_FACE not in pair:
        if arguments.check:
            raise ConfigError(f"--check compares with transformers, which reads neither {pair[0]} nor {pair[1]}")
        return False
    if importlib.util.find_spec("transformers") is None:
        if arguments.check:
            raise ConfigError("--check needs the package transformers: pip install 'megapipe[transformers]'")
        print("not checked against transformers: it is not installed")
        return False
    return True


def _compare(snapshot: Snapshot, arguments: argparse.Namespace, source_format: str, target_format: str) -> int:
    """Compare the written model with transformers; a megapipe target is read back from disk."""
    from megapipe.extras.verify.conversion import compare

    folder = arguments.source if source_format == HUGGING_FACE else arguments.target
    if target_format == OWN:
        snapshot = formats.read(OWN, arguments.target, ConversionOptions(step=snapshot.step))
    comparison = compare(snapshot, folder)
    print(comparison)
    if not comparison.agree:
        raise CheckpointError(
            "the conversion is wrong, or the model does not match its configuration: do not use it, and report it"
        )
    return 0
