"""The reader of launch scripts: it follows what bash would do and executes nothing."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megapipe.errors import ConfigError
from megapipe.extras.migrate.shell_script import CLOSE, OPEN, Call, read_script, shown
from tests.tables import rows, value


def call(script: str, *arguments: str) -> Call:
    """Return the only call of a script."""
    (found,) = read_script(script, "run.sh", arguments).calls
    return found


def arguments(script: str, *words: str) -> list[str]:
    """Return the arguments of the only call of a script, placeholders as written."""
    return [shown(word) for word in call(script, *words).arguments]


def in_bash(script: str, *words: str) -> list[str]:
    """Return what bash passes to the command that the script calls, with no environment."""
    show = 'torchrun() { shift; [ $# -eq 0 ] || printf "%s\\0" "$@"; }\nexport -f torchrun\n'
    command = ["bash", "--noprofile", "--norc", "-c", show + script, "run.sh", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=20, env={"PATH": "/usr/bin:/bin"})
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split("\0")[:-1]


TABLE = rows(Path(__file__).with_name("shell_scripts.tsv"))
LIKE_BASH = {name: value(script) for kind, script, name in TABLE if kind == "like bash"}


@pytest.mark.parametrize("script", LIKE_BASH.values(), ids=LIKE_BASH)
def test_the_arguments_are_those_of_bash(script: str) -> None:
    script = script.replace("RUN", "torchrun pretrain_gpt.py")
    assert arguments(script) == in_bash(script.replace("\r\n", "\n"))


def test_positional_arguments_are_those_of_bash() -> None:
    script = 'A=$1 B=${2:-two} N=$#\ntorchrun pretrain_gpt.py $A $B $N $1 ${3:-none} "$@"'
    for words in (["a", "b c", "d"], ["a", "b"]):
        assert arguments(script, *words) == in_bash(script, *words)


NAMES = st.sampled_from(["A", "B", "C"])
TEXTS = st.text(alphabet="ab 1'\"$\\#(){}*;&|<>~=\t", max_size=8)


@st.composite
def scripts(draw: st.DrawFn) -> str:
    """Draw a script of assignments, appends, conditions and expansions, all of which bash knows."""
    lines = ["A=1", "B='b b'", "C=(x 'y z')"]
    for _ in range(draw(st.integers(1, 6))):
        name, text = draw(NAMES), shlex.quote(draw(TEXTS))
        other = draw(st.sampled_from(["$A", '"$B"', '"${C[@]}"', "${A:-d}", "$((2*3))", '"${B%b}"', "${Z:-$A}"]))
        lines.append(
            draw(
                st.sampled_from(
                    [
                        f"{name}={text}",
                        f"{name}+={text}",
                        f"C+=({text} {other})",
                        f"if [ {text} = {other} ]; then A=same; else A=other; fi" if "[@]" not in other else "B=3",
                        f'A="{other.strip(chr(34))} x"' if "[@]" not in other else "A=2",
                    ]
                )
            )
        )
    return "\n".join([*lines, 'torchrun pretrain_gpt.py "$A" $B "${C[@]}" ${C[0]}'])


@settings(max_examples=40, deadline=None)
@given(scripts())
@example("A='*'\ntorchrun pretrain_gpt.py \"$A\"")
def test_any_script_of_known_parts_gives_the_words_of_bash(script: str) -> None:
    # bash expands * in unquoted words by the files of its folder, which is not followed
    expected = in_bash("set -f\n" + script)
    assert arguments(script) == expected


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abXif thenfi;&|()<>{}[]$`'\"\\\n#=+-*/%!0 9\ue000\ue001@", max_size=60))
@example("if [ 1 ]; then\n" * 40)
@example("${" * 500)
@example("$(" * 5000)
@example("x=$((" + "(" * 5000)
@example("a() { a; }; a")
@example("X=aa; " + 'X="$X$X"; ' * 40)
@example("case x in")
@example("for a in b; do")
@example("cat <<")
@example(";;&")
@example("&>a")
@example("[[ |")
@example("A=1 [[")
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    message = ""
    try:
        read_script(text)
    except ConfigError as error:
        message = str(error)
    assert "\n" not in message


def test_nothing_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    script = f"""
        touch {mark}
        A=$(touch {mark}; echo 1)
        B=`touch {mark}`
        cat <(touch {mark}) > {mark}
        eval "touch {mark}"
        bash -c 'touch {mark}'
        trap 'touch {mark}' EXIT
        [ -f {mark} ] || touch {mark}
        X=${{Y:-$(touch {mark})}}
        python -c 'open("{mark}", "w")'
        echo $(( Q[$(touch {mark})] ))
        torchrun pretrain_gpt.py --save $A --load "$B" $(touch {mark})
    """
    found = arguments(script)
    assert not mark.exists() and not list(tmp_path.iterdir())
    assert found == ["--save", f"$(touch {mark}; echo 1)", "--load", f"$(touch {mark})", f"$(touch {mark})"]


def test_what_only_a_run_would_tell_stays_a_placeholder() -> None:
    script = (
        "N=$(nvidia-smi -L | wc -l)\nW=$((N*2))\nD=/data/$USER/x\n"
        'torchrun pretrain_gpt.py --a $N --b $W --c $D/y --d "$HOME" --e ${F:?} --g $UNSET'
    )
    reading = read_script(script)
    words = [shown(word) for word in reading.calls[0].arguments]
    assert words[1::2] == ["$(nvidia-smi -L | wc -l)", "$((N*2))", "/data/$USER/x/y", "$HOME", "${F:?}", "$UNSET"]


def test_conditions_that_decide_are_named_with_their_outcome() -> None:
    script = (
        'if [ -d /data ]; then D=/data; else D=/tmp; fi\nif [ -n "$KEY" ]; then D=$D/key; fi\n'
        "if [ 1 = 1 ]; then UNUSED=1; fi; if [[ x == 'a*' ]]; then L=7; fi\n"
        "if [ 2 -gt 1 ]; then L=3; fi\nwhile read x; do L=$L$x; done\n"
        "torchrun pretrain_gpt.py --load $D --num-layers $L"
    )
    reading = read_script(script)
    (found,) = reading.calls
    assert [shown(word) for word in found.arguments] == ["--load", "/tmp", "--num-layers", "$L"]
    told = [(each.line, each.outcome) for each in reading.decisions if each.names & found.names]
    assert told == [
        (1, "not taken: it depends on running the script"),
        (2, "not taken: $KEY is not set in the script"),
        (3, "not taken: it depends on running the script"),
        (4, "taken"),
        (5, "skipped: it depends on running it"),
    ]


LAUNCHED = {
    "srun and bash -c": 'CMD="python pretrain_gpt.py --lr 1"\nsrun -l bash -c "RANK=\\$SLURM_PROCID numactl $CMD"',
    "srun with exported variables": "export L='torchrun --nnodes 2' C='x/pretrain_gpt.py --lr 1'\nsrun bash -c '$L $C'",
    "exec": "exec torchrun /m/pretrain_gpt.py --lr 1",
    "singularity": "srun singularity exec -B /a:/a image.sif ./launch.sh pretrain_gpt.py --lr 1 > log",
    "tee": "python -m torch.distributed.launch pretrain_gpt.py --lr 1 2>&1 | tee log",
    "after cd": "cd /x && torchrun pretrain_gpt.py --lr 1",
    "in the background": "torchrun pretrain_gpt.py --lr 1 &\nwait",
    "an array of words": 'C=(torchrun pretrain_gpt.py --lr 1)\n"${C[@]}"',
    "in a function with an exit before": "main() { torchrun pretrain_gpt.py --lr 1; }\n[ -f x ] || exit 1\nmain",
}


@pytest.mark.parametrize("script", LAUNCHED.values(), ids=LAUNCHED)
def test_the_call_is_found(script: str) -> None:
    assert arguments(script) == ["--lr", "1"]


def test_a_command_that_only_names_the_script_is_no_call() -> None:
    script = 'P=pretrain_gpt.py\nif [ ! -f "$P" ]; then echo "$P is missing"; fi\ncp $P /tmp\necho "torchrun $P"\n'
    assert read_script(script).calls == []


def test_variables_of_slurm_come_from_the_head_of_the_script() -> None:
    head = "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node 8 # ranks\n"
    assert arguments(f"{head}srun python pretrain_gpt.py $SLURM_NNODES $SLURM_NTASKS") == ["4", "32"]


@pytest.mark.parametrize(
    ("script", "line", "what"),
    [
        ("A=1\nB='x\n", 2, "a ' is not closed"),
        ('torchrun "x', 1, 'a " is not closed'),
        ("\n\nif true; then A=1\n", 3, "fi is missing"),
        ("A=(1 2", 1, "a ( is not closed"),
        ("echo ${A", 1, "a ${ is not closed"),
        ("A=1\n)\n", 2, "')' begins no command"),
        ("A=1\neval '$('", 2, "a $( is not closed; "),
    ],
    ids=["single quote", "double quote", "if", "array", "brace", "parenthesis", "eval"],
)
def test_a_broken_script_is_refused_with_its_line(script: str, line: int, what: str) -> None:
    with pytest.raises(ConfigError, match=rf"^line {line}: ") as refused:
        read_script(script)
    assert what in str(refused.value)


REFUSED = {value(script): said for kind, script, said in TABLE if kind == "refused"}


@pytest.mark.parametrize("script", REFUSED)
def test_what_is_not_read_is_refused_with_its_line_and_a_way_out(script: str) -> None:
    line = 2 + script.startswith("K=L")
    with pytest.raises(ConfigError) as refused:
        read_script(f"L=0\n{script}\ntorchrun pretrain_gpt.py --num-layers $L")
    way_out = "run the script with echo in front of its launcher and give the command that it prints"
    assert str(refused.value) == f"line {line}: {REFUSED[script]}; {way_out}: megapipe migrate COMMAND"


UNKNOWN = {name: word for kind, word, name in TABLE if kind == "unknown"}


@pytest.mark.parametrize("word", UNKNOWN.values(), ids=UNKNOWN)
def test_a_value_that_is_not_read_stays_unknown(word: str) -> None:
    values = call(f"A=bcd B=1 C=(1)\nX={word if word[0] == '$' else 1}\ntorchrun pretrain_gpt.py $X {word}").arguments
    assert values[1] == f"{OPEN}{word}{CLOSE}"
    assert values[0] == (values[1] if word[0] == "$" else "1")


def test_what_a_command_reads_is_unknown_and_what_another_loop_assigns_too() -> None:
    script = (
        "A=1 B=2 C=3 D=4\nread -r A\nreadarray -t B < <(ls)\nIFS=, mapfile C <<< 1\n"
        "for i in $(ls); do D=$i; done\ntorchrun pretrain_gpt.py $A $B $C $D"
    )
    reading = read_script(script)
    assert reading.calls[0].arguments == tuple(f"{OPEN}${name}{CLOSE}" for name in "ABCD")
    assert [each.outcome for each in reading.decisions] == ["skipped: it depends on running it"]


def test_a_job_in_a_here_document_starts_what_its_variables_hold() -> None:
    script = r"""
        CMD="python pretrain_gpt.py --num-layers 4"
        sbatch <<EOF
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
srun bash -c \\\${CMD}
EOF
    """
    reading = read_script(script)
    (found,) = reading.calls
    assert (found.launcher, found.arguments, found.line) == (("python",), ("--num-layers", "4"), 6)
    assert reading.variables["SLURM_NTASKS"] == ["16"]


@pytest.mark.parametrize(
    ("script", "note"),
    [
        ("CMD='torchrun pretrain_gpt.py --a 1'\necho $CMD", "$CMD is taken as a command that the script runs"),
        ("ssh host 'cd x; torchrun pretrain_gpt.py --a 1'", ""),
        ("cat > run.sh <<'EOF'\ntorchrun pretrain_gpt.py --a 1\nEOF\nsbatch run.sh", ""),
    ],
    ids=["a variable", "another host", "a file"],
)
def test_a_command_in_a_text_is_found(script: str, note: str) -> None:
    reading = read_script(script)
    assert [call.arguments for call in reading.calls] == [("--a", "1")]
    assert reading.notes == ([note] if note else [])


def test_a_text_that_is_no_script_is_noted() -> None:
    reading = read_script("python - <<EOF\nopen('pretrain_gpt.py ')\nEOF\npython -c 'f(pretrain_gpt.py )'")
    assert not reading.calls
    assert [note.split(": ")[:2] for note in reading.notes] == [
        ["a text in the script is not read", f"line {line}"] for line in (2, 4)
    ]


def test_conditions_before_an_eval_are_named() -> None:
    script = 'if [ -z "$TP" ]; then TP=2; fi\nfor x in $MORE; do TP=3; done\nrun="RUN $TP"\neval $run'
    reading = read_script(script.replace("RUN", "torchrun pretrain_gpt.py"))
    (found,) = reading.calls
    assert found.arguments == ("2",)
    assert [each.outcome for each in reading.decisions if each.names & found.names] == [
        "taken: $TP is not set in the script",
        "followed for 0 words: $MORE is not set in the script",
    ]
