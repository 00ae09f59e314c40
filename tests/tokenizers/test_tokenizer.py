from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers as library
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config.files import TOKENIZER_TYPES
from megapipe.config.megatron_flags import megatron_flags
from megapipe.errors import ConfigError, DataError
from megapipe.tokenizers.tokenizer import FROM_MODEL, ByteTokenizer, build_tokenizer, files_of

TEXT = [
    'def f(x):\n\tif x:\r\n        return "é漢😀"  # two  spaces\n\n',
    "  lead and trail  ",
    "\n\n\n",
    "<EOD> </s> <|endoftext|>",
    "",
]


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory):
    """Write a byte-level BPE tokenizer as Hugging Face and as GPT-2 files."""
    folder = tmp_path_factory.mktemp("bpe")
    trained = library.ByteLevelBPETokenizer()
    trained.train_from_iterator(
        TEXT * 3, vocab_size=300, special_tokens=["<|endoftext|>", "<pad>"], show_progress=False
    )
    trained.save(str(folder / "tokenizer.json"))
    trained.save_model(str(folder))
    config = {"eos_token": {"content": "<|endoftext|>"}, "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@settings(max_examples=50)
@given(text=st.text())
def test_byte_tokenizer_round_trips_any_text(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, tokenizer.eod]) == text
    assert all(0 <= i < 256 for i in ids)
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)


def test_a_cut_character_is_decoded_as_the_replacement_character():
    assert ByteTokenizer().decode(ByteTokenizer().encode("aé")[:2]) == "a\ufffd"


def test_null_tokenizer_reads_numbers_below_the_vocabulary_size():
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert tokenizer.encode("3 14 99") == [3, 14, 99]
    assert tokenizer.decode([3, 14]) == "3 14"
    assert (tokenizer.eod, tokenizer.vocab_size) == (100, 101)
    for text in ("3 x", "-1", "101", "1.5"):
        with pytest.raises(DataError, match="numbers from 0 to 100"):
            tokenizer.encode(text)


@pytest.mark.parametrize("tokenizer_type", ["HuggingFaceTokenizer", "GPT2BPETokenizer"])
@pytest.mark.parametrize("text", TEXT[:3], ids=["code", "spaces", "newlines"])
def test_byte_level_bpe_round_trips_text(tokenizer_type, text, bpe_folder):
    tokenizer = build_tokenizer(tokenizer_type, str(bpe_folder))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(TEXT[0])) < len(TEXT[0].encode())
    assert max(tokenizer.encode(text)) < tokenizer.vocab_size


def test_hugging_face_special_tokens_come_from_the_config(bpe_folder):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(bpe_folder))
    assert (tokenizer.eod, tokenizer.pad, tokenizer.bos) == (0, 1, None)
    assert tokenizer.vocab_size == len(json.loads((bpe_folder / "vocab.json").read_text()))


def test_a_hugging_face_file_alone_has_the_common_end_of_document(bpe_folder, tmp_path):
    (tmp_path / "t.json").write_bytes((bpe_folder / "tokenizer.json").read_bytes())
    assert build_tokenizer("HuggingFaceTokenizer", str(tmp_path / "t.json")).eod == 0


def test_hugging_face_vocabularies_with_gaps_count_up_to_the_highest_id(bpe_folder, tmp_path):
    content = json.loads((bpe_folder / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 1000, "content": "<late>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    assert max(tokenizer.encode("<late>")) < tokenizer.vocab_size


def test_hugging_face_truncation_and_padding_are_switched_off(bpe_folder, tmp_path):
    tokenizer = library.Tokenizer.from_file(str(bpe_folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert build_tokenizer("HuggingFaceTokenizer", str(tmp_path)).encode(TEXT[0]) == build_tokenizer(
        "HuggingFaceTokenizer", str(bpe_folder)
    ).encode(TEXT[0])


def test_gpt2_takes_its_two_files_by_flag(bpe_folder):
    by_flag = build_tokenizer(
        "GPT2BPETokenizer", vocab_file=str(bpe_folder / "vocab.json"), merge_file=str(bpe_folder / "merges.txt")
    )
    assert by_flag.encode(TEXT[0]) == build_tokenizer("HuggingFaceTokenizer", str(bpe_folder)).encode(TEXT[0])
    assert by_flag.eod == 0


@pytest.mark.parametrize("tokenizer_type", ["HuggingFaceTokenizer", "GPT2BPETokenizer"])
def test_saved_tokenizer_is_the_same(tokenizer_type, bpe_folder, tmp_path):
    first = build_tokenizer(tokenizer_type, str(bpe_folder))
    first.save(tmp_path / "saved")
    second = build_tokenizer(tokenizer_type, str(tmp_path / "saved"))
    assert second.encode(TEXT[0]) == first.encode(TEXT[0])
    assert (second.vocab_size, second.eod, second.pad) == (first.vocab_size, first.eod, first.pad)


def test_a_tokenizer_file_of_any_name_is_saved_under_the_one_that_is_read(bpe_folder, tmp_path):
    (tmp_path / "mine.json").write_bytes((bpe_folder / "tokenizer.json").read_bytes())
    (tmp_path / "weights.safetensors").write_bytes(b"many")
    files = files_of(build_tokenizer("HuggingFaceTokenizer", str(tmp_path / "mine.json")))
    assert files == {"tokenizer.json": (tmp_path / "mine.json").read_bytes()}


WRONG = {
    "unknown": ({"tokenizer_type": "SentencepieceTokeniser"}, ConfigError, "did you mean SentencePieceTokenizer"),
    "far-off": (
        {"tokenizer_type": "x"},
        ConfigError,
        "unknown --tokenizer-type x: choose ByteTokenizer, NullTokenizer, .* or one that an extension registers",
    ),
    "no-model": ({"tokenizer_type": "Llama2Tokenizer"}, ConfigError, "Llama2Tokenizer needs --tokenizer-model"),
    "no-vocab-size": ({"tokenizer_type": "NullTokenizer"}, ConfigError, "needs --vocab-size"),
    "no-vocab-file": ({"tokenizer_type": "GPT2BPETokenizer"}, ConfigError, "needs --vocab-file and --merge-file"),
    "missing-spm": (
        {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "nowhere.model"},
        DataError,
        r"nowhere\.model",
    ),
    "missing-merges": (
        {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v", "merge_file": "m"},
        DataError,
        "no file v; see --vocab-file",
    ),
}


@pytest.mark.parametrize(("flags", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_flags_are_refused(flags, error, message):
    with pytest.raises(error, match=message):
        build_tokenizer(**flags)


@pytest.mark.parametrize("tokenizer_type", ["SentencePieceTokenizer", "Llama2Tokenizer", "HuggingFaceTokenizer"])
@pytest.mark.parametrize("content", [b"", b"not a model", b'{"a": 1}'], ids=["empty", "text", "json"])
def test_file_that_is_no_tokenizer_is_named(tokenizer_type, content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DataError, match=r"file.* is not a"):
        build_tokenizer(tokenizer_type, str(tmp_path / "file"))


@pytest.mark.parametrize("package", ["tokenizers", "transformers"])
def test_a_missing_package_is_reported_with_its_install_command(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # simulates a missing package
    if package == "tokenizers":
        (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"needs the package '{package}': run pip install 'megapipe\[{package}\]'$"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))


def test_a_tokenizer_that_is_not_here_or_of_another_kind_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="the tokenizer gpt2 is no file or folder; one of Hugging Face's hub needs"):
        build_tokenizer("HuggingFaceTokenizer", "gpt2")
    for path in (tmp_path / "missing", "./missing", "data/models/missing", "missing/"):  # the hub is not asked
        with pytest.raises(DataError, match=rf"there is no file or folder {path}"):
            build_tokenizer("HuggingFaceTokenizer", str(path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer.json: .*--tokenizer-type HuggingFaceTokenizer"):
        build_tokenizer("SentencePieceTokenizer", str(tmp_path))


@pytest.mark.parametrize("has_json", [True, False], ids=["tokenizer.json", "code alone"])
def test_a_folder_without_tokenizer_json_is_read_as_transformers_writes_it(has_json, bpe_folder, tmp_path, monkeypatch):
    class Loaded:
        def save_pretrained(self, folder):
            Path(folder, "tokenizer_config.json").write_text('{"bos_token": "a"}')
            if has_json:
                Path(folder, "tokenizer.json").write_bytes((bpe_folder / "tokenizer.json").read_bytes())

    class Package:
        class AutoTokenizer:
            @staticmethod
            def from_pretrained(model, trust_remote_code):
                assert model == str(tmp_path) and not trust_remote_code
                return Loaded()

    monkeypatch.setitem(sys.modules, "transformers", Package)
    if not has_json:
        with pytest.raises(DataError, match=r"no tokenizer.json"):
            build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
        return
    tokenizer, plain = (build_tokenizer("HuggingFaceTokenizer", str(path)) for path in (tmp_path, bpe_folder))
    assert tokenizer.encode("some text") == plain.encode("some text") and tokenizer.bos is not None
    tokenizer.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "tokenizer.json").read_bytes() == (bpe_folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("has_file", [False, True], ids=["needs_code", "needs_none"])
def test_a_tokenizer_of_remote_code_is_an_error_if_and_only_if_it_needs_the_code(has_file, bpe_folder, tmp_path):
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    marker = tmp_path / "executed"
    (tmp_path / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass OwnTokenizer: pass\n")
    assert "--trust-remote-code" in megatron_flags()
    if has_file:
        (tmp_path / "tokenizer.json").write_bytes((bpe_folder / "tokenizer.json").read_bytes())
        assert build_tokenizer("HuggingFaceTokenizer", tmp_path).vocab_size == 300
    else:
        pytest.importorskip("transformers")
        with pytest.raises(DataError, match=r"never executed"):
            build_tokenizer("HuggingFaceTokenizer", tmp_path)
    assert not marker.exists()


def test_every_type_has_its_name(bpe_folder):
    for name in ("ByteTokenizer", "NullTokenizer", "GPT2BPETokenizer", "HuggingFaceTokenizer"):
        assert build_tokenizer(name, str(bpe_folder), vocab_size=5).name == name
    others = {"ByteTokenizer", "NullTokenizer", "GPT2BPETokenizer"}
    assert set(FROM_MODEL) | others == set(TOKENIZER_TYPES)  # every value that the flag accepts can be built


def test_the_package_imports_neither_torch_nor_optional_packages():
    code = (
        "import sys, megapipe.tokenizers.tokenizer, megapipe.tokenizers.sentencepiece, "
        "megapipe.extras.preprocess.preprocess, megapipe.data.build_datasets, "
        "megapipe.data.loader; print([m for m in ('torch', 'transformers', 'tokenizers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
