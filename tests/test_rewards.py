"""Each reward's exact numbers, sums that keep their parts, and rewards that cannot work said so at once."""

import json
import statistics
import sys

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from posttrain.base.errors import ConfigError, ModelError, RewardError
from posttrain.base.functions import find_function
from posttrain.config import DataConfig, DevicesConfig, ModelConfig, TagsConfig, load
from posttrain.config.schema.rewards import Reward, named_by_function, term_name
from posttrain.inspection.rows import score
from posttrain.rewards import compose, maths, tagged
from posttrain.rewards.compose import RewardInput, Rewards

REWARDS = TypeAdapter(tuple[Reward, ...])
TAGS = TagsConfig().model_dump()
OTHER = TagsConfig(reasoning_start="<t>", reasoning_end="</t>", solution_start="[", solution_end="]").model_dump()


def settings(*terms: dict) -> tuple[Reward, ...]:
    return REWARDS.validate_python(terms)


def dress(text: str, tags: dict) -> str:
    """`)` ends the reasoning, `[` and `]` stand around the solution."""
    return "".join(
        {")": tags["reasoning_end"], "[": tags["solution_start"], "]": tags["solution_end"]}.get(c, c) for c in text
    )


# --- the tagged format ------------------------------------------------------------------------------------------------

#    completion     gold    exactly  approximately  answer  numbers
TABLE = [
    ("why)[18]", "18", 3.0, 1.5, 5.0, 3.0),  # everything: 12.5
    ("", "18", 0.0, -3.0, -2.0, -1.5),  # the usual start: -6.5
    ("18", "18", 0.0, -3.0, -2.0, -1.5),
    ("why)[ 18 ]", "18", 3.0, 1.5, 3.5, 3.0),
    ("why)[18]\n ", "18", 3.0, 1.5, 5.0, 3.0),
    ("why)[18] so", "18", 0.0, 1.5, 5.0, 3.0),
    ("why)[19]", "18", 3.0, 1.5, 2.0, -1.5),  # 19/18 = 1.056
    ("why)[19.8]", "18", 3.0, 1.5, 2.0, -1.5),  # exactly 10 %
    ("why)[16.2]", "18", 3.0, 1.5, 2.0, -1.5),
    ("why)[21.6]", "18", 3.0, 1.5, 1.5, -1.5),  # exactly 20 %
    ("why)[14.4]", "18", 3.0, 1.5, 1.5, -1.5),
    ("why)[21.7]", "18", 3.0, 1.5, -2.0, -1.5),
    ("why)[-18]", "18", 3.0, 1.5, -2.0, -1.5),
    ("why)[18.0]", "18", 3.0, 1.5, 2.0, 3.0),
    ("why)[1,000]", "1000", 3.0, 1.5, 2.0, 3.0),
    ("why)[it is 18 dollars]", "18", 3.0, 1.5, -2.0, 3.0),
    ("why)[east]", "18", 3.0, 1.5, -2.0, -1.5),
    ("why)[0]", "0", 3.0, 1.5, 5.0, 3.0),
    ("why)[0.0]", "0", 3.0, 1.5, 2.0, 3.0),
    ("why)[1]", "0", 3.0, 1.5, -2.0, -1.5),
    (")[18]", "18", 3.0, 1.5, 5.0, 3.0),
    ("why[18]", "18", 0.0, 0.0, 5.0, 3.0),  # 0.5 + 0.5 - 1
    ("why)18]", "18", 0.0, 0.0, -2.0, -1.5),
    ("why)[18", "18", 0.0, 0.0, -2.0, 3.0),
    ("why)[]", "18", 0.0, 1.5, -2.0, -1.5),
    ("[18])why", "18", 0.0, 1.5, 5.0, 3.0),
    ("a)b)[18]", "18", 3.0, 0.0, 5.0, 3.0),
    ("a)[17][18]", "18", 3.0, -1.5, 5.0, 3.0),  # 0.5 - 1 - 1
    ("why)[18]]", "18", 3.0, 0.0, -2.0, 3.0),
]


@pytest.mark.parametrize("tags", [TAGS, OTHER], ids=["default tags", "other tags"])
@pytest.mark.parametrize(("text", "gold", *["exactly", "approximately", "answer", "numbers"]), TABLE)
def test_tagged_rewards_by_hand(text, gold, exactly, approximately, answer, numbers, tags):
    completion = dress(text, tags)
    found = [
        rule(completion, gold, tags).score
        for rule in (tagged.format_exactly, tagged.format_approximately, tagged.answer, tagged.numbers)
    ]
    print(f"{completion!r} against {gold!r}: {found}, together {sum(found):g}")
    assert found == [exactly, approximately, answer, numbers]


def test_the_range_of_the_four_together():
    totals = [sum(row[2:]) for row in TABLE]
    assert (min(totals), max(totals)) == (-6.5, 12.5)


# --- right or wrong ---------------------------------------------------------------------------------------------------

CLASSES = [
    # completion, class of r1_zero, class of question_only (format, answer), against 18
    ("so </think> <answer> 18 </answer>", "11", "01"),
    ("so </think> <answer> 17 </answer>", "10", "00"),
    (r"so </think> <answer> \boxed{18} </answer>", "11", "11"),
    (r"so </think> <answer> it is \boxed{18} </answer>", "11", "11"),
    ("so </think><answer> 18 </answer>", "01", "01"),  # the space is part of the format
    ("<answer> 18 </answer>", "01", "01"),
    ("so </think> <answer> 18", "01", "01"),
    (r"so \boxed{18}", "01", "11"),
    (r"so \boxed{17}", "00", "10"),
    (r"\boxed{17} then \boxed{18}", "01", "11"),
    (r"\boxed{18} then \boxed{17}", "00", "10"),
    (r"\boxed{18}</think> no", "00", "00"),
    ("the answer is 18", "01", "01"),
    ("the answer is 17", "00", "00"),
    ("", "00", "00"),
    ("</think> <answer></answer>", "10", "00"),
]


@pytest.mark.parametrize(("completion", "r1_zero", "question_only"), CLASSES)
def test_four_classes(completion, r1_zero, question_only):
    for rule, want in ((maths.r1_zero, r1_zero), (maths.question_only, question_only)):
        found = rule(completion, "18")
        assert f"{found.parts['format']:.0f}{found.parts['answer']:.0f}" == want, found
        assert (found.score, found.correct) == (float(want == "11"), want == "11")


def test_math_and_gsm8k_take_the_answer_from_where_it_stands():
    assert maths.math(r"so \boxed{1,234}.", "1234").score == 1.0
    assert maths.math("so 1234", "1234").score == 0.0, "a number alone is no answer of `math`"
    assert maths.math(r"\boxed{5}", r"We get \boxed{5}.").score == 1.0, "a whole solution as the right answer"
    for text in ("#### 18", "it is 17.\n#### $18.00", r"\boxed{18}", "<answer>18</answer>", "so 20 - 2 = 18 dollars."):
        assert maths.gsm8k(text, "A lot.\n#### 18").score == 1.0, text
    for text in ("#### 17", "18 is not 17", "eighteen", "", "<think>18"):
        assert maths.gsm8k(text, "#### 18").score == 0.0, text


# --- of tokens alone --------------------------------------------------------------------------------------------------


def test_length_overlong_and_repetition_by_hand():
    assert compose.length_reward(90, 100, 0.01) == pytest.approx(-0.1) == compose.length_reward(110, 100, 0.01)
    # limit 100, cache 20: 0 up to 80, then (80 - n) / 20, beyond the limit -1
    want = {0: 0.0, 80: 0.0, 81: -0.05, 90: -0.5, 100: -1.0, 101: -1.0}
    assert {n: compose.overlong_reward(n, 100, 20) for n in want} == want
    # a b a b a: 3-grams aba, bab, aba: one of three repeats
    assert compose.repetition_reward([1, 2, 1, 2, 1], 3, -1.0) == pytest.approx(-1 / 3)
    assert compose.repetition_reward([7] * 12, 3, -2.0) == pytest.approx(-2 * 0.9)
    assert compose.repetition_reward([1, 2, 3, 4], 3, -1.0) == 0.0 == compose.repetition_reward([1, 1], 3, -1.0)


# --- together ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def functions(tmp_path, monkeypatch):
    """A module `my_rewards` in the working folder."""
    (tmp_path / "my_rewards.py").write_text(
        "import math\n"
        "def brevity(completions, **kwargs):\n    return [-len(c) for c in completions]\n"
        "def only_long(completions):\n    return [1 if len(c) > 5 else None for c in completions]\n"
        "def by_column(completions, level, answer):\n    return [float(l) for l in level]\n"
        "def raises(completions):\n    return [1 / 0 for c in completions]\n"
        "def nan(completions):\n    return [math.nan] * len(completions)\n"
        "def text(completions):\n    return ['1.0'] * len(completions)\n"
        "def huge(completions):\n    return [10 ** 400] * len(completions)\n"
        "def short(completions):\n    return [1.0]\n"
        "def one(completions):\n    return 1.0\n"
        "def tensor(completions):\n    import torch; return torch.ones(len(completions))\n"
        "def no_completions(prompts):\n    return [1.0]\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_a_file_may_be_named_by_any_path_below_the_folder(functions, tmp_path):
    """Also when settings were written by a program, which names whole paths; a file elsewhere is no user's file."""
    whole, upwards = tmp_path / "my_rewards.py", f"../{tmp_path.name}/my_rewards.py"
    for name in ("my_rewards.py", "./my_rewards.py", str(whole), upwards):
        assert find_function(f"{name}:brevity")(completions=["ab"]) == [-2]
    (tmp_path.parent / "elsewhere.py").write_text("def brevity(completions):\n    return [0.0]\n")
    for name in (str(tmp_path.parent / "elsewhere.py"), "../elsewhere.py"):
        with pytest.raises(RewardError, match="neither in the current folder nor next to the settings file: move it"):
            find_function(f"{name}:brevity")


def test_weighted_sum_keeps_every_part(grading_pool, functions):
    terms = settings(
        {"type": "match_format_approximately"},
        {"type": "check_answer", "weight": 0.5, "name": "answer"},
        {"type": "length", "target": 3, "scale": 0.1},
        {"type": "python", "function": "my_rewards:only_long", "weight": 10},
        {"type": "check_numbers", "weight": 0},
    )
    completions = [
        RewardInput(dress("why)[18]", TAGS), [1, 2], answer="18"),
        RewardInput("18", [1, 2, 3], answer="18"),
        RewardInput(dress("why)[18]", TAGS), [1] * 5, answer=" "),  # no answer to compare with
        RewardInput("", [], answer="eighteen"),  # no number: bad for check_numbers alone
    ]
    with Rewards(terms, grading_pool) as rewards:
        found = rewards(completions)
    print(found.metrics())
    # 1.5 + 0.5 * 5 - 0.1 + 10;   -3 + 0.5 * -2 - 0   (only_long does not apply);   the last has no number for
    # check_numbers, which counts nothing: -3 + 0.5 * -2 - 0.3
    assert found.totals[:2] == (pytest.approx(13.9), pytest.approx(-4.0)) and found.totals[2:] == (None, -4.3)
    assert [part.name for part in found[0].parts] == [term_name(term) for term in named_by_function(terms)]
    answers, applicable = ([reward.parts[index].value for reward in found] for index in (1, 3))
    assert answers == [5.0, -2.0, None, -2.0] and applicable == [1.0, None, 1.0, None]
    metrics = found.metrics()
    assert metrics["reward"] == pytest.approx((13.9 - 4 - 4.3) / 3) and metrics["reward_std"] == pytest.approx(
        statistics.stdev([13.9, -4.0, -4.3])
    )
    assert metrics["rewards/answer/mean"] == pytest.approx(1 / 3) and metrics["rewards/left_out"] == 1
    assert metrics["rewards/only_long/not_applicable"] == 2
    assert (metrics["rewards/answer/bad_gold"], metrics["rewards/check_numbers/bad_gold"]) == (1, 2)
    assert "rewards/length/timeout" not in metrics


def nothing(completions, **_columns):
    return [None for _ in completions]


def half(completions, **_columns):
    return [1.0 if text == "a" else None for text in completions]


@pytest.mark.parametrize("zero", [0, -0.0])
def test_a_reward_of_weight_0_changes_no_total(grading_pool, zero):
    """Not beside a None, not by a verdict that it lacks, not by a value: it is logged, and right or wrong as ever."""
    math_ = {"type": "math", "weight": zero}
    function = {"type": "python", "function": "test_rewards:half", "name": "half"}
    length = {"type": "length", "target": 1, "scale": 1.0, "weight": zero}
    given = [
        RewardInput("a", [1], answer=""),
        RewardInput(r"\boxed{2}", [1, 2], answer="2"),
        RewardInput("a", answer="3"),
    ]
    with Rewards(settings(function, math_, length), grading_pool) as rewards:
        found = rewards(given)
        accuracies = rewards.accuracies(found)
    with Rewards(settings(function), grading_pool) as rewards:
        alone = rewards(given)
    assert found.totals == alone.totals == (1.0, None, 1.0)
    metrics = found.metrics()
    assert metrics["rewards/math/bad_gold"] == 1 and metrics["rewards/length/mean"] == pytest.approx(-2 / 3)
    assert accuracies == {"answer_accuracy": 0.5}
    assert [reward.lacks_verdict for reward in found] == [False] * 3, "half does not apply, math does not count"
    with Rewards(settings(function, math_, length), grading_pool, zeros_count=True) as rewards:
        assert rewards(given).totals == (None, 0.0, 1.0), "the rule of behaviour version 1"


def test_not_applicable_is_no_missing_verdict(grading_pool):
    """A None of a function is counted by itself, also beside a rule that has no verdict, and late calls are none."""
    rules = [{"type": "python", "function": "test_rewards:nothing", "name": "no"}, {"type": "math"}]
    given = [RewardInput(r"\boxed{2}", answer="2"), RewardInput("", answer="")]
    with Rewards(settings(*rules), grading_pool) as rewards:
        found = rewards(given)
    metrics = found.metrics()
    assert found.totals == (1.0, None) and (metrics["rewards/no/not_applicable"], metrics["rewards/left_out"]) == (2, 1)
    assert [reward.lacks_verdict for reward in found] == [False, True]
    assert "rewards/math/not_applicable" not in metrics


def test_a_list_whose_weights_are_all_0_is_refused(tmp_path):
    """In a run's settings, those of a validation set, and for stored completions."""
    none = [{"type": "math", "weight": 0}, {"type": "length", "target": 3, "weight": 0}]
    with pytest.raises(RewardError, match=r"all rewards have weight 0, .* a different weight \(math, length\)"):
        Rewards(settings(*none))
    for method in ({"type": "grpo"}, {"type": "ppo"}, {"type": "sft"}):
        given = {"model": "m", "data": {"source": "x", "validation": {"rows": 2}}, "method": method}
        file = tmp_path / "config.json"
        own = {
            "evaluation": {"datasets": [{"name": "a", "source": "x", "rewards": none}]},
            "rewards": [{"type": "math"}],
        }
        for more, field in (({"rewards": none}, "rewards"), (own, "evaluation.datasets.0.rewards")):
            file.write_text(json.dumps(given | more))
            with pytest.raises(ConfigError, match=rf"{field}.0.weight is 0: all rewards have weight 0"):
                load(file)


def test_four_classes_are_reported(grading_pool):
    with Rewards(settings({"type": "r1_zero"}), grading_pool) as rewards:
        metrics = rewards([RewardInput(text, answer="18") for text, *_ in CLASSES]).metrics()
    counts = {name: sum(row[1] == name for row in CLASSES) for name in ("00", "01", "10", "11")}
    assert {name: metrics[f"rewards/r1_zero/{name}"] * len(CLASSES) for name in counts} == counts
    assert metrics["reward"] == pytest.approx(counts["11"] / len(CLASSES))


def test_no_verdict_is_no_zero(grading_pool):
    """A group without any verdict has no reward at all, and says so."""
    with Rewards(settings({"type": "math"}), grading_pool) as rewards:
        found = rewards([RewardInput(r"\boxed{1}", answer=""), RewardInput(r"\boxed{2}", answer=None)])
    metrics = found.metrics()
    assert found.totals == (None, None) and "reward" not in metrics and "rewards/math/mean" not in metrics
    assert (metrics["rewards/left_out"], metrics["rewards/math/bad_gold"]) == (2, 2)


def test_rewards_start_their_own_workers_and_end_them():
    with Rewards(settings({"type": "gsm8k"}), workers=1) as rewards:
        assert rewards([RewardInput("#### 3", answer="3")]).totals == (1.0,)
        pool = rewards._pool
    assert pool is not None
    with pytest.raises(RewardError, match="closed"):
        rewards([RewardInput("#### 3", answer="3")])


def test_the_rollouts_length_is_the_limit_of_overlong():
    with Rewards(settings({"type": "overlong", "cache": 20}), max_completion_length=100) as rewards:
        assert rewards([RewardInput("", [0] * 90)]).totals == (-0.5,)
    for limit, said in ((None, "not given"), (10, "10")):
        with pytest.raises(RewardError, match=f"last 20 tokens .* which is {said}"):
            Rewards(settings({"type": "overlong", "cache": 20}), max_completion_length=limit)


# --- functions --------------------------------------------------------------------------------------------------------


def test_functions_are_called_as_trl_calls_them(functions):
    terms = [{"type": "python", "function": f"my_rewards:{name}", "name": name} for name in ("brevity", "by_column")]
    with Rewards(settings(*terms, {"type": "python", "function": "my_rewards:tensor", "weight": 0.5})) as rewards:
        found = rewards([RewardInput("four", columns={"level": "3"}), RewardInput("", columns={"level": "4"})])
    assert found.totals == (-4 + 3 + 0.5, 0 + 4 + 0.5)


def test_a_function_receives_the_answer_of_the_data_too(tmp_path, monkeypatch):
    """`answer` is the part that rules compare, as in GSM8K; a column that is called `full_answer` comes first."""
    monkeypatch.chdir(tmp_path)
    gold = "def gold(completions, answer, full_answer):\n    return [float(f.split('####')[1]) - float(a) for a, f in "
    (tmp_path / "my_gold.py").write_text(f"{gold}zip(answer, full_answer)]\n")
    whole = {"answer": "He has 6 + 7. #### 13"}
    with Rewards(settings({"type": "python", "function": "my_gold:gold"})) as rewards:
        found = rewards([RewardInput("", answer="12", columns=each) for each in (whole, whole)])
        assert found.totals == (1.0, 1.0)
        found = rewards([RewardInput("", answer="12", columns={**whole, "full_answer": "#### 14"})])
    assert found.totals == (2.0,)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_rewards:raises", r"my_rewards:raises failed \(my_rewards.py line 9\) with ZeroDivisionError: division by"),
        ("my_rewards:nan", "returned nan for completion 0; a finite number is needed"),
        ("my_rewards:text", "returned '1.0' for completion 0"),
        ("my_rewards:huge", "returned 1000000.* for completion 0"),
        ("my_rewards:short", "returned 1 rewards for 2 completions"),
        ("my_rewards:one", "returned float; a list of 2 numbers is needed"),
        ("my_rewards:by_column", "takes level, which the data lacks; it has prompts, completions"),
        ("my_rewards:no_completions", "takes prompts; a reward function takes `completions`"),
        ("my_rewards:brevty", "my_rewards has no function brevty; it has brevity, "),
        ("my_rewards:number", "has no function number"),
        ("no_such_module:f", "there is no module no_such_module in "),
    ],
)
def test_functions_that_do_not_work(functions, name, message):
    with pytest.raises(RewardError, match=message), Rewards(settings({"type": "python", "function": name})) as rewards:
        rewards([RewardInput("a"), RewardInput("b")])


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ({"type": "maths"}, "does not match any of the expected tags"),
        ({"type": "math", "target": 3}, "Extra inputs"),
        ({"type": "length"}, "target"),
        ({"type": "model"}, "give one of the two"),
        ({"type": "model", "path": "a", "from": "b"}, "give one of the two"),
        ({"type": "python", "function": "my_rewards.brevity"}, "pattern"),
        ({"type": "overlong", "cache": 30, "max_completion_length": 20}, "is 30, above max_completion_length, 20"),
        ({"type": "math", "weight": float("nan")}, "finite"),
    ],
)
def test_settings_that_cannot_be(term, message):
    with pytest.raises(ValidationError, match=message):
        settings(term)


def test_lists_that_cannot_be(grading_pool):
    with pytest.raises(RewardError, match="two rewards are called math: give one of them a different `name`"):
        Rewards(settings({"type": "math"}, {"type": "math"}), grading_pool)
    with pytest.raises(RewardError, match=r"reward model of a stage \(reward\) is not known here: give its `path`"):
        Rewards(settings({"type": "model", "from": "reward"}))


# --- a reward model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reward_model(scratch_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(scratch_model, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight)
    model.config.max_position_embeddings = 200
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(scratch_model).save_pretrained(folder)
    return folder


def plain_rewards(folder, texts):
    """transformers alone, one text at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [
            float(model(torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])).logits) for text in texts
        ]


def test_a_reward_model_gives_what_transformers_gives(reward_model):
    """Prompts shared by several completions, one of them empty, and prompts that begin alike."""
    stop = AutoTokenizer.from_pretrained(reward_model).eos_token
    pairs = [("Say it.", " Yes"), ("Say it.", " No, no."), ("Say it.", ""), ("Say", " it"), ("Why?", " So")]
    terms = settings({"type": "model", "path": str(reward_model), "weight": 2.0})
    with Rewards(terms, devices=DevicesConfig(type="cpu")) as rewards:
        found = rewards([RewardInput(text, prompt=prompt) for prompt, text in pairs])
    want = plain_rewards(reward_model, [prompt + text + stop for prompt, text in pairs])
    values = [reward.parts[0].value for reward in found]
    print(values, want)
    assert values == pytest.approx(want, abs=1e-5) and len(set(want)) == 5
    assert found.totals == pytest.approx([2 * value for value in want], abs=1e-5)


def test_completions_longer_than_the_reward_model_reads_are_said_at_the_start(reward_model, caplog):
    term = settings({"type": "model", "path": str(reward_model)})
    for length, said in ((199, 0), (200, 1)):
        caplog.clear()
        with Rewards(term, max_completion_length=length):
            assert len([one for one in caplog.messages if "reads 200 tokens" in one]) == said


def test_a_reward_model_reads_conversations(reward_model):
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    chats = [[{"role": "user", "content": text}] for text in ("Hi", "Hi", "Ho")]
    replies = ["there", "you", "there"]
    with Rewards(settings({"type": "model", "path": str(reward_model)})) as rewards:
        found = rewards([RewardInput(r, prompt=chat) for r, chat in zip(replies, chats, strict=True)])
        with pytest.raises(RewardError, match="all be strings or all be lists"):
            rewards([RewardInput("a", prompt="x"), RewardInput("b", prompt=chats[0])])
        with pytest.raises(RewardError, match=r"tokens with its prompt, but .* reads at most 200: lower rollout"):
            rewards([RewardInput("word " * 300, prompt="x")])
    whole = [
        tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": reply}], tokenize=False)
        for chat, reply in zip(chats, replies, strict=True)
    ]
    want = plain_rewards(reward_model, whole)
    print(found.totals, want)
    assert found.totals == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("pad", ["stop", "none", "other"])
def test_a_reward_model_is_read_where_transformers_reads_it(reward_model, tmp_path, pad):
    """At the last token that is not the pad token. Where that is the stop token, so are the ones before it skipped."""
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    other = next(id for id in tokenizer.all_special_ids if id != tokenizer.eos_token_id)
    model = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
    model.config.pad_token_id = {"stop": tokenizer.eos_token_id, "none": None, "other": other}[pad]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    stop = tokenizer.eos_token
    pairs = [("Say it.", " Yes"), ("Say it.", " No"), ("Say it.", ""), ("Why?", f" So{stop}{stop}"), ("Why?", " So")]
    with Rewards(settings({"type": "model", "path": str(tmp_path)})) as rewards:
        found = rewards([RewardInput(text, prompt=prompt) for prompt, text in pairs]).totals
    ended = [text if text.endswith(stop) else text + stop for text in (prompt + text for prompt, text in pairs)]
    want = plain_rewards(tmp_path, ended)
    print(pad, found, want)
    assert found == pytest.approx(want, abs=1e-5)
    without = plain_rewards(tmp_path, [text.removesuffix(stop).removesuffix(stop) for text in ended])
    assert (found == pytest.approx(without, abs=1e-5)) == (pad == "stop")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in pairs))
    data = DataConfig(source=str(rows), template="none")
    score(ModelConfig(path=str(tmp_path)), rows, tmp_path / "scored.jsonl", data, DevicesConfig(type="cpu"), 4096)
    scored = [json.loads(line)["reward"] for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    assert scored == pytest.approx(want, abs=1e-5)


def test_a_reward_model_scores_the_sampled_tokens(shared, reward_model, tmp_path):
    """After plain prompts, where they are its own tokenizer's, however the text would be tokenised. In a
    run of an earlier version, with another tokenizer and without the thinking, the text."""
    stories = shared / "models/stories260K"
    tokenizer = AutoTokenizer.from_pretrained(stories)
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(stories, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight)
    model.config.pad_token_id = tokenizer.unk_token_id
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    prompt, ids = "there was a girl", tokenizer.convert_tokens_to_ids(["\u2581n", "a", "m", "e", "d"])
    before, end = tokenizer(prompt).input_ids, tokenizer.eos_token_id

    def scored(tokens):
        with torch.no_grad():
            return float(model(torch.tensor([tokens])).logits)

    cases = [  # sampled, whether cut off, what is read
        (ids, True, [*before, *ids]),
        ([*ids, end], False, [*before, *ids, end]),
        ([*ids, tokenizer.bos_token_id], False, [*before, *ids, end]),  # another stop token
        (ids, False, [*before, *ids, end]),  # a stop string
    ]
    inputs = [RewardInput(" named", tokens, prompt, truncated=cut) for tokens, cut, _ in cases]
    term = settings({"type": "model", "path": str(tmp_path)})
    with Rewards(term) as rewards:
        found = rewards(inputs).totals
        others = rewards([RewardInput(" named", [5, 6], prompt), RewardInput("named", ids, prompt)]).totals
    want = [scored(read) for *_, read in cases]
    text = scored([*tokenizer(prompt + " named").input_ids, end])
    print(found, want, text)
    assert found == pytest.approx(want, abs=1e-4) and abs(want[1] - text) > 1e-3
    assert others == pytest.approx([text, scored([*tokenizer(prompt + "named").input_ids, end])], abs=1e-4)
    with Rewards(term, sampled_ids=False) as rewards:
        assert rewards(inputs[1:]).totals == pytest.approx([text] * 3, abs=1e-4)


def test_a_completion_that_was_cut_off_has_no_end(reward_model):
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    chat = [{"role": "user", "content": "Hi"}]
    opened = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    with Rewards(settings({"type": "model", "path": str(reward_model)})) as rewards:
        texts = rewards([RewardInput(" No, n", prompt="Say.", truncated=cut) for cut in (True, False, True)]).totals
        chats = rewards([RewardInput("there", prompt=chat, truncated=cut) for cut in (True, False)]).totals
        assert len(rewards([RewardInput("", prompt="Say.", truncated=True)]).totals) == 1
        with pytest.raises(RewardError, match="completion 0 and its prompt are empty"):
            rewards([RewardInput("", truncated=True)])
    whole = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": "there"}], tokenize=False)
    want = plain_rewards(
        reward_model, ["Say. No, n", f"Say. No, n{tokenizer.eos_token}", "Say. No, n", f"{opened}there", whole]
    )
    assert [*texts, *chats] == pytest.approx(want, abs=1e-5) and abs(want[0] - want[1]) > 1e-3 < abs(want[3] - want[4])


def test_a_reward_model_with_the_tokenizer_of_another(reward_model, tmp_path):
    """Tokens without an embedding: its own vocabulary is refused at the start, an added one where a text has it."""
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    model = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
    model.resize_token_embeddings(5000)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    term = settings({"type": "model", "path": str(tmp_path)})
    with pytest.raises(
        ModelError, match=r"its tokenizer has token ids up to 6,\d+, but the model has 5,000 embeddings: use"
    ):
        Rewards(term)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.add_special_tokens({"pad_token": "[EXTRA]"})
    tokenizer.save_pretrained(tmp_path)
    with Rewards(term) as rewards:
        assert len(rewards([RewardInput(" Yes", prompt="Say it.")]).totals) == 1
        with pytest.raises(RewardError, match=r"or its prompt has the token 6,\d+ .* which has 6,\d+ embeddings"):
            rewards([RewardInput(" Yes", prompt="Say [EXTRA] it.")])


def test_thinking_can_be_stripped_before_a_reward_model_scores(reward_model):
    stop = AutoTokenizer.from_pretrained(reward_model).eos_token
    replies = {
        "<think>so</think>\n\nYes": "Yes" + stop,
        "so</think> Yes": "Yes" + stop,
        "<think>a</think>b<think>c</think>Yes": "Yes" + stop,
        "Yes": "Yes" + stop,
        "<think>so": stop,
    }
    completions = [RewardInput(text, prompt="Say it. ") for text in replies]
    completions.append(RewardInput("so on and", prompt="Say it. ", thinking=True, truncated=True))
    completions.append(RewardInput("so</think> Ye", prompt="Say it. ", thinking=True, truncated=True))
    term = {"type": "model", "path": str(reward_model)}
    both = [{**term, "name": "whole"}, {**term, "name": "reply", "strip_thinking": True}]
    with Rewards(settings(*both)) as rewards:
        found = rewards(completions)
    whole, reply = ([reward.parts[index].value for reward in found] for index in (0, 1))
    read = [*replies.values(), "", "Ye"]
    assert reply == pytest.approx(plain_rewards(reward_model, [f"Say it. {text}" for text in read]), abs=1e-5)
    assert whole.pop(3) == pytest.approx(reply.pop(3), abs=1e-5)
    assert all(abs(a - b) > 1e-4 for a, b in zip(whole, reply, strict=True))


def test_a_model_that_is_no_reward_model(scratch_model):
    with pytest.raises(ModelError, match="is not a reward model: it has no classification head"):
        Rewards(settings({"type": "model", "path": str(scratch_model)}))
