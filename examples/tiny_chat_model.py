"""Write a Hugging Face folder with a tiny Llama with random weights, and a tokenizer trained on chat data.

    python examples/tiny_chat_model.py examples/chat.jsonl tiny-llama

It stands for a pretrained model in docs/finetuning.md, where nothing is downloaded. Needs transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_tokenizer(folder: Path, texts: list[str], vocab_size: int = 512) -> int:
    """Train a byte-level BPE on the texts, write its files with a chat template, and return its number of tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return int(tokenizer.get_vocab_size())


def write_model(folder: Path, vocab_size: int, seed: int = 0) -> None:
    """Write a Llama of two layers with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def main(data: Path, folder: Path) -> None:
    chats = [json.loads(line)["messages"] for line in data.read_text(encoding="utf-8").splitlines()]
    texts = [message["content"] for chat in chats for message in chat]
    write_model(folder, write_tokenizer(folder, texts))
    print(f"wrote {folder}: a Llama of two layers with random weights, and its tokenizer")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
