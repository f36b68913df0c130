"""A whole PPO run beside that of TRL 1.12, which had PPO last: from the same completions comes the same model.

All completions are of one length: after a shorter one TRL gives the reward to the padding behind it, and so counts the
value of a token that was never sampled; the algorithms are the same for all that comes before.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open
from test_trl import pairs
from test_trl_online import LIMIT, RATE, assert_same_weights, letters, train_ours
from transformers import AutoTokenizer

from benchmarks.online_trl import TRL_WITH_PPO
from posttrain.engines import EmbeddedEngine

HERE = Path(__file__).parent
PROMPTS, STEPS = 6, 5


@pytest.mark.slow
@pytest.mark.skipif(not TRL_WITH_PPO.exists(), reason="`make slow` puts TRL 1.12 into build/")
@pytest.mark.parametrize("kl_estimator", ["k1", "k3"])
def test_ppo_equals_trl(tmp_path, shared, scratch_model, monkeypatch, kl_estimator):
    tokenizer = AutoTokenizer.from_pretrained(scratch_model)
    generate = EmbeddedEngine.generate

    def to_the_limit(self, asked, sampling, **named):
        return generate(self, asked, replace(sampling, stop_token_ids=()), **named)

    monkeypatch.setattr(EmbeddedEngine, "generate", to_the_limit)
    method = {"kl_coef": 0.1, "kl_estimator": kl_estimator, "num_ppo_epochs": 3, "gamma": 0.99, "vf_coef": 0.5}
    method |= {"cliprange": 0.1, "cliprange_value": 0.05}
    prompts = [row["prompt"][-120:] for row in pairs(shared, PROMPTS)]
    training = {"batch_size": PROMPTS, "max_steps": STEPS, "max_grad_norm": 0.0}
    given = {"type": "ppo", "num_generations": 1, "num_minibatches": 1, "normalize_returns": False, **method}
    folder, sampled = train_ours(tmp_path, scratch_model, prompts, monkeypatch, training, **given)

    asked = sampled[0][0]
    assert all(before == asked for before, _ in sampled) and len(sampled) == STEPS
    completions = [[group[0].tokens for group in groups] for _, groups in sampled]
    assert all(len(tokens) == LIMIT and tokenizer.pad_token_id not in tokens for step in completions for tokens in step)
    job = {
        "model": str(scratch_model),
        "prompts": [list(prompt) for prompt in asked],
        "completions": completions,
        "scores": [letters(tokenizer.batch_decode(step, skip_special_tokens=True)) for step in completions],
        "settings": method | {"learning_rate": RATE, "weight_decay": 0.1, "temperature": 1.0, "lam": 0.95},
        "output": str(tmp_path / "trl.safetensors"),
    }
    job["settings"] |= {"output_dir": str(tmp_path / "trl"), "max_grad_norm": 0.0}
    (tmp_path / "job.json").write_text(json.dumps(job))
    subprocess.run(
        [sys.executable, str(HERE / "trl_ppo.py"), str(tmp_path / "job.json")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TRL_WITH_PPO), str(HERE.parent)])},
        check=True,
    )

    with safe_open(job["output"], "pt") as file:
        log = [entry for entry in json.loads(file.metadata()["log"]) if "loss/policy_avg" in entry]
        theirs = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    ours = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line, entry in zip(ours, log, strict=True):
        assert line["reward"] == pytest.approx(entry["objective/scores"], abs=1e-6)
        assert line["kl"] == pytest.approx(entry["objective/kl"], abs=1e-4)
        assert line["loss/policy"] == pytest.approx(entry["loss/policy_avg"], abs=1e-4)
        assert line["loss/value"] == pytest.approx(entry["loss/value_avg"], abs=1e-4)
        assert line["clip_ratio"] == pytest.approx(entry["policy/clipfrac_avg"], abs=1e-3)
        assert line["value_clip_ratio"] == pytest.approx(entry["val/clipfrac_avg"], abs=1e-3)
    assert max(line["clip_ratio"] for line in ours) > 0 < max(line["value_clip_ratio"] for line in ours)

    assert_same_weights(scratch_model, folder / "final", theirs)
