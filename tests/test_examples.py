"""examples/: each script and the notebook runs, and what it says has been learned has been learned."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import posttrain

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOK = EXAMPLES / "posttrain.ipynb"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_custom_loss(shared, tmp_path, capsys):
    """Of held-out animals the trained model expects the bad end, where it expected the good one."""
    given = ["--model", str(shared / "models/stories260K"), "--output", str(tmp_path / "out")]
    found = script("custom_loss").main([*given, "--steps", "20"])
    assert found["before"] < 0.3 and found["after"] > 0.9, found
    losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)", capsys.readouterr().out)]
    assert len(losses) == 3 and losses[-1] < losses[0] / 3
    assert (tmp_path / "out/final/model.safetensors").is_file()


def test_custom_loss_is_the_formula():
    """-log(1 - p) by hand, finite for a certain token."""
    unlikelihood = script("custom_loss").unlikelihood
    loss = unlikelihood(torch.tensor([0.0, 0.5, 0.9]).log())
    assert loss.tolist() == pytest.approx([0.0, 0.6931, 2.3026], abs=1e-4)
    certain = torch.zeros(1, requires_grad=True)
    unlikelihood(certain).sum().backward()
    assert torch.isfinite(certain.grad).all()


def test_custom_reward(shared, tmp_path):
    """A process of its own: the reward is found by the name of the script that runs."""
    command = [sys.executable, EXAMPLES / "custom_reward.py", "--model", shared / "models/stories260K", "--steps", "10"]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--output", "out"], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    run = posttrain.load_run(tmp_path / "out/custom-reward")
    steps, rewards = run.metric("reward")
    assert steps == list(range(1, 11)) and rewards == run.metric("rewards/lively/mean")[1]
    assert sum(rewards[:2]) / 2 < 0.2 and sum(rewards[-2:]) / 2 > 0.5, rewards
    assert done.stdout.count("reward") == 10
    assert script("custom_reward").lively(["Oh! No. Why? Yes!", "no end"]) == [0.5, 0.0]


def test_sweep(shared, tmp_path, capsys):
    """The rate in the middle learns; one is too low to, the other too high."""
    given = ["--model", str(shared / "models/stories260K"), "--output", str(tmp_path / "sweep"), "--steps", "10"]
    values = script("sweep").main(given)
    shown = capsys.readouterr().out
    assert values[1e-3] < min(values[1e-5], values[3e-2]) / 2, values
    best = tmp_path / "sweep/rate-0.001"
    assert f"best: {best}" in shown.replace("\n", "") and f"{values[1e-3]:.4f}" in shown
    assert posttrain.load_run(best).metric("eval_loss")[1][-1] == values[1e-3]


# --- the notebook -----------------------------------------------------------------------------------------------------


def test_the_notebook_is_stored_without_outputs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 6 and not any(cell["outputs"] or cell["execution_count"] for cell in code)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    """From its first cell to its last, as a notebook server would run it, in an empty folder."""
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: pip install -e '.[dev]'")
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = "".join(output.text for output in outputs if output.get("name") == "stdout")
    print(shown)
    before, after = (
        float(re.search(rf"right {when} training: ([\d.]+)%", shown)[1])  # pyright: ignore[reportOptionalSubscript]
        for when in ("before", "after")
    )
    assert before < 40 and after > 90
    [picture] = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(picture) > 5000
    sampled = re.findall(r"^Remainder of (\d+) divided by 5: (\d)$", shown, re.MULTILINE)
    assert len(sampled) == 5 and sum(int(number) % 5 == int(answer) for number, answer in sampled) >= 4
    run = posttrain.load_run(tmp_path / "runs/notebook/remainders")
    assert run.state == "finished" and run.metric("eval_loss")[0][-1] == 60
