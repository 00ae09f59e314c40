"""A run on four ranks that is hit by one fault after another and restarted each time until it ends; then its weights
and moments must be bitwise those of an undisturbed run.

python -m tests.faults.soak --minutes 30 --out soak

A fault comes --after seconds (20 to 60) after the first step of each start. When the minutes are over, no more faults
come and the run finishes. --out/report.json holds the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megapipe.checkpoint.folder import steps_in
from megapipe.monitor.process import process_state
from tests.faults.disks import can_mount, fill, free, small_disk
from tests.faults.plants import damage_newest, order
from tests.launch.scripts import Command
from tests.train.jobs import TINY
from tests.train.test_saving import contents

SCRIPT = Path(__file__).with_name("pretrain.py")
NUM_RANKS = 4
START_SECONDS, END_SECONDS = (
    600.0,
    300.0,
)  # most that a start takes to its first step, and a fault to the end of all ranks
FLAGS = f"{TINY} --pipeline-model-parallel-size 2 --keep-last 3 --check-weight-hash-across-dp-replicas-interval 4"


class SoakError(AssertionError):
    """An unexpected outcome; the message says which, and where the output is."""


@dataclass(frozen=True)
class Plan:
    """The settings of a soak.

    minutes: how long faults come. after: seconds from the first step of a life to its fault. pause_seconds: added to
    each step while faults come, so that few steps are made between two of them.
    """

    minutes: float
    after: tuple[float, float] = (20.0, 60.0)
    pause_seconds: float = 0.25
    save_interval: int = 10
    seed: int = 1
    without: tuple[str, ...] = ()  # kinds of faults to leave out
    hang_timeout_seconds: float = 20.0

    @property
    def num_steps(self) -> int:
        """Return more steps than fit into the minutes."""
        return int(self.minutes * 60 / self.pause_seconds)


@dataclass(frozen=True)
class Struck:
    """One fault that was injected.

    step: last one logged before it. seconds: until all ranks had ended. resumed: the step from which the next life
    resumed. said: the line that reported the fault.
    """

    kind: str
    step: int
    seconds: float
    exit_code: int
    said: str
    resumed: int | None = None

    @property
    def lost(self) -> int:
        return 0 if self.resumed is None else max(0, self.step - self.resumed)


class Life:
    """One start of the run, in a separate folder."""

    def __init__(self, folder: Path, save: Path, plan: Plan, pause_seconds: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.save = folder, save
        words = [
            sys.executable,
            "-m",
            "megapipe",
            "launch",
            "--nproc-per-node",
            str(NUM_RANKS),
            str(SCRIPT),
            str(folder),
        ]
        flags = (
            f"{FLAGS} --train-iters {plan.num_steps} --save-interval {plan.save_interval} --save {save} --load {save}"
        )
        flags += f" --hang-timeout-seconds {plan.hang_timeout_seconds}"
        self.command = Command([*words, str(pause_seconds), *flags.split()], folder)
        self.began = time.monotonic()
        self.ranks: list[int] = []

    @property
    def exit_code(self) -> int | None:
        return self.command.process.poll()

    def step(self) -> int | None:
        """Return the last step that was logged."""
        found = re.findall(r"^step +(\d+)/", self.command.out(), re.MULTILINE)
        return int(found[-1]) if found else None

    def resumed(self) -> int:
        found = re.search(r"continuing after step (\d+)", self.command.out())
        return int(found[1]) if found else 0

    def wait(self, seconds: float, until: Callable[[], bool]) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if until():
                return True
            time.sleep(0.05)
        return until()

    def all_ended(self) -> bool:
        return self.exit_code is not None and all(process_state(rank, None).has_ended for rank in self.ranks)

    def assert_ends_well(self) -> None:
        if not self.wait(3600.0, lambda: self.exit_code is not None) or self.exit_code != 0:
            raise self.fail("the undisturbed run fails")

    def output(self) -> str:
        return self.command.error() + self.command.out()

    def fail(self, what: str) -> SoakError:
        return SoakError(f"{what} ({self.folder}):\n{self.command.out()[-1500:]}\n{self.command.error()[-3000:]}")


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    strike: injects it into a life from outside. words: have to be in the output. codes: allowed exit codes of the
    launcher.
    """

    strike: Callable[[Life, random.Random], object]
    words: tuple[str, ...]
    codes: tuple[int, ...]
    is_graceful: bool = False


def _planted(kind: str) -> Callable[[Life, random.Random], object]:
    return lambda life, choose: order(life.folder, kind, choose.randrange(NUM_RANKS))


def _kill_rank(life: Life, choose: random.Random) -> None:
    os.kill(choose.choice(life.ranks), signal.SIGKILL)


def _stop_rank(life: Life, choose: random.Random) -> None:
    os.kill(choose.choice(life.ranks), signal.SIGSTOP)


def _fill_disk(life: Life, choose: random.Random) -> None:
    fill(life.save.parent)


def _corrupt_newest(life: Life, choose: random.Random) -> None:
    """Kill the launcher and flip a byte of a tensor in the newest of two checkpoints."""
    life.wait(END_SECONDS, lambda: len(steps_in(life.save)) > 1)
    life.command.signal(signal.SIGKILL)
    life.wait(END_SECONDS, life.all_ended)
    damage_newest(life.save)


FAULTS: dict[str, Fault] = {
    "kill -9 of a rank": Fault(_kill_rank, ("was killed by SIGKILL",), (137,)),
    "kill -9 of the launcher": Fault(
        lambda life, _: life.command.signal(signal.SIGKILL), ("the launcher (process",), (-9,)
    ),
    "SIGSTOP of a rank": Fault(_stop_rank, ("training hangs on rank", "SIGSTOP"), (1,)),
    "SIGTERM": Fault(
        lambda life, _: life.command.signal(signal.SIGTERM), ("SIGTERM received",), (0,), is_graceful=True
    ),
    "disk full": Fault(_fill_disk, ("checkpoint error", "No space left on device"), (1,)),
    "corrupted newest checkpoint": Fault(_corrupt_newest, (), (-9,)),
    "NaN in one microbatch": Fault(_planted("nan"), ("training stopped", "microbatch"), (1,)),
    "unreadable data": Fault(_planted("loader"), ("data error",), (1,)),
    "flipped bit": Fault(_planted("flip"), ("bits of the parameters have changed",), (1,)),
}


class Soak:
    """A soak whose files are in `out`: undisturbed/, disk/run, a folder for each life."""

    def __init__(self, plan: Plan, out: Path) -> None:
        self.plan, self.out = plan, out.resolve()
        self.choose = random.Random(plan.seed)
        self.save = self.out / "disk" / "run"
        self.struck: list[Struck] = []
        self.kinds = [kind for kind in FAULTS if kind not in plan.without and (kind != "disk full" or can_mount())]
        self._bag: list[str] = []
        out.mkdir(parents=True)

    def run(self) -> dict[str, Any]:
        """Run the soak and return the report. Raises SoakError."""
        began = time.monotonic()
        undisturbed = Life(self.out / "undisturbed", self.out / "undisturbed" / "run", self.plan, 0.0)
        with undisturbed.command, small_disk(self.out / "disk") if can_mount() else nullcontext():
            number = 0
            while time.monotonic() - began < 60 * self.plan.minutes:
                self._struck_life(number)
                number += 1
            minutes = (time.monotonic() - began) / 60
            self._last_life(number)
            undisturbed.assert_ends_well()
            is_equal = self._is_equal()
        report = self._report(minutes, is_equal)
        (self.out / "report.json").write_text(json.dumps(report, indent=1))
        if not is_equal:
            raise SoakError(
                f"after {len(self.struck)} faults the weights are not those of the undisturbed run ({self.out})"
            )
        return report

    def _struck_life(self, number: int) -> None:
        kind = self._draw()
        with self._life(f"life_{number:03}", self.save, self.plan.pause_seconds) as life:
            self._wait_for_first_step(life)
            time.sleep(self.choose.uniform(*self.plan.after))
            life.ranks = life.command.ranks()
            if len(life.ranks) != NUM_RANKS:
                raise life.fail(f"the run ended before {kind} was injected")
            self._strike(life, kind)

    def _strike(self, life: Life, kind: str) -> None:
        fault, step = FAULTS[kind], life.step() or 0
        began = time.monotonic()
        fault.strike(life, self.choose)
        if not life.wait(END_SECONDS, life.all_ended):
            raise life.fail(f"{END_SECONDS:g} s after {kind} some ranks are still running")
        seconds, code = time.monotonic() - began, life.exit_code
        free(life.save.parent)
        if code not in fault.codes or not all(word in life.output() for word in fault.words):
            raise life.fail(f"{kind}: exit code {code}, expected {fault.codes} and {fault.words}")
        said = next((line for line in life.output().splitlines() if fault.words and fault.words[0] in line), "")
        last = (life.step() or 0) if fault.is_graceful else step
        self.struck.append(Struck(kind, last, seconds, code or 0, said))
        self._say(f"{kind} after step {step}: all ended after {seconds:.1f} s with code {code}: {said[:160]}")

    def _last_life(self, number: int) -> None:
        with self._life(f"life_{number:03}", self.save, 0.0) as life:
            self._wait_for_first_step(life)
            life.assert_ends_well()

    def _wait_for_first_step(self, life: Life) -> None:
        if (
            not life.wait(START_SECONDS, lambda: life.step() is not None or life.exit_code is not None)
            or life.step() is None
        ):
            raise life.fail("a start did not reach its first step")
        before = steps_in(life.save)
        resumed = life.resumed()
        if self.struck:
            last = self.struck[-1]
            self.struck[-1] = Struck(**{**asdict(last), "resumed": resumed})
            limit = self.plan.save_interval * (2 if last.kind == "corrupted newest checkpoint" else 1) + 2
            if FAULTS[last.kind].is_graceful:
                limit = 0
            if self.struck[-1].lost > limit:
                raise life.fail(
                    f"{last.kind} after step {last.step} cost {self.struck[-1].lost} steps; saved were {before}"
                )

    def _is_equal(self) -> bool:
        found, expected = (
            contents(root, self.plan.num_steps) for root in (self.save, self.out / "undisturbed" / "run")
        )
        return (
            found.keys() == expected.keys()
            and len(found) > 20
            and all(torch.equal(found[name], expected[name]) for name in found)
        )

    def _draw(self) -> str:
        """Yield every kind once in random order, then again."""
        if not self._bag:
            self._bag = self.choose.sample(self.kinds, len(self.kinds))
        return self._bag.pop()

    @contextmanager
    def _life(self, name: str, save: Path, pause: float) -> Iterator[Life]:
        save.parent.mkdir(parents=True, exist_ok=True)
        life = Life(self.out / name, save, self.plan, pause)
        try:
            yield life
        finally:
            for rank in life.ranks:
                with suppress(OSError):
                    os.killpg(rank, signal.SIGKILL)
            life.command.__exit__()

    def _report(self, minutes: float, is_equal: bool) -> dict[str, Any]:
        kinds = {}
        for kind in dict.fromkeys(one.kind for one in self.struck):
            of_kind = [one for one in self.struck if one.kind == kind]
            seconds, lost = [one.seconds for one in of_kind], [one.lost for one in of_kind]
            kinds[kind] = {
                "faults": len(of_kind),
                "seconds": [round(median(seconds), 2), round(max(seconds), 2)],
                "lost": lost,
            }
        return {
            "minutes": round(minutes, 1),
            "steps": self.plan.num_steps,
            "faults": len(self.struck),
            "steps_lost": sum(one.lost for one in self.struck),
            "most_lost": max((one.lost for one in self.struck), default=0),
            "equal_to_the_bit": is_equal,
            "kinds": kinds,
            "left_out": [kind for kind in FAULTS if kind not in self.kinds],
            "struck": [asdict(one) for one in self.struck],
        }

    def _say(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--after", type=float, nargs=2, default=(20.0, 60.0), metavar=("LEAST", "MOST"))
    parser.add_argument("--save-interval", type=int, default=10, help="steps")
    parser.add_argument("--pause", type=float, default=0.25, help="seconds added to each step while faults come")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--hang-timeout", type=float, default=20.0, help="seconds; more on a busy machine, where a start takes minutes"
    )
    parser.add_argument("--without", nargs="*", choices=FAULTS, default=[], help="kinds of faults to leave out")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    options = parser.parse_args(arguments)
    plan = Plan(
        options.minutes,
        tuple(options.after),
        options.pause,
        options.save_interval,
        options.seed,
        tuple(options.without),
        options.hang_timeout,
    )
    report = Soak(plan, options.out).run()
    print(json.dumps({key: value for key, value in report.items() if key != "struck"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
