"""`megapipe chat` and `serve`: talk to a trained model in the terminal, or through an HTTP server."""

from __future__ import annotations

import argparse
import errno
import queue
import signal
import socket
import threading

from megapipe.environment import Environment
from megapipe.errors import ConfigError
from megapipe.extras.cli.frame import command, option
from megapipe.extras.cli.inference import CHECKPOINT_OPTIONS, GRID_OPTIONS, SAMPLING_OPTIONS, model_asked
from megapipe.extras.inference.saved_model import open_model
from megapipe.tokenizers.hugging_face import optional_package

RUN_OPTIONS = (
    option("load", "folder of a run, one of its checkpoints, or a folder of runs: the newest", metavar="RUN"),
    *CHECKPOINT_OPTIONS,
)
CHAT_OPTIONS = (
    *RUN_OPTIONS,
    option("--max-new-tokens", "of an answer (default: what the context holds)", type=int, at_least=1),
    *SAMPLING_OPTIONS,
)
SERVE_OPTIONS = (
    *RUN_OPTIONS,
    *GRID_OPTIONS,
    "server",
    option("--host", "address to listen on; another than this machine's own needs --token", default="127.0.0.1"),
    option("--port", "0: a free one", default=8000, at_least=0, at_most=65535),
    option("--token", "requests must have Authorization: Bearer TOKEN", metavar="TOKEN"),
    option(
        "--max-request-bytes", "of the body of a request (default: what the context can need)", type=int, at_least=1
    ),
    option("--queue", "requests that may wait while one is answered", default=16, at_least=1),
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
        raise ConfigError(f"megapipe chat runs on one process, not on {environment.world_size}; use megapipe serve")
    model = open_model(model_asked(own, environment), environment, micro_batch_size=1, takes_newest=True)
    chats, reason = model.chat_tokenizer()
    from megapipe.extras.inference.dialog import HELP, Dialog, converse
    from megapipe.extras.inference.generate import Sampling

    dialog = Dialog(model, Sampling(own.temperature, own.top_k, own.top_p, own.seed), own.max_new_tokens)
    how = f"it continues each line of text: {reason}" if chats is None else "it answers by its chat template"
    print(f"{model.folder}: {how}\n{HELP}", flush=True)
    converse(dialog, input)


@command("megapipe serve", SERVE_OPTIONS, on_ranks=True)
def serve(own: argparse.Namespace, environment: Environment) -> None:
    """Serve a trained model over HTTP, with the paths of OpenAI's API and a page to talk to it.

        megapipe serve runs/chat
        megapipe launch --nproc-per-node 2 serve runs/chat --tensor-model-parallel-size 2 --port 8080
        megapipe serve runs/chat --host 0.0.0.0 --token SECRET

    /v1/chat/completions, /v1/completions and /v1/models, with streaming; / is the page. One request is answered at a
    time, others wait in a queue. On several ranks rank 0 listens. Ctrl-C stops it.
    """
    for package in ("starlette", "uvicorn"):
        optional_package(package, "megapipe serve", "serve")
    if own.token == "":
        raise ConfigError("--token is empty; give the text that requests must send, or leave it out")
    if own.token is None and own.host not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(f"--host {own.host} lets other machines use the model; give a --token that they must send")
    model = open_model(model_asked(own, environment), environment, micro_batch_size=1, takes_newest=True)
    tokenizer, chats = model.required_tokenizer(), model.chat_tokenizer()[0]
    model.tell_copies()
    listener = None
    if environment.global_rank == 0:
        try:
            family = socket.AF_INET6 if ":" in own.host else socket.AF_INET
            listener = socket.create_server((own.host, own.port), family=family)
        except OSError as error:
            of_port, rule = error.errno in (errno.EADDRINUSE, errno.EACCES), str(error.strerror).partition(" (")[0]
            way = "choose another port, or 0 for a free one" if of_port else "give an address of this machine"
            raise ConfigError(f"--host {own.host} --port {own.port}: {rule}; {way}") from None
    stopping = threading.Event()

    def stop(number: int, frame: object) -> None:
        stopping.set()
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process

    from megapipe.extras.inference.server import Server, body_bytes
    from megapipe.extras.inference.session import Session

    session = Session(model.runtime())
    for number in (signal.SIGINT, signal.SIGTERM):  # a launcher sends them to all ranks; rank 0 ends the others
        signal.signal(number, stop if listener else signal.SIG_IGN)
    if listener is None:
        session.follow()
        return
    root = model.folder.parent
    name = root.parent.name if root.name == "checkpoints" else root.name
    positions = model.plan.config.model.max_position_embeddings
    most_bytes = own.max_request_bytes or body_bytes(tokenizer, positions)
    host, port = listener.getsockname()[:2]
    print(f"the model is {model.folder}", flush=True)
    print(f"serving {name} at http://{f'[{host}]' if ':' in host else host}:{port}; Ctrl-C stops it", flush=True)
    num_tokens = model.plan.config.model.vocab_size
    server = Server(
        session, name, tokenizer, chats, positions, num_tokens, queue.Queue(own.queue), most_bytes, own.token
    )
    server.run(listener, stopping.is_set)
    session.end()
    print("stopped", flush=True)
