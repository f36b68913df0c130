"""The findings of `posttrain explore` about rows: planted faults are found, with their rows; real data as measured."""

import gzip
import itertools
import json
import random
import re

import numpy as np
import pytest
from data_tokenizer import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.base.errors import ConfigError, PosttrainError
from posttrain.cli import main
from posttrain.config import load
from posttrain.config.options import ExploreOptions
from posttrain.evaluation.suite import suite_names
from posttrain.inspection.overlap import NEAR, SHINGLE, Questions, contamination, near_groups, questions_of
from posttrain.inspection.preferences import auc, label_noise, length_bias
from posttrain.inspection.quality import check_quality
from posttrain.inspection.texts import Texts, jaccard, ngrams, ngrams_of_each, read_corpus, shingles, words_of
from posttrain.training.job import data_of

WORDS = [f"w{number}" for number in range(500)]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A folder with a tokenizer, which is all that data needs."""
    folder = tmp_path_factory.mktemp("quality") / "model"
    byte_tokenizer().save_pretrained(folder)
    return folder


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def quality(model, method, *given, **options):
    config = load(None, [f"method.type={method}", f"model.path={model}", "data.template=none", *given]).config
    tokenizer = byte_tokenizer()
    return check_quality(config, data_of(config, config.models[0], tokenizer), tokenizer, ExploreOptions(**options))


def lines_of(found):
    return {one.what: one.rows for one in found.duplicates if one.rows}


def text(seed, count=60):
    return " ".join(random.Random(seed).choices(WORDS, k=count))


# --- words and n-grams ------------------------------------------------------------------------------------------------


def test_words_are_letters_and_digits_in_lower_case():
    assert words_of("The CAT_sat — on \\frac{1}{2}!").tolist() == words_of("the cat sat on frac 1 2").tolist()
    assert len(words_of("我喜歡 cats")) == 4, "a character each, where words have no spaces"
    assert words_of("cat").tolist() == [0x9E5E43A8] and len(words_of("!?")) == 0, "the same in every process"


@given(st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=1, max_size=6), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_ngrams_of_many_texts_are_those_of_each(texts, n):
    arrays = [np.array(one, np.uint32) for one in texts]
    found, counts = ngrams_of_each(Texts(arrays), np.arange(len(arrays)), n)
    each = [ngrams(one, n) for one in arrays]
    assert counts.tolist() == [len(one) for one in each] and found.tolist() == np.concatenate(each).tolist()
    by_hand = {tuple(one[i : i + n]) for one in texts for i in range(len(one) - n + 1)}
    assert len(set(found.tolist())) == len(by_hand), "different n-grams have different hashes, equal ones the same"


# --- duplicates -------------------------------------------------------------------------------------------------------


def test_near_groups_are_those_of_all_pairs():
    """Texts with 0 to 8 of 120 words changed, around and below the limit; and short and empty ones."""
    rng = random.Random(0)
    texts = ["", "one two", "one two", "one two three", "!"]
    for family in range(40):
        base = text(family, 120).split()
        for changes in (0, 1, 2, 3, 4, 8):
            words = list(base)
            for place in rng.sample(range(120), changes):
                words[place] = f"x{rng.random()}".replace(".", "")
            texts.append(" ".join(words))
    rng.shuffle(texts)
    every = Texts(map(words_of, texts))
    sets = [shingles(every[index], SHINGLE) for index in range(len(every))]
    same = np.array([texts.index(one) for one in texts])
    parent = same.tolist()
    for one, other in itertools.combinations(range(len(texts)), 2):
        if jaccard(sets[one], sets[other]) >= NEAR and parent[one] != parent[other]:
            least, most = sorted((parent[one], parent[other]))
            parent = [least if value == most else value for value in parent]
    got = near_groups(every, same)
    joined = int((np.array(parent) != np.arange(len(texts))).sum())
    print(f"{joined} of {len(texts)} texts are near an earlier one")
    assert got.tolist() == parent and 80 < joined < 120


def test_planted_duplicates_are_found_with_their_rows(model, tmp_path):
    """Numbered through both sources, over a malformed row, by the run's own split."""
    pairs = [{"prompt": text(i), "chosen": text(1000 + i, 20), "rejected": text(2000 + i, 20)} for i in range(110)]
    pairs[100] = dict(pairs[7])
    pairs[101] = {"prompt": pairs[8]["prompt"] + " ", "chosen": "a", "rejected": "b"}
    pairs[102] = {"prompt": pairs[9]["prompt"] + " once more", "chosen": "c", "rejected": "d"}
    pairs[103] = {"prompt": pairs[10]["prompt"], "chosen": pairs[10]["rejected"], "rejected": pairs[10]["chosen"]}
    first = write(tmp_path / "first.jsonl", [*pairs[:100], {"prompt": 5}])
    second = write(tmp_path / "second.jsonl", pairs[100:])
    held = write(tmp_path / "held.jsonl", [pairs[3], {**pairs[4], "chosen": "e"}, {**pairs[5], "prompt": text(99_999)}])
    found = quality(
        model, "dpo", f"data.source=[{{source: {first}}}, {{source: {second}}}]",
        f"data.validation={{source: {held}}}",
    )  # fmt: skip
    lines = lines_of(found)
    print(json.dumps(lines, indent=1))
    assert lines.pop("prompt, exact duplicate") == (("101", "7"), ("102", "8"), ("104", "10"))
    assert lines.pop("prompt, near duplicate") == (("103", "9"),)
    assert lines.pop("row, exact duplicate") == (("101", "7"),)
    assert lines.pop("row, near duplicate") == (("104", "10"),), "the same words: a pair turned around"
    assert lines.pop("pair with opposite labels") == (("104", "10"),)
    assert lines.pop("validation: row in train, exact") == (("validation 0", "3"),)
    assert lines.pop("validation: prompt in train, exact") == (("validation 0", "3"), ("validation 1", "4"))
    assert lines.pop("validation: prompt in train, near") == (("validation 0", "3"), ("validation 1", "4"))
    assert set(lines) == {"validation: row in train, near"}
    [count] = {one.among for one in found.duplicates if one.what == "row, near duplicate"}
    assert count == 110


def test_held_out_rows_are_compared_with_the_rest(model, tmp_path):
    rows = [{"prompt": text(i % 50), "completion": text(100 + i, 5)} for i in range(100)]
    found = quality(model, "sft", f"data.source={write(tmp_path / 'rows.jsonl', rows)}", "data.validation={rows: 20}")
    lines = lines_of(found)
    pairs = lines["validation: prompt in train, exact"]
    assert not any("validation" in row for pair in lines["prompt, exact duplicate"] for row in pair)
    assert found.corpus.names == ("train", "validation") and (found.corpus.sets == 1).sum() == 20
    assert all(int(one.split()[1]) % 50 == int(other) % 50 for one, other in pairs) and len(pairs) >= 10


def test_rows_beyond_the_limit_of_words_are_told(model, tmp_path, monkeypatch):
    rows = [{"prompt": text(i), "completion": "x"} for i in range(20)]
    config = load(None, ["method.type=sft", f"model.path={model}", "data.template=none",
                         f"data.source={write(tmp_path / 'rows.jsonl', rows)}",
                         f"data.validation={{source: {write(tmp_path / 'held.jsonl', rows[:5])}}}"]).config  # fmt: skip
    from posttrain.data.prepare import rows_of_run

    tokenizer = byte_tokenizer()
    prepared = data_of(config, config.models[0], tokenizer)
    whole = read_corpus(rows_of_run(config, tokenizer), prepared)
    monkeypatch.setattr("posttrain.inspection.texts.MOST_WORDS", 300)
    part = read_corpus(rows_of_run(config, tokenizer), prepared)
    assert (len(whole.rows), whole.cut, len(part.rows), part.cut) == (25, (), 10, ("train",)), (
        "each source has its own limit"
    )


# --- contamination ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gsm8k(model, shared, tmp_path_factory):
    """Rows of GSM8K with one question of the test set among them, and the findings against suites."""
    leaked = json.loads((shared / "data/gsm8k/test.jsonl").read_text().splitlines()[17])
    rows = (shared / "data/gsm8k/train.jsonl").read_text().splitlines()[:800]
    rows.insert(123, json.dumps({**leaked, "question": "Q: " + leaked["question"].upper().replace(",", "")}))
    file = tmp_path_factory.mktemp("leak") / "train.jsonl"
    file.write_text("\n".join(rows) + "\n")
    against = [f"gsm8k={shared / 'data/gsm8k/test.jsonl'}", f"mmlu={shared / 'data/mmlu'}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POSTTRAIN_CACHE", str(file.parent / "cache"))
        return quality(model, "sft", f"data.source={file}", "data.max_length=4096", against=against)


def test_a_planted_leak_is_found_in_gsm8k(gsm8k):
    suite, mmlu = gsm8k.contamination
    print(suite, mmlu)
    assert suite.checked == 1319 and suite.hits[0] == ("17", 1.0, "123") and suite.copies == 1
    assert len(suite.hits) <= 3, "13 words in a row are seldom shared by chance"
    assert (mmlu.checked, mmlu.copies) == (1_552, 0)


@pytest.mark.slow
def test_gsm8k_has_no_question_of_its_test_set(model, shared):
    """7,473 rows: no copy; three of 1,319 questions share 13 words with one."""
    data = [f"data.source={shared / 'data/gsm8k/train.jsonl'}", "data.max_length=4096"]
    found = quality(model, "sft", *data, against=[f"gsm8k={shared / 'data/gsm8k/test.jsonl'}"])
    [suite] = found.contamination
    assert (suite.checked, suite.short, len(suite.hits), suite.copies) == (1_319, 0, 3, 0)


@pytest.mark.slow
def test_math_has_variants_of_math500(model, shared):
    """None of MATH-500 is in the training rows as it is, yet a few questions are there with other numbers."""
    data = [f"data.source={shared / 'data/math/math_train.json'}", "data.max_length=4096"]
    found = quality(model, "sft", *data, against=[f"math500={shared / 'data/math/math500.jsonl'}"])
    [suite] = found.contamination
    print(suite)
    assert (suite.checked, suite.short) == (487, 13) and 3 <= suite.copies <= 15 and suite.copies < len(suite.hits)


def corpus_of(model, tmp_path, *rows):
    return quality(
        model, "sft", f"data.source={write(tmp_path / 'rows.jsonl', [{'text': row} for row in rows])}"
    ).corpus


def test_ngrams_of_questions(model, tmp_path):
    """Coverage by hand; no n-gram across two rows; short questions as a whole, or not at all."""
    question = " ".join(f"q{i}" for i in range(20))
    head, tail = " ".join(question.split()[:10]), " ".join(question.split()[10:])
    rows = [
        f"{text(1)} {head}",
        f"{tail} {text(2)}",
        f"zz {' '.join(question.split()[:14])} zz",
        "Some nine words that are all of a question!",
    ]
    corpus = corpus_of(model, tmp_path, *rows, *(text(i) for i in range(10, 20)))
    asked = Questions(
        "mine", (question, "some nine words that are all of a question", "two words", tail), tuple("abcd")
    )
    found = contamination(asked, corpus, 13)
    assert (found.checked, found.short) == (3, 1)
    assert found.hits == (("b", 1.0, "3"), ("d", 1.0, "1"), ("a", 14 / 20, "2")) and found.copies == 2
    by_eight = contamination(asked, corpus, 8)
    assert dict((name, share) for name, share, _ in by_eight.hits)["a"] == 1.0


def test_suites_out_of_reach_are_named(tmp_path):
    """Without a network: all but pairs, and but the same questions again."""
    found, missing = questions_of(())
    assert found == [] and set(missing) == set(suite_names()) - {"hh", "mmlu_logprob"}
    for wrong in ("gsm8k", "gsmk", "hh", "no-such-file.jsonl", "gsm8k=no-such-file.jsonl"):
        with pytest.raises(PosttrainError):
            questions_of([wrong])


# --- preferences ------------------------------------------------------------------------------------------------------


def test_length_bias_by_hand():
    chosen, rejected = np.array([5, 7, 3, 4, 9]), np.array([4, 2, 8, 4, 1])
    found = length_bias(chosen, rejected, [1, 1, 2, 3, 4])
    assert found.longer is not None and (found.longer.value, found.longer.prompts, found.equal) == (0.75, 3, 1)
    pairs = [(a > b) + (a == b) / 2 for a in chosen for b in rejected]
    assert found.auc == pytest.approx(np.mean(pairs)) and auc(chosen, chosen) == 0.5
    assert length_bias(chosen, chosen, range(5)).longer is None


@pytest.mark.slow
def test_hh_prefers_short_replies(model, shared):
    found = quality(model, "dpo", f"data.source={shared / 'data/hh-harmless/train.jsonl.gz'}", "data.format=hh",
                    "data.max_length=4096", "training.tokens_per_pack=8192")  # fmt: skip
    bias, longer = found.bias, found.bias.longer
    print(bias)
    with gzip.open(shared / "data/hh-harmless/train.jsonl.gz", "rt") as rows:
        replies = [
            [r[k].rpartition("\n\nAssistant:")[2] for k in ("chosen", "rejected")] for r in map(json.loads, rows)
        ]
    sizes = [[len(reply.encode()) for reply in pair] for pair in replies]
    by_bytes = np.mean([one > other for one, other in sizes if one != other])
    assert abs(longer.value - by_bytes) < 0.02 and longer.high < 0.5, "a byte is a token here"
    assert 0.4 < bias.auc < 0.5 and lines_of(found)["prompt, exact duplicate"] == (("1224", "211"),)


# --- label noise ------------------------------------------------------------------------------------------------------


def simulated(rng, pairs, rate, spread=3.0, scale=2.5):
    """Margins of a reward model that knows the true preference up to a scale, and which labels were turned."""
    z = rng.normal(0, spread, pairs)
    first_is_better = rng.random(pairs) < 1 / (1 + np.exp(-z))
    turned = rng.random(pairs) < rate
    return np.where(first_is_better ^ turned, z, -z) * scale, turned


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.1, 0.2, 0.3])
def test_the_share_of_turned_labels_is_estimated(rate):
    """4,000 pairs: to 3 percentage points, whatever the margins' unit."""
    margins, turned = simulated(np.random.default_rng(1), 4_000, rate)
    found = label_noise(margins)
    print(found.rate, found.low, found.high, found.temperature, len(found.contradicted))
    assert abs(found.rate - rate) <= 0.03 and found.low <= found.rate <= found.high < found.low + 0.1
    assert label_noise(margins / 50).rate == pytest.approx(found.rate, abs=0.002)
    assert found.disagree == (margins < 0).sum() and (np.diff(margins[found.contradicted]) >= 0).all()
    if rate >= 0.1:
        assert found.temperature == pytest.approx(2.5, rel=0.3)
        listed = turned[found.contradicted].mean()
        assert listed > 2 * rate and abs(found.wrong_P.mean() - rate) < 0.05
        assert abs(found.wrong_P[found.contradicted].mean() - listed) < 0.15, "the probabilities are calibrated"


@pytest.mark.slow
def test_intervals_of_label_noise_cover():
    """95 % intervals of 1,000 pairs cover the true rate in 90 to 99 % of 200 simulations."""
    rng = np.random.default_rng(0)
    for rate in (0.1, 0.2):
        found = [label_noise(simulated(rng, 1_000, rate)[0]) for _ in range(200)]
        covered = np.mean([one.low <= rate <= one.high for one in found])
        print(rate, covered, np.mean([one.rate for one in found]))
        assert 0.90 <= covered <= 0.99 and abs(np.mean([one.rate for one in found]) - rate) < 0.01


def test_margins_that_say_nothing():
    rng = np.random.default_rng(0)
    guessing = label_noise(rng.normal(0, 1, 2_000))
    assert guessing.high == 0.5, "a model that guesses cannot exclude that all labels are noise"
    for margins in ([], [1.0], [0.0, 0.0], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="two or more pairs"):
            label_noise(np.array(margins))


@pytest.mark.slow
def test_a_trained_reward_model_finds_turned_labels(sums_home, tmp_path, monkeypatch, capsys):
    """Trained on correct pairs; of 400 others 20 % are turned: the estimate is within 5 points, the listed rows are
    turned ones."""
    from posttrain import runner
    from posttrain.data import arithmetic_problems

    def pairs(split, count):
        for row in arithmetic_problems(split, count, seed=0):
            worked, bare = f"{row['solution']} so {row['answer']}", f"{row['answer']}"
            yield {"prompt": row["problem"], "chosen": worked, "rejected": bare}

    train, other = list(pairs("train", 300)), list(pairs("test", 400))
    rng = random.Random(0)
    turned = set(rng.sample(range(400), 80))
    for row in turned:
        other[row] = {**other[row], "chosen": other[row]["rejected"], "rejected": other[row]["chosen"]}
    common = [f"model.path={sums_home / 'model'}", "data.template=none", f"output_dir={tmp_path}", "devices.type=cpu"]
    runner.train(load(None, ["method.type=reward", "name=rm", f"data.source={write(tmp_path / 'a.jsonl', train)}",
                             "training.learning_rate=1e-3", "training.batch_size=16", "training.num_train_epochs=2",
                             *common]).config)  # fmt: skip
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    source = f"data.source={write(tmp_path / 'b.jsonl', other)}"
    command = ["explore", "method=dpo", source, *common[:2], "--rows", "0"]
    assert main([*command, "--reward-model", "rm/final", "--report", "found.json"]) == 0
    noise = json.loads((tmp_path / "found.json").read_text())["label_noise"]
    print(capsys.readouterr().out)
    assert noise["pairs"] == 400 and abs(noise["rate"] - 0.2) <= 0.05
    assert noise["interval"][0] <= 0.2 <= noise["interval"][1]
    listed = {row["row"] for row in noise["contradicted"]}
    assert len(listed & turned) >= 70 and len(listed - turned) <= 8


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": text(i % 15, 20), "chosen": "long " * (i % 7 + 1), "rejected": "no " * 3} for i in range(30)]
    asked = write(tmp_path / "asked\x1b[31m.jsonl", [{"id": 1, "question": text(3, 20)}, {"question": text(77, 20)}])
    with open(asked, "a") as file:
        file.write("{broken\n")
    arguments = ["explore", "method=dpo", f"model.path={model}", f"data.source={write(tmp_path / 'a.jsonl', rows)}",
                 "data.template=none", "data.validation={rows: 5}", "--rows", "0"]  # fmt: skip
    assert main([*arguments, "--against", asked, "--report", "found.json"]) == 0
    shown = capsys.readouterr().out
    data = json.loads((tmp_path / "found.json").read_text())
    assert max(map(len, shown.splitlines())) <= 80 and "\x1b" not in shown and "\\x1b" in shown
    assert "length bias: the longer reply is chosen in" in " ".join(shown.split())
    assert re.search(r"^prompt, exact duplicate +1[0-5] ", shown, re.M), shown
    [suite] = data["contamination"].values()
    assert data["rows"] == {"train": 25, "validation": 5} and suite["copies"] == 1 and suite["hits"][0][1] == 1.0
    assert "unreadable questions, not checked: 1 of" in shown and suite["unread"] == 1
    assert data["label_noise"] is None and data["length_bias"]["pairs"] == 25

    for wrong, message in (
        (["--report", "found.json"], "found.json exists"),
        (["--ngram", "5"], "--ngram 5: it must be 13 or 8"),
        (["--no-quality", "--against", asked], "--no-quality cannot be combined"),
        (["--against", "gsmk"], "did you mean gsm8k"),
        (["--against", "none.jsonl"], "--against none.jsonl: there is no such file"),
        (["--reward-model", str(model)], "config.json"),
        (["method=sft", "--reward-model", str(model)], "--reward-model scores preference pairs"),
    ):
        assert main([*arguments, *wrong]) != 0
        error = capsys.readouterr().err
        assert message in error, error
    assert main([*arguments, "--no-quality"]) == 0
    assert "duplicates" not in capsys.readouterr().out


def test_a_causal_model_is_no_reward_model(shared, tmp_path):
    rows = write(tmp_path / "a.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}] * 2)
    with pytest.raises(ConfigError, match="is not a reward model"):
        path = shared / "models/stories260K"
        quality(path, "dpo", f"data.source={rows}", reward_model=str(path))
