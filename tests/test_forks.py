"""Chat templates that rewrite earlier turns: an episode forks there, or keeps what was sampled, or is refused."""

import json
import shutil
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from test_acting import train, whole_and_resumed
from test_branches import packs_of
from test_codec import HELLO, RESULT, WEATHER
from test_engines import policy_of
from test_episodes import CODE, END, Scripted, add, check
from test_turns import Again
from transformers import AutoTokenizer

from posttrain.base.errors import ConfigError, DataError
from posttrain.batch import Example, Node, pack
from posttrain.cli import main
from posttrain.config.schema.rollout import EnvironmentConfig
from posttrain.data.codec import Codec, RewrittenTurn
from posttrain.engines import EmbeddedEngine, Sampling
from posttrain.engines.turns import Turn, converse
from posttrain.environments.episode import Start
from posttrain.environments.episodes import Episodes, Limits, codecs_of
from posttrain.environments.process import Environments
from posttrain.environments.trajectory import Trajectory
from posttrain.inspection.losslab import losses
from posttrain.rewards.parts import CompletionReward
from posttrain.rollout import Rollout, SampledCompletion
from posttrain.runs.metrics import read_metrics
from posttrain.runs.stored_rollouts import StoredRun, trained_tokens
from posttrain.sampler import of_episodes
from posttrain.scoring import Scorer

USER = {"role": "user", "content": "Thanks."}
# As DeepSeek-R1's: only what follows the thinking of a reply is written, and the opening begins to think.
STRIPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
CUTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content[-2:] if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KEEPS = STRIPS.replace(".split('</think>')[-1].lstrip()", "")  # it writes a reply as it is


@pytest.fixture
def tokenizer(shared):
    return AutoTokenizer.from_pretrained(shared / "tokenizers" / "qwen3")


# --- the codec --------------------------------------------------------------------------------------------------------


def rewrites(codec, following, empty=False):
    """Whether the codec says that the thinking of a reply is left out before these messages."""
    thinking = "" if empty else "Rome is in the south."
    ids = codec.first(HELLO) + codec._ids(f"<think>\n{thinking}\n</think>\n\nYes.<|im_end|>")
    assert codec.bridge(ids, following), "without asking, what was sampled stays"
    try:
        codec.bridge(ids, following, after=codec.parse(ids[len(codec.first(HELLO)) :]))
    except RewrittenTurn as error:
        assert "removes the thinking" in str(error) and "rewritten_turns" in str(error)
        return True
    return False


def test_which_templates_leave_out_thinking_and_when(tokenizer):
    """Qwen3 keeps thinking while tools are called, and leaves it out once the user speaks again."""
    codec = Codec(tokenizer, [WEATHER])
    assert [rewrites(codec, [following]) for following in (USER, RESULT)] == [True, False]
    assert [rewrites(codec, [following], empty=True) for following in (USER, RESULT)] == [True, True]
    for template, expected in ((STRIPS, True), (KEEPS, False)):
        tokenizer.chat_template = template
        assert rewrites(Codec(tokenizer), [USER]) is expected


# --- episodes ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def play(tmp_path, users_module, tokenizer):
    name = f"my_forks_{tmp_path.name}"
    users_module(name, CODE)
    opened = []

    def play(script, template=None, cls="Guess", contract="messages", variables=None, **limits):
        tokenizer.chat_template = template or tokenizer.chat_template
        settings = EnvironmentConfig(**{"name": "e", "class": f"{name}.py:{cls}", "contract": contract})
        environments = Environments([settings], [], 3)
        opened.append(environments)
        codecs = codecs_of(environments, tokenizer)
        limits = Limits(**{"max_completion_length": 2000, "max_prompt_length": 500, "rewritten_turns": "fork"} | limits)
        episodes = Episodes(Scripted(tokenizer, {"Row": script}), environments, codecs, limits)
        opened.append(episodes)
        start = Start([{"role": "user", "content": "Row 0."}], {"secret": 3}, variables=variables)
        made = episodes.run([start], 1, Sampling(), [0])
        check(made, tokenizer, codecs["e"])
        return made, codecs["e"], episodes.engine

    yield play
    for each in opened:
        each.close()


def thinking(number):
    return f"<think>\nPerhaps {number}.\n</think>\n\n{number}{END}"


@pytest.mark.parametrize("template", [None, STRIPS], ids=["qwen3", "strips"])
def test_each_reply_follows_what_the_template_writes(play, template, tokenizer):
    """The context of each reply is the rendering of the conversation before it, to the token."""
    script = [thinking(number) if template is None else thinking(number)[8:] for number in (1, 2, 3)]
    [[made]], codec, engine = play(script, template, rewritten_turns="fork")
    assert made.stop_reason == "env_done" and made.turns == 3 and len(made.forks) == 2
    asked = made.asked or [{"role": "user", "content": "Row 0."}]
    talks = [[*asked, *made.messages[:count]] for count in (0, 2, 4)]
    assert engine.prompts == [tokenizer.decode(codec.first(talk)) for talk in talks]
    assert all("Perhaps" not in prompt.rpartition("<|im_start|>assistant")[0] for prompt in engine.prompts)
    assert [message.get("reasoning_content") for message in made.messages[::2]] == [f"Perhaps {n}." for n in (1, 2, 3)]
    whole = [*made.prompt, *made.tokens]
    for (start, keep), talk in zip(made.forks, talks[1:], strict=True):
        rendered = codec.first(talk)
        stop = start + len(made.prompt) + len(rendered) - (keep + len(made.prompt))
        assert whole[len(made.prompt) + start : stop] == rendered[keep + len(made.prompt) :]
    assert (min(keep for _, keep in made.forks) < 0) == (template is not None), "an opening that thinks is left out too"
    assert made.context() == codec.first(talks[-1]) + made.replies()[-1].tokens


@pytest.mark.parametrize(
    ("template", "how", "replies"), [(None, "keep", thinking), (None, "fork", str), (KEEPS, "fork", thinking)]
)
def test_what_is_not_rewritten_stays(play, template, how, replies):
    script = [replies(number).removesuffix(END) + END for number in (1, 2, 3)]
    [[made]], _, engine = play(script, template, rewritten_turns=how)
    assert made.turns == 3 and not made.forks
    for before, after in zip(engine.prompts, engine.prompts[1:], strict=False):
        assert after.startswith(before) and script[0].removesuffix(END) in after


def test_an_empty_block_of_thinking_is_left_out_too(play, tokenizer):
    """With thinking off, Qwen3's opening writes one; what follows later has none."""
    [[made]], codec, engine = play(["1" + END, "2" + END, "3" + END], variables={"enable_thinking": False})
    assert made.turns == 3 and len(made.forks) == 2
    asked = made.asked or [{"role": "user", "content": "Row 0."}]
    codec = codec.varied({"enable_thinking": False})
    talks = [[*asked, *made.messages[:count]] for count in (0, 2, 4)]
    assert engine.prompts == [tokenizer.decode(codec.first(talk)) for talk in talks]


CHECKED = (  # a template that needs the ids of calls, and leaves out thinking before anything
    "{% for m in messages %}{% if m.role == 'tool' and not m.tool_call_id %}{{ raise_exception('no id') }}{% endif %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].lstrip() }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    "{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_calls_keep_their_ids_where_a_conversation_is_written_again(play):
    script = ["<think>\nI add.\n</think>\n\n" + add(3), "<think>\nOn.\n</think>\n\n" + add(4), "It is 7." + END]
    [[made]], *_ = play(script, CHECKED, cls="Sum", contract="tools", rewritten_turns="fork")
    assert made.stop_reason == "completed" and made.turns == 3 and len(made.forks) == 2, made.reason


def test_what_no_reply_follows_is_not_computed():
    """A game that ends with a message writes the conversation again, and nothing is sampled after it."""
    made = Trajectory([1, 2, 3, 4], [])
    made.add("model", [40, 41], [-0.5, -0.5])
    made.add("user", [7, 8, 9], keep=0)
    [part] = Rollout([Example((Node([1, 2, 3, 4]),), 0)], [completion_of(made)]).parts([0], packs_of, 100)
    assert part.pack.num_tokens == 5 and part.pack.target_N.tolist() == [40, 41]


def test_variables_of_a_row_that_are_none_end_only_its_episode(play):
    [[made]], *_ = play(["1" + END], variables="not json")
    assert made.stop_reason == "env_error" and "chat_template_kwargs" in made.reason


def test_a_template_that_rewrites_is_refused_at_the_start(play):
    with pytest.raises(DataError, match=r"removes the thinking of a reply .*<think> … </think> is left out"):
        play([], rewritten_turns="refuse")
    script = ["<think>\nI add.\n</think>\n\nIt is 7." + END]
    [[made]], *_ = play(script, rewritten_turns="refuse", cls="Sum", contract="tools")
    assert made.stop_reason == "completed", "while tools are called, Qwen3 rewrites nothing"


def test_what_is_written_again_counts_among_the_tokens(play):
    script = [thinking(number) for number in (1, 2, 1, 2, 3)]
    [[made]], *_ = play(script, rewritten_turns="fork", max_completion_length=90)
    assert made.stop_reason == "max_tokens" and len(made.tokens) <= 90


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_an_engine_continues_from_what_a_fork_keeps(family):
    """As if it got the whole context as a prompt again; only what is new is computed."""

    def talk(engine):
        sampled, path = Sampling(temperature=0.8, stop_token_ids=(7,)), [5, 9, 11, 2]
        first, replies = Future(), []
        first.set_result(Turn([*path], 3, 9))

        def follow(index, reply):
            nonlocal path
            path += reply.tokens
            replies.append([*path])
            if len(replies) == 4:
                return None
            keep = [4, 2, len(path)][len(replies) - 1]
            path = [*path[:keep], 21, 22]
            future = Future()
            future.set_result(Turn([21, 22], 3 + len(replies), 9, keep))
            return future

        converse(engine, [first], sampled, follow=follow, longest=80)
        return replies

    assert talk(EmbeddedEngine(policy_of(family))) == talk(Again(policy_of(family)))


# --- trees of tokens --------------------------------------------------------------------------------------------------


def completion_of(made):
    return SampledCompletion(0, made.tokens, made.logprobs, "", "stop", 0, CompletionReward(1.0), made.trained, made)


def forked(count=4, seed=0, tree=None):
    """A group of episodes, of which all but the first fork: as a rollout, and the (context, reply) pairs of each."""
    source, episodes, pairs = np.random.default_rng(seed), [], []
    draw = lambda low, high, size: source.integers(low, high, size).tolist()  # noqa: E731
    for number in range(count):
        made, turns = Trajectory([1, 2, 3], [], tree=tree), []
        for turn in range(4):
            context, size = made.context(), int(source.integers(1, 5))
            made.add("model", draw(30, 60, size), [-0.5] * size)
            turns.append((context, made.tokens[-size:]))
            if turn < 3:
                size = len(made.context()) - len(made.prompt)
                keep = int(source.integers(0, size)) if number and source.random() < 0.7 else None
                made.add("user", draw(4, 30, 3), keep=keep)
        episodes.append(made)
        pairs.append(turns)
    assert sum(len(each.forks) for each in episodes) > count
    return Rollout([Example((Node([1, 2, 3]),), 0)], [completion_of(each) for each in episodes]), pairs


@pytest.mark.parametrize("tree", [None, 0])
@pytest.mark.parametrize("seed", range(3))
def test_the_gradients_are_those_of_each_reply_alone(seed, tree):
    """Every reply is trained once, in the context that it was sampled in."""
    policy = policy_of("qwen3")
    rollout, pairs = forked(seed=seed, tree=tree)
    weights = torch.linspace(-1, 2, len(pairs))

    def gradients():
        return [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]

    for turns, weight in zip(pairs, weights, strict=True):
        for context, reply in turns:
            [packed] = packs_of([Example((Node(context, children=(Node(reply, True),)),), 0)])
            (weight * Scorer(policy)(packed).logprob_N).sum().backward()
    alone = gradients()
    for most in (10_000, max(len(c.tokens) for c in rollout.completions) + 3):
        policy.zero_grad()
        for part in rollout.parts(range(len(pairs)), lambda examples, most=most: pack(examples, most), most):
            scores = Scorer(policy)(part.pack).logprob_N
            (weights[part.completion_S[part.pack.sequence_N]] * scores).sum().backward()
        for one, other in zip(gradients(), alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("tree", [None, 0])
def test_a_pack_of_forked_episodes_has_one_sequence_for_each(tree):
    rollout, pairs = forked(6, seed=5, tree=tree)
    [part] = rollout.parts(range(6), packs_of, 10_000)
    packed = part.pack
    assert part.completion_S.tolist() == [*range(6)] and packed.num_sequences == len(packed.groups) == 6
    assert packed.length_S.tolist() == rollout.length_S.tolist()
    assert torch.equal(part.token_N, torch.arange(rollout.num_tokens)), "in the order of the rollout"
    assert torch.equal(packed.sequence_N, rollout.sequence_R)
    replies = [token for turns in pairs for _, reply in turns for token in reply]
    assert packed.target_N.tolist() == replies
    assert torch.equal(packed.read_U[packed.where_N], packed.source_N)
    unique = 3 + sum(len(completion.tokens) for completion in rollout.completions)
    assert packed.num_tokens < unique, "each token once"


def test_what_a_fork_leaves_out_of_the_prompt_is_context_of_the_first_branch():
    made = Trajectory([1, 2, 3, 4], [])
    made.add("model", [40, 41], [-0.5, -0.5])
    made.add("user", [7, 8, 9], keep=-2)
    made.add("model", [50], [-0.5])
    rollout = of_episodes([Example((Node([9, 9]),), 0)], [completion_of(made)])
    [prompt], [own] = rollout.prompts, rollout.completions
    assert [*prompt.trees[0].tokens] == [1, 2] and own.tokens == [3, 4, 40, 41, 7, 8, 9, 50]
    assert own.episode.paths() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    [part] = rollout.parts([0], packs_of, 100)
    assert [part.pack.tokens_T[seen].tolist() for seen in part.pack.seen_ST()] == [[1, 2, 7, 8, 9]]
    assert part.pack.target_N.tolist() == [40, 41, 50]


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def thinking_home(calculator_home, tmp_path):
    """The model of the calculator, with a template that cuts earlier replies; a game."""
    home = tmp_path / "home"
    shutil.copytree(calculator_home / "model", home / "model")
    (home / "model/chat_template.jinja").write_text(CUTS)
    rows = [{"prompt": f"{i}+1=?", "answer": "1", "secret": i} for i in range(40)]
    (home / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


GAME = {
    "environments": [{"name": "game", "class": "guess", "contract": "messages"}],
    "rollout": {"max_completion_length": 72, "max_turns": 3},
}


def test_a_run_whose_episodes_fork_resumes_regrades_and_is_shown(thinking_home, tmp_path, power_cut, capsys):
    overrides = (
        "training.max_steps=3", "checkpoint.save_steps=1", "training.batch_size=4", "data.max_length=160",
        "method.beta=0.05",
        f"environments={json.dumps(GAME['environments'])}", f"rollout={json.dumps(GAME['rollout'])}", "rewards=[]",
    )  # fmt: skip
    _, cut = whole_and_resumed(thinking_home, tmp_path, {"type": "grpo"}, overrides, power_cut)
    lines = [line for line in read_metrics(cut) if "turns" in line]
    assert all(line["episodes/forks"] > 0.5 for line in lines), lines
    assert all(line["sampling/sampling_logp_difference/max"] < 1e-4 for line in lines), "each in its own context"
    assert all(line["packing_ratio"] > 1.2 for line in lines)
    rows = [row for step in (1, 2, 3) for row in StoredRun(cut).rollouts(step)]
    row = next(row for row in rows if any(part["keep"] is not None for part in row["turns"]["turns"]))
    trained = trained_tokens(row)
    for part in row["turns"]["turns"]:
        assert set(trained[part["start"] : part["stop"]]) == {part["author"] == "model"}
    lab = losses(cut, 3, [])
    line = next(line for line in read_metrics(cut) if line["step"] == 3 and "loss" in line)
    assert lab.rows[0].norm == pytest.approx(line["grad_norm"], rel=1e-4)
    capsys.readouterr()
    where = ["--step", str(row["step"]), "--prompt", str(row["prompt_index"]), "--rollout", str(row["rollout_index"])]
    assert main(["why", str(cut), *where]) == 0
    assert "earlier turns rewritten" in capsys.readouterr().out


def test_a_setting_without_environments_has_no_effect(thinking_home, tmp_path):
    with pytest.raises(ConfigError, match=r"rewritten_turns"):
        train(thinking_home, tmp_path, None, "rollout.rewritten_turns=keep", environments=[])
