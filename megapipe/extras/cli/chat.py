"""`megapipe chat`: talk to a trained model in the terminal."""

from __future__ import annotations

import argparse

from megapipe.environment import Environment
from megapipe.errors import ConfigError
from megapipe.extras.cli.frame import command, option
from megapipe.extras.cli.inference import CHECKPOINT_OPTIONS, SAMPLING_OPTIONS, model_asked
from megapipe.extras.inference.saved_model import open_model

CHAT_OPTIONS = (
    option("load", "folder of a run, one of its checkpoints, or a folder of runs: the newest", metavar="RUN"),
    *CHECKPOINT_OPTIONS,
    option("--max-new-tokens", "of an answer (default: what the context holds)", type=int, at_least=1),
    *SAMPLING_OPTIONS,
)


@command("megapipe chat", CHAT_OPTIONS, on_ranks=True)
def chat(own: argparse.Namespace, environment: Environment) -> None:
    """Talk to a trained model in the terminal.

        megapipe chat runs/chat
        megapipe chat runs/chat/step_00000150 --temperature 0.7

    The conversation is written with the chat template that the model was finetuned with; a model without one continues
    the text of each line. Answers appear as they are generated. Once the conversation fills the context, its oldest
    messages are left out, which is said. /new begins another conversation, /quit or Ctrl-D leaves, Ctrl-C stops an
    answer.
    """
    if environment.world_size > 1:
        raise ConfigError(f"megapipe chat runs on one process, not on {environment.world_size}; use megapipe generate")
    model = open_model(model_asked(own, environment), environment, micro_batch_size=1, takes_newest=True)
    chats, reason = model.chat_tokenizer()
    from megapipe.extras.inference.dialog import HELP, Dialog, converse
    from megapipe.extras.inference.generate import Sampling

    dialog = Dialog(model, Sampling(own.temperature, own.top_k, own.top_p, own.seed), own.max_new_tokens)
    how = f"it continues each line of text: {reason}" if chats is None else "it answers by its chat template"
    print(f"{model.folder}: {how}\n{HELP}", flush=True)
    converse(dialog, input)
