"""Episodes that branch: which turns are shared, what their environments repeat, their gradients and advantages."""

import json
import random
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from test_acting import CALCULATOR, train, whole_and_resumed
from test_engines import policy_of
from test_episodes import CODE, END, Scripted, add, check
from test_turns import Again
from transformers import AutoTokenizer

from posttrain.base.errors import ConfigError
from posttrain.batch import Example, Node, pack
from posttrain.cli import main
from posttrain.config import load
from posttrain.config.schema.online import GRPOMethod
from posttrain.config.schema.rollout import EnvironmentConfig
from posttrain.engines import EmbeddedEngine, Sampling, generation
from posttrain.engines.protocol import seed_of
from posttrain.engines.turns import Turn, converse
from posttrain.environments.episode import Forest, Start
from posttrain.environments.episodes import Episodes, Limits, codecs_of
from posttrain.environments.process import Environments
from posttrain.environments.trajectory import Trajectory
from posttrain.inspection.losslab import losses
from posttrain.recipes import REWARDED, grpo
from posttrain.rewards.parts import CompletionReward
from posttrain.rollout import Rollout, SampledCompletion, turns_of
from posttrain.runs.metrics import read_metrics
from posttrain.runs.stored_rollouts import StoredRun, of_trained
from posttrain.scoring import Scorer


def test_the_rounds_of_a_forest():
    forest = Forest(2, rounds=2)
    assert [forest.rounds_of(tree, 8) for tree in (0, 1)] == [[[0], [2, 4], [6]], [[1], [3, 5], [7]]]
    assert [Forest(3).rounds_of(tree, 4) for tree in (0, 1, 2)] == [[[0], [3]], [[1]], [[2]]]


# --- the engine -------------------------------------------------------------------------------------------------------

PROMPT = [5, 9, 11, 2]
SAMPLED = Sampling(temperature=0.8, max_completion_length=9, stop_token_ids=(7, 19))


def grown(engine, turns=4, branches=3):
    """A conversation, and branches of it that begin once it has ended: the tokens of each."""
    begun = [Future() for _ in range(1 + branches)]
    talks, replies = {0: [*PROMPT]}, dict.fromkeys(range(1 + branches), 0)
    nodes = []

    def turn(index, added):
        future = Future()
        future.set_result(Turn(added, seed_of(3, index, replies[index]), 9))
        return future

    def follow(index, reply):
        talks[index] += reply.tokens
        replies[index] += 1
        if replies[index] == turns:
            ended = Future()
            ended.set_result(None)
            for branch in range(1, 1 + branches) if index == 0 else ():
                prefix = nodes[(branch - 1) % len(nodes)]
                talks[branch], replies[branch] = [*prefix], turns - 1
                begun[branch].set_result(Turn(prefix, seed_of(3, branch), 9, branches_from=0))
            return ended
        talks[index] += [20 + replies[index], 3]
        if index == 0:
            nodes.append([*talks[0]])
        return turn(index, [20 + replies[index], 3])

    begun[0].set_result(Turn(PROMPT, seed_of(3, 0), 9))
    converse(engine, begun, SAMPLED, follow=follow, longest=100, branching=True)
    return talks


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mistral"])
def test_a_branch_continues_from_the_keys_of_its_trunk(family, monkeypatch):
    monkeypatch.setattr(
        generation, "width_step", lambda *_: None
    )  # whether prefills are padded depends on the processor
    policy, fed = policy_of(family), []
    policy.get_input_embeddings().register_forward_hook(lambda module, given, out: fed.append(given[0].shape))
    once = grown(EmbeddedEngine(policy))
    widths = [shape[1] for shape in fed]
    fed.clear()
    assert grown(Again(policy)) == once
    assert len({tuple(tokens) for tokens in once.values()}) == 4
    assert widths[0] == len(PROMPT) and max(widths[1:]) <= 3, "of a branch, only its last token"
    assert sum(shape[1] for shape in fed) > 2 * sum(widths), "without the keys of its trunk, all of its tokens"


# --- episodes ---------------------------------------------------------------------------------------------------------

MOODY = '''

class Moody(Sum):
    def add(self, number: int) -> int:
        """
        Add a number, and sometimes another.

        Args:
            number: the number
        """
        import os
        return super().add(number) + int.from_bytes(os.urandom(4), "big")
'''


@pytest.fixture
def run(tmp_path, users_module, shared):
    name = f"my_branches_{tmp_path.name}"
    users_module(name, CODE + MOODY)
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "qwen3")
    opened = []

    def run(script, n=8, forest=None, cls="Sum", rows=({"goal": 7}, {"goal": 9}), contract="tools"):
        settings = EnvironmentConfig(**{"name": "e", "class": f"{name}.py:{cls}", "contract": contract})
        environments = Environments([settings], [], 3)
        opened.append(environments)
        episodes = Episodes(
            Scripted(tokenizer, {"Row": script}), environments, codecs_of(environments, tokenizer), Limits(2000, 2000)
        )
        opened.append(episodes)
        starts = [Start([{"role": "user", "content": f"Row {i}."}], row) for i, row in enumerate(rows)]
        made = episodes.run(starts, n, Sampling(), [11 * i for i in range(len(rows))], forest=forest)
        check(made, tokenizer, None)
        return made, episodes.engine.prompts

    yield run
    for each in opened:
        each.close()


SCRIPT = [add(3), add(4), add(0), "It is 7." + END]


@pytest.mark.parametrize("rounds", [1, 2])
def test_branches_share_turns_and_their_environments_repeat_the_calls(run, rounds):
    groups, prompts = run(SCRIPT, n=16, forest=Forest(2, rounds))
    for group in groups:
        assert [each.tree for each in group] == [0, 1] * 8
        assert [each.trunk is None for each in group] == [True, True] + [False] * 14
        for number, each in enumerate(group):
            assert each.state.calls == 3 and each.state.total == 7, "its own environment made every call"
            assert each.reward == float(each is group[number] and groups.index(group) == 0)
            if each.trunk is not None:
                trunk = group[each.trunk]
                assert trunk.tree == each.tree and 0 < each.shared < len(each.tokens)
                assert each.tokens[: each.shared] == trunk.tokens[: each.shared]
                assert each.shared in [part.stop for part in each.parts if part.author == "tool"]
    first = {each.trunk for group in groups for each in group[2:]}
    assert first == {0, 1} if rounds == 1 else first > {0, 1}
    sampled = sum(4 - shared_replies(each) for group in groups for each in group)
    assert len(prompts) == sampled, "shared replies are not sampled again"


def shared_replies(each):
    return sum(part.stop <= each.shared for part in each.parts if part.author == "model")


def test_which_turns_branch_depends_on_seeds_alone(run):
    first, second = (run(SCRIPT, forest=Forest(2))[0] for _ in range(2))
    assert [each.stored() for group in first for each in group] == [each.stored() for group in second for each in group]
    assert len({each.shared for group in first for each in group if each.trunk is not None}) > 1


def test_without_inner_turns_branches_begin_anew(run):
    [group, _] = run(["It is 7." + END], n=4, forest=Forest(1))[0]
    assert [each.tree for each in group] == [0] * 4 and all(each.trunk is None for each in group)
    assert all(each.stop_reason == "completed" for each in group)


def test_an_environment_that_does_not_repeat_itself_is_told(run):
    [group, _] = run(SCRIPT, n=4, forest=Forest(1), cls="Moody")[0]
    assert [each.stop_reason for each in group] == ["completed"] + ["env_error"] * 3
    assert "repeated the calls of another episode, with other results" in group[1].reason


def test_games_branch_too(run):
    script = ["1" + END, "2" + END, "3" + END]
    [group] = run(script, n=4, forest=Forest(1), cls="Guess", contract="messages", rows=[{"secret": 3}])[0]
    assert [each.turn_rewards for each in group] == [[-0.1, -0.1, 1.0]] * 4
    assert all(0 < each.shared < len(each.tokens) for each in group[1:])


# --- trees of tokens --------------------------------------------------------------------------------------------------


def branching(turns, branches, seed=0):
    """A group of a trunk with this number of turns and branches of it, as a rollout; the number of unique tokens."""
    source = random.Random(seed)

    def extended(made, count):
        for _ in range(count):
            size = source.randint(1, 4)
            made.add("model", [source.randint(30, 60) for _ in range(size)], [-0.5] * size)
            made.add("tool", [source.randint(1, 29) for _ in range(source.randint(1, 3))])
        return made

    trunk = extended(Trajectory([1, 2], [], tree=0), turns)
    episodes, unique = [trunk], len(trunk.tokens)
    for number in range(branches):
        stop = [part.stop for part in trunk.parts if part.author == "tool"][number % (turns - 1)]
        parts = [part for part in trunk.parts if part.stop <= stop]
        count = sum(trunk.trained[:stop])
        own = Trajectory(
            [1, 2], [], trunk.tokens[:stop], trunk.trained[:stop], trunk.logprobs[:count], parts, tree=0, trunk=0,
            shared=stop,
        )  # fmt: skip
        episodes.append(extended(own, turns - 1 - number % (turns - 1)))
        unique += len(episodes[-1].tokens) - stop
    completions = [
        SampledCompletion(0, e.tokens, e.logprobs, "", "stop", 0, CompletionReward(float(i)), e.trained, e)
        for i, e in enumerate(episodes)
    ]
    return Rollout([Example((Node([1, 2]),), 0)], completions), unique


def packs_of(examples):
    return pack(examples, 10_000)


@pytest.mark.parametrize(("turns", "branches"), [(4, 5), (8, 7), (32, 7), (128, 3)])
def test_every_token_of_a_tree_is_fed_once(turns, branches):
    """Branches may begin with the same token by chance; then even that one is shared."""
    rollout, unique = branching(turns, branches)
    [part] = rollout.parts(range(1 + branches), packs_of, 10_000)
    leaves = 1 + branches  # whose last tokens are not fed
    assert unique + 2 - leaves - branches <= part.pack.num_tokens <= unique + 2 - leaves


def test_a_trees_gradients_are_those_of_each_branch_alone():
    policy = policy_of("qwen3")
    rollout, _ = branching(5, 6)
    weights = torch.linspace(-1, 2, 7)

    def gradients(parts):
        policy.zero_grad()
        for part in parts:
            scores = Scorer(policy)(part.pack).logprob_N
            owner_N = part.completion_S[part.pack.sequence_N]
            (weights[owner_N] * scores).sum().backward()
        return [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]

    together = gradients(rollout.parts(range(7), packs_of, 10_000))
    alone = gradients([part for index in range(7) for part in rollout.parts([index], packs_of, 10_000)])
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_the_tokens_of_a_tree_in_packs_are_those_of_the_completions():
    """Whatever the packs: each scored token is the token of its completion, and none is lost."""
    rollout, unique = branching(6, 6)
    tokens_R = torch.tensor(
        [token for c in rollout.completions for token, own in zip(c.tokens, c.trained, strict=True) if own]
    )
    for most in (unique + 2, unique // 2 + 10, max(len(c.tokens) for c in rollout.completions) + 2):
        parts = rollout.parts(range(7), lambda examples, most=most: pack(examples, most), most)
        assert sorted(index for part in parts for index in part.completion_S.tolist()) == [*range(7)]
        assert torch.equal(torch.cat([part.token_N for part in parts]).sort()[0], torch.arange(len(tokens_R)))
        for part in parts:
            assert torch.equal(tokens_R[part.token_N], part.pack.target_N)
            assert torch.equal(rollout.sequence_R[part.token_N], part.completion_S[part.pack.sequence_N])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_compare_with_the_group_and_with_the_tree(scale):
    """Tree-GRPO, section 3.3: the advantage within the tree is added to that among all trees of the prompt."""
    rewards, trees, groups = [1.0, 0, 0, 3, 2, 5, 4, 1], [0, 1, 0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1]
    episodes = [Trajectory([1], [], tree=tree) for tree in trees]
    for each in episodes:
        each.add("model", [7, 8], [-0.5, -0.5])
    turns = turns_of(episodes, torch.tensor(rewards), torch.full((8,), 2))
    method = GRPOMethod(scale_rewards=scale, num_trees=2)
    got = grpo.of_tokens(method, turns, torch.tensor(groups), torch.zeros(16)).view(8, 2)
    expected = []
    for reward, tree, group in zip(rewards, trees, groups, strict=True):
        total = 0.0
        for same in (
            [g == group for g in groups],
            [g == group and t == tree for g, t in zip(groups, trees, strict=True)],
        ):
            values = np.array(rewards)[same]
            spread = {"group": values.std(ddof=1) if len(values) > 1 else 0, "batch": np.std(rewards, ddof=1)}
            total += (reward - values.mean()) / (spread.get(scale, 1 - 1e-4) + 1e-4)
        expected.append(total)
    np.testing.assert_allclose(got[:, 0], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(got[:, 0], got[:, 1])


# --- runs -------------------------------------------------------------------------------------------------------------

TREES = {"type": "grpo", "num_generations": 8, "num_trees": 4, "beta": 0.05}


def test_a_run_with_branches_resumes_regrades_and_is_shown(calculator_home, tmp_path, power_cut, capsys):
    overrides = ("training.max_steps=3", "checkpoint.save_steps=1", "training.batch_size=12")
    _, cut = whole_and_resumed(calculator_home, tmp_path, TREES, overrides, power_cut)
    rows = [row for step in (1, 2, 3) for row in StoredRun(cut).rollouts(step)]
    branches = [row for row in rows if row["turns"]["trunk"] is not None]
    assert branches and all(row["turns"]["tree"] == row["rollout_index"] % 4 for row in rows)
    by_place = {(row["step"], row["prompt_index"], row["rollout_index"]): row for row in rows}
    for row in branches:
        trunk = by_place[row["step"], row["prompt_index"], row["turns"]["trunk"]]
        shared = row["turns"]["shared"]
        assert shared > 0 and row["tokens"][:shared].tolist() == trunk["tokens"][:shared].tolist()
    lines = [line for line in read_metrics(cut) if "turns" in line]
    assert any(line.get("trees/shared_ratio", 0) > 0 for line in lines)
    assert all(line["packing_ratio"] > 1.3 for line in lines), "prompts of 35 tokens are shared too"
    method = load(cut / "config.yaml").config.method
    first = StoredRun(cut).rollouts(1)
    again = REWARDED["grpo"].regraded(method, [of_trained(row) for row in first], [row["reward"] for row in first])
    assert again == pytest.approx([row["advantage"] for row in first], abs=1e-5)
    lab = losses(cut, 3, [method.loss_name])
    line = next(line for line in read_metrics(cut) if line["step"] == 3 and "loss" in line)
    assert lab.rows[0].norm == pytest.approx(line["grad_norm"], rel=1e-4)
    assert len(losses(cut, 3, []).rows) > 5, "other losses are computed on branches too"
    capsys.readouterr()
    row = next(row for row in branches if row["step"] == branches[0]["step"])
    where = ["--step", str(row["step"]), "--prompt", str(row["prompt_index"]), "--rollout", str(row["rollout_index"])]
    assert main(["why", str(cut), *where]) == 0
    assert f"branch of rollout {row['turns']['trunk']}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("method", "environments", "message"),
    [
        ({"num_trees": 2}, [], "method.num_trees is set, but without environments or tools nothing branches"),
        ({"num_trees": 5}, [CALCULATOR], "method.num_trees is 5 of 8 .* fewer than 1 branches per tree"),
        ({"num_trees": 2, "tree_rounds": 4}, [CALCULATOR], "fewer than 4 branches per tree"),
        ({"tree_rounds": 2}, [CALCULATOR], "method.tree_rounds has no effect without num_trees"),
        ({"num_trees": 2, "advantage_level": "turn"}, [CALCULATOR], "cannot be combined with advantage_level: turn"),
        ({"num_trees": 2, "loss_type": "no_baseline"}, [CALCULATOR], "num_trees is not read by no_baseline"),
        ({"type": "rloo", "num_trees": 2}, [CALCULATOR], "num_trees"),
    ],
)
def test_settings_that_cannot_branch_are_refused(calculator_home, tmp_path, method, environments, message):
    with pytest.raises(ConfigError, match=message):
        train(calculator_home, tmp_path, {"type": "grpo"} | method, environments=environments)
    assert json.loads((tmp_path / "run.json").read_text())["method"]
