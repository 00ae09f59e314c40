"""An exported model stops where it was trained to: its files name the tokens of the tokenizer that trained."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.files import DataConfig
from megapipe.config.load import load_config
from megapipe.errors import CheckpointError, ConfigError
from megapipe.extras.cli.convert import main
from megapipe.extras.convert import hugging_face
from megapipe.extras.convert.hugging_face import start_from
from megapipe.extras.convert.snapshot import Snapshot, read_checkpoint, write_checkpoint
from megapipe.extras.convert.special_tokens import ends_of, tokenizer_of_snapshot
from megapipe.extras.verify.conversion import compare
from megapipe.tokenizers.hugging_face import HuggingFaceTokenizer
from megapipe.tokenizers.tokenizer import SentencePieceTokenizer, is_same, tokenizer_fingerprint
from tests.extras.convert.models import CASES, make, save
from tests.extras.convert.test_refusals import folder as llama_folder
from tests.tokenizers.sentencepiece_models import train_sentencepiece

CORPUS = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]


def trained_with(data: DataConfig, files: tuple[Path, ...] = (), vocab_size: int | None = None) -> Any:
    """Return the function that gives a snapshot the tokenizer of a run."""

    def change(snapshot: Snapshot) -> Snapshot:
        config = dataclasses.replace(snapshot.config, data=data)
        return dataclasses.replace(snapshot, config=config, files=files, extra_settings={})

    return change


def exported(snapshot: Snapshot, folder: Path) -> dict[str, dict[str, Any]]:
    """Export and return the JSON files by name."""
    hugging_face.write(snapshot, folder)
    return {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}


def small(root: Path, **data: Any) -> Snapshot:
    """Return a tiny Llama that was trained with this data section."""
    snapshot = hugging_face.read(llama_folder(root / "llama"))
    return trained_with(DataConfig(**data))(snapshot)


def test_without_a_tokenizer_no_token_ends_a_text(tmp_path: Path) -> None:
    """transformers would take token 2, its default for the architecture."""
    files = exported(small(tmp_path), tmp_path / "out")
    assert {name: files["config.json"][f"{name}_token_id"] for name in ("eos", "bos", "pad")} == dict.fromkeys(
        ("eos", "bos", "pad")
    )
    assert "generation_config.json" not in files


def test_numbers_end_at_the_last_token(tmp_path: Path) -> None:
    files = exported(small(tmp_path, tokenizer_type="NullTokenizer"), tmp_path / "out")  # 10 and the end of a document
    assert files["config.json"]["eos_token_id"] == files["generation_config.json"]["eos_token_id"] == 10


def test_a_special_token_outside_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ByteTokenizer has a special token 256, the model only 11 tokens"):
        exported(small(tmp_path, tokenizer_type="ByteTokenizer"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


WORDS = {
    "<bos>": 0,
    "a": 1,
    "b": 2,
    "c": 3,
    "d": 4,
    "e": 5,
    "<|endoftext|>": 6,
    "<|im_end|>": 7,
    "<unk>": 8,
    "<pad>": 9,
}


def word_tokenizer(folder: Path, **configs: dict[str, Any]) -> Path:
    """Write a tokenizer of ten words, with files such as tokenizer_config."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


NAMED = {"eos_token": "<|endoftext|>", "bos_token": "<bos>", "pad_token": "<pad>"}
# files of the folder -> eos of config.json and of generation_config.json after the export
FOLDERS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "tokenizer_alone": ({}, 6, 6),
    "named": ({"tokenizer_config": NAMED}, 6, 6),
    "list": ({"tokenizer_config": NAMED, "generation_config": {"eos_token_id": [7, 6]}}, 6, [7, 6]),
    "list_without_the_end_of_documents": (
        {"tokenizer_config": NAMED, "generation_config": {"eos_token_id": [7], "top_p": 0.9}},
        6,
        [6, 7],
    ),
    "config": ({"tokenizer_config": NAMED, "config": {"eos_token_id": [7, 6]}}, [7, 6], [7, 6]),
}


@pytest.mark.parametrize(("configs", "eos", "generation_eos"), FOLDERS.values(), ids=FOLDERS)
def test_an_export_stops_where_the_run_ended_documents(
    tmp_path: Path, configs: dict[str, Any], eos: Any, generation_eos: Any
) -> None:
    source = word_tokenizer(tmp_path / "tokenizer", **configs)
    snapshot = small(tmp_path, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(source))
    tokenizer = tokenizer_of_snapshot(snapshot)
    assert tokenizer is not None
    tokenizer.save(tmp_path / "kept")
    paths = tuple(sorted((tmp_path / "kept").iterdir()))
    write_checkpoint(dataclasses.replace(snapshot, files=paths), tmp_path / "run")
    saved = read_checkpoint(tmp_path / "run")
    files = exported(saved, tmp_path / "out")
    assert (files["config.json"]["eos_token_id"], files["generation_config.json"]["eos_token_id"]) == (
        eos,
        generation_eos,
    )
    assert files["tokenizer_config.json"]["eos_token"] == "<|endoftext|>"
    wanted = {generation_eos} if isinstance(generation_eos, int) else set(generation_eos)
    assert set(ends_of(saved)) == wanted
    for name, content in configs.get("generation_config", {}).items():
        assert name == "eos_token_id" or files["generation_config.json"][name] == content


def test_what_a_folder_says_comes_back(tmp_path: Path) -> None:
    generation = {"bos_token_id": 0, "eos_token_id": [7, 6], "temperature": 0.6, "transformers_version": "4.40.0"}
    source = word_tokenizer(
        llama_folder(tmp_path / "theirs", {"eos_token_id": 7, "bos_token_id": 3}),
        tokenizer_config={"eos_token": "<|im_end|>", "pad_token": None},
        generation_config=generation,
    )
    write_checkpoint(hugging_face.read(source), tmp_path / "ours")
    files = exported(read_checkpoint(tmp_path / "ours"), tmp_path / "back")
    assert files["generation_config.json"] == generation
    assert (files["config.json"]["eos_token_id"], files["config.json"]["bos_token_id"]) == (7, 3)
    assert "pad_token_id" not in files["config.json"]
    assert (tmp_path / "back" / "tokenizer_config.json").read_bytes() == (source / "tokenizer_config.json").read_bytes()


def test_the_check_of_an_export_compares_where_texts_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    model = make(CASES["llama"])
    snapshot = hugging_face.read(save(model, tmp_path / "theirs"))
    change = trained_with(DataConfig(tokenizer_type="NullTokenizer"))
    write_checkpoint(change(snapshot), tmp_path / "run")
    assert main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "the models agree" in said and ", texts end at 60\n" in said
    ends = ends_of(read_checkpoint(tmp_path / "run"))
    assert ends == (60,)
    for other in ([], [60, 5], [2]):
        (tmp_path / "out" / "generation_config.json").write_text(json.dumps({"eos_token_id": other} if other else {}))
        comparison = compare(read_checkpoint(tmp_path / "run"), tmp_path / "out", ends)
        assert not comparison.agree and str(comparison).startswith("THE MODELS DIFFER"), other
        assert comparison.largest_difference < 1e-5


def test_transformers_reads_an_exported_sentencepiece_tokenizer_as_it_trained(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = tmp_path / "tokenizer.model"
    train_sentencepiece(CORPUS, model, vocab_size=500)
    tokenizer = SentencePieceTokenizer(model)
    assert tokenizer.eod == 6
    import torch

    shapes = {name: torch.zeros(500, 8) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    source = hugging_face.read(llama_folder(tmp_path / "llama", {"vocab_size": 500}, shapes))
    data = DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(model))
    files = exported(trained_with(data, (model,))(source), tmp_path / "out")
    assert (files["config.json"]["eos_token_id"], files["generation_config.json"]["eos_token_id"]) == (6, 6)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id) == (6, tokenizer.bos, tokenizer.pad)
    for text in ("def f(x):\n    return x", "two  spaces", CORPUS[0][:500]):
        assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)


def test_the_tokenizer_of_a_folder_is_kept_and_compared(tmp_path: Path) -> None:
    """Another tokenizer of equal size would read the same text as other tokens."""
    theirs, other = llama_folder(tmp_path / "llama"), tmp_path / "other"
    word_tokenizer(theirs)
    word_tokenizer(other)
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    own, exchanged = (tokenizer_fingerprint(HuggingFaceTokenizer(path), str(path)) for path in (theirs, other))

    write_checkpoint(hugging_face.read(theirs), tmp_path / "ours")
    saved = read_checkpoint(tmp_path / "ours").state["tokenizer"]
    assert is_same(saved, own) and not is_same(saved, exchanged)

    words = (
        f"--load {theirs} --finetune --micro-batch-size 1 --train-iters 1 --lr 1e-3 --data-path unread "
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model"
    )
    assert start_from(load_config(f"{words} {theirs}".split()))[0].config.data.tokenizer_model == str(theirs)
    with pytest.raises(CheckpointError, match=r"Tokenizer of .*llama.* HuggingFaceTokenizer of .*other"):
        start_from(load_config(f"{words} {other}".split()))
    allowed = load_config(f"{words} {other} --allow-changed-data".split())
    assert start_from(allowed)[0].config.data.tokenizer_model == str(other)
