"""The second half of `megapipe quickstart --sft`: finetuning on conversations, one exchange, an export, and the same
answer from transformers.
"""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megapipe.checkpoint.folder import steps_in
from megapipe.environment import read_environment
from megapipe.errors import TrainingError

CONVERSATIONS = Path(__file__).with_name("conversations.jsonl")  # on the order of days and months
QUESTION = "What day comes after Monday?"
FINETUNING_STEPS, MOST_ANSWER_TOKENS = 200, 64


def say(word: str, text: str) -> None:
    """Print a step of the quickstart."""
    print(f"== {word}: {text}", flush=True)


def finetuning_arguments(base: Path, chat: Path) -> list[str]:
    """Return the flags of pretrain_gpt.py that finetune the model in `base` on conversations and save it in `chat`."""
    steps = FINETUNING_STEPS
    settings = f"--train-iters {steps} --eval-interval {steps} --eval-iters 2 --lr 3e-3 --lr-warmup-iters {steps // 10}"
    words = ["--finetune", "--sft", "--load", str(base), "--save", str(chat), *settings.split()]
    words += ["--lr-wsd-decay-iters", str(steps // 2)]
    return [*words, "--train-data-path", str(CONVERSATIONS), "--valid-data-path", str(CONVERSATIONS)]


def finetune_and_export(folder: Path, base: Path, step: int, launched: Sequence[str], device: str = "auto") -> int:
    """Finetune the model of `step`, show an exchange, export it, and compare the answer with transformers'.

    launched: the words before the flags of finetuning. device: of the chat. Files that exist are used. Returns the exit
    code of the ranks. Raises TrainingError if the answer does not end, or transformers answers otherwise.
    """
    from megapipe.extras.cli.convert import main as convert
    from megapipe.extras.cli.launch import launch

    chat, export = folder / f"chat_{step}", folder / f"export_{step}"
    if not (chat.is_dir() and steps_in(chat)):
        words = [*launched, *finetuning_arguments(base, chat), "--data-cache-path", str(folder / "cache")]
        say("finetuning", f"on the conversations of {CONVERSATIONS}, {FINETUNING_STEPS} steps")
        print(f"   megapipe launch {shlex.join(words)}\n", flush=True)
        if code := launch(words):
            return code
    words = [str(chat), "--device", device]
    say("chat", f"megapipe chat {shlex.join(words)}")
    print(f"> {QUESTION}", flush=True)
    answer = exchange(words)
    say("export", f"megapipe convert {chat} {export}")
    if not export.exists() and (code := convert([str(chat), str(export)])):
        return code
    if importlib.util.find_spec("transformers") is None:
        say("export", f"{export} holds the model, its tokenizer and chat template; transformers is not installed here")
        return 0
    theirs = answer_of_transformers(export)
    if theirs != answer:
        raise TrainingError(f"transformers answers {theirs!r} with {export}, where this model answers {answer!r}")
    say("transformers", f"answers the same with {export}: {theirs}")
    return 0


def exchange(words: Sequence[str]) -> str:
    """Write the answer of `megapipe chat` to QUESTION, and return it. Raises TrainingError if it does not end."""
    from megapipe.extras.cli.chat import chat
    from megapipe.extras.cli.inference import model_asked
    from megapipe.extras.inference.dialog import Dialog
    from megapipe.extras.inference.generate import Sampling
    from megapipe.extras.inference.saved_model import open_model

    environment = read_environment()
    model = open_model(model_asked(chat.parse(words), environment), environment, micro_batch_size=1)
    dialog = Dialog(model, Sampling(temperature=0.0), MOST_ANSWER_TOKENS)
    text, is_ended = dialog.answer(QUESTION)
    if not is_ended:
        raise TrainingError(f"the answer did not end within {MOST_ANSWER_TOKENS} tokens; train for more --steps")
    return text


def answer_of_transformers(export: Path) -> str:
    """Return the answer to QUESTION by transformers with an exported model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(export)
    model: Any = AutoModelForCausalLM.from_pretrained(export)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**asked, max_new_tokens=MOST_ANSWER_TOKENS, do_sample=False)[0]
    return str(tokenizer.decode(tokens[asked["input_ids"].shape[1] :], skip_special_tokens=True))
