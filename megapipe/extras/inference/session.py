"""`Session`: a model that answers one request after the other, on one process or on a grid that rank 0 leads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from megapipe.assembly.runtime import InferenceRuntime
from megapipe.checkpoint.folder import CheckpointFolder
from megapipe.checkpoint.load import load_tensors
from megapipe.comm.collectives import broadcast_object
from megapipe.errors import CheckpointError, ConfigError
from megapipe.extras.inference.generate import Generator, Limits, Sampling, ignore
from megapipe.extras.inference.logprobs import Scored, Scoring

ANSWERED = (ConfigError, CheckpointError)  # errors that all ranks raise for a request, and that do not end the session


def load_weights(runtime: InferenceRuntime, folder: CheckpointFolder) -> int:
    """Fill the parameters from a checkpoint of any grid, and return the bytes filled on this rank. A collective.

    Takes the master weights where the checkpoint holds them, rounded as the optimizer rounds them. Vocabulary
    padding becomes zero. Raises CheckpointError on all ranks.
    """
    key = "master" if folder.manifest.holds("master") else "weights"
    for stage_buffers in runtime.buffers.values():
        for buffer in stage_buffers.buffers:
            for kept in buffer.kept_parameters:
                kept.zero_()
    return load_tensors(folder, (box for _, box in runtime.held_weights(key)), runtime.groups.world, may_round=True)


@dataclass(frozen=True)
class Request:
    """A prompt, as tokens, to be continued. ends: the tokens that end the text. max_new_tokens: 0 scores the
    prompt, which takes one token. scoring: of the log probabilities to report.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    ends: tuple[int, ...]
    sampling: Sampling
    scoring: Scoring | None = None


class Session:
    """A loaded model and its ranks. Rank 0 calls `answer` for each request and `end` at last, the others `follow`."""

    def __init__(self, runtime: InferenceRuntime) -> None:
        self._runtime = runtime

    def answer(
        self,
        request: Request,
        on_token: Callable[[int], None],
        is_stopped: Callable[[], bool] = lambda: False,
        on_scores: Callable[[list[Scored]], None] = ignore,
    ) -> list[int]:
        """Return the tokens that follow the prompt, without the one that ended the text; as many as fit.

        on_token: called for each token. is_stopped: asked after each token; True ends the text there. on_scores: gets
        those that the request asks for. Raises ConfigError, CheckpointError, as `Generator.continue_prompts`; the
        session goes on.
        """
        broadcast_object(request, self._runtime.groups.world)
        return self._run(request, on_token, is_stopped, on_scores)

    def keep_alive(self) -> None:
        """Send the waiting ranks a sign of life, so that their wait does not time out. Called every few seconds."""
        broadcast_object(False, self._runtime.groups.world)

    def end(self) -> None:
        """Let the other ranks return from `follow`."""
        broadcast_object(None, self._runtime.groups.world)

    def follow(self) -> None:
        """Do this rank's part of every request, until rank 0 calls `end`."""
        while (request := broadcast_object(None, self._runtime.groups.world)) is not None:
            if request:
                with suppress(*ANSWERED):
                    self._run(request, ignore, lambda: False, ignore)

    def _run(
        self,
        request: Request,
        on_token: Callable[[int], None],
        is_stopped: Callable[[], bool],
        on_scores: Callable[[list[Scored]], None],
    ) -> list[int]:
        limits = Limits(max(1, request.max_new_tokens), frozenset(request.ends))
        generator = Generator(self._runtime, request.sampling, batch_size=1, scoring=request.scoring)
        (text,) = generator.continue_prompts(
            [request.prompt],
            limits,
            lambda number, token: on_token(token),
            is_stopped,
            lambda number, scores: on_scores(scores),
        )
        return text
