"""`megapipe convert`: convert checkpoints from and to Hugging Face and Megatron."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from megapipe.checkpoint.folder import read_newest, steps_in
from megapipe.checkpoint.manifest import MANIFEST_NAME
from megapipe.config.yaml_file import to_yaml
from megapipe.errors import CheckpointError, ConfigError
from megapipe.extras.cli.frame import command, option, switch
from megapipe.extras.convert import hugging_face, megatron_dist, megatron_legacy
from megapipe.extras.convert.megatron import has_writable_optimizer, iteration_folder, left_out
from megapipe.extras.convert.megatron_args import MegatronGrid
from megapipe.extras.convert.snapshot import DTYPES, Snapshot, read_checkpoint, write_checkpoint
from megapipe.extras.convert.special_tokens import ends_of

HUGGING_FACE, OWN, MEGATRON = FORMATS = ("hugging-face", "megapipe", "megatron")


def guess(folder: Path) -> str:
    """Return the format of a folder. Raises CheckpointError if it is unknown."""
    if not folder.is_dir():
        way_out = "give a checkpoint of megapipe or Megatron, or a Hugging Face model"
        raise CheckpointError(f"{folder} is not a folder; {way_out}")
    if (folder / MANIFEST_NAME).exists() or steps_in(folder):
        return OWN
    if megatron_legacy.is_legacy(folder) or megatron_dist.is_distributed(folder):
        return MEGATRON
    if (folder / hugging_face.CONFIG).exists():
        return HUGGING_FACE
    raise CheckpointError(f"{folder} looks like none of {', '.join(FORMATS)}; give its format with --from")


# flags that mean something for some formats alone: these flags, their side, the formats
CONCERNS = (
    ("--ignore-key --text-only", "from", HUGGING_FACE),
    ("--vocab-size", "from", MEGATRON),
    ("--weights-only", "from", MEGATRON),
    ("--drop-vocab-padding", "from", MEGATRON),
    ("--architecture --max-shard-size", "to", HUGGING_FACE),
    ("--like", "to", HUGGING_FACE, OWN),
    ("--tensor-model-parallel-size --pipeline-model-parallel-size --expert-model-parallel-size", "to", MEGATRON),
    ("--expert-tensor-parallel-size --transformer-impl --use-distributed-optimizer", "to", MEGATRON),
)

OPTIONS = (
    option("source", "folder to read", type=Path),
    option("target", "folder to write: a new one, for megapipe a directory to --load", type=Path, nargs="?"),
    option("--from", "format of the source (default: detected)", dest="source_format", choices=FORMATS),
    option(
        "--to",
        "format to write (default: megapipe, or hugging-face if the source is megapipe)",
        dest="target_format",
        choices=FORMATS,
    ),
    option("--step", "step of the source (default: the newest)", type=int),
    option("--dtype", "dtype of the weights (default: unchanged)", choices=DTYPES),
    option(
        "--check",
        "run both models and compare logits (default: if transformers is installed)",
        action=argparse.BooleanOptionalAction,
    ),
    switch("--print-config", "print the source's configuration as YAML; convert nothing"),
    "reading",
    option("--ignore-key", "ignore this key of config.json", action="append", default=[], metavar="KEY"),
    switch("--text-only", "convert the text model of a model with images, sound or video, and list what is left out"),
    option("--seq-length", "training length of a converted model (default: its positions, at most 4096)", type=int),
    option("--vocab-size", "true vocabulary size, if a Megatron checkpoint only has the padded one", type=int),
    switch(
        "--drop-vocab-padding",
        "leave out the padding rows of a Megatron run's vocabulary, which its softmax counts: the loss changes",
    ),
    switch("--weights-only", "leave out optimizer state, step and schedules"),
    "writing",
    option(
        "--like",
        "take tokenizer files and ids of special tokens from a Hugging Face folder",
        type=Path,
        metavar="FOLDER",
    ),
    option("--architecture", "Hugging Face architecture (default: that of the source, or the first that fits)"),
    option("--max-shard-size", "largest safetensors file (default: 5 GB)", default=5.0),
    switch("--use-distributed-optimizer", "Megatron: write the optimizer's state for a run with this flag"),
    option("--tensor-model-parallel-size", "Megatron: tp of the ranks to write for", default=1),
    option("--pipeline-model-parallel-size", "Megatron: pp of the ranks to write for", default=1),
    option("--expert-model-parallel-size", "Megatron: ep of the ranks to write for", default=1),
    option("--expert-tensor-parallel-size", "Megatron: etp of the ranks to write for (default: tp)", type=int),
    option(
        "--transformer-impl",
        "Megatron: naming scheme of norms",
        choices=("transformer_engine", "local"),
        default="transformer_engine",
    ),
)


REFUSED = {
    "--ckpt-format": "torch_dist is written, for Megatron 0.19 and later; leave it out. Weights go to earlier versions "
    "by way of --to hugging-face"
}


@command("megapipe convert", OPTIONS, interrupted="\ninterrupted; no checkpoint was written", refused=REFUSED)
def main(own: argparse.Namespace) -> None:
    """Convert checkpoints on the CPU: Hugging Face <-> megapipe <-> Megatron.

    megapipe convert Llama-3.2-1B checkpoints/llama              a Hugging Face folder, to --load and train on
    megapipe convert checkpoints/llama export --to hugging-face  back, or after training
    megapipe convert megatron_run checkpoints/run                a Megatron run: weights, moments, step, schedules
    megapipe convert checkpoints/run out --to megatron --use-distributed-optimizer   back
    """
    source_format = own.source_format or guess(own.source)
    target_format = own.target_format or (HUGGING_FACE if source_format == OWN else OWN)
    if target_format == source_format:
        raise ConfigError(f"{own.source} is already {source_format}; give the format to write with --to")
    defaults, formats = main.parser(), {"from": source_format, "to": target_format}
    for flags, side, *meant in CONCERNS:
        for flag in flags.split() if formats[side] not in meant else ():
            name = flag[2:].replace("-", "_")
            if getattr(own, name) != defaults.get_default(name):
                rule = f"applies only to a conversion {side} {' or '.join(meant)}, this one is {side} {formats[side]}"
                raise ConfigError(f"{flag} {rule}")
    if own.target is None and not own.print_config:
        raise ConfigError("give a folder to write, or --print-config")
    is_checked = not own.print_config and _is_checked(own.check, source_format, target_format)
    # a run that saves in the source may remove the checkpoint before all of it is read
    snapshot, written = read_newest(lambda: None, lambda _: _convert(source_format, target_format, own))
    if own.print_config:
        print(to_yaml(snapshot.config), end="")
        return
    for remark in (*snapshot.remarks, *(left_out(snapshot) if target_format == MEGATRON else ())):
        print(remark)
    print(f"{own.source} ({source_format}) -> {written}")
    if is_checked:
        if target_format == OWN:  # read back from disk
            snapshot = read_checkpoint(own.target, snapshot.step)
        _compare(snapshot, own)


def _convert(source_format: str, target_format: str, own: argparse.Namespace) -> tuple[Snapshot, str]:
    """Read the source and, unless its configuration is all that is asked for, write the target."""
    snapshot = read(source_format, own)
    if own.like is not None:
        snapshot = hugging_face.with_settings_of(snapshot, own.like)
    if own.seq_length is not None:
        snapshot = snapshot.with_seq_length(own.seq_length)
    if own.dtype is not None:
        snapshot = snapshot.cast(DTYPES[own.dtype])
    return snapshot, "" if own.print_config else write(target_format, snapshot, own)


def read(source_format: str, own: argparse.Namespace) -> Snapshot:
    """Read the source. Raises ConfigError, CheckpointError."""
    if source_format == OWN:
        return read_checkpoint(own.source, own.step)
    if source_format == HUGGING_FACE:
        return hugging_face.read(own.source, frozenset(own.ignore_key), own.text_only)
    if megatron_dist.is_distributed(iteration_folder(own.source, own.step)):
        return megatron_dist.read(own.source, own.step, own.vocab_size, own.weights_only, own.drop_vocab_padding)
    return megatron_legacy.read(own.source, own.step, own.vocab_size, own.weights_only)


def write(target_format: str, snapshot: Snapshot, own: argparse.Namespace) -> str:
    """Write the target. Returns what was written, for the user. Raises ConfigError, CheckpointError."""
    target: Path = own.target
    if target_format == OWN:
        report = write_checkpoint(snapshot, target)
        return f"{report.path} ({report.num_bytes:,} bytes): --load {target}"
    if target_format == HUGGING_FACE:
        return f"{target} ({hugging_face.write(snapshot, target, own.architecture, int(own.max_shard_size * 1e9))})"
    tp, pp = own.tensor_model_parallel_size, own.pipeline_model_parallel_size
    grid = MegatronGrid(tp, pp, own.expert_model_parallel_size, own.expert_tensor_parallel_size)
    is_fused = own.transformer_impl == "transformer_engine"
    folder = megatron_dist.write(snapshot, target, grid, is_fused, own.use_distributed_optimizer)
    said = f"{folder}: in Megatron --load {target} --ckpt-format torch_dist"
    if not has_writable_optimizer(snapshot):
        return f"{said} --finetune"
    if own.use_distributed_optimizer:
        return f"{said} --use-distributed-optimizer"
    way = "convert with --use-distributed-optimizer for runs that have this flag"
    return f"{said} (the state of its plain optimizer: {way})"


def _is_checked(asked: bool | None, source_format: str, target_format: str) -> bool:
    """Return True if the models can and shall be compared. Raises ConfigError if --check asks for it in vain."""
    if asked is False:
        return False
    is_read = HUGGING_FACE in (source_format, target_format)
    if is_read and importlib.util.find_spec("transformers") is not None:
        return True
    if asked and is_read:
        raise ConfigError("--check needs the package transformers: pip install 'megapipe[transformers]'")
    if asked:
        formats_read = f"neither {source_format} nor {target_format}"
        raise ConfigError(f"--check compares with transformers, which reads {formats_read}")
    if is_read:
        print("not checked against transformers: it is not installed")
    return False


def _compare(snapshot: Snapshot, own: argparse.Namespace) -> None:
    """Compare a model with that of the Hugging Face folder, by transformers: logits, and the ends of texts."""
    from megapipe.extras.verify.conversion import compare

    is_import = (own.source_format or guess(own.source)) == HUGGING_FACE
    comparison = compare(snapshot, own.source if is_import else own.target, None if is_import else ends_of(snapshot))
    print(comparison)
    if not comparison.agree:
        raise CheckpointError(
            "the conversion is wrong, or the model does not match its configuration: do not use it, and report it"
        )
