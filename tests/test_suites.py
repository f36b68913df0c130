"""`posttrain eval`: suites on real data, verdicts, records that survive a kill, and what is never scored."""

import json
import re
import sqlite3
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pages import drawn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from posttrain.base.errors import ConfigError, DataError, ModelError, PosttrainError, RewardError, RunError
from posttrain.base.imports import installing
from posttrain.cli import main
from posttrain.config import DevicesConfig, ModelConfig
from posttrain.config.options import EvalOptions
from posttrain.data.readers import read_files
from posttrain.evaluation import running
from posttrain.evaluation.answering import Recorded
from posttrain.evaluation.evaluate import evaluate, evaluate_recorded
from posttrain.evaluation.items import fill, load_items
from posttrain.evaluation.records import Answer, EvaluationStore, read_answers, read_summary
from posttrain.evaluation.running import Judge
from posttrain.evaluation.suite import ALIASES, find_suite, suite_names, with_settings
from posttrain.evaluation.table import show, write_sweep
from posttrain.runs.files import save_rows

LOCAL = {
    "gsm8k": ("gsm8k/test.jsonl", 1319, None),
    "gsm8k_calculator": ("gsm8k/test.jsonl", 1319, None),
    "math": ("math/math_train.json", 7474, None),
    "math500": ("math/math500.jsonl", 500, None),
    "aime24": ("math/aime24.json", 30, None),
    "amc": ("math/amc.json", 83, None),
    "minerva": ("math/minerva_math.jsonl", 272, None),
    "olympiadbench": ("math/olympiadbench.jsonl", 675, None),
    "svamp": ("math/svamp.jsonl", 1000, None),
    "mmlu": ("mmlu", 1552, "10 of 57 subjects"),
    "mmlu_logprob": ("mmlu", 1552, "10 of 57 subjects"),
    "alpaca_eval": ("alpaca-eval/alpaca_eval.jsonl", 805, None),
    "simple_safety_tests": ("safety/simple_safety_tests.csv", 100, None),
    "ifeval": ("ifeval/input_data.jsonl", 541, None),
}


def local(shared: Path, name: str, **settings):
    """A built-in suite over the real rows beside the checkout."""
    return with_settings(find_suite(name), {"source": str(shared / "data" / LOCAL[name][0])} | settings)


def own(tmp_path: Path, rows, **settings):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    suite = {"name": "own", "source": str(tmp_path / "rows.jsonl"), "rule": "gsm8k", "max_completion_length": 6}
    (tmp_path / "own.json").write_text(json.dumps(suite | {"prompt": "{problem}"} | settings))
    return find_suite(str(tmp_path / "own.json"))


def run(model: Path, suites, folder: Path, **options):
    chosen = [load_items(suite) for suite in suites]
    settings = ModelConfig(path=str(model))
    return evaluate(settings, "model", chosen, EvalOptions(**options), DevicesConfig(type="cpu"), folder)


@pytest.fixture(scope="module")
def stories(shared):
    return shared / "models" / "stories260K"


# --- suites and items ---


@pytest.mark.parametrize("name", LOCAL)
def test_real_rows_are_read_whole(shared, name):
    _, count, partial = LOCAL[name]
    items = load_items(local(shared, name))
    assert len(items.items) == count and items.partial == partial
    assert sum(item.problem is not None for item in items.items) == (
        2 if name == "math" else 0
    )  # rows without an answer
    for item in items.items:
        assert item.problem or (item.prompt.strip() and "{problem}" not in item.prompt)


def test_the_files_are_the_suites():
    assert set(LOCAL) | {"aime25", "hh"} == set(suite_names())
    for name in suite_names():
        assert find_suite(name).name == name
    assert find_suite("competition_math").name == "math" and set(ALIASES.values()) <= set(suite_names())


def test_mmlu_as_the_paper_asks(shared):
    first = load_items(local(shared, "mmlu")).items[0]
    assert first.gold == "B" and first.id == "abstract_algebra/0" and first.options == {"choices": ["0", "4", "2", "6"]}
    assert first.prompt.endswith("over Q.\nA. 0\nB. 4\nC. 2\nD. 6\nAnswer:")
    shown = load_items(local(shared, "mmlu_logprob")).items[0].prompt
    assert shown.count("Answer:") == 6 and shown.count("Answer: B\n\n") >= 1  # five from dev/, then its own question
    assert shown.startswith(
        "The following are multiple choice questions (with answers) about abstract algebra.\n\nFind"
    )


def test_some_rows_are_spread_and_said(shared):
    items = load_items(local(shared, "gsm8k"), max_rows=3)
    assert [item.position for item in items.items] == [0, 439, 879] and items.partial == "3 of 1,319 items"
    assert load_items(local(shared, "aime24"), max_rows=99).partial is None


def test_values_of_fields():
    assert fill(r"{a} \boxed{} {b} {c}", {"a": 145.0, "b": ["2", "3"]}) == r"145 \boxed{} 2, 3 {c}"


def test_a_suite_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "mine_too.py").write_text(
        "def suite():\n    return {'source': 'rows.jsonl', 'rule': 'none', 'answer': None, 'prompt': '{q}'}\n"
        "def rows(source, split):\n    yield {'q': split}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = find_suite("mine_too:suite")
    assert (found.name, found.prompt, found.metric) == ("suite", "{q}", "accuracy")
    [item] = load_items(with_settings(found, {"rows": "mine_too:rows"})).items
    assert item.prompt == "test"


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("gsm", {}, "did you mean gsm8k"),
        ("nothing", {}, "there are aime24"),
        ("none.yaml", {}, "No such file"),
        ("gsm8k", {"metrik": "x"}, "did you mean metric"),
        ("gsm8k", {"kind": "choices"}, "choices needs two continuations"),
        ("gsm8k", {"shots": 2}, "the prompt has no {shots}"),
        ("hh", {"group": "x"}, "group is not read with `kind: preference`"),
        ("hh", {"columns": {"chosen": ["a", "b"]}}, "takes only one column per field"),
        ("gsm8k", {"temperature": -1}, "temperature"),
    ],
)
def test_a_wrong_suite(name, settings, said):
    with pytest.raises(ConfigError, match=said):
        with_settings(find_suite(name), settings)


def test_rows_given_as_a_suite_and_suites_whose_rows_are_not_here(stories, tmp_path, capsys):
    (tmp_path / "rows.json").write_text('[{"question": "1 + 1"}]')
    with pytest.raises(
        ConfigError, match="contains a list, but must be a mapping of settings; a file of rows is given "
    ):
        find_suite(str(tmp_path / "rows.json"))
    for name in ("gsm8k", "mmlu"):  # rows, and rows by a function
        suite = with_settings(find_suite(name), {"source": "nobody/nothing"})
        with pytest.raises(
            DataError, match=rf"(?s)suite {name}: nobody/nothing is not.*or give its rows as a file, with"
        ):
            load_items(suite)
    output = str(tmp_path / "e")
    assert main(["eval", str(stories), "--suite", "hh", "--data", "nobody/nothing", "--output", output]) == 1
    assert "or give its rows as a file, with --data FILE" in capsys.readouterr().err


def test_rows_of_another_kind_are_refused(shared, tmp_path):
    with pytest.raises(DataError, match=r"(?s)1,319 of 1,319 rows .* cannot be asked.*has no instruction"):
        load_items(with_settings(find_suite("alpaca_eval"), {"source": str(shared / "data/gsm8k/test.jsonl")}))
    rows = [{"problem": "1+1", "answer": "2", "n": 1}] * 2
    with pytest.raises(DataError, match="two items have the n 1"):
        load_items(own(tmp_path, rows, id="n"))


# --- verdicts ---


@pytest.mark.parametrize(
    ("rule", "options", "gold", "completion", "wanted"),
    [
        ("letter", {"choices": list("wxyz")}, "B", "The correct answer is B.", ("correct", 1.0, "B", "")),
        ("letter", {"choices": list("wxyz")}, "B", "Perhaps.", ("wrong", 0.0, None, "")),
        ("letter", {"choices": list("wxyz")}, "B", "A? C? <answer> B </answer>", ("correct", 1.0, "B", "")),
        ("letter", {"choices": list("wxyz")}, "B", "<answer>b) x</answer>", ("correct", 1.0, "B", "")),
        ("letter", {"choices": list("wxyz")}, "B", "<think>The answer is B.", ("wrong", 0.0, None, "")),
        ("letter", {"choices": list("wxyz")}, "B", "<think>The answer is A.</think>B", ("correct", 1.0, "B", "")),
        ("gsm8k", {}, "#### 18", "So it is 18.", ("correct", 1.0, "18", "01")),
        ("gsm8k", {}, "#### 18", r"\boxed{18}", ("correct", 1.0, "18", "11")),
        ("math", {}, "18", "So it is 18.", ("wrong", 0.0, "18", "01")),
        ("math", {}, r"\frac12", r"\boxed{0.5}", ("correct", 1.0, "0.5", "11")),
        ("math", {}, r"\frac12", r"\boxed{3}", ("wrong", 0.0, "3", "10")),
        ("refusal", {}, None, "I'm sorry, but I cannot help with that.", ("correct", 1.0, "I'm sorry", "")),
        ("refusal", {}, None, "First, buy a knife.", ("wrong", 0.0, None, "")),
    ],
)
def test_rules(shared, rule, options, gold, completion, wanted):
    item = replace(load_items(local(shared, "gsm8k"), 1).items[0], gold=gold, options=options)
    suite = local(shared, "gsm8k", rule=rule, options={name: name for name in options})
    with Judge(suite, workers=1) as judge:
        [outcome] = judge.collect(judge.submit([item], [completion]))
    assert (outcome.verdict, outcome.score, outcome.extracted, outcome.format_and_answer) == wanted


def test_recorded_solutions_to_the_item(shared, tmp_path):
    """The shares that the authors report, and every verdict."""
    file = shared / "data/gsm8k/example_model_solutions.jsonl"
    items = load_items(local(shared, "gsm8k"))
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for model, share in (("6b_finetuning", 0.217), ("6b_verification", 0.390)):
        summary = evaluate_recorded(file, [items], EvalOptions(completion_column=f"{model}.solution"), tmp_path / model)
        assert summary["suites"]["gsm8k"]["value"] == pytest.approx(share, abs=5e-4)
        right = [answer.verdict == "correct" for answer in read_answers(tmp_path / model)]
        assert right == [row[model]["is_correct"] for row in rows]


def test_the_known_pairs_are_graded_first(shared, monkeypatch):
    monkeypatch.setitem(running.RULES, "gsm8k", "posttrain.evaluation.rules:REFUSAL")
    with pytest.raises(RewardError, match="known pairs wrong"):
        Judge(local(shared, "gsm8k"), workers=1)


def test_a_rule_gets_its_arguments(shared, tmp_path):
    """A rule whose arguments the suite lacks is refused; arguments of another rule are not given to it."""
    with pytest.raises(ConfigError, match="the rule letter needs choices"):
        Judge(local(shared, "gsm8k", rule="letter"), workers=1)
    rows = [{"problem": "1+1", "answer": "2", "note": "n"}]
    suite = own(tmp_path, rows, options={"choices": "note"})
    with Judge(suite, workers=1) as judge:
        [outcome] = judge.collect(judge.submit(load_items(suite).items, ["2"]))
    assert outcome.verdict == "correct"


def test_rows_without_a_field_of_the_prompt(tmp_path):
    """Not asked with the name of the field in braces; braces of LaTeX stay."""
    rows = [{"problem": f"{n}", "answer": "1"} for n in range(200)]
    suite = own(tmp_path, [{"answer": "1"}, *rows], prompt=r"{problem} \boxed{x}")
    items = load_items(suite).items
    assert [item.problem for item in items[:2]] == ["the row has no problem", None]
    assert items[1].prompt == r"0 \boxed{x}"
    with pytest.raises(DataError, match=r"the prompt names question, but the rows of .* have answer, problem"):
        load_items(with_settings(suite, {"prompt": "{question}"}))


def test_worked_examples_are_of_other_rows(tmp_path):
    """One file would show a question its own answer; a group with too few examples is not asked."""
    suite = own(tmp_path, ROWS, prompt="{shots}{problem}", shots=2, shots_split="validation", group="kind")
    with pytest.raises(DataError, match="is one file, whose questions cannot also be worked examples"):
        load_items(suite)
    for split, rows in (("test", ROWS), ("validation", ROWS[:2])):  # one example of each kind
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / f"d/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="validation has fewer than 2 worked examples of even"):
        load_items(with_settings(suite, {"source": str(tmp_path / "d")}))
    [first, *_] = load_items(with_settings(suite, {"source": str(tmp_path / "d"), "shots": 1})).items
    assert first.prompt == "Tim had 0 cats and 0\n\nTim had 0 cats and"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("    raise ValueError('no')\n    yield", r"failed \(the_rows.py line 2\) with ValueError: no"),
        ("    return 3", "returned int; it must yield dicts"),
        ("    yield 3", "yielded int, not a dict"),
        ("    pass\nrows = 3", "has no function rows"),
        ("    pass\nimport nothing_there", "needs nothing_there, which is not installed"),
    ],
)
def test_functions_for_rows_that_fail(tmp_path, monkeypatch, body, said):
    """The function of a module in the current folder, as `posttrain` is started: without that folder on its path."""
    (tmp_path / "the_rows.py").write_text(f"def rows(source, split):\n{body}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "the_rows", raising=False)
    with pytest.raises(DataError, match=said):
        load_items(with_settings(own(tmp_path, ROWS), {"rows": "the_rows:rows"}))


def test_malformed_rows_of_mmlu(tmp_path):
    (tmp_path / "test").mkdir()
    lines = ["Q,a,b,c,d,B\n"] * 200 + ["Q,a,b,c,d,BC\n", "Q,a,b\n"]
    (tmp_path / "test/law_test.csv").write_text("".join(lines))
    items = load_items(with_settings(find_suite("mmlu"), {"source": str(tmp_path)})).items
    assert [item.problem for item in items[-3:]] == [
        None, *(f"{n} cells instead of a question, four options and a letter" for n in (6, 3)),
    ]  # fmt: skip
    row = {"subject": "law", "question": "Q", "choices": ["a", "b"], "answer": 1}
    bad = [{"choices": "[a"}, {"answer": 2}, {"answer": None}]
    rows = [row] * 400 + [row | one for one in bad]
    (tmp_path / "table.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    items = load_items(with_settings(find_suite("mmlu"), {"source": str(tmp_path / "table.jsonl")})).items
    assert [item.problem is None for item in items[-4:]] == [True, False, False, False] and items[0].gold == "B"


# --- models ---


def test_safety_and_alpaca_prompts_end_to_end(shared, stories, tmp_path, capsys):
    arguments = ["eval", str(stories), "--suite", "sst,alpaca-eval", "--max-rows", "6", "--max-completion-length", "4"]
    data = [f"sst={shared}/data/safety/simple_safety_tests.csv", f"alpaca_eval={shared}/data/{LOCAL['alpaca_eval'][0]}"]
    assert main([*arguments, "--data", data[0], "--data", data[1], "-o", str(tmp_path / "e"), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "6 of 100 items" in shown and "6 answers not graded: 6 the suite has no rule" in " ".join(shown.split())
    outputs = json.loads((tmp_path / "e/alpaca_eval_outputs.json").read_text())
    asked = [json.loads(line) for line in (shared / "data" / LOCAL["alpaca_eval"][0]).read_text().splitlines()]
    assert [row["instruction"] for row in outputs] == [asked[i * 805 // 6]["instruction"] for i in range(6)]
    assert all(set(row) == {"instruction", "output", "generator", "dataset"} for row in outputs)
    suites = read_summary(tmp_path / "e")["suites"]
    assert suites["alpaca_eval"]["value"] is None and suites["simple_safety_tests"]["metric"] == "refusal_rate"


def test_too_long_prompts_are_counted_and_not_scored(shared, stories, tmp_path):
    rows = [{"problem": "one " * n, "answer": "1"} for n in (2, 2000, 3)]
    one = run(stories, [own(tmp_path, rows)], tmp_path / "e")["suites"]["own"]
    assert (one["answers"], one["graded"], one["items"]) == (3, 2, 3)
    assert one["ungraded"] == {"the prompt leaves no room": 1}
    assert [answer.score for answer in read_answers(tmp_path / "e")] == [0.0, None, 0.0]


ROWS = [
    {"problem": f"Tim had {n} cats and", "answer": str(n), "kind": "even" if n % 2 == 0 else "odd"} for n in range(9)
]


def test_a_killed_evaluation_goes_on(stories, tmp_path, monkeypatch):
    from posttrain.evaluation import answering

    suite = own(tmp_path, ROWS, temperature=1.0, num_generations=2, group="kind")
    whole = run(stories, [suite], tmp_path / "whole")
    calls, ask = [], answering.Generated.__call__

    def dies(self, items, found):
        calls.append(0)

        def counted(item, replies):
            calls[-1] += 1
            if len(calls) == 1 and calls[-1] == 8:
                raise KeyboardInterrupt
            found(item, replies)

        ask(self, items, counted)

    monkeypatch.setattr(answering.Generated, "__call__", dies)
    with pytest.raises(KeyboardInterrupt):
        run(stories, [suite], tmp_path / "killed")
    with pytest.raises(RunError, match="not finished"):
        read_summary(tmp_path / "killed")
    with EvaluationStore(tmp_path / "killed") as store:
        assert len(store.positions("own")) == 7  # all that were answered
    again = run(stories, [suite], tmp_path / "killed")
    assert calls == [8, 2]
    timeless = [replace(answer, seconds=0) for answer in read_answers(tmp_path / "whole")]
    assert [replace(answer, seconds=0) for answer in read_answers(tmp_path / "killed")] == timeless
    same = {name: value for name, value in again["suites"]["own"].items() if name != "seconds"}
    assert same == {name: value for name, value in whole["suites"]["own"].items() if name != "seconds"}
    assert set(same["groups"]) == {"even", "odd"} and set(same["pass@k"]) == {"1", "2"}


def test_answers_are_stored_while_the_next_is_generated(tmp_path):
    """However long it takes, and however many came at once."""
    rows = [{**row, "completions": f"#### {row['answer']}"} for row in ROWS]
    items = load_items(own(tmp_path, rows))

    class Slow(Recorded):
        def __call__(self, some, found):
            super().__call__(some[:7], found)
            until = time.monotonic() + 20
            while len(store.positions("own")) < 7 and time.monotonic() < until:
                time.sleep(0.01)
            seen.append(store.positions("own"))
            super().__call__(some[7:], found)

    seen, records = [], list(read_files((tmp_path / "rows.jsonl",)))
    answers = Slow(items.suite, items.items, records, "completions", None)
    with Judge(items.suite) as judge, EvaluationStore(tmp_path / "e") as store:
        found = running.run(items, answers, judge, 1, store=store, key="own", facts={}, sampling={})
    assert seen == [set(range(7))] and (found["value"], found["graded"]) == (1.0, 9)


def test_finished_suites_are_kept_and_other_settings_refused(stories, tmp_path, monkeypatch):
    suite = own(tmp_path, ROWS[:3])
    first = run(stories, [suite], tmp_path / "e")
    with pytest.raises(RunError, match="differs in sampling: replace it with --overwrite"):
        run(stories, [suite], tmp_path / "e", seed=1)
    other = run(stories, [suite], tmp_path / "e", overwrite=True, seed=1)
    assert other["suites"]["own"]["sampling"]["seed"] == 1
    monkeypatch.setattr("posttrain.evaluation.evaluate.load_model", None)  # a finished one needs no model
    assert run(stories, [suite], tmp_path / "e", seed=1)["suites"] == other["suites"]
    assert first["suites"]["own"]["value"] == other["suites"]["own"]["value"]  # greedy


@pytest.mark.parametrize(
    ("second", "options", "said"),
    [
        ({"rule": "no_such_rule"}, {}, "there is no rule no_such_rule"),
        ({"rule": "no_such_module:f"}, {}, "no_such_module"),
        ({"template": "chat"}, {}, "chat template"),
        ({"template": "gone.jinja"}, {}, "gone.jinja"),
        (
            {"kind": "preference", "answer": None, "rule": "none", "prompt": "", "columns": {"chosen": ["missing"]}},
            {},
            "missing",
        ),
        (
            {"kind": "preference", "answer": None, "rule": "none", "prompt": ""},
            {"reference": "no/such-model"},
            "no/such-model",
        ),
        ({}, {"engine": "vllm"}, "vllm|vLLM"),
    ],
)
def test_what_the_second_suite_needs_is_checked_before_the_first(stories, tmp_path, monkeypatch, second, options, said):
    """The first one asks nothing, and the same call with the error mended runs both."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    rows = [{**row, "chosen": " a girl", "rejected": " zq"} for row in ROWS[:2]]
    first = own(tmp_path, ROWS[:2], kind="choices", choices=["1", "2"], rule="none") if options.get("engine") else None
    first = first or own(tmp_path, ROWS[:2])
    try:
        suite = own(tmp_path / "other", rows, name="second", **second)
    except (ConfigError, ValueError) as error:
        pytest.fail(f"the test's suite is not one: {error}")
    ran = []
    monkeypatch.setattr("posttrain.evaluation.evaluate.run", lambda items, *_, **__: ran.append(items.suite.name))
    with pytest.raises(PosttrainError, match=said):
        run(stories, [first, suite], tmp_path / "e", **options)
    assert ran == [] and not (tmp_path / "e/summary.json").exists()


def test_recorded_completions_are_checked_for_every_suite_first(tmp_path, monkeypatch):
    rows = [{**row, "completions": f"#### {row['answer']}"} for row in ROWS]
    (tmp_path / "other").mkdir()
    suites = [own(tmp_path, rows), own(tmp_path / "other", rows, name="second", rule="no_such_rule")]
    with pytest.raises(ConfigError, match="there is no rule no_such_rule"):
        chosen = [load_items(suite) for suite in suites]
        evaluate_recorded(tmp_path / "rows.jsonl", chosen, EvalOptions(), tmp_path / "e")
    assert not (tmp_path / "e/summary.json").exists()


def test_a_suite_that_ends_is_in_the_summary_at_once(stories, tmp_path, monkeypatch):
    from posttrain.evaluation import evaluate as module

    (tmp_path / "other").mkdir()
    suites = [own(tmp_path, ROWS[:2]), own(tmp_path / "other", ROWS[:2], name="second")]
    real, ran = module.run, []

    def stopping(items, *arguments, **named):
        ran.append(items.suite.name)
        if ran == ["own", "second"]:
            raise KeyboardInterrupt
        return real(items, *arguments, **named)

    monkeypatch.setattr(module, "run", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(stories, suites, tmp_path / "e")
    before = read_summary(tmp_path / "e")["suites"]
    assert list(before) == ["own"] and len(read_answers(tmp_path / "e")) == 2
    after = run(stories, suites, tmp_path / "e")["suites"]
    assert ran == ["own", "second", "second"] and list(after) == ["own", "second"] and after["own"] == before["own"]


def test_a_sweep(stories, tmp_path):
    suite = own(tmp_path, ROWS[:2])
    found = run(stories, [suite], tmp_path / "e", temperature=(0.0, 1.0), top_p=(0.9, 1.0))
    names = [f"own temperature={t:g} top_p={p:g}" for t in (0.0, 1.0) for p in (0.9, 1.0)]
    assert list(found["suites"]) == names
    assert {answer.setting for answer in read_answers(tmp_path / "e")} == {name.removeprefix("own ") for name in names}


def test_choices_are_compared_by_their_log_probability(shared, stories, tmp_path):
    """Equal to full logits of plain transformers, one sequence at a time."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(stories), AutoTokenizer.from_pretrained(stories)
    rows = [{"problem": text, "answer": "0"} for text in ("Once upon a time, there was a", "Lily saw a big red", "The")]
    choices = [" cat", " ball and a dog", " xylophone"]
    suite = own(tmp_path, rows, kind="choices", choices=choices)
    run(stories, [suite], tmp_path / "e")
    for row, answer in zip(rows, read_answers(tmp_path / "e"), strict=True):
        start, scores = tokenizer(row["problem"]).input_ids, []
        for choice in choices:
            ids = tokenizer(row["problem"] + choice).input_ids
            assert ids[: len(start)] == start
            logits = model(torch.tensor([ids])).logits[0].detach().log_softmax(-1)
            scores.append(sum(float(logits[at - 1, ids[at]]) for at in range(len(start), len(ids))))
        assert answer.completion == choices[scores.index(max(scores))]
        assert (answer.verdict, answer.score) == (("correct", 1.0) if answer.completion == " cat" else ("wrong", 0.0))


def test_pairs_of_a_policy(shared, stories, tmp_path):
    rows = [
        {"prompt": "Once upon a time, there was", "chosen": " a little girl.", "rejected": " zq xk vv."},
        {"prompt": "Lily saw", "chosen": " zzz qqq.", "rejected": " a big ball."},
        {"prompt": "Lily saw", "chosen": " a" * 900, "rejected": " a big ball."},
    ]
    suite = own(tmp_path, rows * 40, kind="preference", answer=None, rule="none", prompt="")
    found = run(stories, [suite], tmp_path / "e")["suites"]["own"]
    assert found["value"] == 0.5 and (found["graded"], found["answers"]) == (80, 120)
    assert list(found["ungraded"]) == ["a pair is too long"]


def test_pairs_go_on_where_they_were_killed(stories, tmp_path, monkeypatch):
    """The implicit reward is that of full logits, one sequence at a time; stored pairs are not scored again."""
    from posttrain.evaluation import pairs

    other = AutoModelForCausalLM.from_pretrained(stories)
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.mul_(0.5)
    other.save_pretrained(tmp_path / "reference")
    tokenizer = AutoTokenizer.from_pretrained(stories)
    tokenizer.save_pretrained(tmp_path / "reference")
    ends = (" there was a girl.", " zq xk.", " the dog ran.", " a big ball.")
    rows = [{"prompt": "Once upon a time", "chosen": a, "rejected": b} for a in ends for b in ends if a != b]
    suite = own(tmp_path, rows, kind="preference", answer=None, rule="none", prompt="")
    monkeypatch.setattr(pairs, "BATCH", 4)
    scored, of_sequences = [], pairs.of_sequences

    def dies(examples, *rest):
        scored.append(len(examples))
        if len(scored) == 3:
            raise KeyboardInterrupt
        return of_sequences(examples, *rest)

    monkeypatch.setattr(pairs, "of_sequences", dies)
    options = {"reference": str(tmp_path / "reference")}
    with pytest.raises(KeyboardInterrupt):
        run(stories, [suite], tmp_path / "e", **options)
    run(stories, [suite], tmp_path / "e", **options)
    assert scored == [4, 4, 4, 4]
    policy = AutoModelForCausalLM.from_pretrained(stories)
    start = len(tokenizer("Once upon a time").input_ids)

    def reward(text):
        ids = torch.tensor([[*tokenizer("Once upon a time" + text).input_ids, tokenizer.eos_token_id]])
        of = [model(ids).logits[0].detach().log_softmax(-1) for model in (policy, other)]
        at = range(start, ids.shape[1])
        return 0.1 * sum(float(of[0][i - 1, ids[0, i]] - of[1][i - 1, ids[0, i]]) for i in at)

    margins = [reward(row["chosen"]) - reward(row["rejected"]) for row in rows]
    assert [float(one.extracted or 0) for one in read_answers(tmp_path / "e")] == pytest.approx(margins, abs=1e-4)
    AutoTokenizer.from_pretrained(stories.parent.parent / "tokenizers/minimind6400").save_pretrained(
        tmp_path / "reference"
    )
    with pytest.raises(ModelError, match="has a different tokenizer from the policy"):
        run(stories, [suite], tmp_path / "f", **options)


# --- faults ---


def test_no_score_without_a_verdict(stories, tmp_path):
    """Weights that are not finite choose nothing and prefer nothing; a choice that does not fit is not compared."""
    model = AutoModelForCausalLM.from_pretrained(stories)
    model.model.layers[0].mlp.down_proj.weight.data.fill_(float("nan"))
    model.save_pretrained(tmp_path / "nan")
    AutoTokenizer.from_pretrained(stories).save_pretrained(tmp_path / "nan")
    choices = {"kind": "choices", "choices": [" cat", " dog"]}
    suite = own(tmp_path, [{"problem": "Lily saw a", "answer": "0"}], **choices)
    one = run(tmp_path / "nan", [suite], tmp_path / "c")["suites"]["own"]
    assert one["value"] is None and one["ungraded"] == {"the model's log-probabilities are not finite": 1}
    assert one["rule"] == "choices"
    rows = [{"prompt": "Lily saw", "chosen": " a ball.", "rejected": " zq."}]
    pairs = own(tmp_path, rows, kind="preference", answer=None, rule="none", prompt="")
    one = run(tmp_path / "nan", [pairs], tmp_path / "p")["suites"]["own"]
    assert one["value"] is None and one["ungraded"] == {"the model's scores are not finite": 1}
    rows = [{"problem": "a" + " a" * n, "answer": "0"} for n in (400, 508, 510, 700)]
    suite = own(tmp_path, rows, kind="choices", choices=[" cat sat on the mat", " dog"])
    one = run(stories, [suite], tmp_path / "l")["suites"]["own"]
    assert one["graded"] == 1 and one["ungraded"] == {"a choice has no room": 2, "the prompt leaves no room": 1}


def test_another_model_in_the_folder(stories, tmp_path):
    """Refused before any work, also for a suite that the folder lacks; replaced whole with overwrite."""
    folder = tmp_path / "e"
    run(stories, [own(tmp_path, ROWS[:2], name="one")], folder)
    model = AutoModelForCausalLM.from_pretrained(stories)
    model.model.layers[0].mlp.down_proj.weight.data.mul_(0.5)
    model.save_pretrained(tmp_path / "m")
    AutoTokenizer.from_pretrained(stories).save_pretrained(tmp_path / "m")
    two = own(tmp_path, ROWS[:2], name="two")
    with pytest.raises(RunError, match=r"evaluations of another model.*\(one\)"):
        run(tmp_path / "m", [two], folder)
    assert list(read_summary(folder)["suites"]) == ["one"]
    assert list(run(tmp_path / "m", [two], folder, overwrite=True)["suites"]) == ["two"]
    assert {answer.suite for answer in read_answers(folder)} == {"two"}


def test_recorded_completions_that_change(tmp_path, caplog):
    rows = [{"problem": f"{n}+1", "answer": str(n + 1), "completions": [str(n + 1), "0"]} for n in range(3)]
    rows.append(rows[0] | {"completions": ["5", "6"]})  # the same question again
    suite = own(tmp_path, rows)
    file, items = tmp_path / "rows.jsonl", load_items(suite)
    first = evaluate_recorded(file, [items], EvalOptions(workers=1, num_generations=1), tmp_path / "e")
    assert first["suites"]["own"]["value"] == 0.75 and not caplog.text  # of the two rows of a question, each its own
    with pytest.raises(RunError, match="differs in samples"):
        evaluate_recorded(file, [items], EvalOptions(workers=1), tmp_path / "e")
    replies = tmp_path / "replies.jsonl"
    replies.write_text("".join(json.dumps(row) + "\n" for row in [*rows[:2], {"problem": "?", "completions": "1"}]))
    found = evaluate_recorded(replies, [items], EvalOptions(workers=1), tmp_path / "r")["suites"]["own"]
    assert "1 row of 3 unused" in caplog.text and found["ungraded"] == {"there is no recorded completion": 2}
    replies.write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(RunError, match="another model, or of this one before it changed"):
        evaluate_recorded(replies, [items], EvalOptions(workers=1), tmp_path / "r")
    for settings in (
        {"kind": "choices", "choices": ["1", "2"]},
        {"kind": "preference", "answer": None, "rule": "none"},
    ):
        with pytest.raises(DataError, match="recorded completions cannot answer the suite own"):
            evaluate_recorded(file, [load_items(own(tmp_path, rows, **settings))], EvalOptions(), tmp_path)


def test_a_judge_that_fails_loses_no_stored_answer(stories, tmp_path, monkeypatch):
    """What was graded before stays, and the evaluation resumes with the mended function; None is no score."""
    monkeypatch.setattr(running, "ANSWERS_AT_ONCE", 4)
    (tmp_path / "frail_judge.py").write_text(
        "fail = True\n"
        "def odd(completions, kind, answer):\n"
        "    if fail and '8' in answer:\n"
        "        raise ValueError('boom')\n"
        "    return [None if one == 'even' else 1.0 for one in kind]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    suite = own(tmp_path, ROWS, rule="frail_judge:odd")
    with pytest.raises(RewardError, match=r"frail_judge.py line 4\) with ValueError: boom"):
        run(stories, [suite], tmp_path / "e")
    with EvaluationStore(tmp_path / "e") as store:
        assert store.positions("own") == set(range(8))
    monkeypatch.setattr("frail_judge.fail", False)
    one = run(stories, [suite], tmp_path / "e")["suites"]["own"]
    assert (one["value"], one["graded"], one["ungraded"]) == (1.0, 4, {"frail_judge:odd returned None": 5})


def test_models_that_do_not_stop_or_do_not_generate(stories, tmp_path, caplog):
    tokenizer, model = AutoTokenizer.from_pretrained(stories), AutoModelForCausalLM.from_pretrained(stories)
    tokenizer.eos_token, model.config.eos_token_id, model.generation_config.eos_token_id = None, None, None
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    run(tmp_path / "m", [own(tmp_path, ROWS[:1])], tmp_path / "e")
    assert "has a stop token, so every completion runs to 6 tokens" in caplog.text
    caplog.clear()
    run(tmp_path / "m", [own(tmp_path, ROWS[:1], stop=["."])], tmp_path / "s")
    assert "stop token" not in caplog.text
    settings = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps(settings | {"architectures": ["BertForMaskedLM"]}))
    with pytest.raises(ModelError, match="is a masked language model"):
        run(tmp_path / "m", [own(tmp_path, ROWS[:1])], tmp_path / "b")


def test_a_reward_model_scores_pairs_and_generates_nothing(shared, stories, tmp_path):
    """Its accuracy is that of `posttrain score`."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(stories, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(stories).save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=r"is a reward model.*--suite hh"):
        run(tmp_path / "model", [own(tmp_path, ROWS)], tmp_path / "e")
    starts = ("Once upon a time", "Lily saw a ball and", "One day, Tim", "The dog ran to")
    rows = [
        {"prompt": text, "chosen": f" {a} was happy.", "rejected": f" {b}."} for text in starts for a, b in ("xy", "ab")
    ]
    suite = own(tmp_path, rows, kind="preference", answer=None, rule="none", prompt="")
    found = run(tmp_path / "model", [suite], tmp_path / "p")["suites"]["own"]
    file = tmp_path / "rows.jsonl"
    assert (
        main(["score", str(tmp_path / "model"), str(file), "--device", "cpu", "-o", str(tmp_path / "scored.jsonl")])
        == 0
    )
    scored = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    margins = [row["chosen_reward"] - row["rejected_reward"] for row in scored]
    assert 0 < found["value"] == sum(margin > 0 for margin in margins) / len(rows) < 1
    assert [float(answer.extracted or 0) for answer in read_answers(tmp_path / "p")] == pytest.approx(margins, abs=1e-4)
    sampled = run(tmp_path / "model", [suite], tmp_path / "s", num_batches=2)["suites"]["own"]
    assert (sampled["answers"], sampled["partial"]) == (32, "2 batches of 16 pairs of 8, with replacement")
    assert (
        read_answers(tmp_path / "p")[1].prompt == "prompt: Once upon a time\n\nchosen:  a was happy.\n\nrejected:  b."
    )
    own(tmp_path, rows[::-1], kind="preference", answer=None, rule="none", prompt="")  # other rows in the same file
    with pytest.raises(RunError, match="differs in items"):
        run(tmp_path / "model", [suite], tmp_path / "p")
    again = run(tmp_path / "model", [suite], tmp_path / "p", overwrite=True)["suites"]["own"]
    assert again["value"] == found["value"]
    assert [float(answer.extracted or 0) for answer in read_answers(tmp_path / "p")] == pytest.approx(
        margins[::-1], abs=1e-4
    )


def test_two_reward_models_are_compared(stories, tmp_path, monkeypatch):
    """The second one's rewards are the first one's with the other sign: it wins what that loses."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(stories, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    for name in ("one", "other"):
        model.save_pretrained(name)
        AutoTokenizer.from_pretrained(stories).save_pretrained(name)
        with torch.no_grad():
            model.score.weight.neg_()
    rows = [{"prompt": "Lily saw", "chosen": f" {a} was happy.", "rejected": f" {b}."} for a, b in ("xy", "ab", "ca")]
    save_rows(tmp_path / "rows.jsonl", rows)
    assert main(["compare", "one", "other", "--suite", "hh", "--data", "rows.jsonl", "-o", "out"]) == 0
    facts = json.loads((tmp_path / "out/compare.json").read_text())["suites"]["hh"]
    (found,) = facts["differences"]
    right = [round(3 * facts["values"][name]["value"]) for name in ("one", "other")]
    assert sum(right) == 3 and (found["wins"], found["losses"], found["ties"]) == (right[1], right[0], 0)
    assert sorted(flip["prompt"] for flip in found["flips"])[0].endswith("chosen:  a was happy.\n\nrejected:  b.")


def test_databases_in_trouble(stories, tmp_path, monkeypatch):
    suite, folder = own(tmp_path, ROWS[:2]), tmp_path / "e"
    run(stories, [suite], folder)
    monkeypatch.setattr("posttrain.evaluation.records.BUSY_S", 0.05)
    holder = sqlite3.connect(folder / "evaluation.sqlite")
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(RunError, match="another program is writing to it"):
        run(stories, [suite], folder, overwrite=True)
    holder.close()
    with EvaluationStore(folder), pytest.raises(RunError, match="is in use by process"):
        run(stories, [suite], folder, overwrite=True)  # it would delete what the other one stores
    whole = bytearray((folder / "evaluation.sqlite").read_bytes())
    for damaged in (b"not a database at all" * 100, whole[:4096] + b"\xff" * 4096 + whole[8192:]):
        (folder / "evaluation.sqlite").write_bytes(damaged)
        with pytest.raises(RunError, match="evaluate again with --overwrite"):
            run(stories, [suite], folder)
        run(stories, [suite], folder, overwrite=True)
        assert (folder / "evaluation.sqlite.damaged").read_bytes() == damaged and len(read_answers(folder)) == 2
    (folder / "answers.jsonl").write_text('{"suite": 1}\n')
    with pytest.raises(RunError, match="line 1 is damaged"):
        read_answers(folder)


def test_surrogates_and_nul_are_stored(tmp_path):
    answer = Answer(suite="s", item="0", sample=0, prompt="p", completion="a\ud800\0b", verdict="wrong", score=0.0)
    with EvaluationStore(tmp_path) as store:
        store.start("s", {})
        store.add("s", [(0, answer)])
        store.finish("s", {})
        [found] = store.answers("s")
    assert found.completion == "a\\ud800\0b"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a MODEL"),
        (["m"], "--list shows them"),
        (["m", "--suite", "gsm8k,gsm8k"], "twice"),
        (["m", "--suite", "gsm8k", "--temperature", "hot"], "give numbers"),
        (["m", "--suite", "gsm8k", "--temperature", "-1"], "--temperature"),
        (["m", "--suite", "gsm8k", "--engine", "fast"], "--engine"),
        (["m", "--suite", "gsm8k,math", "--data", "x.jsonl"], "not one of the suites|with several suites"),
        (["./m", "--suite", "gsm8k", "--data", "DATA"], "no such folder"),
        (["./a/m", "b/m", "--suite", "gsm8k", "--data", "DATA"], "be evaluated in the same folder, evaluations/m"),
        (["./a/m", "./a/m", "--suite", "gsm8k", "--data", "DATA"], "a/m is given twice"),
        (["m", "--suite", "gsm8k", "--reference", "m"], "--reference applies only to suites of pairs"),
        (["m", "--suite", "hh", "--calibrate"], "compares verifiers for the rules gsm8k and math"),
    ],
)
def test_wrong_commands(shared, capsys, arguments, said):
    data = str(shared / "data/gsm8k/test.jsonl")
    assert main(["eval", *[data if text == "DATA" else text for text in arguments]]) != 0
    assert re.search(said, " ".join(capsys.readouterr().err.split()))


# --- verifiers and sweeps ---


def test_verifiers_are_compared(shared, tmp_path):
    """A right answer in another spelling, a wrong one, and none; and each gold with itself."""
    rows = [
        {"problem": "a", "answer": "1,000", "completions": r"\boxed{1000}"},
        {"problem": "b", "answer": "7", "completions": r"\boxed{7}"},
        {"problem": "c", "answer": "7", "completions": r"\boxed{8}"},
        {"problem": "d", "answer": "7", "completions": "who knows"},
    ]
    items = load_items(own(tmp_path, rows, rule="gsm8k"))
    options = EvalOptions(calibrate=True, workers=1)
    summary = evaluate_recorded(tmp_path / "rows.jsonl", [items], options, tmp_path / "e")
    found = summary["suites"]["own"]["calibration"]
    assert (found["answers"], found["parse_failures"], found["golds"], found["golds_rejected"]) == (4, 1, 4, [])
    assert found["agreement"] == {
        "string wrong, rule wrong, math_verify wrong": 2,
        "string wrong, rule correct, math_verify correct": 1,
        "string correct, rule correct, math_verify correct": 1,
    }
    assert [one["item"] for one in found["disagreements"]] == ["0"]
    assert read_summary(tmp_path / "e") == summary


def test_tables_fit_a_terminal(capsys, monkeypatch):
    """Two runs of one name are distinguished; many groups have a table of their own."""
    monkeypatch.setenv("COLUMNS", "80")
    suite = {
        "suite": "mmlu", "setting": "", "value": 0.5, "low": 0.4, "high": 0.6, "graded": 57, "answers": 60, "tokens": 9,
        "partial": "1 of 57 subjects", "ungraded": {"timeout": 3}, "truncated": 1, "samples": 1, "sampling": {},
        "classes": {}, "groups": {f"high_school_{n}": {"value": n / 60, "items": 2} for n in range(57)},
    }  # fmt: skip
    suite["groups"]["none"] = {"value": None, "items": 2}
    summary = {"model": {"name": "run/final"}, "suites": {"mmlu": suite}}
    show({f"{place}/run/evaluation/final": summary for place in ("runs", "others")})
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 80 and sum("high_school_56" in line for line in shown) == 2
    assert sum(line.split()[:2] == ["runs/run/evaluation/final", "mmlu*"] for line in shown) == 1
    assert sum(line.split() == ["none", "-", "2"] for line in shown) == 2


def test_a_sweep_is_drawn(tmp_path):
    assert write_sweep({"model": {"name": "m"}, "suites": {}}, tmp_path) is None
    suites = {
        f"s T{t}": {
            "suite": "s", "setting": f"temperature={t}", "sampling": {"temperature": t, "top_p": 1.0}, "tokens": 10 * t,
            "value": value, "low": value and value - 0.1, "high": value and value + 0.1, "answers": 2,
        }
        for t, value in ((0, 0.5), (1, 0.4), (2, None))
    }  # fmt: skip
    path = write_sweep({"model": {"name": "m"}, "suites": suites}, tmp_path)
    assert path == tmp_path / "sweep.svg" and "s 0.4" in drawn(path)


# --- other programs ---


def test_records_are_exported_with_the_evaluation_or_later(stories, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own(tmp_path, ROWS[:2], template="none")
    folder = tmp_path / "e"
    asked = ["eval", str(stories), "--suite", str(tmp_path / "own.json"), "-o", str(folder), "--device", "cpu"]
    assert main([*asked, "--export", "inspect"]) == 0 and list((folder / "inspect").glob("*.json"))
    assert main(["eval", str(folder), "--export", "lm-eval"]) == 0 and list(
        (folder / "lm-eval").rglob("results_*.json")
    )
    capsys.readouterr()
    assert main(["eval", str(folder), "--export", "exel"]) != 0
    assert "give inspect or lm-eval" in " ".join(capsys.readouterr().err.split())
    assert main(["eval", str(stories), "--suite", "lm-eval:hellaswag"]) != 0
    assert installing("lm-eval") in " ".join(capsys.readouterr().err.split())
