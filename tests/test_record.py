"""`serve --record`: an agent's conversations are stored as episodes with exactly the tokens that were sampled."""

import json

import httpx
import pytest
import torch
from openai import OpenAI
from test_serve import serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.calculator import tools
from posttrain.base.errors import DataError, RunError
from posttrain.batch import Example, Node, pack
from posttrain.cli import main
from posttrain.config.schema.rewards import RuleReward
from posttrain.data.codec import Codec
from posttrain.engines import Completion
from posttrain.environments.calculator import value_of
from posttrain.rewards.compose import Rewards
from posttrain.runs.stored_rollouts import StoredRun, of_trained, trained_tokens
from posttrain.scoring import Scorer
from posttrain.serving.record import TITLE, Recorder

TEMPERATURE = 1.2


@pytest.fixture
def served(calculator_home, tmp_path):
    folder = tmp_path / "recorded"
    rewards = (RuleReward(type="gsm8k"),)
    with serving(calculator_home / "model", template=None, record=folder, graded_by=rewards) as address:
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


# --- the recorder -----------------------------------------------------------------------------------------------------


@pytest.fixture
def recorder(tmp_path, calculator_home):
    tokenizer = AutoTokenizer.from_pretrained(calculator_home / "model")
    made = Recorder(tmp_path / "r", Rewards((), environments=[TITLE]), tokenizer.save_pretrained)
    made.codec = Codec(tokenizer, tools())
    yield made
    made.close()


def said(recorder, turn, text):
    ids = recorder.codec.tokenizer(text + "<|im_end|>")["input_ids"]
    recorder.replied(turn, Completion(ids, [-0.5] * len(ids), "stop", 0))
    return {"role": "assistant", "content": text}


USER = {"role": "user", "content": "1+2=?"}


def more(text):
    return {"role": "user", "content": text}


def test_requests_belong_to_the_conversation_that_they_continue(recorder):
    first = recorder.turn(recorder.codec, [USER], None)
    reply = said(recorder, first, "7")
    second = recorder.turn(recorder.codec, [USER, reply, more("no")], None)
    assert second.episode == first.episode and second.tokens[: len(first.tokens)] == first.tokens
    other = said(recorder, second, "3")
    branch = recorder.turn(recorder.codec, [USER, reply, more("really?")], None)
    assert branch.episode == first.episode and branch.state is second.state
    said(recorder, branch, "8")
    new = recorder.turn(recorder.codec, [USER, {"role": "assistant", "content": "another"}, more("no")], None)
    assert new.episode != first.episode, "a reply that was not sampled"
    fresh = recorder.turn(recorder.codec, [USER], None)
    assert fresh.episode != first.episode
    third = recorder.turn(recorder.codec, [USER, reply, more("no"), other, more("ok")], None)
    assert third.tokens[: len(second.tokens)] == second.tokens
    said(recorder, third, "bye")
    assert recorder.reward(first.episode, 1.0, {}) == [1.0, 1.0]
    with StoredRun(recorder.folder) as stored:
        one, two = stored.rollouts(1)
    trees = [row["turns"] for row in (one, two)]
    assert [turns["tree"] for turns in trees] == [0, 0] and [turns["trunk"] for turns in trees] == [None, 0]
    shared = trees[1]["shared"]
    assert one["tokens"][:shared].tolist() == two["tokens"][:shared].tolist() and shared > 3


def test_a_header_names_the_episode(recorder):
    """Of several conversations: those of subagents, or tries of the same question."""
    for text in ("1", "2"):
        said(recorder, recorder.turn(recorder.codec, [USER], "mine"), text)
    said(recorder, recorder.turn(recorder.codec, [more("sub")], "mine"), "3")
    said(recorder, recorder.turn(recorder.codec, [USER], "yours"), "4")
    assert recorder.reward("mine", 0.25, {"task": 7}) == [0.25] * 3
    with pytest.raises(DataError, match="no open episode 'mine'"):
        recorder.reward("mine", 1, {})
    assert recorder.reward("yours", 1.0, {}) == [1.0]
    with StoredRun(recorder.folder) as stored:
        rows, prompts = stored.rollouts(1), stored.prompts(1)
    assert [(row["prompt_index"], row["rollout_index"]) for row in rows] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert [prompt["facts"]["columns"] for prompt in prompts] == [{"task": 7}, {"task": 7}]


def test_open_episodes_are_stored_at_the_end_and_the_next_server_adds_a_step(recorder, tmp_path, calculator_home):
    said(recorder, recorder.turn(recorder.codec, [USER], "left"), "1")
    with pytest.raises(RunError, match="in use by"):
        Recorder(tmp_path / "r", Rewards(()), lambda folder: None)
    recorder.close()
    again = Recorder(tmp_path / "r", Rewards((), environments=[TITLE]), lambda folder: None)
    assert again.step == 2
    again.close()
    with StoredRun(tmp_path / "r") as stored:
        [row] = stored.rollouts(1)
    assert row["reward"] is None and row["completion"].startswith("1")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(RunError, match="has a training run; give another folder"):
        Recorder(tmp_path / "run", Rewards(()), lambda folder: None)
