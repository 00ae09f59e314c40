"""A chat template in a separate process: whatever it computes, its time and memory are bounded.

Jinja's sandbox keeps a template from files and attributes, and can refuse a loop, a call or a product that is too
large. It has no hook for comparisons: two lists, each the list before it twice, 60 levels deep, take years to compare
in one operation, which neither a limit of steps nor a timer inside the process can stop. `chat` uses `Template`; its
process runs `serve`.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megapipe.errors import ConfigError, DataError

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.parser import Parser

MOST_SECONDS = 5  # of the processor, for one text
MOST_BYTES = 1 << 30  # of address space, the interpreter included
MOST_CHARACTERS = 1 << 20  # of one text, beside MOST_TIMES the characters of its conversation
MOST_TIMES = 4
START = "import sys; sys.path[:] = {path!r}; from megapipe.tokenizers.rendering import serve; serve({seconds})"


class Template:
    """A compiled template. where: what it is, for errors. names: its variables besides the conversation.

    Raises ConfigError if it is not valid Jinja.
    """

    def __init__(self, template: str, names: Mapping[str, str], where: str) -> None:
        self._where = where
        self._process = subprocess.Popen(
            [sys.executable, "-c", START.format(path=sys.path, seconds=MOST_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        weakref.finalize(self, _end, self._process)
        if error := self._answer([template, dict(names)]).get("error"):
            raise ConfigError(f"{where} is not valid Jinja: {error}")

    def text(self, messages: Sequence[Mapping[str, str]], prompt: bool) -> str:
        """Return the text of a conversation, with the beginning of an answer if `prompt`.

        Raises DataError if the template refuses it, ConfigError if the template passes a limit.
        """
        answer = self._answer([list(map(dict, messages)), prompt])
        if error := answer.get("error"):
            raise DataError(f"{self._where} refuses the conversation: {error}")
        return str(answer["text"])

    def _answer(self, request: Any) -> dict[str, str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer: dict[str, str] = json.loads(line) if line else {}
        if not line:
            code = self._process.wait()
            is_late = code == -signal.SIGPROF
            ended = f"takes more than {MOST_SECONDS} s" if is_late else f"ends its process with code {code}"
            answer = {"limit": ended}
        if limit := answer.get("limit"):
            raise ConfigError(f"{self._where} {limit} for one conversation; use another template")
        return answer


def _end(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.kill()
    process.wait()


def serve(seconds: float) -> None:
    """Read a template, then conversations, from standard input, and write a line of JSON for each.

    seconds: the most of the processor that one of them may take; the process ends after it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with contextlib.suppress(ValueError, OSError):  # a lower limit is in force, or the system has none
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    write: Callable[[list[dict[str, str]], bool], str] | None = None
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its default action ends the process
        try:
            if write is None:
                write = compiled(*json.loads(line))
                answer = {}
            else:
                text, most = write(*json.loads(line)), MOST_CHARACTERS + MOST_TIMES * len(line)
                answer = {"text": text} if len(text) <= most else {"limit": f"writes more than {most:,} characters"}
                text.encode("utf-8")
            encoded = json.dumps(answer)
        except UnicodeEncodeError as error:
            found = error.object[error.start]
            text, encoded = "", json.dumps({"limit": f"writes {found!r}, half of a surrogate pair, which is no text,"})
        except MemoryError:
            text, encoded = "", json.dumps({"limit": f"needs more than {MOST_BYTES >> 30} GiB"})
        except Exception as error:
            encoded = json.dumps({"error": _reason(error)})
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(encoded + "\n")
        sys.stdout.flush()


def _reason(error: Exception) -> str:
    from jinja2 import TemplateError, TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno}: {error}"
    return str(error) if isinstance(error, TemplateError) and str(error) else f"{type(error).__name__}: {error}"


def compiled(template: str, names: Mapping[str, str]) -> Callable[[list[dict[str, str]], bool], str]:
    """Compile a template with the names that transformers gives to it. Raises jinja2.TemplateSyntaxError."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Reads transformers' {% generation %} blocks as their content."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's interface

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse  # no strftime_now: the text must not depend on the day
    built = environment.from_string(template)

    def write(messages: list[dict[str, str]], prompt: bool) -> str:
        return built.render(messages=messages, add_generation_prompt=prompt, tools=None, documents=None, **names)

    return write
