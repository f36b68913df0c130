"""`serve --record`: an agent's conversations are stored as episodes with exactly the tokens that were sampled."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from openai import OpenAI
from test_serve import serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.calculator import tools
from posttrain.base.errors import DataError, RewardError, RunError
from posttrain.batch import Example, Node, pack
from posttrain.cli import main
from posttrain.config import load
from posttrain.data.codec import Codec
from posttrain.engines import Completion
from posttrain.environments.calculator import value_of
from posttrain.rewards.compose import Rewards
from posttrain.runs import rollouts
from posttrain.runs.stored_rollouts import StoredRun, of_trained, trained_tokens
from posttrain.scoring import Scorer
from posttrain.serving.record import TITLE, Recorder

TEMPERATURE = 1.2


@pytest.fixture
def served(calculator_home, tmp_path):
    folder = tmp_path / "recorded"
    settings = {"model": "m", "method": "grpo", "data": {"source": "gsm8k"}, "rewards": [{"type": "gsm8k"}]}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    config = load(tmp_path / "settings.json").config
    with serving(calculator_home / "model", template=None, record=folder, graded_by=config) as address:
        yield address, folder


def agent(client, question, seed, **more):
    """A plain loop of an agent: call, answer the calls, go on. The messages, and the episode's name."""
    messages = [{"role": "user", "content": question}]
    while True:
        answer = client.chat.completions.with_raw_response.create(
            model="m", messages=messages, tools=tools(), temperature=TEMPERATURE, seed=seed, max_tokens=40, **more
        )
        reply = answer.parse().choices[0]
        messages.append(reply.message.model_dump(exclude_none=True))
        if reply.finish_reason != "tool_calls":
            return messages, answer.headers["x-posttrain-episode"]
        for call in reply.message.tool_calls:
            expression = json.loads(call.function.arguments).get("expression", "")
            try:
                result = value_of(expression)
            except Exception as error:
                result = str(error)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


def test_an_agent_is_recorded_as_it_sampled(served, calculator_home, capsys):
    address, folder = served
    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    talks, called = [], []
    while len(called) < 2 and len(talks) < 400:  # it calls for one question in twenty
        talks.append(agent(client, "314+159=?", len(talks)))
        called += [len(talks) - 1] if len(talks[-1][0]) > 2 else []
    for number, (_, episode) in enumerate(talks):
        body = {"episode": episode, "columns": {"answer": "473"}} | ({"reward": 0.5} if number % 2 else {})
        told = httpx.post(f"{address}/v1/rewards", json=body).json()
        assert told["step"] == 1 and len(told["rewards"]) == 1
    again = httpx.post(f"{address}/v1/rewards", json={"episode": talks[0][1], "reward": 1})
    assert again.status_code == 400 and "has been rewarded" in again.text
    with StoredRun(folder) as stored:
        rows, [prompt] = stored.rollouts(1), stored.prompts(1)
    assert [row["rollout_index"] for row in rows] == list(range(len(talks)))
    policy = AutoModelForCausalLM.from_pretrained(calculator_home / "model", dtype=torch.float32)
    codec = Codec(AutoTokenizer.from_pretrained(calculator_home / "model"), tools())
    assert prompt["tokens"].tolist() == codec.first([{"role": "user", "content": "314+159=?"}])
    assert prompt["facts"]["tools"][0]["function"]["name"] == "calculate"
    for number, row in enumerate(rows):
        messages, _ = talks[number]
        assert [message["role"] for message in row["turns"]["messages"]] == [m["role"] for m in messages[1:]]
        right = float(messages[-1]["content"] == "473")
        assert row["parts"]["gsm8k"]["value"] == right and row["reward"] == right + (0.5 if number % 2 else 0)
        assert row["parts"][TITLE]["value"] == (0.5 if number % 2 else None)
        trained = trained_tokens(row)
        replies = [part for part in row["turns"]["turns"] if part["author"] == "model"]
        assert sum(part["stop"] - part["start"] for part in replies) == trained.sum()
    for number in (*called[:3], 0):
        row = rows[number]
        tree = Node(prompt["tokens"], children=(Node(row["tokens"].tolist(), trained_tokens(row).tolist()),))
        [packed] = pack([Example((tree,), 0)], 4096)
        scores = Scorer(policy)(packed, TEMPERATURE).logprob_N
        stored = torch.tensor(of_trained(row)["sampler_logprobs"])
        assert torch.allclose(scores, stored, atol=3e-2 if policy.dtype != torch.float32 else 2e-2)
    capsys.readouterr()
    assert main(["rollouts", str(folder)]) == 0 and str(len(talks)) in capsys.readouterr().out
    where = ["--step", "1", "--prompt", "0", "--rollout", str(called[0])]
    assert main(["why", str(folder), *where]) == 0 and "calculate(" in capsys.readouterr().out


def test_requests_are_refused_with_the_reason(served):
    address, _ = served
    body = {"messages": [{"role": "user", "content": "1+1=?"}], "tools": tools()}

    def told(path, **more):
        return httpx.post(f"{address}/v1/{path}", json=more).json()["error"]["message"]

    assert "leave out n" in told("chat/completions", **body, n=2)
    assert "no open episode 'x'" in told("rewards", episode="x", reward=1)
    assert "must be a JSON object" in told("chat/completions", messages=[
        body["messages"][0],
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "3"}}]},
    ])  # fmt: skip
    assert "only the assistant calls tools" in told(
        "chat/completions", messages=[{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]
    )


def test_a_stream_has_the_whole_call(served):
    """Whether text belongs to a call is known at its end."""
    address, _ = served
    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    for seed in range(400):
        stream = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "314+159=?"}], tools=tools(), temperature=TEMPERATURE,
            seed=seed, max_tokens=40, stream=True,
        )  # fmt: skip
        chunks = [chunk.choices[0] for chunk in stream]
        assert chunks[-1].finish_reason in ("stop", "length", "tool_calls")
        if chunks[-1].finish_reason == "tool_calls":
            [call] = chunks[-1].delta.tool_calls
            assert call.function.name == "calculate" and isinstance(json.loads(call.function.arguments), dict)
            break
    else:
        raise AssertionError("it calls for one question in twenty")


def test_agents_that_begin_together_stay_apart(served):
    """Their first requests find no codec yet."""
    address, _ = served
    client = OpenAI(base_url=f"{address}/v1", api_key="none")

    def two_turns(number):
        messages = [{"role": "user", "content": f"{number}+1=?"}]
        names = []
        for _ in range(2):
            answer = client.chat.completions.with_raw_response.create(
                model="m", messages=messages, tools=tools(), seed=number, max_tokens=20
            )
            names.append(answer.headers["x-posttrain-episode"])
            reply = answer.parse().choices[0].message
            messages += [{"role": "assistant", "content": reply.content, "tool_calls": reply.tool_calls or None}]
            messages = [{k: v for k, v in m.items() if v is not None} for m in messages]
            messages[-1]["content"] = reply.content or ""
            messages += [more("and again?")]
        return names

    with ThreadPoolExecutor(6) as threads:
        for first, second in threads.map(two_turns, range(6)):
            assert first == second


# --- the recorder -----------------------------------------------------------------------------------------------------


@pytest.fixture
def recorder(tmp_path, calculator_home):
    made = Recorder(tmp_path / "r", Rewards((), environments=[TITLE]))
    made.codec = Codec(AutoTokenizer.from_pretrained(calculator_home / "model"), tools())
    yield made
    made.close()


KIND = ("model", "tools", "{}")


def asked(recorder, messages, episode=None, kind=KIND):
    return recorder.turn(recorder.codec, kind, messages, episode)


def said(recorder, turn, text, stops=()):
    ids = recorder.codec.tokenizer(text + "<|im_end|>")["input_ids"]
    recorder.replied(turn, Completion(ids, [-0.5] * len(ids), "stop", 0), stops)
    return {"role": "assistant", "content": text}


USER = {"role": "user", "content": "1+2=?"}


def more(text):
    return {"role": "user", "content": text}


def test_requests_belong_to_the_conversation_that_they_continue(recorder):
    first = asked(recorder, [USER])
    reply = said(recorder, first, "7")
    second = asked(recorder, [USER, reply, more("no")])
    assert second.episode == first.episode and second.tokens[: len(first.tokens)] == first.tokens
    other = said(recorder, second, "3")
    branch = asked(recorder, [USER, reply, more("really?")])
    assert branch.episode == first.episode and branch.state is second.state
    said(recorder, branch, "8")
    new = asked(recorder, [USER, {"role": "assistant", "content": "another"}, more("no")])
    assert new.episode != first.episode, "a reply that was not sampled"
    fresh = asked(recorder, [USER])
    assert fresh.episode != first.episode
    third = asked(recorder, [USER, reply, more("no"), other, more("ok")])
    assert third.tokens[: len(second.tokens)] == second.tokens
    said(recorder, third, "bye")
    assert recorder.reward(first.episode, 1.0, {}) == [1.0, 1.0]
    with StoredRun(recorder.folder) as stored:
        one, two = stored.rollouts(1)
    trees = [row["turns"] for row in (one, two)]
    assert [turns["tree"] for turns in trees] == [0, 0] and [turns["trunk"] for turns in trees] == [None, 0]
    shared = trees[1]["shared"]
    assert one["tokens"][:shared].tolist() == two["tokens"][:shared].tolist() and shared == 2


def test_a_header_names_the_episode(recorder):
    """Of several conversations: those of subagents, or tries of the same question."""
    for text in ("1", "2"):
        said(recorder, asked(recorder, [USER], "mine"), text)
    said(recorder, asked(recorder, [more("sub")], "mine"), "3")
    said(recorder, asked(recorder, [USER], "yours"), "4")
    assert recorder.reward("mine", 0.25, {"task": 7}) == [0.25] * 3
    with pytest.raises(DataError, match="no open episode 'mine'"):
        recorder.reward("mine", 1, {})
    assert recorder.reward("yours", 1.0, {}) == [1.0]
    with StoredRun(recorder.folder) as stored:
        rows, prompts = stored.rollouts(1), stored.prompts(1)
    assert [(row["prompt_index"], row["rollout_index"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert [prompt["facts"]["columns"] for prompt in prompts] == [{"task": 7}, {"task": 7}, {}]
    assert [prompt["facts"]["prompt"] for prompt in prompts] == [[USER], [more("sub")], [USER]]
    assert all(row["turns"]["trunk"] is None for row in rows), "tries of a question share no turn"


def test_open_episodes_are_stored_at_the_end_and_the_next_server_adds_a_step(recorder, tmp_path, calculator_home):
    said(recorder, asked(recorder, [USER], "left"), "1")
    with pytest.raises(RunError, match="in use by"):
        Recorder(tmp_path / "r", Rewards(()))
    recorder.close()
    again = Recorder(tmp_path / "r", Rewards((), environments=[TITLE]))
    assert again.step == 2
    again.close()
    with StoredRun(tmp_path / "r") as stored:
        [row] = stored.rollouts(1)
    assert row["reward"] is None and row["completion"].startswith("1")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(RunError, match="has a training run; give another folder"):
        Recorder(tmp_path / "run", Rewards(()))


def test_conversations_that_cannot_be_told_apart_need_their_header(recorder):
    first, second = (asked(recorder, [USER]) for _ in range(2))
    reply = said(recorder, first, "3")
    said(recorder, second, "3")
    with pytest.raises(DataError, match="send the header X-Posttrain-Episode"):
        asked(recorder, [USER, reply, more("sure?")])
    assert asked(recorder, [USER, reply, more("sure?")], second.episode).state.before is second.state


@pytest.mark.parametrize("kind", [("other", *KIND[1:]), (KIND[0], "others", KIND[2]), (*KIND[:2], '{"a": 1}')])
def test_another_policy_other_tools_and_variables_begin_anew(recorder, kind, caplog):
    first = asked(recorder, [USER])
    reply = said(recorder, first, "3")
    assert asked(recorder, [USER, reply, more("sure?")], kind=kind).episode != first.episode
    assert "begins with replies that were not sampled here" in caplog.text


def test_what_a_client_changes_of_a_reply_is_the_same_message(recorder):
    first = asked(recorder, [USER])
    said(recorder, first, 'Let me see.<call>{"name": "calculate", "arguments": {"expression": "1", "n": 3.0}}</call>')
    call = {"id": "x", "type": "function", "function": {"name": "calculate", "arguments": {"n": 3, "expression": "1"}}}
    reply = {"role": "assistant", "content": "Let me see. ", "tool_calls": [call]}
    second = asked(recorder, [USER, reply, {"role": "tool", "name": "calculate", "content": "1"}])
    assert second.episode == first.episode
    stopped = asked(recorder, [more("other")])
    said(recorder, stopped, "one END two", stops=["END"])
    reply = {"role": "assistant", "content": "one "}
    assert asked(recorder, [more("other"), reply, more("go on")]).episode == stopped.episode


def test_a_reward_that_fails_leaves_the_episode_open(recorder, caplog):
    said(recorder, asked(recorder, [USER], "e"), "1")
    rewards = recorder.rewards

    def failing(inputs):
        late = asked(recorder, [USER], "f")
        said(recorder, late, "2")
        raise RewardError("no such file")

    recorder.rewards = failing
    with pytest.raises(RewardError):
        recorder.reward("e", 1.0, {})
    recorder.rewards = rewards
    pending = asked(recorder, [USER], "e")
    assert recorder.reward("e", 1.0, {}) == [1.0] and recorder.reward("f", 0.0, {}) == [0.0]
    said(recorder, pending, "late")
    assert "a reply came after the reward of episode e" in caplog.text
    with pytest.raises(DataError, match="has been rewarded"):
        recorder.reward("e", 1.0, {})


def test_a_store_that_cannot_be_written_is_told_and_closed(tmp_path, calculator_home, monkeypatch, caplog):
    recorder = Recorder(tmp_path / "full", Rewards((), environments=[TITLE]))
    recorder.codec = Codec(AutoTokenizer.from_pretrained(calculator_home / "model"), tools())
    for name in ("a", "b"):
        said(recorder, asked(recorder, [USER], name), name)
    monkeypatch.setattr(rollouts, "_insert", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    for _ in range(2):
        with pytest.raises(RunError, match="disk full"):
            recorder.reward("a", 1.0, {})
    recorder.close()
    assert "the last episodes are not stored" in caplog.text
    Recorder(tmp_path / "full", Rewards((), environments=[TITLE])).close()


@pytest.mark.parametrize(
    "wrong",
    [
        [{}], [{"type": "function"}], [{"function": None}], [{"type": "web_search"}], [{"function": {"name": ""}}],
        [{"function": {"name": "f", "parameters": "x"}}],
        [{"function": {"name": "f", "parameters": {"properties": [1]}}}],
    ],
)  # fmt: skip
def test_tools_that_are_no_functions_are_refused(served, wrong):
    body = {"messages": [USER], "tools": wrong}
    answer = httpx.post(f"{served[0]}/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "tools.0" in answer.json()["error"]["message"]
