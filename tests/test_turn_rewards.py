"""Rewards of turns: where they are placed, the advantages by turn, and their gradient against exact enumeration."""

import itertools

import numpy as np
import pytest
import torch
from test_acting import CALCULATOR, train

from posttrain.base.errors import ConfigError
from posttrain.cli import main
from posttrain.config import load
from posttrain.config.schema.online import GRPOMethod, PPOMethod, ReinforcePlusPlusMethod, RLOOMethod
from posttrain.environments.trajectory import Trajectory
from posttrain.inspection.losslab import losses
from posttrain.recipes import REWARDED, grpo, ppo
from posttrain.rollout import turns_of
from posttrain.runs.metrics import read_metrics
from posttrain.runs.stored_rollouts import StoredRun, of_trained


def episode(lengths, rewards):
    """An episode whose replies have these numbers of tokens, with one token of a tool after each."""
    made = Trajectory([1], [])
    for length in lengths:
        made.add("model", [7] * length, [-0.5] * length)
        made.add("tool", [8])
    made.turn_rewards = list(rewards)
    return made


def placed(episodes, totals):
    lengths = [3 if each is None else sum(each.reply_lengths) for each in episodes]
    return turns_of(episodes, torch.tensor(totals), torch.tensor(lengths))


def test_what_the_turns_did_not_earn_belongs_to_the_last():
    """Replies without tokens hand their reward to the next that has some, or else to the one before."""
    episodes = [episode([2, 1], [0.25, 0.5]), None, episode([1, 0, 2], [0.5, -1.0]), episode([2, 0], [0.5])]
    turns = placed(episodes, [1.0, 2.0, 0.0, 3.0])
    assert turns.sequence_U.tolist() == [0, 0, 1, 2, 2, 3] and turns.length_U.tolist() == [2, 1, 3, 1, 2, 2]
    assert turns.reward_U.tolist() == [0.25, 0.75, 2.0, 0.5, -0.5, 3.0] and turns.reward_S.tolist() == [1, 2, 0, 3]
    penalty_N = torch.arange(11.0)
    expected = torch.tensor([0, 0.25, 0.75, 0, 0, 2.0, 0.5, 0, -0.5, 0, 3.0]) - penalty_N
    assert torch.equal(turns.token_rewards(penalty_N), expected)
    assert turns.sequence_N.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    to_go_U, number_U = turns.to_go(penalty_N)
    assert to_go_U.tolist() == [1 - 3, 0.75 - 2, 2 - 12, 0 - 21, -0.5 - 15, 3 - 19] and number_U.tolist() == [
        0,
        1,
        0,
        0,
        1,
        0,
    ]
    assert turns.totals(penalty_N).tolist() == [-2, -10, -21, -16]
    single = placed([None, None], [1.0, 2.0])
    assert single.reward_U.tolist() == [1.0, 2.0] and single.length_U.tolist() == [3, 3]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_grpo_compares_what_follows_with_the_same_turn_of_the_group(scale):
    method = GRPOMethod(advantage_level="turn", scale_rewards=scale)
    episodes = [episode([2, 1], [0.5, 1]), episode([1, 3], [0.0, 2]), episode([2], []), episode([1, 1], [3]), None]
    group, totals = [0, 0, 0, 1, 1], [1.5, 2.0, 0.5, 4.0, 1.0]
    turns = placed(episodes, totals)
    got = grpo.of_tokens(method, turns, torch.tensor(group), torch.zeros(14))
    to_go = {(0, 0): 1.5, (0, 1): 1.0, (1, 0): 2.0, (1, 1): 2.0, (2, 0): 0.5, (3, 0): 4.0, (3, 1): 1.0, (4, 0): 1.0}
    expected = []
    for (index, turn), value in to_go.items():
        same = [other for (one, at), other in to_go.items() if at == turn and group[one] == group[index]]
        spread = {"group": np.std(same, ddof=1) if len(same) > 1 else 0, "batch": np.std([*to_go.values()], ddof=1)}
        expected.append((value - np.mean(same)) / (spread.get(scale, 1 - 1e-4) + 1e-4))
    np.testing.assert_allclose(got, np.repeat(expected, [2, 1, 1, 3, 2, 1, 1, 3]), rtol=1e-5, atol=1e-6)
    assert got[10] == 0, "the only second turn of its group"
    whole = grpo.of_tokens(GRPOMethod(scale_rewards=scale), turns, torch.tensor(group), torch.zeros(14))
    single = grpo.of_tokens(
        GRPOMethod(scale_rewards=scale), turns_of([None] * 5, torch.tensor(totals), torch.tensor([3, 4, 2, 2, 3])),
        torch.tensor(group), torch.zeros(14),
    )  # fmt: skip
    assert torch.equal(whole, single), "by trajectory, only the total counts"


REWARDS = torch.tensor([0.3, -0.2]), torch.tensor([[1.0, -0.5], [0.7, 2.0]])  # of the first action, of the second


def estimated(advantages):
    """The expected gradient over all pairs of episodes of two actions, each action a turn of one token."""
    first, second = torch.tensor([0.4, -0.3]), torch.tensor([[0.1, 0.9], [-0.6, 0.2]])
    once, twice = torch.softmax(first, 0), torch.softmax(second, 1)
    episodes = [(a, b, float(once[a] * twice[a, b])) for a in (0, 1) for b in (0, 1)]
    gradient, exact = [torch.zeros(2), torch.zeros(2, 2)], [torch.zeros(2), torch.zeros(2, 2)]
    for a, b, chance in episodes:
        total = float(REWARDS[0][a] + REWARDS[1][a, b])
        exact[0] += chance * total * (torch.eye(2)[a] - once)
        exact[1][a] += chance * total * (torch.eye(2)[b] - twice[a])
    for pair in itertools.product(episodes, repeat=2):
        earned = [[float(REWARDS[0][a]), float(REWARDS[1][a, b])] for a, b, _ in pair]
        turns = placed([episode([1, 1], each) for each in earned], [sum(each) for each in earned])
        for (a, b, _), (one, two) in zip(pair, advantages(turns).view(2, 2), strict=True):
            chance = pair[0][2] * pair[1][2] / 2
            gradient[0] += chance * one * (torch.eye(2)[a] - once)
            gradient[1][a] += chance * two * (torch.eye(2)[b] - twice[a])
    return gradient, exact


@pytest.mark.parametrize("level", ["trajectory", "turn"])
def test_rloo_is_unbiased_at_both_levels(level):
    """Enumerated exactly, with two turns in every episode: the expected gradient is that of the expected reward."""
    method = RLOOMethod(advantage_level=level, num_generations=2)
    gradient, exact = estimated(
        lambda turns: grpo.of_tokens(method, turns, torch.zeros(2, dtype=torch.int64), torch.zeros(4))
    )
    for one, other in zip(gradient, exact, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert exact[0].abs().max() > 0.1


@pytest.mark.parametrize("method", [GRPOMethod(), RLOOMethod(advantage_level="turn"), ReinforcePlusPlusMethod()])
def test_episodes_without_a_reply_are_regraded_as_none(method):
    """Of a step's stored rows; those without tokens were in no group."""
    stored = episode([2, 1], [0.5]).stored() | {"turn_rewards": [0.5]}
    row = {"prompt_index": 0, "tokens": [1, 2, 3], "turns": stored, "advantages": None, "ref_logprobs": None}
    empty = row | {"tokens": [], "turns": Trajectory([1], [], stop_reason="context_overflow").stored()}
    got = grpo.regraded(method, [empty, row, row, empty], [0.0, 1.0, 3.0, 0.0])
    assert got[0] is got[3] is None
    alone = grpo.regraded(method, [row, row], [1.0, 3.0])
    assert got[1:3] == alone and alone[0] != alone[1]
    assert grpo.regraded(method, [empty], [0.0]) == [None]


def test_returns_of_tokens_see_when_a_turn_earned_its_reward():
    """REINFORCE++ and PPO: a token's return has no rewards of earlier turns."""
    turns = placed([episode([2, 1], [5.0, 1.0]), episode([1, 1], [0.0, 2.0])], [6.0, 2.0])
    got = grpo.of_tokens(ReinforcePlusPlusMethod(), turns, torch.tensor([0, 1]), torch.zeros(5))
    returns = np.array([6, 6, 1, 2, 2.0])
    np.testing.assert_allclose(got, (returns - returns.mean()) / (returns.std(ddof=1) + 1e-4), rtol=1e-5)
    reward_N, sequence_N = ppo.token_rewards(PPOMethod(), turns, torch.full((5,), 0.5))
    assert reward_N.tolist() == [-0.5, 4.5, 0.5, -0.5, 1.5] and sequence_N.tolist() == [0, 0, 0, 1, 1]


CODE = '''
from posttrain.environments.calculator import Calculator


class Paid(Calculator):
    """A calculator whose calls cost something, or earn it."""

    def turn_rewards(self):
        return [0.25 if "+" in expression else -0.5 for expression in self.expressions]


class TooMany(Calculator):
    def turn_rewards(self):
        return [1.0] * 9
'''


@pytest.fixture
def paid(tmp_path, users_module):
    users_module("paid_env", CODE)
    return {"name": "p", "class": "paid_env.py:Paid"}


@pytest.mark.parametrize(
    "method",
    [
        {"type": "grpo", "advantage_level": "turn"},
        {"type": "rloo", "advantage_level": "turn", "beta": 0.1},
        {"type": "ppo", "num_generations": 8, "num_ppo_epochs": 1, "num_minibatches": 1},
    ],
)
def test_a_run_places_stores_and_regrades_the_rewards_of_turns(calculator_home, tmp_path, paid, capsys, method):
    overrides = ["training.batch_size=8", "training.max_steps=2", "checkpoint.save_steps=1", "seed=2"]
    folder = train(calculator_home, tmp_path / "runs", method, *overrides, environments=[paid])
    rows = StoredRun(folder).rollouts(1)
    called = [row for row in rows if any(part["calls"] for part in row["turns"]["turns"])]
    assert called
    for row in rows:
        calls = [call for part in row["turns"]["turns"] for call in part["calls"]]
        assert row["turns"]["turn_rewards"] == [0.25 if "+" in call[1]["expression"] else -0.5 for call in calls]
        assert row["turns"]["reward"] == sum(row["turns"]["turn_rewards"])
    longest = max(called, key=lambda row: len(row["turns"]["turns"]))
    spans = [part for part in longest["turns"]["turns"] if part["author"] == "model"]
    each = [set(longest["advantages"][part["start"] : part["stop"]].tolist()) for part in spans]
    if method["type"] != "ppo":
        assert all(len(values) == 1 for values in each) and each[0] != each[-1], "one advantage for a turn"
    again = REWARDED[method["type"]].regraded(
        load(folder / "config.yaml").config.method, [of_trained(row) for row in rows], [row["reward"] for row in rows]
    )
    assert again == pytest.approx([row["advantage"] for row in rows], abs=1e-5)
    capsys.readouterr()
    assert main(["regrade", str(folder), "--reward", '{"type": "gsm8k"}']) == 0
    assert "of 128 advantages change sign" in capsys.readouterr().out
    lab = losses(folder, 2, [load(folder / "config.yaml").config.method.loss_name])
    line = next(line for line in read_metrics(folder) if line["step"] == 2 and "loss" in line)
    assert lab.rows[0].norm == pytest.approx(line["grad_norm"], rel=1e-4)


def test_more_rewards_than_turns_is_an_error_of_the_environment(calculator_home, tmp_path, paid):
    environments = [paid | {"class": "paid_env.py:TooMany"}]
    folder = train(calculator_home, tmp_path / "runs", None, "training.max_steps=1", environments=environments)
    assert {row["turns"]["stop_reason"] for row in StoredRun(folder).rollouts(1)} == {"env_error"}
    assert "turn_rewards() has 9 rewards for" in (folder / "training.log").read_text()


@pytest.mark.parametrize(
    ("method", "environments", "message"),
    [
        ({"type": "grpo"}, [], "method.advantage_level is turn, but without environments or tools there is one turn"),
        ({"type": "reinforce_plus_plus"}, [CALCULATOR], "is not read by reinforce_plus_plus"),
    ],
)
def test_settings_that_have_no_turns_are_refused(calculator_home, tmp_path, method, environments, message):
    with pytest.raises(ConfigError, match=message):
        train(calculator_home, tmp_path, method | {"advantage_level": "turn"}, environments=environments)
