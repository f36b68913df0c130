"""Episodes outside of training: suites of `eval`, `sample`, `why` and the pages."""

import html
import json
import sqlite3

import pytest
import yaml
from test_acting import CALCULATOR, train

from posttrain.base.errors import ConfigError, DataError, RunError
from posttrain.cli import main
from posttrain.evaluation.records import EvaluationStore, read_answers
from posttrain.evaluation.running import run as run_suite
from posttrain.evaluation.suite import find_suite
from posttrain.runs.receipt import shown_turns
from posttrain.runs.stored_rollouts import StoredRun
from posttrain.runs.summary import RunSummary
from posttrain.ui.evaluations_page import _side
from posttrain.ui.parts import Query
from posttrain.ui.receipt import completion_view

SUITE = {
    "name": "sums", "prompt": "{question}", "columns": {"question": ["problem"], "answer": ["answer"]}, "rule": "gsm8k",
    "environments": [CALCULATOR], "max_completion_length": 48,
}  # fmt: skip
PAYS = """
from posttrain.environments.calculator import Calculator


class Pays(Calculator):
    def reset(self, answer, **row):
        super().reset()
        self.answer = int(answer)

    def get_reward(self):
        return 1.0 if self.expressions else 0.5


class Fails(Pays):
    def get_reward(self):
        if self.answer % 2:
            raise OSError("no such table")
        return None
"""


@pytest.fixture
def suite(calculator_home, tmp_path, users_module):
    """Writes a suite of the first sums; returns the arguments of `eval`."""
    users_module("pays_env", PAYS)
    rows = [json.loads(line) for line in (calculator_home / "train.jsonl").read_text().splitlines()[:24]]
    rows = [{"problem": row["prompt"][0]["content"], "answer": row["answer"]} for row in rows]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def arguments(*more, **settings):
        (tmp_path / "sums.yaml").write_text(yaml.safe_dump(SUITE | {"source": "sums.jsonl"} | settings))
        return ["eval", str(calculator_home / "model"), "--suite", "sums.yaml", "--output", "out", *more]

    return arguments


def test_an_environment_is_a_suite(suite, tmp_path, capsys):
    """The last reply is graded; calls, results and how each episode ended are stored and shown."""
    assert main(suite("-n", "4", "--temperature", "1.0")) == 0
    answers = read_answers(tmp_path / "out")
    assert len(answers) == 96 and all(answer.episode for answer in answers)
    called = [answer for answer in answers if len(answer.episode["turns"]) > 1]
    assert called and all(answer.completion == answer.episode["messages"][-1]["content"] for answer in called)
    assert {answer.episode["stop_reason"] for answer in answers} <= {"completed", "max_tokens", "parse_error"}
    right = [answer for answer in called if answer.verdict == "correct"]
    assert len(right) > len(called) / 2, "it repeats what the calculator says"
    page = html.unescape(str(_side("", right[0])))
    assert "calls <code>calculate(expression=" in page and right[0].completion in page
    assert main(suite("-n", "4", "--temperature", "1.0")) == 0, "finished: nothing is answered again"
    capsys.readouterr()
    assert main(suite("-n", "4", "--temperature", "1.0", max_turns=1)) == 1
    assert "differs in max_turns" in " ".join(capsys.readouterr().err.split())
    assert main(suite("-n", "4", "--temperature", "1.0", "--overwrite", max_turns=1)) == 0
    last = [answer for answer in read_answers(tmp_path / "out") if answer.episode["stop_reason"] == "max_turns"]
    assert last and all(shown_turns(answer.episode)[-1].calls for answer in last), "calls that were not made are shown"
    assert main(suite("--overwrite", max_prompt_length=3)) == 0
    assert {answer.reason.partition(":")[0] for answer in read_answers(tmp_path / "out")} == {"the prompt is too long"}
    capsys.readouterr()
    assert main(suite("--overwrite", max_completion_length=500)) == 1
    assert "which leaves no room for a prompt: lower it" in " ".join(capsys.readouterr().err.split())
    lines = (tmp_path / "out/answers.jsonl").read_text().splitlines()
    (tmp_path / "out/answers.jsonl").write_text(lines[0].replace('"turns": [', '"turns": [3, ') + "\n")
    with pytest.raises(RunError, match="line 1 is damaged"):
        read_answers(tmp_path / "out")


def test_an_environment_grades_its_episodes(suite, tmp_path, capsys):
    pays = [{"name": "p", "class": "pays_env.py:Pays"}]
    assert main(suite("-n", "4", "--temperature", "1.0", environments=pays, rule="environment")) == 0
    answers = read_answers(tmp_path / "out")
    calls = [any(part["calls"] for part in answer.episode["turns"]) for answer in answers]
    assert [answer.score for answer in answers] == [1.0 if called else 0.5 for called in calls] and any(calls)
    assert {answer.verdict for answer in answers} == {"scored"}
    fails = [{"name": "p", "class": "pays_env.py:Fails"}]
    assert main(suite("--overwrite", environments=fails, rule="environment")) == 0
    for answer in read_answers(tmp_path / "out"):
        odd = int(answer.gold) % 2
        assert answer.verdict == "ungraded" and answer.score is None
        assert ("env_error" in answer.reason and "no such table" in answer.reason) == bool(odd)
        assert ("the environment has no reward" in answer.reason) == (not odd)
    capsys.readouterr()
    assert main(suite("--overwrite", rule="environment")) == 1
    assert "nothing rewards the episodes" in " ".join(capsys.readouterr().err.split())


def test_a_stopped_evaluation_of_episodes_goes_on(suite, tmp_path, monkeypatch, capsys):
    """What was answered is kept, with its episodes, and the rest is the same as without the stop."""
    assert main(suite("--temperature", "1.0")) == 0
    whole = [(answer.item, answer.completion, answer.episode) for answer in read_answers(tmp_path / "out")]

    class Stopping:
        def __init__(self, answers):
            self.answers, self.prompts = answers, answers.prompts

        def __call__(self, items, found):
            count = iter(range(9))

            def some(item, replies):
                found(item, replies)
                if next(count) == 8:
                    raise KeyboardInterrupt

            self.answers(items, some)

    def stopping(items, answers, *rest, **more):
        return run_suite(items, Stopping(answers), *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr("posttrain.evaluation.evaluate.run", stopping)
        assert main(suite("--temperature", "1.0", "--overwrite")) == 130
    with EvaluationStore(tmp_path / "out") as store:
        assert 0 < len(store.positions("sums")) < 24
    assert main(suite("--temperature", "1.0")) == 0
    assert [(a.item, a.completion, a.episode) for a in read_answers(tmp_path / "out")] == whole


def test_an_evaluation_of_an_earlier_version_is_read_and_goes_on(suite, tmp_path):
    """Its table and its files have no column for episodes."""
    environments = {"environments": [], "max_completion_length": 8}
    assert main(suite(**environments)) == 0
    assert all("episode" not in json.loads(line) for line in (tmp_path / "out/answers.jsonl").open())
    before = read_answers(tmp_path / "out")
    with sqlite3.connect(tmp_path / "out/evaluation.sqlite") as database:
        database.execute("ALTER TABLE answers DROP COLUMN episode")
    assert main(suite(**environments)) == 0 and read_answers(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "none"}, "template needs to be auto or chat"),
        ({"environments": [CALCULATOR, CALCULATOR]}, "has two called 'calculator'"),
        ({"kind": "choices", "choices": ["a", "b"]}, "kind needs to be generate"),
        ({"stop": ["x"]}, "stop cannot be combined with environments or tools"),
        ({"environments": [], "rule": "environment"}, "rule is environment, but there is none"),
    ],
)
def test_suites_that_are_refused(suite, tmp_path, settings, message):
    suite(**settings)
    with pytest.raises(ConfigError, match=message):
        find_suite(str(tmp_path / "sums.yaml"))


def test_recorded_answers_have_no_environment(suite, tmp_path, capsys):
    suite(rule="environment", environments=[{"name": "p", "class": "pays_env.py:Pays"}])
    assert main(["eval", "sums.jsonl", "--suite", "sums.yaml", "--completion-column", "answer"]) == 1
    assert "is graded by its environment, which needs a model" in " ".join(capsys.readouterr().err.split())


def test_sample_shows_an_episode_as_it_comes(calculator_home, tmp_path, users_module, monkeypatch, capsys):
    """As in training: the tools of the settings, their limits, the rewards of rules and of the environment."""
    monkeypatch.setenv("COLUMNS", "120")
    users_module("pays_env", PAYS)
    settings = {
        "model": str(calculator_home / "model"), "method": {"type": "grpo"}, "rewards": [{"type": "gsm8k"}],
        "environments": [{"name": "p", "class": "pays_env.py:Pays"}], "rollout": {"max_completion_length": 48},
        "data": {"source": str(calculator_home / "train.jsonl"), "max_length": 96},
    }  # fmt: skip
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(settings))
    arguments = ["sample", str(calculator_home / "model"), "--config", "a.yaml", "-n", "12", "--prompts", "3"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "first episode, assistant" in out and out.index("first episode") < out.index("row 0, prompt of")
    assert "1 x 0.5 (Pays)" in out and "(gsm8k)" in out and "calculate" in out
    assert main([*arguments, "--show", "0"]) == 0 and "first episode" not in capsys.readouterr().out
    settings["environments"] = [{"name": "p", "class": "pays_env.py:Missing"}]
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(settings))
    assert main(arguments) == 1
    assert "pays_env has no function Missing" in " ".join(capsys.readouterr().err.split())


def test_turns_are_shown_with_their_calls_and_what_they_did(calculator_home, tmp_path, monkeypatch, capsys):
    """`why`, the page of a completion and the list of a step: authors, calls, rewards, why each episode ended."""
    monkeypatch.setenv("COLUMNS", "140")
    folder = train(calculator_home, tmp_path, {"num_generations": 24}, "training.max_steps=1")
    with StoredRun(folder) as stored:
        rows = stored.rollouts(1)
        row = next(row for row in rows if len(row["turns"]["turns"]) == 3)
        said, told, answer = shown_turns(row["turns"])
        assert [turn.author for turn in (said, told, answer)] == ["model", "tool", "model"]
        [call] = said.calls
        assert call.startswith('calculate(expression="') and not told.calls and told.text in answer.text
        assert (said.start, answer.stop) == (0, len(row["tokens"]))
        place = str(row["prompt_index"]), str(row["rollout_index"])
        arguments = stored, RunSummary(folder), 1, row["prompt_index"], row["rollout_index"]
        page = html.unescape(str(completion_view(*arguments, Query())))
    assert f"calls <code>{call}</code>" in page and "<b>tool</b>" in page and ">completed<" in page
    capsys.readouterr()
    assert main(["why", str(folder), "--step", "1", "--prompt", place[0], "--rollout", place[1]]) == 0
    out = capsys.readouterr().out
    assert "2 replies, ended by completed" in out
    assert out.index("tool") < out.index("sampler") and "calculate(expression=" in out
    assert main(["rollouts", str(folder), "--step", "1"]) == 0
    assert "completed" in capsys.readouterr().out


GIVES = """
class Gives:
    '''The messages come from `reset`: the rows have no prompt.'''

    def reset(self, secret, **row):
        self.secret = secret
        return f"{secret}+{secret}=?"

    def get_reward(self):
        return float(self.secret % 2)

    def double(self, number: int) -> int:
        '''
        Double a number.

        Args:
            number: the number
        '''
        return 2 * number
"""


def test_rows_need_no_prompt_if_the_environment_gives_the_messages(calculator_home, tmp_path, users_module):
    users_module("gives_env", GIVES)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"secret": {secret}}}\n' for secret in range(100, 120)))
    environments = [{"name": "g", "class": "gives_env.py:Gives"}]
    data = {"source": "rows.jsonl", "format": "episode", "max_length": 96}
    folder = train(calculator_home, tmp_path / "runs", None, environments=environments, rewards=[], data=data)
    with StoredRun(folder) as stored:
        rows, prompts = stored.rollouts(1), stored.prompts(1)
    for row in rows:
        assert row["reward"] == prompts[row["prompt_index"]]["facts"]["columns"]["secret"] % 2
    auto = {name: value for name, value in data.items() if name != "format"}
    with pytest.raises(DataError, match=r"fit no format.*set data\.format: episode"):
        train(calculator_home, tmp_path / "auto", None, environments=environments, rewards=[], data=auto)
    with pytest.raises(ConfigError, match=r"data\.format is episode, which needs environments"):
        train(calculator_home, tmp_path / "none", None, environments=[], data=data)
