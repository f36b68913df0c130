"""`posttrain eval`: suites on real data, verdicts, records that survive a kill, and what is never scored."""

import json
import re
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from posttrain.cli import main
from posttrain.config import DevicesConfig, ModelConfig
from posttrain.errors import ConfigError, DataError, ModelError, RewardError, RunError
from posttrain.evaluation.items import fill, load_items
from posttrain.evaluation.judging import Judge
from posttrain.evaluation.records import Answer, EvaluationStore, read_answers, read_summary
from posttrain.evaluation.suite import ALIASES, find_suite, suite_names, with_settings
from posttrain.inspection.evaluate import Options, evaluate, evaluate_recorded
from posttrain.inspection.evaluate_table import write_sweep
from posttrain.inspection.pairs import PairOptions
from posttrain.store.files import save_rows

LOCAL = {
    "gsm8k": ("gsm8k/test.jsonl", 1319, None),
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


def run(model: Path, suites, folder: Path, overwrite=False, **options):
    chosen = [load_items(suite) for suite in suites]
    settings = ModelConfig(path=str(model))
    return evaluate(settings, "model", chosen, Options(**options), DevicesConfig(type="cpu"), folder, overwrite)


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
        ("gsm8k", {"temperature": -1}, "temperature"),
    ],
)
def test_a_wrong_suite(name, settings, said):
    with pytest.raises(ConfigError, match=said):
        with_settings(find_suite(name), settings)


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
    suite = local(shared, "gsm8k", rule=rule)
    item = replace(load_items(suite, 1).items[0], gold=gold, options=options)
    with Judge(suite, workers=1) as judge:
        [outcome] = judge.collect(judge.submit([item], [completion]))
    assert (outcome.verdict, outcome.score, outcome.extracted, outcome.format_and_answer) == wanted


def test_recorded_solutions_to_the_item(shared, tmp_path):
    """The shares that the authors report, and every verdict."""
    file = shared / "data/gsm8k/example_model_solutions.jsonl"
    items = load_items(local(shared, "gsm8k"))
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for model, share in (("6b_finetuning", 0.217), ("6b_verification", 0.390)):
        summary = evaluate_recorded(file, f"{model}.solution", [items], Options(), tmp_path / model)
        assert summary["suites"]["gsm8k"]["value"] == pytest.approx(share, abs=5e-4)
        right = [answer.verdict == "correct" for answer in read_answers(tmp_path / model)]
        assert right == [row[model]["is_correct"] for row in rows]


def test_the_known_pairs_are_graded_first(shared, monkeypatch):
    from posttrain.evaluation import judging

    monkeypatch.setitem(judging.RULES, "gsm8k", "posttrain.evaluation.rules:REFUSES")
    with pytest.raises(RewardError, match="known pairs wrong"):
        Judge(local(shared, "gsm8k"), workers=1)


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
    assert one["ungraded"] == {"the prompt has N tokens and the model N positions: it leaves no room": 1}
    assert [answer.score for answer in read_answers(tmp_path / "e")] == [0.0, None, 0.0]


ROWS = [
    {"problem": f"Tim had {n} cats and", "answer": str(n), "kind": "even" if n % 2 == 0 else "odd"} for n in range(9)
]


def test_a_killed_evaluation_goes_on(stories, tmp_path, monkeypatch):
    from posttrain.evaluation import answering, running

    monkeypatch.setattr(running, "FIRST_BLOCK", 4)
    monkeypatch.setattr(running, "MOST_BLOCK", 4)
    suite = own(tmp_path, ROWS, temperature=1.0, num_generations=2, group="kind")
    whole = run(stories, [suite], tmp_path / "whole")
    calls, ask = [], answering.Generated.__call__

    def dies(self, items):
        calls.append(len(items))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return ask(self, items)

    monkeypatch.setattr(answering.Generated, "__call__", dies)
    with pytest.raises(KeyboardInterrupt):
        run(stories, [suite], tmp_path / "killed")
    with pytest.raises(RunError, match="not finished"):
        read_summary(tmp_path / "killed")
    with EvaluationStore(tmp_path / "killed") as store:
        assert store.positions("own") == {0, 1, 2, 3}  # two whole blocks; the third was being graded
    again = run(stories, [suite], tmp_path / "killed")
    assert calls[4:] == [2, 2, 1]
    timeless = [replace(answer, seconds=0) for answer in read_answers(tmp_path / "whole")]
    assert [replace(answer, seconds=0) for answer in read_answers(tmp_path / "killed")] == timeless
    same = {name: value for name, value in again["suites"]["own"].items() if name != "seconds"}
    assert same == {name: value for name, value in whole["suites"]["own"].items() if name != "seconds"}
    assert set(same["groups"]) == {"even", "odd"} and set(same["pass@k"]) == {"1", "2"}


def test_finished_suites_are_kept_and_other_settings_refused(stories, tmp_path, monkeypatch):
    suite = own(tmp_path, ROWS[:3])
    first = run(stories, [suite], tmp_path / "e")
    with pytest.raises(RunError, match="differs in sampling: replace it with --overwrite"):
        run(stories, [suite], tmp_path / "e", seed=1)
    other = run(stories, [suite], tmp_path / "e", overwrite=True, seed=1)
    assert other["suites"]["own"]["sampling"]["seed"] == 1
    monkeypatch.setattr("posttrain.inspection.evaluate.load_model", None)  # a finished one needs no model
    assert run(stories, [suite], tmp_path / "e", seed=1)["suites"] == other["suites"]
    assert first["suites"]["own"]["value"] == other["suites"]["own"]["value"]  # greedy


def test_a_sweep(stories, tmp_path):
    suite = own(tmp_path, ROWS[:2])
    found = run(stories, [suite], tmp_path / "e", temperatures=(0.0, 1.0), top_ps=(0.9, 1.0))
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
    assert list(found["ungraded"]) == ["a completion with its prompt has over N tokens"]


# --- faults ---


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
    pairs = PairOptions(num_batches=2, batch_size=8)
    sampled = run(tmp_path / "model", [suite], tmp_path / "s", pairs=pairs)["suites"]["own"]
    assert (sampled["answers"], sampled["partial"]) == (16, "2 batches of 8 pairs of 8, with replacement")
    assert (
        read_answers(tmp_path / "p")[1].prompt == "prompt: Once upon a time\n\nchosen:  a was happy.\n\nrejected:  b."
    )
    own(tmp_path, rows[::-1], kind="preference", answer=None, rule="none", prompt="")  # other rows in the same file
    assert run(tmp_path / "model", [suite], tmp_path / "p")["suites"]["own"]["value"] == found["value"]
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
    with pytest.raises(RunError, match="another program writes it"):
        run(stories, [suite], folder, overwrite=True)
    holder.close()
    (folder / "evaluation.sqlite").write_bytes(b"not a database at all" * 100)
    with pytest.raises(RunError, match="the file is damaged"):
        run(stories, [suite], folder)
    (folder / "answers.jsonl").write_text('{"suite": 1}\n')
    with pytest.raises(RunError, match="line 1 is damaged"):
        read_answers(folder)


def test_surrogates_and_nul_are_stored(tmp_path):
    answer = Answer("s", "", "0", 0, "", "p", None, "a\ud800\0b", None, "wrong", 0.0, "", 1, "stop", 0.0, None)
    with EvaluationStore(tmp_path) as store:
        store.start("s", {})
        store.add("s", [(0, answer)])
        store.finish("s", {})
        [found] = store.answers()
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
        (["m", "--suite", "gsm8k", "--rule", "nope", "--data", "DATA"], "no such folder|is not a folder"),
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
        {"problem": "a", "answer": r"\frac{1}{2}", "completions": r"\boxed{0.5}"},
        {"problem": "b", "answer": "7", "completions": r"\boxed{7}"},
        {"problem": "c", "answer": "7", "completions": r"\boxed{8}"},
        {"problem": "d", "answer": "7", "completions": "who knows"},
    ]
    items = load_items(own(tmp_path, rows, rule="math"))
    options = Options(calibrate=True, workers=1)
    summary = evaluate_recorded(tmp_path / "rows.jsonl", "completions", [items], options, tmp_path / "e")
    found = summary["suites"]["own"]["calibration"]
    assert (found["answers"], found["parse_failures"], found["golds"], found["golds_rejected"]) == (4, 1, 4, [])
    assert found["agreement"] == {
        "string wrong, rule wrong, math_verify wrong": 2,
        "string wrong, rule correct, math_verify correct": 1,
        "string correct, rule correct, math_verify correct": 1,
    }
    assert [one["item"] for one in found["disagreements"]] == ["0"]
    assert read_summary(tmp_path / "e") == summary


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
    assert path is not None and path.read_bytes()[1:4] == b"PNG"


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
    assert "pip install 'posttrain[lm-eval]'" in " ".join(capsys.readouterr().err.split())
