"""Files that are no files, have no end, or hold what no reader expects: one message and an exit code within seconds."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.files import DataConfig
from megapipe.data.build_datasets import DatasetRequest, build_datasets
from megapipe.data.chat import open_chats
from megapipe.data.index_cache import IndexCache
from megapipe.extras.calibrate.hardware_reader import read_hardware
from megapipe.extras.cli.convert import main as convert
from megapipe.extras.cli.data import merge, preprocess
from megapipe.extras.cli.frame import guarded
from megapipe.extras.cli.pretrain import main as pretrain
from megapipe.tokenizers import rendering
from megapipe.tokenizers.chat import ChatTokenizer
from megapipe.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.config.examples import JOB
from tests.data.chats import ByteEncoder
from tests.extras.convert.test_refusals import LLAMA, folder
from tests.fuzz.outcome import Said, fault, said
from tests.token_files import IndexedWriter
from tests.tokenizers.chat_tokenizers import write_tokenizer

MOST_SECONDS = 10.0  # of the processor; `limits` ends a case that waits
Content = bytes | str | Callable[[Path], Any]
Case = tuple[Callable[[Path], Said], str]  # what is run in a folder, and a word of its message


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def large(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(100 << 20)


def put(path: Path, content: Content) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if callable(content):
        content(path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def reading(read: Callable[[], Any]) -> Said:
    """Run a reader as a command runs it."""

    def body() -> int:
        read()
        return 0

    return said(lambda words: guarded(body), ())


# ------------------------------------------------------------------------------------------------ settings

SPECIAL_FILES: dict[str, tuple[Content, str]] = {
    "pipe": (pipe, "pipe or a device"),
    "device without end": (endless, "pipe or a device"),
    "folder": (Path.mkdir, ""),
    "100 MB": (large, "104,857,600"),
    "not UTF-8": (b"\xff\xfe\xff", ""),
}
ANY_FILES = {name: (content, "") for name, (content, _) in SPECIAL_FILES.items()}  # with any message
DEEP = "[" * 100_000
LAUGHS = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopq"))
YAML: dict[str, tuple[Content, str]] = SPECIAL_FILES | {
    "5,000 unknown keys": ("".join(f"key_{n}: 1\n" for n in range(5_000)), "key_0"),
    "5,000 keys twice": ("a: 1\n" * 5_000, "already given on line 1"),
    "5,000 wrong values": (f"profile_ranks: [{', '.join(['x'] * 5_000)}]", "profile_ranks"),
    "deep brackets": (f"a: {DEEP}", "nested too deeply"),
    "deep blocks": ("".join(" " * n + "a:\n" for n in range(600)), ""),
    "deep dashes": ("- " * 60_000, ""),
    "many aliases": (LAUGHS, "nested list"),
    "an alias of itself": ("model: &m\n  num_layers: *m\n", "num_layers"),
    "an object's tag": ("num_layers: !!python/object/apply:os.getpid []", "python/object"),
    "a tag of a value": ("model:\n  num_layers: !env LAYERS", "!env"),
    "a tag in a list": ("data_path: [!include a.yaml]", "!include"),
    "a tag of a key": ("!env num_layers: 4", "!env"),
    "NUL": ("num_layers: 4\0", "YAML"),
    "a key twice": ("model:\n  num_layers: 2\n  num-layers: 4\n", "line 3"),
}


def planned_with(flag: str, name: str, content: Content) -> Callable[[Path], Said]:
    return lambda root: said(pretrain, [*JOB, flag, str(put(root / name, content)), "--plan", "--world-size", "1"])


CASES: dict[str, Case] = {
    f"--config {name}": (planned_with("--config", "c.yaml", content), word) for name, (content, word) in YAML.items()
}
for flag in ("--tuned", "--data-args-path", "--heterogeneous-layers-config-path"):
    CASES |= {
        f"{flag} {name}": (planned_with(flag, "c.yaml", content), word)
        for name, (content, word) in SPECIAL_FILES.items()
    }
    if flag != "--data-args-path":
        CASES[f"{flag} deep"] = (planned_with(flag, "c.yaml", f"device: {DEEP}"), "")

CASES |= {
    f"--hardware {name}": (
        lambda root, content=content: reading(lambda: read_hardware(put(root / "h.yaml", content))),
        word,
    )
    for name, (content, word) in (SPECIAL_FILES | {"deep": (DEEP, "")}).items()
}

# ----------------------------------------------------------------------------------------------------- data


def token_files(suffix: str, content: Content) -> Callable[[Path], Said]:
    def run(root: Path) -> Said:
        with IndexedWriter(root / "x", "u2") as writer:
            writer.add_document(list(range(90)))
        put(root / f"x{suffix}", content)
        request = DatasetRequest(DataConfig(data_path=(str(root / "x"),), split="1"), 8, 1, (4, 0, 0), 100)
        return reading(lambda: build_datasets(request))

    return run


def conversation(name: str, content: Content) -> Callable[[Path], Said]:
    def run(root: Path) -> Said:
        path = put(root / name, content)
        return reading(lambda: open_chats(str(path), ByteEncoder(), IndexCache.at(None, str(path))))

    return run


def message(text: str) -> str:
    return f'{{"messages": [{text}, {{"role": "assistant", "content": "b"}}]}}'


CASES |= {
    f"{suffix} {name}": (token_files(suffix, content), word)
    for suffix in (".bin", ".idx")
    for name, (content, word) in ANY_FILES.items()
}
LINES: dict[str, tuple[Content, str]] = {
    **{name: SPECIAL_FILES[name] for name in ("pipe", "device without end", "folder", "not UTF-8")},
    "deep": (message(DEEP), "line 1"),
    "a key twice": (message('{"role": "user", "content": "a", "content": "c"}'), "line 1"),
    "a number of 5,000 digits": (message("1" * 5000), "line 1"),
    "a surrogate": (message('{"role": "user", "content": "\\ud800"}'), "line 1"),
    "a surrogate as a role": (message('{"role": "\\ud800", "content": "a"}'), "line 1"),
    "a surrogate as a key": (message('{"role": "user", "content": "a", "\\ud800": 1}'), "line 1"),
    "zeros": (bytes(1 << 20), "line 1"),
}
CASES |= {f".jsonl {name}": (conversation("c.jsonl", content), word) for name, (content, word) in LINES.items()}
CASES |= {
    "a .gz that is none": (conversation("c.jsonl.gz", "text"), "c.jsonl.gz"),
    "a .gz that is a pipe": (conversation("c.jsonl.gz", pipe), "pipe or a device"),
}
BYTES = ["--tokenizer-type", "ByteTokenizer"]
CASES |= {
    f"--input {name}": (
        lambda root, content=content: said(
            preprocess, ["--input", str(put(root / "x.jsonl", content)), "--output-prefix", str(root / "y"), *BYTES]
        ),
        word,
    )
    for name, (content, word) in {"device without end": (endless, "device"), "deep": (DEEP, "x.jsonl")}.items()
}
CASES["merge of a pipe"] = (
    lambda root: said(
        merge, ["--input", str(put(root / "in" / "x.idx", pipe).parent), "--output-prefix", str(root / "y")]
    ),
    "x.idx",
)

# ----------------------------------------------------------------------------------- tokenizers and templates


def tokenizer(kind: str, name: str, content: Content) -> Callable[[Path], Said]:
    """Plan with a tokenizer of which one file has another content."""

    def run(root: Path) -> Said:
        put(write_tokenizer(root / "t") / name, content)
        words = [
            "--tokenizer-type",
            kind,
            "--tokenizer-model",
            str(root / "t" if "json" in name else root / "t" / name),
        ]
        if kind == "GPT2BPETokenizer":
            words = [
                "--tokenizer-type",
                kind,
                "--vocab-file",
                str(root / "t" / name),
                "--merge-file",
                str(root / "t" / name),
            ]
        return said(pretrain, [*JOB, *words, "--plan", "--world-size", "1"])

    return run


def template(content: Content, name: str = "chat_template.jinja") -> Callable[[Path], Said]:
    def run(root: Path) -> Said:
        put(write_tokenizer(root) / name, content)
        return reading(lambda: ChatTokenizer(HuggingFaceTokenizer(root)))

    return run


def holder(text: str) -> str:
    return json.dumps({"eos_token": "<|endoftext|>", "chat_template": text})


FOR = "{% for x in range(9999) %}"
LOOP = f"{3 * FOR}%{3 * '{% endfor %}'}"
CONFIG = "tokenizer_config.json"
CASES |= {
    f"{name} {kind}": (tokenizer("HuggingFaceTokenizer", name, content), word)
    for name, rows in {
        "tokenizer.json": {**ANY_FILES, "deep": (DEEP, ""), "null": ("null", ""), "empty": ("", "")},
        CONFIG: {"not UTF-8": (b"\xff", CONFIG), "deep": (DEEP, CONFIG), "endless number": ("1" * 5000, CONFIG)},
        "generation_config.json": {"not UTF-8": (b"\xff", "generation_config"), "100 MB": (large, "104,857,600")},
    }.items()
    for kind, (content, word) in rows.items()
}
CASES |= {
    f"{kind} {name}": (tokenizer(kind, "m.model", content), word)
    for kind in ("SentencePieceTokenizer", "GPT2BPETokenizer")
    for name, (content, word) in {**ANY_FILES, "deep": (DEEP, "")}.items()
}
CASES |= {
    "template not UTF-8": (template(b"\xff\xfe{{ messages }}"), "utf-8"),
    "template without end": (template(LOOP.replace("%}%{%", "%}{%")), "takes more than"),
    "template of 60 million characters": (template("{{ 'a' * 60000000 }}"), "for one conversation"),
    "template of all memory": (template("{{ 'a' * 100000000000 }}"), "GiB"),
    "template of a surrogate": (template(holder("{{ messages[0].content }}\ud800"), CONFIG), "surrogate"),
    "template that makes a surrogate": (template("{{ '\\ud800' }}"), "surrogate"),
    "template of deep brackets": (template("{{ " + "(" * 100_000), ""),
    "template of deep blocks": (template("{% if 1 %}" * 20_000), ""),
    "special token of a surrogate": (template(json.dumps({"eos_token": "\ud800"}), CONFIG), ""),
    "template that is a pipe": (template(pipe), ""),
}

# --------------------------------------------------------------------------------------------- config.json


def model(change: Content | dict[str, Any]) -> Callable[[Path], Said]:
    def run(root: Path) -> Said:
        source = folder(root / "in", change) if isinstance(change, dict) else folder(root / "in")
        if not isinstance(change, dict):
            put(source / "config.json", change)
        return said(convert, [str(source), str(root / "out"), "--from", "hugging-face"])

    return run


NUMBERS = ("64", 2.5, "x", True, -8, 0, [8], {"a": 8}, 10**400, float("nan"), float("inf"))
CASES |= {f"hidden_size {value!r:.20}": (model({"hidden_size": value}), "hidden_size") for value in NUMBERS}
CASES |= {
    f"num_hidden_layers {value!r:.20}": (model({"num_hidden_layers": value}), "num_hidden_layers") for value in NUMBERS
}
VALUES: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (None,),
    "num_key_value_heads": ("2", 2.5, True, -1),
    "vocab_size": ("11", -11),
    "max_position_embeddings": ("16", 0),
    "rope_theta": ("x", "10000", -1.0, True, [1], float("nan"), float("inf")),
    "rms_norm_eps": ("1e-5", "x", True, float("nan")),
    "tie_word_embeddings": ("false", 2, []),
    "attention_bias": ("no", [1], {}),
    "initializer_range": ("x", -1),
    "hidden_act": (1, ["silu"], {}),
    "rope_scaling": ("x", 3, [1], {"rope_type": 1}, {"rope_type": ["linear"]}, {"rope_type": "linear", "factor": "x"}),
    "rope_scaling without a factor": ({"rope_type": "yarn", "attention_factor": 1.0},),
    "rope_parameters": ("x", [1], {"rope_theta": "x"}, {"rope_type": "linear", "factor": True}),
    "quantization_config": ("fp8", 3, [1], {"quant_method": 3}, {"quant_method": "fp8", "weight_block_size": "ab"}),
    "architectures": ("LlamaForCausalLM", 3, [3], [["a"]], {"a": 1}, ["LlamaForCausalLM", 3]),
    "model_type": (3, ["llama"], {}),
}
CASES |= {
    f"{key} {value!r:.40}": (
        model(json.dumps(LLAMA | {key.partition(" ")[0]: value})),
        "" if isinstance(value, dict) or key == "model_type" else key,
    )
    for key, values in VALUES.items()
    for value in values
}
GEMMA = {"architectures": ["Gemma3ForCausalLM"], "rope_theta": "absent"}
QWEN = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "moe_intermediate_size": 4}
OTHERS: tuple[dict[str, Any], ...] = (
    GEMMA | {"layer_types": 3},
    GEMMA | {"layer_types": [3]},
    GEMMA | {"layer_types": "full_attention"},
    GEMMA | {"sliding_window": "x"},
    GEMMA | {"rope_parameters": {"full_attention": "x"}},
    GEMMA | {"rope_parameters": [["full_attention", {}]]},
    QWEN | {"num_experts": "8"},
    QWEN | {"mlp_only_layers": 3},
    QWEN | {"mlp_only_layers": ["0"]},
    QWEN | {"decoder_sparse_step": "1"},
    QWEN | {"num_experts_per_tok": 1.5},
    {"text_config": "x", "architectures": ["Gemma3ForConditionalGeneration"]},
)
CASES |= {
    f"{[*change][-1]} {[*change.values()][-1]!r} of another family".replace("[", "("): (model(change), "error: /")
    for change in OTHERS
}
CASES |= {
    f"config.json {name}": (model(content), "config.json")
    for name, (content, _) in {
        **SPECIAL_FILES,
        "deep": (DEEP, ""),
        "deep value": (json.dumps(LLAMA)[:-1] + ', "dtype": ' + DEEP + "}", ""),
        "a list": ("[]", ""),
        "null": ("null", ""),
        "a key twice": (json.dumps(LLAMA)[:-1] + ', "hidden_size": 16}', ""),
        "a number of 5,000 digits": ('{"hidden_size": ' + "1" * 5000 + "}", ""),
    }.items()
}


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_file_is_refused_with_one_message(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "MOST_SECONDS", 1)
    run, word = CASES[name]
    began = time.process_time()
    ended = run(tmp_path)  # its memory is limited
    seconds = time.process_time() - began
    assert not fault(ended), ended.error[-3000:]
    assert ended.code != 0, ended.out
    assert word in ended.error
    assert len(ended.error) < 20_000
    assert seconds < MOST_SECONDS
