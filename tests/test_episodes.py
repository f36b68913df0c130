"""Episodes: turns of a scripted model and real environments, their tokens, limits and verdicts."""

import json
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from posttrain.base.errors import RewardError
from posttrain.config.schema.rollout import EnvironmentConfig
from posttrain.engines import Completion, Sampling
from posttrain.environments.episode import start_of
from posttrain.environments.episodes import Episodes, Limits, codecs_of
from posttrain.environments.process import BUILT_IN, Environments

CODE = '''
import os, time


class Sum:
    def reset(self, goal=0, **row):
        self.total, self.goal, self.calls = 0, goal, 0
        return f" Reach {goal}." if goal else None

    def add(self, number: int) -> int:
        """
        Add a number.

        Args:
            number: the number
        """
        self.calls += 1
        self.total += number
        return self.total

    def long(self) -> str:
        """Return a long text."""
        return "word " * 300

    def hang(self) -> str:
        """Hang."""
        time.sleep(60)

    def leave(self) -> str:
        """Leave."""
        os._exit(3)

    def done(self):
        return self.total == 99

    def get_reward(self):
        return float(self.total == self.goal)


class Children:
    def reset(self, **row):
        pass

    def start(self, file: str) -> str:
        """
        Start a child that outlives its parent, and hang.

        Args:
            file: gets the child's process id
        """
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        open(file, "w").write(str(child))
        time.sleep(60)


class Guess:
    def reset(self, secret=3, says=({"role": "user", "content": "Guess a number."},), **row):
        self.secret = secret
        return list(says) if isinstance(says, (list, tuple)) else says

    async def step(self, message):
        from posttrain.environments import Step
        right = message["content"].strip() == str(self.secret)
        return Step([] if right else [{"role": "user", "content": "No."}], 1.0 if right else -0.1, right)
'''
END = "<|im_end|>"


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>{END}'


def add(number: int) -> str:
    return call("add", f'{{"number": {number}}}')


class Scripted:
    """An engine that gives each conversation the next of its lines; the seed of its first turn finds the script."""

    version = 5

    def __init__(self, tokenizer, scripts):
        self.tokenizer, self.scripts, self.prompts = tokenizer, scripts, []

    def generate(self, prompts, sampling, *, seeds=None, limits=None, finished=None):
        replies = []
        for prompt, [limit] in zip(prompts, limits, strict=True):
            text = self.tokenizer.decode(prompt)
            self.prompts.append(text)
            key = next(key for key in self.scripts if key in text)
            line = self.scripts[key][text.count("<|im_start|>assistant") - 1]
            ids = self.tokenizer(line)["input_ids"]
            cut = ids[:limit]
            reason = "stop" if len(cut) == len(ids) and line.endswith(END) else "length"
            replies.append([Completion(cut, [-0.5] * len(cut), reason, self.version)])
        return replies


@pytest.fixture
def run(tmp_path, monkeypatch, shared):
    name = f"my_acts_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "qwen3")
    opened = []

    def run(scripts, rows=None, n=1, cls="Sum", contract="tools", workers=3, timeout=5, args=None, **limits):
        cls = cls if cls in BUILT_IN else f"{name}.py:{cls}"
        settings = EnvironmentConfig(
            **{"name": "e", "class": cls, "contract": contract, "timeout": timeout, "args": args or {}}
        )
        environments = Environments([settings], [], workers)
        opened.append(environments)
        codecs = codecs_of(environments, tokenizer)
        bounds = Limits(**{"max_completion_length": 2000, "max_prompt_length": 2000} | limits)
        episodes = Episodes(Scripted(tokenizer, scripts), environments, codecs, bounds)
        opened.append(episodes)
        rows = rows or [{"goal": 7}]
        starts = [start_of({"prompt": f"Row {i}.", "columns": row}) for i, row in enumerate(rows)]
        made = episodes.run(starts, n, Sampling(), [11 * i for i in range(len(rows))])
        check(made, tokenizer, codecs["e"])
        return made

    yield run
    for each in opened:
        each.close()


def check(groups, tokenizer, codec):
    """What holds for every trajectory: each sampled token is trained, and its parts are its tokens."""
    for trajectory in (trajectory for group in groups for trajectory in group):
        assert len(trajectory.tokens) == len(trajectory.trained) and sum(trajectory.trained) == len(trajectory.logprobs)
        spans = [(part.start, part.stop) for part in trajectory.parts]
        assert [0, *(stop for _, stop in spans)] == [*(start for start, _ in spans), len(trajectory.tokens)]
        for part in trajectory.parts:
            assert set(trajectory.trained[part.start : part.stop]) == {part.author == "model"}


def test_tools_are_called_until_the_model_answers(run):
    [[made]] = run({"Row 0": ["I add.\n" + add(3), add(4), "It is 7." + END]})
    assert (made.stop_reason, made.reward, made.turns, made.version) == ("completed", 1.0, 3, 5)
    assert made.state.calls == 2 and made.state.total == 7
    assert [part.author for part in made.parts] == ["model", "tool", "model", "tool", "model"]
    assert made.parts[1].calls == (("add", {"number": 3}, False),)
    assert [message["role"] for message in made.messages] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert made.messages[1]["content"] == "3" and made.messages[-1]["content"] == "It is 7."


def test_observations_join_the_last_user_message_and_rows_have_their_own(run):
    scripts = {"Reach 2.": [add(2), "Done." + END], "Reach 9.": ["No idea." + END]}
    [first, second] = run(scripts, [{"goal": 2}, {"goal": 9}], n=2, workers=2)
    assert [made.reward for made in first + second] == [1.0, 1.0, 0.0, 0.0]
    assert first[0].prompt == first[1].prompt != second[0].prompt


@pytest.mark.parametrize(
    ("script", "limits", "reason", "turns"),
    [
        ([add(99), "never"], {}, "env_done", 1),
        ([add(1)] * 9, {"max_turns": 3}, "max_turns", 3),
        ([add(1)] * 9, {"max_tool_calls": 2}, "max_tool_calls", 3),
        ([add(1)] * 99, {"max_completion_length": 300}, "max_tokens", None),
        ([add(1)] * 99, {"max_prompt_length": 20}, "context_overflow", 0),
        ([call("long"), "never"], {"max_completion_length": 200}, "max_tokens", 1),
        (["<tool_call>{" + END], {}, "parse_error", 1),
        ([call("hang")], {"timeout": 0.5}, "tool_timeout", 1),
        ([call("leave")], {}, "env_error", 1),
    ],
)
def test_each_way_to_end(run, script, limits, reason, turns):
    [[made]] = run({"Row 0": script}, **limits)
    assert made.finish_reason == ("length" if reason in ("max_tokens", "context_overflow") else "stop")
    assert made.stop_reason == reason and turns in (None, made.turns)
    assert len(made.tokens) <= limits.get("max_completion_length", 2000)
    assert (made.reward is None) == (reason in ("tool_timeout", "env_error")) != made.has_verdict


def test_a_failing_or_missing_tool_and_a_long_result_go_on(run):
    script = [call("nothing"), call("add", '{"x": 1}'), call("long"), "Sorry." + END]
    [[made]] = run({"Row 0": script}, max_tool_result=20)
    assert [part.calls[0][2] for part in made.parts if part.author == "tool"] == [True, True, False]
    assert made.stop_reason == "completed" and made.reward == 0.0
    assert made.parts[-2].stop - made.parts[-2].start < 60


def test_more_episodes_than_places(run):
    rows = [{"goal": k} for k in range(1, 8)]
    scripts = {f"Reach {k}.": [add(k), "Done." + END] for k in range(1, 8)}
    groups = run(scripts, rows, n=3, workers=2)
    assert [made.reward for group in groups for made in group] == [1.0] * 21


def test_a_game_of_messages(run):
    [[made]] = run({"Row 0": ["1" + END, "2" + END, "3" + END]}, [{"secret": 3}], cls="Guess", contract="messages")
    assert made.stop_reason == "env_done" and made.turns == 3
    assert made.turn_rewards == [-0.1, -0.1, 1.0] and made.reward == pytest.approx(0.8)
    assert [part.author for part in made.parts] == ["model", "user", "model", "user", "model"]


def test_a_row_has_variables_of_the_template(run, shared):
    rows = [{"goal": 7}, {"goal": 7, "chat_template_kwargs": {"enable_thinking": False}}]
    [plain], [varied] = run({"Row": [add(7), "It is 7." + END]}, rows)
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "qwen3")
    assert tokenizer.decode(varied.prompt).endswith("assistant\n<think>\n\n</think>\n\n")
    assert tokenizer.decode(plain.prompt).endswith("assistant\n")
    assert plain.reward == varied.reward == 1.0


def test_a_game_answers_the_last_reply_and_ends_even_without_room(run):
    guesses = {"Row 0": ["1" + END, "3" + END]}
    [[made]] = run(guesses, [{"secret": 3}], cls="Guess", contract="messages", max_turns=2)
    assert (made.stop_reason, made.reward) == ("env_done", pytest.approx(0.9))
    [[made]] = run(guesses, [{"secret": 9}], cls="Guess", contract="messages", max_turns=2)
    assert (made.stop_reason, made.turns, made.reward) == ("max_turns", 2, pytest.approx(-0.2))


def test_what_a_tool_has_started_ends_with_it(run, tmp_path):
    """A child holds the pipes of its parent: the deadline still ends the episode, and the child."""
    file = tmp_path / "child"
    [[made]] = run({"Row 0": [call("start", f'{{"file": "{file}"}}')]}, cls="Children", timeout=1)
    assert made.stop_reason == "tool_timeout"
    child, until = Path(f"/proc/{file.read_text()}/stat"), time.monotonic() + 20
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < until:
        time.sleep(0.05)
    assert time.monotonic() < until


@pytest.mark.parametrize("says", [[{"role": "user"}], [{"role": "user", "content": None}], [3], 7], ids=str)
def test_messages_that_are_none_end_only_their_episode(run, says):
    scripts = {"Row 0": [], "Row 1": ["3" + END]}
    first, second = run(scripts, [{"says": says}, {"secret": 3}], cls="Guess", contract="messages")
    assert first[0].stop_reason == "env_error" and "TypeError" in first[0].reason
    assert second[0].reward == 1.0


def python(code: str) -> str:
    return call("python", json.dumps({"code": code}))


def results(trajectory) -> list[str]:
    return [message["content"] for message in trajectory.messages if message["role"] == "tool"]


def test_programs_of_the_model_run_apart(run, tmp_path):
    """They print, fail with their own lines, keep nothing, change no file, and end at their deadline."""
    programs = [
        "print(2**70)\nimport sys; print('said', file=sys.stderr)", "x = 1", "print(x)", "def f():\n  1/0\nf()", "1 +",
        f"open({str(tmp_path / 'made')!r}, 'w').write('a')", "raise SystemExit(3)", "print(input())",
        "print('a' * 10**5)", "while True: pass", "b = bytearray(3 * 10**9)", "import os; os.kill(os.getpid(), 9)",
    ]  # fmt: skip
    [[made]] = run({"Row 0": [*map(python, programs), "Done." + END]}, cls="python", args={"seconds": 2}, timeout=20)
    printed = results(made)
    assert printed[0].splitlines() == [str(2**70), "said"] or printed[0].splitlines() == ["said", str(2**70)]
    assert printed[1] == "" and "NameError" in printed[2] and "line 1, in <module>" in printed[2]
    assert "line 2, in f" in printed[3] and "ZeroDivisionError" in printed[3] and "sandbox.py" not in printed[3]
    assert "SyntaxError" in printed[4] and "Error" in printed[5]
    assert not (tmp_path / "made").exists() or not (tmp_path / "made").stat().st_size
    assert printed[6] == "" and "EOFError" in printed[7]
    assert printed[8] == "a" * 10_000 + "… (more is not shown)"
    assert "did not end within 2 s" in printed[9] and "MemoryError" in printed[10]
    assert printed[11].strip() == "ended by signal 9"
    assert made.state.programs == programs and made.stop_reason == "completed"


def test_a_corpus_is_searched(run, tmp_path):
    """The index lies beside the file, and is made again when the file has changed."""
    corpus = tmp_path / "corpus.jsonl"
    texts = [("Cats", "A cat sleeps all day."), ("", 'Dogs bark at "cats".'), ("Trees", "An oak is a tree.")]
    corpus.write_text("".join(json.dumps({"title": title, "text": text}) + "\n" for title, text in texts))

    def found(*queries):
        script = [*(call("search", json.dumps({"query": query})) for query in queries), "Done." + END]
        [[made]] = run({"Row 0": script}, cls="search", args={"corpus": corpus.name, "results": 2})
        assert made.state.queries == [*queries]
        return results(made)

    cats, trees, nothing, odd = found("cats", "what is an OAK tree?", "zebra", '"; DROP TABLE x')
    assert {*cats.split("\n\n")} == {"[1] Cats: A cat sleeps all day.", '[2] Dogs bark at "cats".'}
    assert trees.startswith("[1] Trees: An oak") and nothing == odd == "nothing found"
    [made] = tmp_path.glob("*.fts5")
    before = made.stat().st_mtime_ns
    assert found("oak") == ["[1] Trees: An oak is a tree."] and made.stat().st_mtime_ns == before
    corpus.write_text(json.dumps({"text": "A zebra."}) + "\n\n")
    assert found("zebra") == ["[1] A zebra."] and len([*tmp_path.glob("*.fts5")]) == 2
    corpus.write_text("{}\nnot JSON\n")
    with pytest.raises(RewardError, match=r"line 1 has no string in the column text"):
        found("zebra")
    corpus.write_text("\nnot JSON\n")
    with pytest.raises(RewardError, match=r"line 2 is not JSON"):
        found("zebra")
    corpus.write_text(json.dumps({"body": "A zebra."}) + "\n")
    with pytest.raises(RewardError, match=r"line 1 has no string in the column text"):
        found("zebra")


SERVED = """
from posttrain.environments import ToolServer


class Served(ToolServer):
    def __init__(self, names):
        self.names, self.asked = names, []

    async def schemas(self):
        about = {"description": "", "parameters": {"type": "object", "properties": {}}}
        return [{"type": "function", "function": {"name": name, **about}} for name in self.names]

    async def call(self, name, arguments):
        if name == "fail":
            raise ValueError("no")
        self.asked.append((name, arguments))
        return name.upper()

    def reset(self, **row):
        pass

    def __getstate__(self):
        return {"asked": self.asked}
"""


def test_tools_that_are_known_only_when_it_runs(run, tmp_path, monkeypatch):
    (tmp_path / "served.py").write_text(SERVED)
    monkeypatch.setitem(BUILT_IN, "served", "served:Served")
    monkeypatch.syspath_prepend(tmp_path)
    script = [call("look", '{"name": "a", "self": 3}'), call("fail"), call("schemas"), "Done." + END]
    [[made]] = run({"Row 0": script}, cls="served", args={"names": ["look", "fail"]})
    assert results(made)[0] == "LOOK" and results(made)[1] == "{'error': 'no'}"
    assert "there is no tool schemas; there are look, fail" in results(made)[2]
    assert made.state.asked == [("look", {"name": "a", "self": 3})]
