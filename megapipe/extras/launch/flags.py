"""torchrun's flags, parsed without torch for `megapipe launch --dry-run`, and the command of each node."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from megapipe.config.fields import nearest
from megapipe.environment import RANKS_PER_GPU, prefixed, read_ranks_per_gpu, value_for_libraries
from megapipe.errors import ConfigError

# the flags of torch.distributed.run in torch 2.13, also with '-' for '_'; a test compares
VALUE_FLAGS = tuple(
    "--nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --max-restarts --monitor-interval "
    "--start-method --event-log-handler --role --log-dir --redirects --tee --local-ranks-filter "
    "--duplicate-stdout-filters --duplicate-stderr-filters --node-rank --master-addr --master-port --local-addr "
    "--logs-specs --numa-binding --signals-to-handle --shutdown-timeout".split()
)
BARE_FLAGS = ("--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank")
SHORT = {"--redirects": "-r", "--tee": "-t", "--module": "-m"}
TORCHRUN_PORT = 29500


@dataclass(frozen=True)
class Launch:
    """The command line of a launch.

    flags: torchrun's that were given, and values of the environment's PET_ variables; '' for those without a value.
    hosts: names of the nodes in the order of their ranks, () if not given.
    """

    flags: Mapping[str, str]
    script: str
    script_arguments: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    slurm: bool = False
    dry_run: bool = False
    gpu_sharing: str | None = None  # --ranks-per-gpu as given

    @property
    def num_nodes(self) -> int:
        """The largest number, if --nnodes is a range."""
        text = self.flags.get("--nnodes", "1")
        if not re.fullmatch(r"\d+(:\d+)?", text) or min(map(int, text.split(":"))) < 1:
            raise ConfigError(f"--nnodes {text}: expected a number of nodes, or MIN:MAX")
        return max(map(int, text.split(":")))

    @property
    def ranks_per_node(self) -> int:
        text = self.flags.get("--nproc-per-node", "1")
        if not text.isdigit():
            why = "depends on the machine it runs on, and a dry run can be on another one"
            raise ConfigError(f"--nproc-per-node {text} {why}: give the number of ranks per node")
        if int(text) < 1:
            raise ConfigError(f"--nproc-per-node {text}: expected at least 1 rank")
        return int(text)

    @property
    def ranks_per_gpu(self) -> int:
        return ranks_per_gpu(self.gpu_sharing, self.ranks_per_node)

    @property
    def is_elastic(self) -> bool:
        return self.flags.get("--rdzv-backend", "static") != "static"

    def on_node(self, node: int) -> list[str]:
        """Return the command of one node. Raises ConfigError if the nodes could not connect."""
        flags = dict(self.flags)
        if self.num_nodes > 1 and not self.is_elastic:
            if not self.hosts and not {"--master-addr", "--rdzv-endpoint"} & set(flags):
                why = f"--nnodes {self.num_nodes} without --master-addr: every node would look for the others on itself"
                raise ConfigError(f"{why}; give the first node's name or address, or all: --hosts node[01-16]")
            flags["--node-rank"] = str(node)
            if "--rdzv-endpoint" not in flags:
                flags = {"--master-addr": self.names[0], "--master-port": str(TORCHRUN_PORT)} | flags
        if self.ranks_per_gpu > 1:
            flags["--ranks-per-gpu"] = str(self.ranks_per_gpu)
        words = [word for flag, value in flags.items() for word in ([flag, value] if value else [flag])]
        return ["megapipe", "launch", *words, self.script, *self.script_arguments]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all nodes: those given, else that of the first and numbers."""
        first = self.flags.get("--master-addr") or self.flags.get("--rdzv-endpoint", "").rpartition(":")[0]
        made_up = [f"node{node}" for node in range(self.num_nodes)]
        return self.hosts or (first or made_up[0], *made_up[1:])


def read_launch(arguments: Sequence[str]) -> Launch:
    """Parse the words after `megapipe launch`. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="megapipe launch", add_help=False)
    for flag in (*VALUE_FLAGS, "--hosts", "--ranks-per-gpu"):
        parser.add_argument(*_spellings(flag), dest=flag)
    for flag in (*BARE_FLAGS, "--dry-run", "--slurm"):
        parser.add_argument(*_spellings(flag), dest=flag, action="store_true")
    parser.add_argument("training_script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    found = vars(parse_refusing(parser, arguments))
    variables = prefixed("PET_")
    flags = {}
    for flag in VALUE_FLAGS:
        value = found[flag] if found[flag] is not None else variables.get(flag[2:].replace("-", "_").upper())
        if value is not None:
            flags[flag] = value
    flags |= {flag: "" for flag in BARE_FLAGS if found[flag]}
    hosts: tuple[str, ...] = ()
    if found["--hosts"] is not None:
        hosts = expand_hosts(found["--hosts"])
        flags = {"--nnodes": str(len(hosts))} | flags
    script, words = found["training_script"], tuple(found["arguments"])
    launch = Launch(flags, script, words, hosts, found["--slurm"], found["--dry-run"], found["--ranks-per-gpu"])
    if hosts and launch.num_nodes != len(hosts):
        raise ConfigError(f"--hosts {found['--hosts']} names {len(hosts)} nodes, but --nnodes is {flags['--nnodes']}")
    return launch


def ranks_per_gpu(flag: str | None, ranks_per_node: int) -> int:
    """Return how many ranks share a GPU: by --ranks-per-gpu, else by the environment's variable. Raises ConfigError."""
    text = (value_for_libraries(RANKS_PER_GPU) or "1") if flag is None else flag
    return read_ranks_per_gpu(text, ranks_per_node)


def parse_refusing(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the launcher's arguments. Raises ConfigError where argparse would print its usage and exit.

    parser: takes torchrun's flags and `training_script`.
    """
    known = [flag for action in parser._actions for flag in action.option_strings]

    def refuse(message: str) -> NoReturn:
        if "training_script" not in message:
            order = "; flags of the script follow its name, as in megapipe launch pretrain --config FILE"
            raise ConfigError(message + order * message.startswith("unrecognized"))
        unknown = next((word for word in arguments if word.startswith("-") and word.partition("=")[0] not in known), "")
        hint = f"{unknown} is not a flag of torchrun{nearest(unknown, known)}" if unknown else "the script is missing"
        raise ConfigError(f"megapipe launch [flags of torchrun] SCRIPT [flags of the script]: {hint}")

    spelled = parser._get_option_tuples

    def one_per_flag(word: str) -> list[Any]:
        """Return the flags that a word abbreviates; two spellings of one flag are not ambiguous."""
        return list({id(found[0]): found for found in spelled(word)}.values())

    parser._get_option_tuples = one_per_flag  # type: ignore[assignment, method-assign]
    parser.error = refuse  # type: ignore[method-assign]
    return parser.parse_args(list(arguments))


def _spellings(flag: str) -> list[str]:
    """Return the short flag if there is one, the flag, and the flag with underscores if that differs."""
    return list(dict.fromkeys((SHORT.get(flag, flag), flag, "--" + flag[2:].replace("-", "_"))))


def expand_hosts(text: str) -> tuple[str, ...]:
    """Expand names as SLURM writes them, or separated by commas or spaces. Raises ConfigError.

    'n[01-03,7],login' is n01 n02 n03 n7 login.
    """
    parts = re.findall(r"(?:[^\s,\[\]]|\[[^\[\]]*\])+", text)
    names = [name for part in parts for name in _expanded(part, text)]
    if not names or set("[]") & set(re.sub(r"\[[^\[\]]*\]", "", text)):
        raise ConfigError(f"--hosts {text}: expected names such as node1,node2 or node[01-16]")
    if len(set(names)) < len(names):
        raise ConfigError(f"--hosts {text}: {next(name for name in names if names.count(name) > 1)} is given twice")
    return tuple(names)


def _expanded(part: str, text: str) -> list[str]:
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if match is None:
        return [part]
    names = []
    for piece in match[2].split(","):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        if ends is None or int(ends[2] or ends[1]) < int(ends[1]):
            raise ConfigError(f"--hosts {text}: {piece!r} is neither a number nor a range such as 01-16")
        for number in range(int(ends[1]), int(ends[2] or ends[1]) + 1):
            names += [f"{match[1]}{number:0{len(ends[1])}d}{rest}" for rest in _expanded(match[3], text)]
    return names
