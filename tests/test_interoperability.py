"""What others read and run: Inspect and lm-eval themselves, in their own environment (`make test-eval`).

`python tests/test_interoperability.py` there writes the files of tests/exports again.
"""

import json
import math
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from evaluation_samples import answers, write_evaluation

from posttrain.evaluation.exports import export_evaluation
from posttrain.evaluation.records import read_answers
from posttrain.evaluation.rules import gsm8k_flexible, gsm8k_strict
from posttrain.evaluation.statistics import mean_by_prompt

STORED = Path(__file__).parent / "exports"
MISSING = [name for name in ("inspect_ai", "lm_eval") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}: make test-eval")
MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
STORIES = "models/stories260K"


# --- Inspect --------------------------------------------------------------------------------------------------------


@pytest.fixture
def logs(tmp_path):
    from inspect_ai.log import read_eval_log

    files = export_evaluation(write_evaluation(tmp_path / "evaluation"), "inspect")
    return {log.eval.task: log for log in (read_eval_log(str(file)) for file in files)}


def test_inspect_reads_every_answer(logs):
    for answer in answers():
        [sample] = [
            one for one in logs[answer.suite].samples if (one.id, one.epoch) == (answer.item, answer.sample + 1)
        ]
        assert (
            sample.input == answer.prompt.replace("\ud83d", "\ufffd") and sample.output.completion == answer.completion
        )
        assert sample.target == (answer.gold or "") and sample.metadata.get("group", "") == answer.group
        assert sample.output.usage.output_tokens == answer.tokens and sample.working_time == answer.seconds
        assert (
            sample.output.stop_reason == {"stop": "stop", "length": "max_tokens", "": "unknown"}[answer.finish_reason]
        )
        [score] = sample.scores.values()
        value = {"C": 1.0, "I": 0.0}.get(score.value, score.value)
        assert math.isnan(value) if answer.score is None else value == answer.score
        asked, graded = sample.events
        assert asked.input[0].text == sample.input and asked.output == sample.output
        assert repr(graded.score) == repr(score)
        assert (score.answer, score.metadata["verdict"], score.explanation) == (
            answer.extracted, answer.verdict, answer.reason,
        )  # fmt: skip
    assert {log.status for log in logs.values()} == {"success"}
    gsm8k = logs["gsm8k"]
    assert gsm8k.eval.config.epochs == 2 and gsm8k.plan.config.temperature == 0.6 and gsm8k.plan.config.max_tokens == 64
    assert gsm8k.stats.model_usage["stories260K"].output_tokens == 70


def test_results_are_those_that_inspect_computes(logs):
    from inspect_ai.log import recompute_metrics

    for log in logs.values():
        ours = log.model_copy(deep=True)
        recompute_metrics(log)
        for mine, theirs in zip(ours.results.scores, log.results.scores, strict=True):
            assert (mine.name, mine.scored_samples, mine.unscored_samples) == (
                theirs.name, theirs.scored_samples, theirs.unscored_samples,
            )  # fmt: skip
            assert {name: metric.value for name, metric in mine.metrics.items()} == pytest.approx(
                {name: metric.value for name, metric in theirs.metrics.items()}, abs=1e-12, nan_ok=True
            )
        assert repr(ours.reductions) == repr(log.reductions) and ours.results.headline == log.results.headline


def test_inspect_lists_the_logs(tmp_path):
    from inspect_ai.log import list_eval_logs

    files = export_evaluation(write_evaluation(tmp_path / "evaluation"), "inspect", tmp_path / "logs")
    listed = list_eval_logs(str(tmp_path / "logs"))
    assert {Path(info.name).name for info in listed} == {file.name for file in files}
    assert {info.task for info in listed} >= {"ifeval", "refusals"}


def test_standard_errors_are_inspects():
    import numpy as np
    from inspect_ai.scorer import Score, mean, stderr
    from inspect_ai.scorer._metric import SampleScore

    random = np.random.default_rng(5)
    for _ in range(50):
        sizes = random.integers(1, 6, random.integers(2, 40))
        groups = [list(random.integers(0, 2, size).astype(float)) for size in sizes]
        if random.random() < 0.5:
            groups = [list(random.normal(size=len(group))) for group in groups]
        scores = [
            SampleScore(score=Score(value=float(value)), sample_id=str(index), sample_metadata={"prompt": index})
            for index, group in enumerate(groups)
            for value in group
        ]
        ours, alone = mean_by_prompt(groups), mean_by_prompt([[value] for group in groups for value in group])
        assert ours.value == pytest.approx(mean()(scores), abs=1e-12)
        assert ours.standard_error == pytest.approx(stderr(cluster="prompt")(scores), abs=1e-12)
        if len(scores) > 1:
            assert alone.standard_error == pytest.approx(stderr()(scores), abs=1e-12)


# --- lm-eval's files ------------------------------------------------------------------------------------------------


def test_lm_eval_reads_the_results(tmp_path):
    from datasets import load_dataset
    from lm_eval.api.metrics import mean_stderr, pooled_sample_stderr
    from lm_eval.utils import get_file_task_name, get_results_filenames, get_sample_results_filenames, make_table

    files = [str(file) for file in export_evaluation(write_evaluation(tmp_path / "evaluation"), "lm-eval")]
    [results], samples = get_results_filenames(files), get_sample_results_filenames(files)
    results = json.loads(Path(results).read_text())
    table, groups = make_table(results), make_table(results, "groups")
    assert "|gsm8k_temperature_0.6|" in table and "- anatomy" in table and "mmlu_logprob" in groups
    found = {}
    for file in samples:
        rows = load_dataset("json", data_files=file, split="train", cache_dir=str(tmp_path))
        found[get_file_task_name(Path(file).name)] = [row for row in rows if row["metrics"]]
        check_hashes(list(rows))
    assert found.keys() == results["task_hashes"].keys() == results["configs"].keys()
    errors, sizes = [], []
    for task, rows in found.items():
        if not rows:
            assert task == "refusals" and results["n-samples"][task] == {"original": 100, "effective": 0}
            continue
        [name] = rows[0]["metrics"]
        values, shown = [row[name] for row in rows], results["results"][task]
        assert shown[f"{name},none"] == pytest.approx(sum(values) / len(values), abs=1e-12)
        if len(values) > 1:
            assert shown[f"{name}_stderr,none"] == pytest.approx(mean_stderr(values), abs=1e-12)
        if task.startswith("mmlu"):
            sizes.append(len(values))
            errors.append(mean_stderr(values) if len(values) > 1 else 0.0)
    assert len(sizes) == 3
    assert results["groups"]["mmlu_logprob"]["acc_stderr,none"] == pytest.approx(pooled_sample_stderr(errors, sizes))


def check_hashes(rows):
    from lm_eval.utils import handle_non_serializable, hash_string

    for row in rows:
        document = json.dumps(row["doc"], indent=2, default=handle_non_serializable, ensure_ascii=False)
        assert row["doc_hash"] == hash_string(document) and row["target_hash"] == hash_string(row["target"])
        assert row["prompt_hash"] == hash_string(row["arguments"]["gen_args_0"]["arg_0"])


# --- lm-eval's tasks ------------------------------------------------------------------------------------------------


def gsm8k_task(folder: Path, shared: Path) -> dict:
    """lm-eval's own GSM8K, on local files and without worked examples."""
    from lm_eval import tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    task = load_yaml(Path(tasks.__file__).parent / "gsm8k/gsm8k.yaml", resolve_func=True)
    files = {split: str(shared / f"data/gsm8k/{split}.jsonl") for split in ("train", "test")}
    del task["dataset_name"], task["tag"]
    return task | {
        "dataset_path": "json", "dataset_kwargs": {"data_files": files, "cache_dir": str(folder)}, "num_fewshot": 0,
    }  # fmt: skip


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def evaluated(lm, task: dict, **more) -> dict:
    from lm_eval import simple_evaluate

    return simple_evaluate(model=lm, tasks=[task], bootstrap_iters=0, **more)


def replay(replies: dict[str, str]):
    from lm_eval.api.model import LM

    class Replay(LM):
        def generate_until(self, requests, disable_tqdm=False):
            return [replies[request.args[0]] for request in requests]

        def loglikelihood(self, requests):
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    return Replay()


def verdicts(results: dict) -> dict[str, dict[str, float]]:
    """The verdicts of each filter by question."""
    found = {}
    for sample in results["samples"]["gsm8k"]:
        found.setdefault(sample["filter"], {})[sample["doc"]["question"]] = sample["exact_match"]
    return found


@pytest.mark.parametrize("model", MODELS)
def test_recorded_gsm8k_solutions_have_lm_evals_verdicts(model, shared, tmp_path):
    """Of all 1,319 solutions; those of two models with `#### ` before the answer, as lm-eval's strict filter wants."""
    recorded = [
        json.loads(line) for line in (shared / "data/gsm8k/example_model_solutions.jsonl").open(encoding="utf-8")
    ]
    marked = model.startswith("6b")
    texts = {row["question"]: row[model]["solution"].replace("A: ", "#### " if marked else "A: ") for row in recorded}
    task = gsm8k_task(tmp_path, shared)
    theirs = verdicts(
        evaluated(replay({f"Question: {question}\nAnswer:": text for question, text in texts.items()}), task)
    )
    golds = [json.loads(line) for line in (shared / "data/gsm8k/test.jsonl").open(encoding="utf-8")]
    assert len(golds) == 1319
    for name, rule in (("strict-match", gsm8k_strict), ("flexible-extract", gsm8k_flexible)):
        ours = {gold["question"]: rule(texts[gold["question"]], gold["answer"]).score for gold in golds}
        assert ours == theirs[name]
        share = sum(ours.values()) / len(ours)
        assert share > 0.1 if marked or name == "flexible-extract" else share == 0
    right = sum(row[model]["is_correct"] for row in recorded)
    print(f"{model}: recorded {right}, flexible {sum(theirs['flexible-extract'].values()):.0f}")


@pytest.fixture(scope="module")
def stories(shared):
    """stories260K as lm-eval's own `hf` model, and as ours."""
    import torch
    from lm_eval.models.huggingface import HFLM

    from posttrain.config import ModelConfig
    from posttrain.config.schema.rollout import RolloutConfig
    from posttrain.evaluation.lm_eval_model import PosttrainLM
    from posttrain.evaluation.lm_eval_requests import Requests
    from posttrain.models.load import load_model, load_tokenizer

    path = str(shared / STORIES)
    config = ModelConfig(path=path)
    policy = load_model(config, "lm", torch.float32, torch.device("cpu"))
    with Requests(policy, load_tokenizer(config), RolloutConfig(), 0) as requests:
        yield HFLM(pretrained=path, dtype="float32", device="cpu", batch_size=4), PosttrainLM(requests)


def instances(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, 0, ("task", index, 1)) for index, given in enumerate(arguments)]


def test_log_probabilities_are_those_of_lm_evals_model(stories, shared):
    story = (shared / "data/tinystories/sample.txt").read_text(encoding="utf-8")
    pairs = [("Once upon a time", text) for text in (" there was a little girl", " , there was", "a", " the big")]
    pairs += [("", "Once upon"), ("Lily ", "was happy"), (story[:2500], " the end")]
    theirs, ours = (model.loglikelihood(instances("loglikelihood", pairs)) for model in stories)
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-4)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    texts = [(text.strip(),) for text in story.split("<|endoftext|>")[:3]] + [(story,)]
    theirs, ours = (model.loglikelihood_rolling(instances("loglikelihood_rolling", texts)) for model in stories)
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_completions_are_those_of_lm_evals_model(stories, shared):
    story = (shared / "data/tinystories/sample.txt").read_text(encoding="utf-8")
    asked = [
        (prompt, {"until": until, "do_sample": False, "max_gen_toks": 40})
        for prompt in ("Once upon a time", "Lily and Tom", story[:3000])
        for until in ([". "], ["big", "\n"], [])
    ]
    theirs, ours = (model.generate_until(instances("generate_until", asked)) for model in stories)
    assert ours == theirs


def test_generated_gsm8k_answers_have_the_same_verdicts(shared, tmp_path):
    """Of `posttrain eval` and of lm-eval, each with its own prompt, engine and verdict."""
    from posttrain.cli import main
    from posttrain.config import ModelConfig
    from posttrain.evaluation.lm_eval_model import answers_of, run_lm_eval

    file = tmp_path / "gsm8k.yaml"
    task = gsm8k_task(tmp_path, shared) | {"generation_kwargs": {"until": ["Question:"], "max_gen_toks": 32}}
    file.write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
    results = run_lm_eval(ModelConfig(path=str(shared / STORIES)), [str(file)], limit=6)
    found = answers_of(results)
    assert len(found) == 12 and {answer.setting for answer in found} == {
        "filter=strict-match",
        "filter=flexible-extract",
    }
    rules = {"filter=strict-match": gsm8k_strict, "filter=flexible-extract": gsm8k_flexible}
    for answer in found:
        judged = rules[answer.setting](answer.completion, answer.gold)
        assert answer.score == judged.score and answer.verdict == ("correct" if judged.correct else "wrong")
        assert answer.extracted == (judged.extracted or "[invalid]")
        assert 0 < answer.tokens <= 32 and answer.finish_reason in ("stop", "length") and answer.seconds > 0
    flexible = [answer for answer in found if answer.setting == "filter=flexible-extract"]
    mean = sum(answer.score for answer in flexible) / len(flexible)
    assert results["results"]["gsm8k"]["exact_match,flexible-extract"] == pytest.approx(mean)

    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join((shared / "data/gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines()[:6]) + "\n")
    settings = {"--prompt": "Question: {problem}\nAnswer:", "--rule": "gsm8k_flexible", "--stop": "Question:",
                "--max-completion-length": "32", "--template": "none", "--output": str(tmp_path / "ours")}  # fmt: skip
    flags = [word for pair in settings.items() for word in pair]
    assert main(["eval", str(shared / STORIES), "--suite", "gsm8k", "--data", str(rows), *flags]) == 0
    ours = read_answers(tmp_path / "ours")
    assert [(one.prompt, one.verdict, one.tokens) for one in ours] == [
        (one.prompt, one.verdict, one.tokens) for one in flexible
    ]
    assert [one.completion.split("Question:")[0] for one in ours] == [one.completion for one in flexible]


def test_prompts_have_the_chat_template(shared, scratch_model, tmp_path):
    from transformers import AutoTokenizer

    from posttrain.config import ModelConfig
    from posttrain.evaluation.lm_eval_model import answers_of, run_lm_eval

    file, task = tmp_path / "gsm8k.yaml", gsm8k_task(tmp_path, shared)
    task |= {"repeats": 2, "generation_kwargs": {"until": [], "do_sample": True, "max_gen_toks": 8}}
    task["filter_list"] = [{"name": "none", "filter": [{"function": "take_first"}]}]
    file.write_text(json.dumps(task), encoding="utf-8")
    results = run_lm_eval(
        ModelConfig(path=str(scratch_model)), [str(file)], limit=2, chat=True, system_instruction="Add."
    )
    found, tokenizer = answers_of(results), AutoTokenizer.from_pretrained(scratch_model)
    assert [(one.item, one.sample, one.setting) for one in found] == [(i, n, "") for i in "01" for n in (0, 1)]
    assert found[0].completion != found[1].completion
    assert [one.verdict for one in found] == ["wrong", "ungraded"] * 2 and found[1].score is None
    for answer in found[::2]:
        question = results["samples"]["gsm8k"][int(answer.item)]["doc"]["question"]
        messages = [("system", "Add."), ("user", f"Question: {question}\nAnswer:")]
        assert answer.prompt == tokenizer.apply_chat_template(
            [{"role": role, "content": text} for role, text in messages], tokenize=False, add_generation_prompt=True
        )


def test_tasks_that_cannot_be_run(shared, tmp_path):
    from posttrain.base.errors import ConfigError, DataError
    from posttrain.config import ModelConfig
    from posttrain.evaluation.lm_eval_model import run_lm_eval

    model = ModelConfig(path=str(shared / STORIES))
    with pytest.raises(ConfigError, match=r"lm-eval has no task hellaswagg, no\.yaml: see `lm-eval ls tasks`"):
        run_lm_eval(model, ["hellaswagg", "no.yaml"])
    with pytest.raises(ConfigError, match="stories260K has no chat template"):
        run_lm_eval(model, ["hellaswag"], chat=True)
    file, task = tmp_path / "task.yaml", gsm8k_task(tmp_path, shared)
    task["dataset_kwargs"]["data_files"] = {"test": str(tmp_path / "none.jsonl")}
    file.write_text(json.dumps(task), encoding="utf-8")
    with pytest.raises(DataError, match=r"lm-eval cannot load the rows of .*task\.yaml: .*none\.jsonl"):
        run_lm_eval(model, [str(file)])


# --- the stored files -----------------------------------------------------------------------------------------------


def written_by_inspect(folder: Path) -> dict:
    """A log of Inspect's own, of six answers of a recorded model."""
    from inspect_ai import Task
    from inspect_ai import eval as run
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.model import ModelOutput, ModelUsage, get_model
    from inspect_ai.scorer import Score, accuracy, match, scorer, stderr
    from inspect_ai.solver import generate

    outputs = [ModelOutput.from_content("mockllm/model", text) for text in ("42", "41", "7", "none", "3", "3")]
    for output in outputs:
        output.usage = ModelUsage(input_tokens=5, output_tokens=3, total_tokens=8)

    @scorer(metrics=[accuracy(), stderr()])
    def graded():
        async def score(state, target):
            if state.output.completion == "none":
                return Score.unscored(reason="timeout", explanation="slow", metadata={"verdict": "timeout"})
            return await match()(state, target)

        return score

    samples = [Sample(f"{item}?", target=target, id=str(item), metadata={"group": "a"})
               for item, target in enumerate(("42", "7", "3"))]  # fmt: skip
    task = Task(dataset=MemoryDataset(samples, name="d", location="d.jsonl"), solver=generate(), scorer=graded(),
                epochs=2, name="gsm8k", metadata={"a": 1})  # fmt: skip
    [log] = run(task, model=get_model("mockllm/model", custom_outputs=outputs), log_dir=str(folder), log_format="json",
                display="none", temperature=0.6, top_p=0.9, top_k=5, max_tokens=64, seed=7)  # fmt: skip
    written = json.loads(Path(log.location).read_text(encoding="utf-8"))
    for sample in written["samples"]:
        sample["events"] = [event for event in sample["events"] if event["event"] in ("model", "score")]
    written["eval"]["model_args"] = {}
    written["eval"].pop("revision", None)  # of the checkout
    return written


def written_by_lm_eval(folder: Path, shared: Path) -> tuple[dict, dict]:
    """Results and a sample of lm-eval's own, with repeated completions."""
    from lm_eval.loggers import EvaluationTracker

    tracker = EvaluationTracker(output_path=str(folder / "out"))
    task = gsm8k_task(folder, shared) | {"repeats": 2}
    prompts = [row["question"] for row in lines_of(shared / "data/gsm8k/test.jsonl")[:2]]
    results = evaluated(replay({f"Question: {prompt}\nAnswer:": "#### 18" for prompt in prompts}), task, limit=2,
                        evaluation_tracker=tracker)  # fmt: skip
    samples = results.pop("samples")
    tracker.save_results_aggregated(results, samples)
    tracker.save_results_samples("gsm8k", samples["gsm8k"])
    [summary], [lines] = (folder / "out").rglob("results_*.json"), (folder / "out").rglob("samples_*.jsonl")
    written = json.loads(summary.read_text(encoding="utf-8"))
    written["pretty_env_info"] = ""
    written["configs"]["gsm8k"]["dataset_kwargs"] = {}
    return written, json.loads(lines.read_text(encoding="utf-8").splitlines()[0])


def shape(value):
    if isinstance(value, dict):
        return {name: shape(inner) for name, inner in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value else type(value).__name__


def test_the_stored_files_are_those_of_these_packages(shared, tmp_path):
    def stored(name):
        return json.loads((STORED / name).read_text(encoding="utf-8"))

    assert shape(written_by_inspect(tmp_path)) == shape(stored("by-inspect.json"))
    results, sample = written_by_lm_eval(tmp_path, shared)
    assert shape(results) == shape(stored("by-lm-eval-results.json"))
    assert shape(sample) == shape(stored("by-lm-eval-sample.json"))


def write_stored() -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        results, sample = written_by_lm_eval(Path(folder), Path(__file__).parents[2] / "shared")
        log = written_by_inspect(Path(folder))
        ours = {f"{to}/{file.name}": file.read_text(encoding="utf-8")
                for to in ("inspect", "lm-eval")
                for file in export_evaluation(write_evaluation(Path(folder) / "evaluation"), to)}  # fmt: skip
    real = {"by-inspect.json": log, "by-lm-eval-results.json": results, "by-lm-eval-sample.json": sample}
    for name, text in ours.items() | {name: json.dumps(value, indent=1) + "\n" for name, value in real.items()}.items():
        (STORED / name).parent.mkdir(parents=True, exist_ok=True)
        (STORED / name).write_text(text, encoding="utf-8")


# --- IFEval -----------------------------------------------------------------------------------------------------------


def test_ifevals_instructions_are_checked(shared, tmp_path):
    """The authors' checks on answers whose verdict is plain; what needs data of NLTK is ungraded, and says so."""
    from posttrain.cli import main

    rows = [json.loads(line) for line in (shared / "data/ifeval/input_data.jsonl").read_text().splitlines()]
    comma = next(row for row in rows if row["instruction_id_list"] == ["punctuation:no_comma"])
    lower = next(row for row in rows if row["instruction_id_list"] == ["change_case:english_lowercase"])
    counted = next(row for row in rows if "length_constraints:number_sentences" in row["instruction_id_list"])
    answers = [
        ("plain words", "correct"),
        ("words, words", "wrong"),
        ("all of this is small", "correct"),
        ("Big", "wrong"),
    ]
    asked = [{**row, "key": n} for n, row in enumerate([comma, comma, lower, lower, counted])]
    answers.append(("One. Two. Three.", "bad_gold"))
    recorded = [{**row, "completions": text} for row, (text, _) in zip(asked, answers, strict=True)]
    file = tmp_path / "recorded.jsonl"
    for number, row in enumerate(recorded):
        row["prompt"] = f"{number} {row['prompt']}"  # completions are matched by their questions
    file.write_text("".join(json.dumps(row) + "\n" for row in recorded))
    assert main(["eval", str(file), "--suite", "ifeval", "--data", str(file), "-o", str(tmp_path / "e")]) == 0
    found = read_answers(tmp_path / "e")
    assert [answer.verdict for answer in found] == [verdict for _, verdict in answers]
    assert found[-1].score is None and "punkt_tab" in (found[-1].reason or "")


if __name__ == "__main__":
    sys.exit(write_stored())
