"""The examples for clusters: well-formed, and their commands are what `posttrain launch` understands."""

import os
import shlex
import subprocess
from inspect import signature
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from posttrain.cli.train import launch

CLUSTER = Path(__file__).parents[1] / "examples/cluster"


OWN = set(signature(launch).parameters) - {"config", "overrides", "options", "flags"}
OPTIONS = {f"--{name.replace('_', '-')}" for name in OWN}


def understood(command: list[str]) -> dict[str, str]:
    """The options of `posttrain launch` in a command that says where a process runs, with their values."""
    return {option: value for option, value in pairwise(command) if option in OPTIONS}


@pytest.fixture
def slurm(tmp_path) -> dict[str, str]:
    """An environment with SLURM's variables on its second machine, and its commands; posttrain prints its arguments."""
    commands = {
        "scontrol": "echo node-a; echo node-b",
        "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
        "posttrain": 'printf "%s\\n" "$@"',
    }
    for name, script in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    own = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_GPUS_ON_NODE": "8", "SLURM_NNODES": "2"}
    return os.environ | own | {"SLURM_NODEID": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_slurm_starts_every_machine_with_its_number_and_resumes_a_job_that_is_queued_again(slurm, tmp_path):
    def run() -> list[str]:
        script = ["bash", str(CLUSTER / "slurm.sh"), "sft.yaml"]
        return subprocess.run(
            script, env=slurm, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.split()

    command = run()
    assert command[:4] == ["launch", "sft.yaml", "--name", "run-17"]
    assert understood(command) == {"--nproc": "8", "--nodes": "2", "--node-rank": "1", "--address": "node-a:29500"}
    (tmp_path / "runs/run-17").mkdir(parents=True)
    (tmp_path / "runs/run-17/run.json").write_text("{}")
    assert run()[:3] == ["launch", "--resume", "runs/run-17"]


def test_slurms_directives_come_before_the_first_command():
    lines = (CLUSTER / "slurm.sh").read_text().splitlines()
    directives = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert len(directives) >= 7 and max(directives) < first


def test_kubernetes_starts_as_many_pods_as_the_command_says():
    service, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {
        "job-name": job["metadata"]["name"]
    }
    assert pod["subdomain"] == service["metadata"]["name"]
    options = understood(shlex.split(container["command"][2]))
    assert options["--nodes"] == str(spec["completions"]) and options["--node-rank"] == "$JOB_COMPLETION_INDEX"
    assert options["--nproc"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    assert options["--address"] == f"{job['metadata']['name']}-0.{pod['subdomain']}:29500"
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
