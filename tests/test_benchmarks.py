"""The benchmarks' own code at a size for tests: what they patch and measure in posttrain is still there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from benchmarks import learn_variants as variants
from benchmarks import mismatch
from benchmarks.house import APART, ROOT, Trace, sizes, traced
from benchmarks.trials import save_trials
from posttrain.base.files import path_of
from posttrain.base.words import counted
from posttrain.engines import EmbeddedEngine, Sampling
from posttrain.quickstart import Size
from posttrain.runs.files import load_json

ONE_STEP = """
import json, sys
from pathlib import Path

import pytest
from benchmarks import online_work as work
work.STEPS, work.WORK, work.LIMIT = {"grpo": 1}, {"grpo": (2, 3)}, 8
from benchmarks import online
found = online.run_posttrain("grpo", {"policy": Path(sys.argv[1])}, [[[5, 8, 2], [1, 4, 8]]], Path(sys.argv[2]))
print(json.dumps(found))
"""


def test_the_figures_of_a_small_house(tmp_path):
    """Lines, files, modules with one importer, a function of 61 lines; other files count nothing."""
    package = tmp_path / "toy"
    long = "def long():\n" + "    x = 1\n" * 60
    files = {
        "__init__.py": "", "a.py": "import toy.b\nfrom toy.room import c\n", "b.py": "from toy.room.c import long\n",
        "room/__init__.py": "", "room/c.py": f"{long}\n\nasync def short():\n    from toy.a import x\n",
        "room/style.css": "a {}\nb {}\n", "room/page.html": "<p>\n",
    }  # fmt: skip
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    found = {size.name: size.value for size in sizes(package)}
    assert list(found.values()) == [2 + 1 + 65 + 2, 6, 2, 1, 1, 1, 2], found
    assert all(size.goal is not None for size in sizes(package))


def test_a_trace_goes_from_one_call_to_another():
    """Files of the package alone, each once, and nothing before the first call or after the last."""

    def begin(work):
        return work()

    def end():
        return None

    def path():
        counted(1, "row")
        counted(2, "row")
        end()
        path_of("after")

    with traced(Trace(ROOT / "posttrain", begin, end, skip=1)) as trace:
        begin(lambda: path_of("skipped"))
        begin(path)
        begin(path)
    assert trace.files == ["base/words.py"]
    with traced(Trace(ROOT, begin, end)) as trace:
        begin(path)
    assert trace.files == ["tests/test_benchmarks.py", "posttrain/base/words.py"]
    assert all((ROOT / "posttrain" / name).exists() for name in APART), "what is left out is still there"


@pytest.mark.slow
def test_a_row_and_an_answer_are_followed():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.house"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    figures = {cells[0]: cells[1:] for cells in lines if len(cells) == 3}
    for name in ("a row to AdamW.step", "an item to its stored verdict"):
        [(count, goal)] = [cells for key, cells in figures.items() if name in key and cells[1]]
        assert 5 < int(count) <= int(goal.removeprefix("≤ ")), done.stdout


@pytest.mark.slow
def test_the_online_benchmark_measures_a_step(scratch_model, tmp_path):
    """In a process of its own, for its timers stay in place of what they measure."""
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", ONE_STEP, str(scratch_model), str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=root, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["mean_length"] == pytest.approx(28 / 6)
    assert 0 < found["storing_seconds"] < found["seconds"] and 0 < found["sampling_seconds"] < found["seconds"]


# --- learn_variants ---------------------------------------------------------------------------------------------------


def test_the_page_has_the_results_of_the_variants():
    """Its table is that of the results, which are those of the cases as they are now, each with its baseline."""
    trials = variants.kept()
    assert len(trials) == len(load_json(variants.RESULTS)["trials"]), "a case was changed: run `make learn-variants`"
    page = variants.PAGE.read_text(encoding="utf-8")
    assert f"<!-- variants -->\n{variants.table(trials)}\n<!-- end -->" in page
    ran = {(trial.name, trial.seed) for trial in trials}
    assert all((case.beside, seed) in ran for name, seed in ran if (case := variants.CASES[name]).beside is not None)


def test_variants_are_compared_by_seed():
    """Differences of 9, 10 and 11 points: 10 ± t(2) · 1 / sqrt(3) = 10 ± 4.303 · 0.577, so the variant is better."""
    during = {"grpo": (0.5, 0.6, 0.7), "sapo": (0.59, 0.7, 0.81), "gspo": (0.5, 0.6, 0.7), "delta": (0.4,)}
    trials = [
        variants.Trial(name, seed, value, value, 1.0, 1.0)
        for name, values in during.items()
        for seed, value in enumerate(values)
    ]
    assert variants.compared("sapo", trials) == ("+10.0 (+7.5 to +12.5)", "better")
    assert variants.compared("gspo", trials) == ("+0.0", "equal")
    assert variants.compared("delta", trials) == ("-10.0", "")
    assert variants.compared("grpo", trials) == ("", "")
    table = variants.table(trials)
    assert "| 40.0% (1 of 3 seeds) |" in table and "| `vespo` | not run |" in table


def test_finished_trials_are_kept_while_their_settings_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(variants, "RESULTS", tmp_path / "results.json")
    assert variants.kept() == []
    trials = [variants.Trial(name, 0, 0.5, 0.5, 1.0, 1.0) for name in ("grpo", "sapo")]
    settings = json.loads(json.dumps(variants.SETTINGS))
    save_trials(variants.RESULTS, settings, trials)
    assert variants.kept() == trials
    settings["sapo"]["training"]["max_steps"] = 5
    save_trials(variants.RESULTS, settings, trials)
    assert variants.kept() == trials[:1]


def test_trials_of_variants(hard_sums_home, tmp_path, monkeypatch):
    """Two steps of each kind: the engine's weights, old weights, SFT of all weights, and of adapters."""
    small = Size(worked=60, bare=20, sft_steps=2, held_out=20)
    monkeypatch.setattr(variants, "SIZE", small)
    monkeypatch.setattr(variants, "FEW", 20)
    monkeypatch.setattr(variants.learn, "SIZE", small)
    monkeypatch.setattr(variants.sums, "make", lambda folder, seed: folder.symlink_to(hard_sums_home))
    variants.make_sums(tmp_path, 0)
    variants.make_sft(tmp_path, 0)
    found = {
        name: variants.trial(tmp_path, tmp_path / f"trial-{number}", name, 0, steps=2)
        for number, name in enumerate(("grpo", "stale: IcePop", "muon", "lora"))
    }
    assert found["grpo"].sample_size == pytest.approx(1, abs=1e-6) and found["stale: IcePop"].sample_size < 0.99
    assert found["grpo"].during > 0 and found["muon"].during is None
    assert all(0 <= trial.final <= 1 and trial.seconds > 0 for trial in found.values())


def test_a_mismatched_engine_leaves_the_policy_as_it_is(hard_sums_home):
    """Log-probabilities of other weights, the policy's own for validation, and the policy unchanged by both."""
    model = AutoModelForCausalLM.from_pretrained(hard_sums_home / "model").eval()
    model.set_attn_implementation("packed")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    sampling = Sampling(max_completion_length=4, stop_token_ids=())
    [[plain]] = EmbeddedEngine(model).generate([[3, 12, 4, 13]], sampling)
    engine = mismatch.MismatchedEngine(mismatch.rounded(3), model)
    [[other]] = engine.generate([[3, 12, 4, 13]], sampling)
    engine.exact = True
    [[exact]] = engine.generate([[3, 12, 4, 13]], sampling)
    assert exact.tokens == plain.tokens and exact.logprobs == plain.logprobs and other.logprobs != plain.logprobs
    assert all(weight.equal(before[name]) for name, weight in model.state_dict().items())
