"""Dockerfile, Kubernetes, torchx and SLURM arrays, as far as they can be tried on one machine without a daemon."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.comm.test_bootstrap import free_port
from tests.docs_commands import plan_run
from tests.launch.scripts import REPOSITORY, environment
from tests.tiny import TINY_FLAGS

LAUNCH = REPOSITORY / "launch"
JOB = [*TINY_FLAGS, "--mock-data", "--global-batch-size", "4", "--train-iters", "2"]


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile and their arguments, in order."""
    text = (LAUNCH / "docker" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines]


def test_the_dockerfile_copies_what_the_repository_has_and_takes_base_and_torch_as_arguments() -> None:
    found = instructions()
    copied = [source for name, rest in found if name == "COPY" for source in rest.split()[:-1]]
    assert copied and all((REPOSITORY / source).exists() for source in copied)
    arguments = dict(rest.split("=", 1) for name, rest in found if name == "ARG")
    assert set(arguments) == {"BASE", "TORCH_INDEX"} and ("FROM", "${BASE}") in found
    assert ("ENTRYPOINT", '["megapipe"]') in found


def test_the_image_has_the_extras_that_its_commands_ask_for() -> None:
    (installed,) = re.findall(r"install .*'\.\[(.*)\]'", "\n".join(rest for _, rest in instructions()))
    calls = "\n".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "megapipe").rglob("*.py"))
    asked = set(re.findall(r'optional_package\([^\n]*"(\w+)"\)', calls))
    assert "tokenizers" in asked  # by the quickstart
    assert asked - set(installed.split(",")) == {"transformers"}  # for tokenizers that others trained


@dataclass(frozen=True)
class Pods:
    """The pods of a Kubernetes job as its operator makes them. of_node: the variables of a node, by the operator."""

    specs: list[dict[str, Any]]
    arguments: list[str]
    ranks_of_node: int
    gpus_of_node: int
    of_node: Callable[[int, int], dict[str, str]]  # from the rank of the node and a port


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((LAUNCH / "kubernetes" / name).read_text(encoding="utf-8")))


def pytorchjob() -> Pods:
    """Return the pods of the PyTorchJob: the master's, then the worker's."""
    (job,) = documents("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert list(replicas) == ["Master", "Worker"] and replicas["Master"]["replicas"] == 1
    specs = [replica["template"]["spec"] for replica in replicas.values()]
    (container,) = specs[0]["containers"]
    assert container["name"] == "pytorch" and container["ports"][0]["name"] == "pytorchjob-port"
    ranks = next(word for word in container["args"] if word.startswith("--nproc-per-node="))
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]

    def of_node(rank: int, port: int) -> dict[str, str]:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}

    return Pods(specs, container["args"], int(ranks.partition("=")[2]), gpus, of_node)


def trainjob() -> Pods:
    """Return the pods of the TrainJob in its TrainingRuntime."""
    runtime, job = documents("trainjob.yaml")
    assert {runtime["apiVersion"], job["apiVersion"]} == {"trainer.kubeflow.org/v1alpha1"}
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"] == "TrainingRuntime"
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] and "torch" in runtime["spec"]["mlPolicy"]
    trainer, (node,) = job["spec"]["trainer"], runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    spec = node["template"]["spec"]["template"]["spec"]
    assert node["name"] == spec["containers"][0]["name"] == "node"
    gpus = trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]

    def of_node(rank: int, port: int) -> dict[str, str]:
        meeting = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port), "PET_NODE_RANK": str(rank)}
        return {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": "1", **meeting}

    return Pods([spec] * trainer["numNodes"], trainer["args"], trainer["numProcPerNode"], gpus, of_node)


JOBS = pytest.mark.parametrize("pods", [pytorchjob, trainjob], ids=["PyTorchJob", "TrainJob"])


@JOBS
def test_a_kubernetes_job_starts_a_rank_for_each_gpu_and_mounts_its_volumes(pods: Callable[[], Pods]) -> None:
    found = pods()
    assert found.ranks_of_node == found.gpus_of_node and len(found.specs) == 2
    for spec in found.specs:
        (container,) = spec["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}


@JOBS
def test_a_kubernetes_job_does_not_start_before_its_image_is_set(pods: Callable[[], Pods]) -> None:
    """Kubernetes takes no capital letters in the name of an image, so what is forgotten is named by the pod."""
    assert {spec["containers"][0]["image"] for spec in pods().specs} == {"SET_THE_IMAGE"}


@JOBS
def test_a_kubernetes_job_is_complete(pods: Callable[[], Pods]) -> None:
    found = pods()
    words = found.arguments[found.arguments.index("pretrain") + 1 :]
    world = found.ranks_of_node * len(found.specs)
    plan_run(words, world, found.ranks_of_node)


def test_the_trainjob_has_only_fields_of_its_schema() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    kinds = {"TrainingRuntime": models.TrainerV1alpha1TrainingRuntime, "TrainJob": models.TrainerV1alpha1TrainJob}
    for document in documents("trainjob.yaml"):
        read = kinds[document["kind"]].from_dict(document)
        assert read is not None and json.loads(json.dumps(read.to_dict(), default=str)) == document


@JOBS
def test_the_containers_of_a_kubernetes_job_train_together_with_what_the_operator_sets(
    pods: Callable[[], Pods], tmp_path: Path
) -> None:
    port, found = free_port(), pods()
    processes = []
    for rank in range(len(found.specs)):
        operator = found.of_node(rank, port) | {"PYTHONUNBUFFERED": "0"}
        words = found.arguments
        for name, value in operator.items():  # as the kubelet does
            words = [word.replace(f"$({name})", value) for word in words]
        words = [word.replace("--nproc-per-node=8", "--nproc-per-node=1") for word in words]
        words = [*words[: words.index("pretrain") + 1], *JOB, "--pipeline-model-parallel-size", "2"]
        command = [sys.executable, "-m", "megapipe", *words]
        processes.append(
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env=environment() | operator,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = [process.communicate(timeout=280) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    assert "step 2/2 |" in ended[0][0] and "pp 2" in ended[0][0]


def test_the_torchx_component_starts_the_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torchx")
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin" / "megapipe"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m megapipe "$@"\n')
    wrapper.chmod(0o755)
    component = f"{LAUNCH / 'torchx' / 'megapipe_pretrain.py'}:pretrain"
    own = ["--ranks_per_node", "2", "--image", str(tmp_path)]
    words = ["run", "-s", "local_cwd", "--wait", component, *own, "--", *JOB, "--save", str(tmp_path / "run")]
    words += ["--pipeline-model-parallel-size", "2"]
    variables = environment() | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-m", "torchx.cli.main", *words],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["step"] == 2


def sweep(folder: Path, task: str | None, *words: str) -> subprocess.CompletedProcess[str]:
    """Run sweep.sbatch with a job script that prints its arguments and the folder of its logs."""
    script = folder / "megapipe" / "extras" / "launch" / "slurm" / "pretrain.sbatch"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text('printf "%s\\n" "$LOG_FOLDER" "$@"\n')
    variables = os.environ | {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "7"}
    variables |= {} if task is None else {"SLURM_ARRAY_TASK_ID": task}
    command = ["bash", str(LAUNCH / "slurm" / "sweep.sbatch"), *words]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)


def test_a_task_of_a_sweep_trains_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "sweep.txt").write_text("lr1 --lr 1e-4\nlr2 --lr 2e-4 --clip-grad 0.5\n../up --lr 1\n")
    ended = sweep(tmp_path, "2", "sweep.txt", "--config", "a b.yaml")
    assert ended.stdout.splitlines() == [
        f"{tmp_path}/logs/lr2-7",
        *["--lr", "2e-4", "--clip-grad", "0.5", "--config", "a b.yaml", "--save", "runs/lr2", "--load", "runs/lr2"],
    ]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("3", "line 3 begins with ../up, which is no name for a run"),
        ("4", "sweep.txt has no line 4"),
        (None, "--array=1-3"),
    ],
    ids=["path", "line", "no array"],
)
def test_a_sweep_without_a_usable_line_is_refused(task: str | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.txt").write_text("lr1 --lr 1e-4\nlr2 --lr 2e-4\n../up --lr 1\n")
    ended = sweep(tmp_path, task, "sweep.txt")
    assert ended.returncode == 2 and message in ended.stderr and ended.stdout == ""
