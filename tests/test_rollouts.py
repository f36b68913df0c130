"""`rollouts.sqlite`: whole steps or none, whatever kills the writer; and what is read out of it."""

import html
import math
import multiprocessing
import os
import random
import re
import signal
import sqlite3
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_online import train as online_run
from transformers import AutoTokenizer

from benchmarks.sums import EXACT_SETTINGS, exact
from posttrain import runner
from posttrain.base.errors import RunError
from posttrain.batch import Example, Node, pack
from posttrain.cli import main
from posttrain.cli.rollouts import token_shown
from posttrain.config import PPOMethod, load
from posttrain.inspection.regrade import _change, _completion
from posttrain.losses.advantage import gae, normalized
from posttrain.recipes import REWARDED, ppo
from posttrain.rewards.parts import CompletionReward
from posttrain.rollout import Rollout, SampledCompletion
from posttrain.runs import rollouts
from posttrain.runs.metrics import read_metrics
from posttrain.runs.receipt import NOT_SAMPLED, StoredPart, TokenNumbers, step_receipt, token_texts
from posttrain.runs.rollouts import GIB, RolloutStore, StoredEvaluation, StoredPrompt, StoredRollout
from posttrain.runs.stored_rollouts import StoredRun, of_trained, trained_tokens
from posttrain.ui.parts import Query
from posttrain.ui.receipt import heat

PROMPTS, EACH = 3, 4


def step_of(number: int) -> tuple[list[StoredPrompt], list[StoredRollout]]:
    prompts = [StoredPrompt(p, f"{p}+{number}=", [1, p], {"answer": str(p + number)}) for p in range(PROMPTS)]
    made = [
        StoredRollout(
            prompt_index=p,
            rollout_index=r,
            completion=f"{number} {p} {r}",
            reward=None if r == 0 else r / 4,
            advantage=r - 1.5,
            finish_reason="stop",
            version=number - 1,
            parts={"exact": {"value": r / 4, "weight": 1.0}},
            arrays={
                "tokens": np.arange(r + 1),
                "sampler_logprobs": np.full(r + 1, -0.5),
                "clipped": np.ones(r + 1, bool),
            },
        )
        for p in range(PROMPTS)
        for r in range(EACH)
    ]
    return prompts, made


def test_what_is_written_is_read(tmp_path):
    store = RolloutStore(tmp_path, GIB, after=-1)
    for number in (1, 2):
        store.add(number, number / 2, *step_of(number))
    evaluation = [StoredEvaluation(7, "1+1=", "2", 1.0, "stop", {}, [3])]
    store.add_evaluation(2, "validation", evaluation)
    store.add_evaluation(2, "validation", evaluation)  # made again after an interruption: there once
    store.flush()
    with StoredRun(tmp_path) as stored:
        assert stored.steps() == [1, 2]
        assert stored.prompts(2)[1]["facts"] == {"answer": "3"} and stored.prompts(2)[1]["tokens"].tolist() == [1, 1]
        one = stored.rollouts(2, 1)[3]
        assert (one["completion"], one["reward"], one["advantage"], one["version"]) == ("2 1 3", 0.75, 1.5, 1)
        assert one["tokens"].tolist() == [0, 1, 2, 3] and one["sampler_logprobs"].tolist() == [-0.5] * 4
        assert one["old_logprobs"] is None and one["clipped"].tolist() == [1, 1, 1, 1]
        [first, _] = stored.summary()
        assert (first["prompts"], first["completions"], first["left_out"]) == (3, 12, 3) and first["reward"] == 0.5
    store.close()
    with sqlite3.connect(tmp_path / rollouts.NAME) as connection:
        assert connection.execute("SELECT COUNT(*) FROM evaluations").fetchone()[0] == 1


def test_a_file_of_an_earlier_version_is_read_and_gone_on_with(tmp_path):
    """It has no values, returns, entropies and penalties; a resumed run adds the columns."""
    store = RolloutStore(tmp_path, GIB, after=-1)
    store.add(1, 0.0, *step_of(1))
    store.close()
    with sqlite3.connect(tmp_path / rollouts.NAME) as connection:
        for name in ("old_values", "returns", "entropies", "penalties"):
            connection.execute(f"ALTER TABLE rollouts DROP COLUMN {name}")
    with StoredRun(tmp_path) as stored:
        one = stored.rollouts(1)[3]
        assert one["old_values"] is None and one["returns"] is None and one["tokens"].tolist() == [0, 1, 2, 3]
    store = RolloutStore(tmp_path, GIB, after=1)
    prompts, made = step_of(2)
    made = [replace(one, arrays=one.arrays | {"returns": np.full(len(one.arrays["tokens"]), 0.25)}) for one in made]
    store.add(2, 0.0, prompts, made)
    store.close()
    with StoredRun(tmp_path) as stored:
        assert stored.rollouts(1)[1]["returns"] is None and stored.rollouts(2)[1]["returns"].tolist() == [0.25, 0.25]


def test_a_resumed_run_begins_after_its_checkpoint(tmp_path):
    store = RolloutStore(tmp_path, GIB, after=-1)
    for number in range(1, 6):
        store.add(number, 0.0, *step_of(number))
    store.close()
    store = RolloutStore(tmp_path, GIB, after=3)
    store.add(4, 0.0, *step_of(4))
    store.close()
    with StoredRun(tmp_path) as stored:
        assert stored.steps() == [1, 2, 3, 4]


def test_the_oldest_steps_make_room(tmp_path):
    store = RolloutStore(tmp_path, 60_000, after=-1)
    for number in range(1, 60):
        store.add(number, 0.0, *step_of(number))
    store.close()
    with StoredRun(tmp_path) as stored:
        steps = stored.steps()
    assert 1 < len(steps) < 59 and steps == list(range(steps[0], 60))
    assert (tmp_path / rollouts.NAME).stat().st_size < 120_000


def write_forever(folder) -> None:
    store = RolloutStore(folder, GIB, after=10**9)
    with StoredRun(folder) as stored:
        begin = max(stored.steps(), default=0) + 1
    for number in range(begin, begin + 10**6):
        store.add(number, 0.0, *step_of(number))


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_killed_writer_leaves_whole_steps(tmp_path, kills, figure):
    """After each kill at a random moment the file is sound; in the end every step has all its completions."""
    luck, context = random.Random(0), multiprocessing.get_context("fork")
    for _ in range(kills):
        process = context.Process(target=write_forever, args=(tmp_path,))
        process.start()
        time.sleep(luck.uniform(0.02, 0.08))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with closing(sqlite3.connect(tmp_path / rollouts.NAME)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    with closing(sqlite3.connect(tmp_path / rollouts.NAME)) as connection:
        counts = connection.execute("SELECT COUNT(*) FROM rollouts GROUP BY step").fetchall()
        prompts = connection.execute("SELECT COUNT(*) FROM prompts GROUP BY step").fetchall()
    print(f"{len(counts)} steps written by {kills} killed writers")
    assert len(counts) == len(prompts) > 1
    figure("kills of the writer", kills)
    figure("steps stored in part", sum(n != PROMPTS * EACH for (n,) in counts) + sum(n != PROMPTS for (n,) in prompts))


def test_a_file_that_stays_locked_stops_the_run_with_a_word(tmp_path, monkeypatch):
    """What it could not take lies in the checkpoint until the run is resumed."""
    monkeypatch.setattr(rollouts, "BUSY_S", 0.05)
    store = RolloutStore(tmp_path, GIB, after=-1)
    holder = sqlite3.connect(tmp_path / rollouts.NAME)
    holder.execute("BEGIN EXCLUSIVE")
    store.add(1, 0.0, *step_of(1))
    with pytest.raises(RunError, match="cannot be written: database is locked"):
        store.flush()
    store.add(2, 0.5, *step_of(2))
    store.add(3, 1.0, *step_of(3))
    (tmp_path / "checkpoint-2").mkdir()
    store.save_unwritten(tmp_path / "checkpoint-2", until=2)
    holder.close()
    store.close()
    for _ in range(2):  # resumed, and again
        RolloutStore(tmp_path, GIB, after=2, checkpoint=tmp_path / "checkpoint-2").close()
        with StoredRun(tmp_path) as stored:
            assert stored.steps() == [1, 2] and stored.prompts(2)[0]["epoch"] == 0.5


def test_whatever_stops_the_writer_stops_the_run_with_a_word(tmp_path):
    """Its queue is bounded: with the writer gone without a word, the run would wait for it without end."""
    store = RolloutStore(tmp_path, GIB, after=-1)
    prompts, found = step_of(1)
    store.add(1, 0.0, [replace(prompts[0], row=2**70), *prompts[1:]], found)
    with pytest.raises(RunError, match=r"cannot be written: .*too large"):
        store.flush()
    store.add(2, 0.0, *step_of(2))
    with pytest.raises(RunError, match="cannot be written"):
        store.check()
    store.close()


def test_lone_surrogates_are_stored_as_escapes(tmp_path, monkeypatch):
    """In any text, of a step as of an evaluation, and in what a failing run still saves."""
    prompts, found = step_of(1)
    prompts[0] = replace(prompts[0], text="p\ud800", facts={"answer": "\udc00"})
    found[0] = replace(found[0], completion="c\udfff", parts={"exact": {"extracted": "\ud83d"}})
    checkpoint = tmp_path / "checkpoint-1"
    checkpoint.mkdir()
    store = RolloutStore(tmp_path, GIB, after=-1)
    store.add(1, 0.0, prompts, found)
    store.add_evaluation(1, "validation", [StoredEvaluation(7, "\ud800", "2", 1.0, "stop", {}, [3])])
    store.flush()
    store._unwritten = [rollouts._Write(2, 0.0, prompts, found)]
    store.save_unwritten(checkpoint, 2)
    store.close()
    RolloutStore(tmp_path, GIB, after=2, checkpoint=checkpoint).close()
    with StoredRun(tmp_path) as stored:
        for step in (1, 2):
            assert [one["prompt"] for one in stored.prompts(step)] == [r"p\ud800", "1+1=", "2+1="]
            assert stored.prompts(step)[0]["facts"] == {"answer": "\udc00"}
            assert [one["completion"] for one in stored.rollouts(step)][:2] == [r"c\udfff", "1 0 1"]
        assert stored.evaluations()[0]["prompt"] == r"\ud800"


@pytest.mark.parametrize("opens", [True, False])
def test_regraded_rewards_are_told_what_the_prompt_opened(tmp_path, shared, opens):
    """As in training: by the end of the prompt's tokens. And what was cut off."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "models/stories260K")
    tokens = np.asarray(tokenizer("A question. <think>\n" if opens else "A question.").input_ids)
    prompt = {"tokens": tokens, "facts": {"prompt": "A question.", "answer": "2", "columns": {}}}
    one = {"tokens": np.asarray([5, 6]), "completion": "so </think> 2", "finish_reason": "length", "version": 0}
    found = _completion(prompt, one, tokenizer)
    assert (found.text, found.thinking, found.truncated, found.answer) == ("so </think> 2", opens, True, "2")
    assert not _completion(prompt, one, None).thinking


def with_a_tools_output() -> SampledCompletion:
    """Two sampled tokens, two of a tool, one sampled: `7 8 [50 51] 9`."""
    mask = [True, True, False, False, True]
    reward = CompletionReward(1.0)
    return SampledCompletion(0, [7, 8, 50, 51, 9], [-0.1, -0.2, -0.3], "78!9", "stop", 0, reward, mask)


def test_tokens_of_others_are_fed_but_not_trained():
    """They are in the tree and in no target; R counts the others, so that each pack finds its tokens' numbers."""
    plain = SampledCompletion(0, [4, 5], [-0.4, -0.5], "45", "length", 0, CompletionReward(0.0))
    rollout = Rollout([Example((Node([1, 2]),), row=0)], [plain, with_a_tools_output()])
    assert rollout.length_S.tolist() == [2, 3] and rollout.num_tokens == 5
    assert rollout.sequence_R.tolist() == [0, 0, 1, 1, 1]
    [part] = rollout.parts([1, 0], lambda examples: pack(examples, 99), 99)
    assert part.pack.tokens_T.tolist() == [1, 2, 7, 8, 50, 51, 4] and part.pack.target_N.tolist() == [7, 8, 9, 4, 5]
    assert part.pack.source_N.tolist() == [1, 2, 5, 1, 6] and part.completion_S.tolist() == [1, 0]
    assert part.token_N.tolist() == [2, 3, 4, 0, 1]
    assert rollout.sampler_R[part.token_N].tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5])
    split = rollout.parts([0, 1], lambda examples: pack(examples, 6), 6)
    assert sorted(one.num_tokens for one in split) == [3, 6], "the tool's tokens count where packs are filled"
    with pytest.raises(ValueError, match="2 log-probabilities for 3 trained tokens"):
        replace(with_a_tools_output(), logprobs=[-0.1, -0.2])


def test_tokens_of_others_are_stored_and_shown_as_such(tmp_path, capsys, monkeypatch):
    """NaN in the file, no number on a page or in `why`, and no part in regrading."""
    one = with_a_tools_output()
    numbers = np.array([-0.1, -0.2, -0.3])
    arrays = {"tokens": np.asarray(one.tokens), "sampler_logprobs": numbers, "old_logprobs": numbers}
    arrays |= {"new_logprobs": numbers, "advantages": np.array([2.0, 2.0, 2.0]), "clipped": np.array([0, 1, 0])}
    mask = np.asarray(one.trained)
    stored = StoredRollout(0, 0, one.text, 1.0, 2.0, "stop", 0, {}, arrays, mask)
    store = RolloutStore(tmp_path, GIB, after=-1)
    store.add(1, 0.0, [StoredPrompt(0, "q", [1, 2], {})], [stored])
    store.close()
    with StoredRun(tmp_path) as run:
        [row] = run.rollouts(1)
    nan = np.nan
    np.testing.assert_allclose(row["advantages"], [2, 2, nan, nan, 2])
    assert row["clipped"].tolist() == [0, 1, 0, 0, 0] and row["tokens"].tolist() == one.tokens
    assert trained_tokens(row).tolist() == one.trained
    assert of_trained(row)["tokens"].tolist() == [7, 8, 9] and of_trained(row)["advantages"].tolist() == [2, 2, 2]
    shown = TokenNumbers.of(row)
    wanted = [2 * (1 - math.exp(-0.1)), 0, 0, 0, 2 * (1 - math.exp(-0.3))]
    assert shown.trained.tolist() == one.trained and shown.push.tolist() == pytest.approx(wanted)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("posttrain.inspection.regrade.tokenizer_of", lambda folder: None)
    assert main(["why", str(tmp_path), "--step", "1", "--prompt", "0", "--rollout", "0"]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert lines["2"] == ["2", "50", *["-"] * 6, "not", "sampled"]
    assert lines["1"][:5] == ["1", "8", "+2.0000", "1.0000", "-0.2000"] and lines["1"][-1] == "clipped"
    texts = [str(token) for token in one.tokens]
    page = html.unescape(str(heat(texts, "push", shown, [0, 4], None, Query())))
    assert page.count('class="other"') == 2 and page.count(NOT_SAMPLED) == 2


SUMMARY = r"(\d+) of (\d+) advantages change sign, (\d+) become 0 and (\d+) were 0, of which (\d+) are still 0"


def test_advantages_under_other_rewards():
    """PPO's from stored values and returns are those that GAE gives; changes to and from 0 are counted apart."""
    torch.manual_seed(0)
    method = PPOMethod(gamma=0.9, lam=0.7)
    lengths, rewards, others = [3, 1, 2], torch.tensor([1.0, 0.0, 2.0]), [0.0, 3.0, 2.0]
    value_N, kl_N = torch.randn(2, 6)
    sequence_N = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    last_N = torch.tensor(lengths).cumsum(0) - 1

    def estimated(reward_S):
        reward_N = (-0.1 * kl_N).index_add(0, last_N, torch.as_tensor(reward_S))
        return gae(reward_N, value_N, sequence_N, gamma=0.9, lam=0.7)

    stored = [
        {
            "reward": float(reward),
            "returns": returns.numpy(),
            "old_values": values.numpy(),
            "advantages": returns.numpy(),
            "tokens": returns.numpy(),
        }
        for reward, returns, values in zip(
            rewards, estimated(rewards)[1].split(lengths), value_N.split(lengths), strict=True
        )
    ]
    for given in (rewards.tolist(), others):
        normal_N = normalized(estimated(given)[0].double(), eps=1e-8)
        expected = [float(one.mean()) for one in normal_N.split(lengths)]
        assert ppo.regraded(method, stored, given) == pytest.approx(expected, abs=1e-5)
    changes = [(1.0, -2.0), (-1.0, 0.0), (0.0, 1.0), (1.0, 2.0), (0.0, 0.0)]
    assert [_change(*pair) for pair in changes] == ["sign", "to 0", "from 0", "same sign", "stays 0"]


def test_from_a_metric_down_to_the_tokens(sums_home, tmp_path, capsys, monkeypatch):
    """A run of three steps: its list, a step's receipt, a group's parts, a completion's tokens, other rewards."""
    monkeypatch.setenv("COLUMNS", "200")
    paths = [f"output_dir={tmp_path}", f"model.path={sums_home / 'model'}", f"data.source={sums_home / 'train.jsonl'}"]
    settings = ["name=run", "method.type=grpo", "method.num_generations=4", "data.template=none", "data.max_length=24"]
    sizes = ["rollout.max_completion_length=6", "training.batch_size=4", "training.max_steps=3", EXACT_SETTINGS]
    runner.train(load(None, [*paths, *settings, *sizes, "tracking.logging_steps=1", "devices.type=cpu"]).config)
    run = str(tmp_path / "run")
    rates = [line["learning_rate"] for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert rates == pytest.approx([1e-6, 1e-6, 5e-7]), "the one step of warm-up has the whole rate, not 0"
    with StoredRun(tmp_path / "run") as stored:
        first = stored.rollouts(1)
        assert len(first) == 16 and stored.steps() == [1, 2, 3]
        for one in first:
            assert len(one["tokens"]) == len(one["new_logprobs"]) == len(one["advantages"])
            np.testing.assert_allclose(one["sampler_logprobs"], one["old_logprobs"], atol=1e-4)
            np.testing.assert_allclose(one["ref_logprobs"], one["old_logprobs"], atol=1e-5)
            assert one["parts"]["exact"]["value"] == one["reward"]
        entropy = np.concatenate([one["entropies"] for one in first]).mean()
        logged = [line["entropy"] for line in read_metrics(tmp_path / "run") if "loss" in line]
        assert entropy == pytest.approx(logged[0], rel=1e-4)
    capsys.readouterr()
    seen = {}
    for arguments in (
        ["rollouts", run],
        ["rollouts", run, "--step", "2"],
        ["why", run, "--step", "2"],
        ["why", run, "--step", "2", "--prompt", "1"],
        ["why", run, "--step", "2", "--prompt", "1", "--rollout", "0"],
        ["regrade", run, "--reward", "benchmarks.sums:exact"],
        ["regrade", run, "--reward", "{type: length, target: 1}"],
        ["regrade", run, "--reward", "{type: length, target: 1}", "--step", "2", "--limit", "1"],
    ):
        assert main(arguments) == 0, capsys.readouterr().err
        seen[" ".join(arguments[2:])] = capsys.readouterr().out
    with StoredRun(tmp_path / "run") as stored:
        groups = step_receipt(stored, 2)
    pushes = [sum(abs(completion.numbers.push).sum() for completion in group.completions) for group in groups]
    assert pushes == sorted(pushes, reverse=True) and len(groups) == 4
    table = seen["--step 2"].partition("share of the")[2]
    order = [int(line.split()[0]) for line in table.splitlines() if re.match(r" *\d+ +\d+ .*%", line)]
    assert order == [group.prompt for group in groups]  # as on the page
    print(seen["--step 2"], seen["--step 2 --prompt 1 --rollout 0"])
    assert "frac_reward_zero_std" in seen["--step 2"] or "prompt" in seen["--step 2"]
    assert "ratio" in seen["--step 2 --prompt 1 --rollout 0"] and "exact" in seen["--step 2 --prompt 1"]
    assert seen["--reward benchmarks.sums:exact"].startswith("0 of 48 advantages")
    assert "of 48 advantages" in seen["--reward {type: length, target: 1}"]
    assert not seen["--reward {type: length, target: 1}"].startswith("0 of")
    short = seen["--reward {type: length, target: 1} --step 2 --limit 1"]
    sign, total, to_zero, zero, still = map(int, re.search(SUMMARY, " ".join(short.split())).groups())
    assert total == 16 and f"and {sign + to_zero + zero - still - 1} more: --limit" in short
    assert len(re.findall(r"^ +2 +\d+ +\d+ +(?:sign|to 0|from 0) ", short, re.MULTILINE)) == 1
    assert main(["regrade", run, "--reward", "math", "--step", "9"]) == 1
    assert main(["why", run, "--step", "9"]) == 1 and "the file has steps 1 to 3" in capsys.readouterr().err


def test_a_part_is_written_with_its_weight_its_verdict_and_the_answer():
    written = [(0.5, 1.0, None, None), (1.0, 0.25, "correct", "42"), (None, 1.0, "timeout", None)]
    shown = [str(StoredPart(*values, {})) for values in written]
    assert shown == ["0.5", "0.25 × 1 correct (42)", "– timeout"]


def test_tokens_of_one_character_are_shown_as_that_character(shared):
    tokenizer = AutoTokenizer.from_pretrained(shared / "models/stories260K")  # other letters are bytes to it
    tokens = tokenizer.encode(" a\u0628\n\u6f22", add_special_tokens=False)
    shown = [token_shown(text) for text in token_texts(tokens, tokenizer)]
    assert len(shown) == len(tokens)
    assert "".join(shown).replace("…", "").strip() == "a\u0628\\n\u6f22"
    assert shown.count("…") == (2 - 1) + (3 - 1)  # UTF-8 has two bytes and three
    assert token_texts(tokens, None) == [str(token) for token in tokens]


# --- advantages: in training, by hand, and under other rewards --------------------------------------------------------

KL = 0.5
METHODS = {
    "rloo": {"type": "rloo"},
    "reinforce_plus_plus": {"type": "reinforce_plus_plus"},
    "grpo": {"type": "grpo", "kl_in": "reward", "kl_estimator": "k1"},
    "grpo, in the loss": {"type": "grpo"},
    "ppo": {"type": "ppo", "num_ppo_epochs": 1, "num_minibatches": 1},
    "ppo, whitened": {"type": "ppo", "num_ppo_epochs": 1, "num_minibatches": 1, "whiten_rewards": True},
}


def by_hand(name, rollouts, rewards):
    """The mean advantage of each completion that has a reward, from stored numbers and these rewards."""
    penalties = [KL * (one["old_logprobs"] - one["ref_logprobs"]).astype(float) for one in rollouts]
    if name == "grpo, in the loss":
        penalties = [0 * one for one in penalties]
    of_tokens = [-penalty for penalty in penalties]
    for one, reward in zip(of_tokens, rewards, strict=True):
        one[-1] += reward
    flat = np.concatenate(of_tokens)
    if name == "ppo, whitened":
        whitened = (flat - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8) + flat.mean()
        of_tokens = np.split(whitened, np.cumsum([len(one) for one in of_tokens])[:-1])
    if name.startswith("ppo"):
        made = []
        for one, reward in zip(rollouts, of_tokens, strict=True):
            value, after, found = [*one["old_values"].astype(float), 0.0], 0.0, []
            for place in reversed(range(len(reward))):
                after = reward[place] + value[place + 1] - value[place] + 0.95 * after
                found.append(after)
            made.append(np.array(found[::-1]))
        flat = np.concatenate(made)
        return [float(((one - flat.mean()) / flat.std(ddof=1)).mean()) for one in made]
    if name == "reinforce_plus_plus":
        returns = [one[::-1].cumsum()[::-1] for one in of_tokens]
        flat = np.concatenate(returns)
        return [float(((one - flat.mean()) / flat.std(ddof=1)).mean()) for one in returns]
    totals = np.array([one.sum() for one in of_tokens])
    group = np.array([one["prompt_index"] for one in rollouts])
    found = []
    for index, total in enumerate(totals):
        others = totals[group == group[index]]
        if name == "rloo":
            found.append(total - (others.sum() - total) / (len(others) - 1))
        else:
            found.append((total - others.mean()) / (others.std(ddof=1) + 1e-4))
    return found


def ones(completions, answer, **_columns):
    """The number of a digit, less for a right answer, so that other completions are better than for the run's own."""
    right = exact(completions, answer)
    return [text.count("1") - 10.0 * one for text, one in zip(completions, right, strict=True)]


@pytest.mark.parametrize("name", METHODS)
def test_advantages_in_training_and_regraded_are_those_by_hand(sums_home, tmp_path, capsys, name):
    """With a KL in the reward, several generations, two steps. A run's own rewards change nothing."""
    method = METHODS[name] | {"num_generations": 4}
    method |= {"kl_coef" if method["type"] == "ppo" else "beta": KL, "kl_estimator": "k1"}
    folder = online_run(sums_home, tmp_path, method, training={"learning_rate": 5e-3})
    changes = 0
    for step in (1, 2):
        with StoredRun(folder) as stored:
            rollouts = stored.rollouts(step)
        own = [one["reward"] for one in rollouts]
        other = [one["completion"].count("1") - 10.0 * one["reward"] for one in rollouts]
        before, after = by_hand(name, rollouts, own), by_hand(name, rollouts, other)
        stored_penalties = [one["penalties"] for one in rollouts if one["penalties"] is not None]
        assert (name == "grpo, in the loss") == (not stored_penalties)
        assert step == 1 or not stored_penalties or max(np.abs(one).max() for one in stored_penalties) > 1e-3
        exact_ones = name == "rloo" or name.startswith("ppo")
        near = {"abs": 1e-4} if exact_ones else {"abs": 2e-3, "rel": 2e-3}  # 1e-4 is added to deviations
        assert [one["advantage"] for one in rollouts] == pytest.approx(before, **near)
        regraded = REWARDED[method["type"]].regraded(load(folder / "config.yaml").config.method, rollouts, other)
        assert regraded == pytest.approx(after, **near)
        same = REWARDED[method["type"]].regraded(load(folder / "config.yaml").config.method, rollouts, own)
        assert same == pytest.approx([one["advantage"] for one in rollouts], abs=1e-5)
        changes += sum(one["advantage"] * new < 0 for one, new in zip(rollouts, regraded, strict=True))
    capsys.readouterr()
    assert main(["regrade", str(folder), "--reward", "test_rollouts:ones"]) == 0
    found = re.search(SUMMARY, " ".join(capsys.readouterr().out.split()))
    assert found is not None and int(found[1]) == changes > 0 and int(found[2]) == 64
    assert main(["regrade", str(folder), "--reward", "benchmarks.sums:exact"]) == 0
    found = re.search(SUMMARY, " ".join(capsys.readouterr().out.split()))
    assert found is not None and (int(found[1]), int(found[3])) == (0, 0) and found[4] == found[5]


def test_advantages_of_0_that_stay_0_are_counted(sums_home, tmp_path, capsys):
    rewards = [{"type": "python", "function": "test_online:equal"}]
    folder = online_run(sums_home, tmp_path, {"beta": 0.0}, rewards=rewards)
    capsys.readouterr()
    assert main(["regrade", str(folder), "--reward", "test_online:equal"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "0 of 64 advantages change sign, 0 become 0 and 64 were 0, of which 64 are still 0" in said


@pytest.mark.parametrize("name", ["rloo", "reinforce_plus_plus", "grpo", "ppo", "ppo, whitened"])
def test_truncated_completions_keep_their_penalty(sums_home, tmp_path, capsys, name):
    """Out of the loss only: in the statistics with the KL in their reward, which is stored and regraded."""
    method = METHODS[name] | {
        "num_generations": 4, "kl_coef" if name.startswith("ppo") else "beta": KL, "kl_estimator": "k1",
        "mask_truncated_completions": True, "ref_model": str(sums_home / "model"),
    }  # fmt: skip
    settings = {"training": {"learning_rate": 5e-3, "max_steps": 3}, "rollout": {"max_completion_length": 2}}
    folder = online_run(sums_home, tmp_path, method, **settings)
    with StoredRun(folder) as stored:
        rollouts = stored.rollouts(3)
    masked = [one["finish_reason"] == "length" for one in rollouts]
    assert 0 < sum(masked) < 32
    assert (
        [one["advantages"] is None for one in rollouts] == masked == [one["new_logprobs"] is None for one in rollouts]
    )
    for one in rollouts:
        by_definition = KL * (one["old_logprobs"] - one["ref_logprobs"])
        np.testing.assert_allclose(one["penalties"], by_definition, atol=1e-5)
    assert max(np.abs(one["penalties"]).max() for one, out in zip(rollouts, masked, strict=True) if out) > 1e-2
    expected = by_hand(name, rollouts, [one["reward"] for one in rollouts])
    for one, out, mean in zip(rollouts, masked, expected, strict=True):
        assert one["advantage"] is None if out else one["advantage"] == pytest.approx(mean, abs=2e-3)
    if name.startswith("ppo"):
        assert all(np.isfinite(one["old_values"]).all() and len(one["returns"]) for one in rollouts)
        line = next(line for line in read_metrics(folder) if line["step"] == 3)
        by_definition = [float((one["old_logprobs"] - one["ref_logprobs"]).sum()) for one in rollouts]
        assert line["kl"] == pytest.approx(np.mean(by_definition), abs=1e-4), "of all completions"
    if name in ("reinforce_plus_plus", "ppo"):  # normalised over all tokens, of which those in the loss are some
        assert max(np.abs(one["advantages"]).max() for one in rollouts if one["advantages"] is not None) < 5
    capsys.readouterr()
    assert main(["regrade", str(folder), "--reward", "benchmarks.sums:exact", "--step", "3"]) == 0
    assert f"0 of {32 - sum(masked)} advantages change" in " ".join(capsys.readouterr().out.split())


def test_truncated_completions_of_an_earlier_run(sums_home, tmp_path):
    """Behaviour version 1: without the penalty, as the run began; so are they regraded."""
    method = METHODS["rloo"] | {"num_generations": 4, "beta": KL, "mask_truncated_completions": True}
    settings = {"training": {"learning_rate": 5e-3}, "rollout": {"max_completion_length": 2}, "behavior_version": 1}
    folder = online_run(sums_home, tmp_path, method, **settings)
    with StoredRun(folder) as stored:
        rollouts = stored.rollouts(2)
    masked = [one["finish_reason"] == "length" for one in rollouts]
    assert 0 < sum(masked) < 32
    for one, out in zip(rollouts, masked, strict=True):
        assert (one["old_logprobs"] is None) == out
    zero = {"old_logprobs": np.zeros(2), "ref_logprobs": np.zeros(2)}
    expected = by_hand("rloo", [one | zero if out else one for one, out in zip(rollouts, masked, strict=True)],
                       [one["reward"] for one in rollouts])  # fmt: skip
    for one, mean in zip(rollouts, expected, strict=True):
        assert one["advantage"] is None or one["advantage"] == pytest.approx(mean, abs=1e-4)
