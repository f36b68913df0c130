"""Which answers are equal, and where in a completion the answer stands: tables, recorded solutions, gold solutions."""

import json
import time
from pathlib import Path

import pytest
from answer_tables import DIFFERENT, EQUAL
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.base.words import last_box
from posttrain.grading.equality import same_answer
from posttrain.grading.extract import after_thinking, final_answer, first_number, last_number, marked_answer
from posttrain.grading.numbers import read_number, same_number
from posttrain.grading.verdict import GradeRequest
from posttrain.rewards.maths import gsm8k
from posttrain.rewards.rules import RULES


def boxed(gold: str, answer: str) -> GradeRequest:
    return GradeRequest(RULES["math"], rf"So it is \boxed{{{answer}}}", gold)


def test_equal_answers_are_equal(grading_pool):
    grades = grading_pool.grade([boxed(gold, answer) for gold, answer in EQUAL])
    missed = [(pair, grade) for pair, grade in zip(EQUAL, grades, strict=True) if grade.verdict != "correct"]
    print(f"{len(EQUAL)} equivalents, {len(missed)} missed")
    assert not missed


def test_different_answers_are_not_equal(grading_pool):
    grades = grading_pool.grade([boxed(gold, answer) for gold, answer in DIFFERENT])
    taken = [(pair, grade) for pair, grade in zip(DIFFERENT, grades, strict=True) if grade.verdict == "correct"]
    print(f"{len(DIFFERENT)} different answers, {len(taken)} taken for right")
    assert not taken
    assert all(grade.verdict == "wrong" for (gold, _), grade in zip(DIFFERENT, grades, strict=True) if gold)


def further_pairs() -> list[tuple[str, str, str]]:
    """(right answer, answer, verdict) of each line `right ≡ equal` or `right ≢ different`."""
    lines = (Path(__file__).parent / "answer_pairs.txt").read_text(encoding="utf-8").splitlines()
    same = [(*line.split(" ≡ "), "correct") for line in lines if " ≡ " in line]
    return same + [(*line.split(" ≢ "), "wrong") for line in lines if " ≢ " in line]


def test_further_pairs(grading_pool, figure):
    """The breadth of competition maths, word problems and careless writing; nothing crashes, no right answer is bad."""
    pairs = further_pairs()
    grades = grading_pool.grade([boxed(gold, answer) for gold, answer, _ in pairs])
    other = [(pair, grade) for pair, grade in zip(pairs, grades, strict=True) if grade.verdict != pair[2]]
    print(f"{len(pairs)} pairs, {sum(want == 'wrong' for *_, want in pairs)} of them different; not as wanted: {other}")
    figure("pairs of answers", len(pairs))
    figure("different answers taken as equal", sum(pair[2] == "wrong" for pair, _ in other))
    figure("equal answers missed", sum(pair[2] == "correct" for pair, _ in other))
    assert len(pairs) >= 600 and not other


def test_the_right_answer_is_its_own_equal_the_other_way_round_too(grading_pool):
    """Equality is symmetric but for what only a right answer may leave out, or bring in: units and percent signs."""
    grades = grading_pool.grade([boxed(answer, gold) for gold, answer in DIFFERENT if answer])
    assert not [grade for grade in grades if grade.verdict == "correct"]


# --- real answers -----------------------------------------------------------------------------------------------------


def test_recorded_gsm8k_solutions_agree_with_is_correct(grading_pool, shared):
    """Solutions of four models, each with the verdict that was recorded with it."""
    lines = (shared / "data/gsm8k/example_model_solutions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    solutions = [(row["ground_truth"], of) for row in rows for of in row.values() if isinstance(of, dict)]
    assert len(solutions) == 5276
    grades = grading_pool.grade([GradeRequest(RULES["gsm8k"], of["solution"], gold) for gold, of in solutions])
    agree = sum(
        grade.verdict == ("correct" if of["is_correct"] else "wrong")
        for grade, (_, of) in zip(grades, solutions, strict=True)
    )
    print(f"{agree} of {len(solutions)} verdicts as recorded, {sum(of['is_correct'] for _, of in solutions)} correct")
    assert agree == len(solutions)


def test_gold_solutions_are_correct_against_their_answers(grading_pool, shared):
    rows = [json.loads(line) for line in (shared / "data/math/math500.jsonl").read_text().splitlines()]
    grades = grading_pool.grade([GradeRequest(RULES["math"], row["solution"], row["answer"]) for row in rows])
    right = sum(grade.verdict == "correct" for grade in grades)
    print(f"{right} of {len(rows)}")
    assert right >= 0.99 * len(rows)


def test_no_answer_in_the_data_is_unreadable(grading_pool, shared):
    """Golds of MATH's training problems: each can be compared with, and equals itself."""
    rows = json.loads((shared / "data/math/math_train.json").read_text())[::10]
    grades = grading_pool.grade([boxed(row["answer"], row["answer"]) for row in rows])
    bad = [(row["answer"], grade) for row, grade in zip(rows, grades, strict=True) if grade.verdict != "correct"]
    print(f"{len(rows) - len(bad)} of {len(rows)}; not: {[answer for answer, _ in bad]}")
    assert len(bad) <= 0.01 * len(rows)


SUM = r"\sum_{k=1}^{\infty} \frac{1}{k^k}"
LETTERED = [
    (SUM, r"\displaystyle\sum_{k=1}^\infty\frac1{k^k}", "correct"),
    (r"\int_0^1 x^x\,dx", r"\int_{0}^{1} x^x \mathrm{d}x", "correct"),
    (r"\lim_{n\to\infty} a_n", r"\lim\limits_{n \rightarrow \infty} a_n", "correct"),
    (r"+\clubsuit*", r"+ \clubsuit *", "correct"),
    *[
        (SUM, other, "wrong")
        for other in ("5", "x^2", r"\frac{1}{k^k}", SUM.replace("infty", "pi"), r"\sum", "a=b", "}{")
    ],
    (r"\int_0^1 x^x\,dx", r"\int_0^1 x^x\,dy", "wrong"),
    (r"\lim_{n\to\infty} a_n", "a_n", "wrong"),
    *[(broken, "1", "wrong") for broken in (r"\frac{1}{", "}{", "???", r"\left(", "–", "$", r"\begin{cases} 1")],
    (r"\left(1, 2", r"\left( 1,2", "correct"), ("???", "? ? ?", "correct"), ("?!", "???", "wrong"),
    (r"\begin{cases} 1", r"\begin{cases}1", "correct"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer", "verdict"), LETTERED)
def test_a_gold_that_no_parser_reads_is_compared_letter_by_letter(grading_pool, gold, answer, verdict):
    [grade] = grading_pool.grade([boxed(gold, answer)])
    assert grade.verdict == verdict


@pytest.mark.parametrize("gold", ["", " ", "\n", r"\boxed{}", None])
def test_a_gold_that_cannot_be_read_is_a_bad_gold(grading_pool, gold):
    [grade] = grading_pool.grade([GradeRequest(RULES["math"], r"\boxed{1}", gold)])
    assert (grade.verdict, grade.score) == ("bad_gold", None) and grade.reason


# --- where the answer stands ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a}\boxed{b", "a"),
        (r"\boxed{1 + \boxed{2}}", r"1 + \boxed{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {3}", "3"),
        (r"\fbox{4}", "4"),
        (r"\boxed 5.", "5."),
        ("no box", None),
        (r"\boxed{1}</think> so \boxed{2}", "2"),
        (r"<think>\boxed{1}</think> nothing", None),
        (r"<think>\boxed{1}", None),
        (r"</think>\boxed{1}<think>", None),
        ("<answer> 7 </answer>", "7"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer>1", None),
        (r"<answer>it is \boxed{8}</answer>", "8"),
        (r"\boxed{1} <answer>2</answer>", "2"),
        (r"<answer>2</answer> \boxed{3}", "3"),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


def test_thinking_and_marks():
    assert after_thinking("a</think>b</think>c") == "c" and after_thinking("plain") == "plain"
    assert after_thinking("<think>a") == "" and after_thinking("<think>a</think>b<think>c") == ""
    assert marked_answer("7\n#### 18\n") == "18" and marked_answer("x\nA: 224") == "224"
    assert marked_answer("#### 1\n#### 2") == "2" and marked_answer("none") is None


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("5-3", "5", "3"),
        ("it is -5.", "-5", "-5"),
        ("= -$3", "-$3", "-$3"),
        ("1,234 and 12,34", "1,234", "34"),
        ("$1,000.50.", "$1,000.50", "$1,000.50"),
        ("x = .5", ".5", ".5"),
        ("none", None, None),
    ],
)
def test_numbers_in_text(text, first, last):
    assert (first_number(text), last_number(text)) == (first, last)


GSM8K = [
    ("the cost is $9{,}500$", "9500", "500"),
    (r"it holds 1\,200 litres", "1200", "200"),
    ("It takes 1/2 hour", "1/2", "2"),
    (r"It takes \frac{1}{2} hour", "0.5", "2"),
    (r"It takes \dfrac12 of an hour", "0.5", "2"),
    ("2 1/2 cups", "2.5", "2"),
    (r"2\frac{1}{2} cups", "2.5", "2"),
    ("2½ cups", "2.5", "2"),
    (r"That is 3 \times 10^2 people", "300", "2"),
    ("That is 3 x 10^2 people", "300", "10"),
    ("1.5e3 dollars", "1500", "3"),
    ("the area is 12 m^2", "12", "2"),
    ("the area is 12 m²", "12", "2"),
    ("the area is 12 cm2.", "12", "2"),
    (r"the area is $12\text{ m}^2$.", "12", "2"),
    (r"the angle is 45^\circ", "45", "0"),
    (r"\boxed{1\,200 \text{ dollars}}", "1200", "200"),
    ("#### $9{,}500$", "9500", "500"),
    ("2^{10} = 1024", "1024", "10"),
    ("we get x_1 = 5", "5", "1"),
    ("= −3", "-3", "3"),
    ("5-3", "3", "-3"),
    ("the total —18", "18", "-18"),
    ("12 / 4 = 3", "3", "4"),
    ("The answer is __18__.", "18", "1"),
    ("The answer is **18**.", "18", "1"),
    ("18% of it", "18", "0.18"),
    (r"-\frac{1}{2} m", "-1/2", "2"),
    ("48/2 clips", "24", "2"),
    ("It is $5 and then $6", "6", "5"),
    ("12,34", "34", "1234"),
    *[
        (text, None, "2")
        for text in (r"\boxed{\frac{\sqrt{3}}{2}}", r"it is \sqrt{2}", r"it is 2\pi", "x = 5^2", "x^2")
    ],
]


@pytest.mark.parametrize(("text", "right", "wrong"), GSM8K)
def test_gsm8k_reads_a_number_in_running_text_as_a_whole(text, right, wrong):
    assert right is None or gsm8k(text, right).correct
    assert not gsm8k(text, wrong).correct


@given(st.text(alphabet="\\boxed{}<answer></answer> 1", max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_has_an_answer_or_none(text):
    """What is found is in the text, and its braces are balanced."""
    box = last_box(text)
    assert box is None or box in text
    assert last_box(text + r"\boxed{42}") == "42" or text.endswith("\\")
    final_answer(text)


# --- numbers ----------------------------------------------------------------------------------------------------------


@given(st.integers(-(10**12), 10**12), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_every_spelling_of_a_number_is_that_number(whole, digits):
    plain = f"{whole}.{digits:06d}"
    want = read_number(plain)
    assert want is not None
    grouped = f"{abs(whole):,}"
    for spelling in (
        f"{whole:,}.{digits:06d}",
        f"${plain}$",
        f"+{plain}".replace("+-", "-"),
        f"{'-' if whole < 0 else ''}{grouped.replace(',', chr(92) + ',')}.{digits:06d}",
        plain.translate({ord("0") + n: 0xFF10 + n for n in range(10)}),
        f"{plain}e0",
        rf"{plain} \times 10^{{0}}",
    ):
        given_number = read_number(spelling)
        assert given_number is not None and same_number(want, given_number), spelling
    other = read_number(f"{whole + 1}.{digits:06d}")
    assert other is not None and not same_number(want, other)


@pytest.mark.parametrize(
    "text", ["", "-", "--5", "1,23", "12,345,6", "1e99999", "0.333...4", "1/0", "five", "9" * 2000, "."]
)
def test_what_is_no_number(text):
    assert read_number(text) is None


@pytest.mark.parametrize(
    "text",
    ["{" * 2400 + "}" * 2400, r"\sqrt[" * 900, r"\color{" * 700, "1{,}" * 1200, "for all " * 600, "|A" * 2000 + "=4"],
)
def test_tidying_takes_no_long_time(text):
    """A completion whose grading exceeds the deadline would have no verdict."""
    before = time.process_time()
    same_answer("5", text)
    assert time.process_time() - before < 1.5
