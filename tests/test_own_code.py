"""Losses and methods of the user's: named by the settings, imported when a run starts, equal to the built-in ones."""

import sys
from pathlib import Path

import pytest
import torch
from test_docs import ROOT, files
from test_recipes import dpo, metrics, weights

import posttrain
from posttrain.base.errors import ConfigError, RewardError
from posttrain.base.functions import find_function
from posttrain.cli import main
from posttrain.config import GRPOMethod, load
from posttrain.config.schema.methods import OWN, UnreadMethod, import_method
from posttrain.data.sources import open_source
from posttrain.evaluation.suite import find_suite
from posttrain.losses import own_token_loss
from posttrain.losses.policy import policy_loss_named
from posttrain.losses.preference import couples_batch, loss_named
from posttrain.losses.unpaired import own_unpaired_loss, unpaired_loss
from posttrain.recipes.grpo import surrogate

LOSSES = '''
import torch
import torch.nn.functional as F

def nll(logprob_N): return -logprob_N
def sigmoid(pairs, *, beta): return -F.logsigmoid(beta * (pairs.chosen_logratio_P - pairs.rejected_logratio_P))
def aot(pairs, *, beta, label_smoothing):
    from posttrain.losses.preference import aot
    return aot(pairs, beta=beta, label_smoothing=label_smoothing)
def kto(logratio_S, desirable_S, *, beta, shift):
    return torch.sigmoid(-torch.where(desirable_S, 1.0, -1.0) * (beta * logratio_S - shift))
def clipped(logprob_N, old_logprob_N, advantage_N, *, epsilon):
    ratio_N = (logprob_N - old_logprob_N).exp()
    free_N, held_N = ratio_N * advantage_N, ratio_N.clamp(1 - epsilon, 1 + epsilon) * advantage_N
    return -torch.minimum(free_N, held_N), (held_N < free_N).detach()
clipped.average = "sequences"

def scalar(logprob_N): return -logprob_N.mean()
def number(logprob_N): return 1.0
def infinite(logprob_N): return -logprob_N / 0.0
def detached(logprob_N): return -logprob_N.detach()
def raising(logprob_N): return logprob_N.nothing
def centred(logprob_N): return -(logprob_N - logprob_N.mean())
def needing(logprob_N, *, gamma): return -gamma * logprob_N
def averaged(logprob_N, old_logprob_N, advantage_N): return -advantage_N * logprob_N
averaged.average = "tokens"
'''  # fmt: skip


def run(folder: Path, *overrides: str, resume=False, **sections) -> Path:
    """Train with these settings; returns the run folder."""
    settings = {"name": "run", "output_dir": str(folder), **sections}
    return posttrain.train(settings, overrides=overrides, resume=resume).folder


@pytest.fixture(autouse=True)
def own_files(tmp_path, monkeypatch):
    """The modules of the docs and of this test in the current folder, not imported yet."""
    monkeypatch.chdir(tmp_path)
    for name, text in files(ROOT / "docs/extending.md").items():
        Path(name).write_text(text, encoding="utf-8")
    Path("own_losses.py").write_text(LOSSES, encoding="utf-8")
    yield
    for cache in (loss_named, own_token_loss, own_unpaired_loss, policy_loss_named):
        cache.cache_clear()
    OWN.clear()


@pytest.mark.parametrize(("named", "own"), [("sigmoid", "own_losses:sigmoid"), ("aot", "own_losses:aot")])
def test_a_loss_on_pairs_equals_the_built_in_one(shared, scratch_model, tmp_path, named, own):
    """In several packs, too: that `aot` depends on other pairs is seen when it is tried."""
    assert couples_batch([own]) == (named == "aot")
    made = {}
    for name in (named, own):
        folder = tmp_path / name.replace(":", "-")
        settings = dpo(shared, scratch_model, training={"tokens_per_pack": 1000})
        run(folder, f"method.loss_type=[{name}]", **settings)
        made[name] = metrics(folder / "run", "loss"), weights(folder / "run/final")
    assert made[named][0] == made[own][0]
    assert all(torch.equal(value, made[own][1][key]) for key, value in made[named][1].items())


def test_losses_of_tokens_and_completions_equal_the_built_in_ones(shared, scratch_model, tmp_path):
    numbers = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([True, False, True])
    common = {"beta": 0.2, "shift": 0.1, "desirable_weight": 1.0, "undesirable_weight": 2.0}
    own, known = (unpaired_loss(*numbers, loss_type=name, **common) for name in ("own_losses:kto", "kto"))
    assert torch.equal(own, known)
    found = policy_loss_named("own_losses:clipped")
    assert found.average == "sequences" and callable(found.surrogate)
    losses = {}
    for name in ("nll", "own_losses:nll"):
        folder = tmp_path / name.replace(":", "-")
        settings: dict = dpo(shared, scratch_model) | {"method": {"type": "sft", "loss_type": name}}
        run(folder, "data.format=auto", **settings)
        losses[name] = metrics(folder / "run", "loss")
    assert losses["nll"] == losses["own_losses:nll"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scalar", "returned shape []; it must return one value for each of 4"),
        ("number", "returned float"),
        ("infinite", "returned [inf, inf, inf, inf] for [[-0.1"),
        ("detached", "has no gradient"),
        ("raising", "failed with AttributeError"),
        ("centred", "depend on others of the batch"),
        ("needing", "takes the keyword gamma; this method offers"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused_before_the_model_is_loaded(
    shared, scratch_model, tmp_path, capsys, name, message
):
    with pytest.raises(ConfigError) as error:
        own_token_loss(f"own_losses:{name}")
    assert message in str(error.value)
    for verb in ("train", "plan"):
        arguments = ["--model", str(tmp_path / "nothing"), "--source", str(shared / "data/hh-harmless")]
        assert main([verb, *arguments, "--method", "sft", "--loss-type", f"own_losses:{name}"]) == 1
        assert f"method.loss_type: own_losses:{name}" in capsys.readouterr().err


def test_an_average_that_is_none_and_a_function_that_is_none():
    with pytest.raises(ConfigError, match=r"averaged.average is 'tokens': it is one of sequences"):
        policy_loss_named("own_losses:averaged")
    with pytest.raises(RewardError, match="has no function absent"):
        own_token_loss("own_losses:absent")


def test_a_method_of_the_docs(shared, scratch_model, tmp_path, capsys):
    """Its settings are typed once it is imported; a resumed run equals one without interruption, to the bit."""
    file = tmp_path / "margin.yaml"
    file.write_text("model: gpt2\nmethod: {type: my_methods:MarginDPO, gamma: 0.3}\ndata: {source: rows.jsonl}\n")
    assert isinstance(load(file).config.method, UnreadMethod) and "my_methods" not in sys.modules
    method = load(file, imports=True).config.method
    assert method.model_dump(include={"beta", "gamma"}) == {"beta": 0.1, "gamma": 0.3}
    assert type(method).__name__ == "MarginDPO"
    with pytest.raises(ConfigError, match=r"margin.yaml:2: method.gamma is 'much'; it must be"):
        file.write_text(file.read_text().replace("0.3", "much"))
        load(file, imports=True)
    own = {"type": "my_methods:MarginDPO", "gamma": 0.3}
    sections = dpo(shared, scratch_model, data={"validation": {"rows": 4}}) | {
        "method": own, "evaluation": {"eval_steps": 1}, "checkpoint": {"save_steps": 1, "best_metric": "auto"},
    }  # fmt: skip
    whole = run(tmp_path / "whole", **sections)
    assert len(metrics(whole, "eval_rewards/accuracies")) == 4 and (whole / "report.html").is_file()
    parted = run(tmp_path / "parted", "training.max_steps=2", "training.lr_scheduler_type=constant", **sections)
    run(tmp_path / "parted", "training.lr_scheduler_type=constant", resume=True, **sections)
    once = run(tmp_path / "once", "training.lr_scheduler_type=constant", **sections)
    assert all(torch.equal(value, weights(once / "final")[key]) for key, value in weights(parted / "final").items())
    OWN.clear()  # as in another process
    assert main(["losses", str(whole), "--step", "1"]) == 0
    assert main(["runs", "show", str(whole)]) == 0
    assert "my_methods:MarginDPO" in capsys.readouterr().out


def test_a_method_that_is_none(tmp_path):
    (tmp_path / "own_losses.py").write_text("class Plain: pass\n")
    with pytest.raises(ConfigError, match="is not a class derived from MethodSettings"):
        load({"model": "gpt2", "method": "own_losses:Plain", "data": {"source": "x.jsonl"}}, imports=True)
    (tmp_path / "own_losses.py").write_text(
        "from posttrain.config.schema.offline import PreferenceMethod\nclass Bare(PreferenceMethod): pass\n"
    )
    sys.modules.pop("own_losses", None)
    with pytest.raises(ConfigError, match=r"needs type, learning_rates, and its module the function train"):
        load({"model": "gpt2", "method": {"type": "own_losses:Bare"}, "data": {"source": "x.jsonl"}}, imports=True)


PACKAGE = """
from posttrain.config.schema.offline import SFTMethod
from posttrain.recipes.sft import train

def rows(split): return [{"text": f"{split} {number}"} for number in range(4)]
def suite(): return {"source": "offered_here:rows", "rule": "offered_here:rule"}
def rule(completions, **columns): return [1.0] * len(completions)
def nll(logprob_N): return -logprob_N
def hidden(logprob_N): return -logprob_N
class Mine(SFTMethod):
    type: str = "offered_here:Mine"
"""


def test_a_package_offers_all_of_them(tmp_path, monkeypatch):
    """Rows, suites, rewards, losses and methods, as entry points; what it does not offer is refused."""
    site = tmp_path / "lib/site-packages"
    (site / "offered-1.dist-info").mkdir(parents=True)
    (site / "offered-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1\n")
    offered = "".join(f"{name} = offered_here:{name}\n" for name in ("rows", "suite", "rule", "nll", "Mine"))
    (site / "offered-1.dist-info/entry_points.txt").write_text(f"[posttrain.functions]\n{offered}")
    (site / "offered_here.py").write_text(PACKAGE)
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    source = open_source("offered_here:rows", "test", None, 0, lambda working, answer: working)
    assert next(source.read()).value["text"] == "test 0"
    assert find_suite("offered_here:suite").rule == "offered_here:rule"
    assert find_function("offered_here:rule")(["a"]) == [1.0]
    assert own_token_loss("offered_here:nll")(torch.tensor([-2.0])).tolist() == [2.0]
    import_method("offered_here:Mine")
    assert OWN["offered_here:Mine"].__name__ == "Mine"
    with pytest.raises(RewardError, match="offered_here:hidden belongs to Python or to an installed package"):
        own_token_loss("offered_here:hidden")


def test_a_loss_of_ones_own_gets_the_number_of_the_upper_clip_range(users_module):
    """`epsilon_high: null` means epsilon, as for the built-in losses."""
    code = "def wide(logprob_N, old_N, advantage_N, *, epsilon_high):\n    return -epsilon_high * logprob_N\n"
    users_module("own_clip", code)
    numbers = torch.tensor([-1.0, -2.0]), torch.zeros(2), torch.ones(2), torch.tensor([0, 0]), torch.tensor([2])
    for given, expected in ((None, 0.1), (0.3, 0.3)):
        method = GRPOMethod(loss_type="own_clip:wide", epsilon=0.1, epsilon_high=given)
        loss_N, clipped_N = surrogate(method, *numbers)
        assert loss_N.tolist() == pytest.approx([expected, 2 * expected]) and not clipped_N.any()
