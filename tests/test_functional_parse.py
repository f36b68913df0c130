"""Reading answers: the course's own examples, how models write, and what must not be taken for an answer."""

import json

import pytest

from posttrain.evaluation.rules import gsm8k, gsm8k_flexible
from posttrain.functional import parse_gsm8k_response, parse_mmlu_response
from posttrain.grading.verdict import Judgement

EXAMPLE = {"subject": "virology", "question": "How many?", "options": ["100", "1", "10", "unknown"], "answer": "A"}

CHOSEN = {
    "The correct answer is B. There is only one human polyomavirus known at present, which is the BK virus.": "B",
    "The correct answer is B There is one.": "B",
    "The correct answer is (C).": "C",
    "The correct answer is **D**": "D",
    "the answer is: A": "A",
    "The answer is A because there are a hundred.": "A",
    "Answer: C": "C",
    "**Answer:** B": "B",
    "Answer: \\boxed{D}": "D",
    "The answer to this question is $\\boxed{\\text{D}}$.": "D",
    "A good question. The answer is C": "C",
    "The answer is not B. The correct answer is C.": "C",
    "First I thought the answer is A. On reflection, the answer is D.": "D",
    "The correct option would be B": "B",
    "B": "B",
    " (b)".upper(): "B",
    "B.": "B",
    "A) 100": "A",
    "C: ten of them": "C",
    "D\nBecause nobody knows.": "D",
    "Nobody knows, so (D).": "D",
    "After some thought I would choose D.": "D",
    "I know it. It is B.": "B",
    "B is correct, since there is one.": "B",
    "ANSWER IS D.": "D",
    "THE CORRECT ANSWER IS: D": "D",
    "The answer is therefore C": "C",
    "The answer is, therefore, C.": "C",
    "The right one is therefore C.": "C",
    "the correct answer is most likely (B)": "B",
    "The answer is option C": "C",
    "d": "D",
    "(d)": "D",
    "**b**": "B",
    "b. 4": "B",
    "b) 4": "B",
    "(b) 4": "B",
    "the answer is d": "D",
    "answer: **c**": "C",
    "The answer is \\boxed{c}": "C",
    "100": "A",
    "Unknown.": "D",
}
NOT_CHOSEN = [
    "The correct answer is 10000 polyomaviruses.",
    "The answer is unclear.",
    "A cat sat on the mat.",
    "The answer: A cat sat on it.",
    "The answer is B-cells.",
    "Vitamin C deficiency",
    "The answer is A or B.",
    "It may be (A), it may be (B).",
    "the answer is above",
    "the answer is a cat",
    "The answer is definitely not B",
    "The answer is therefore a matter of taste.",
    "the answer is b or c",
    "a cat sat",
    "bad",
    "d'accord",
    "c is the speed of light",
    "a, b",
    "ANSWER IS DEFINED",
    "Answer: E",
    "",
    "100 or 10",
]


@pytest.mark.parametrize("text", CHOSEN)
def test_the_letter_that_is_chosen(text):
    assert parse_mmlu_response(EXAMPLE, text) == CHOSEN[text]


@pytest.mark.parametrize("text", NOT_CHOSEN)
def test_no_letter_is_chosen(text):
    assert parse_mmlu_response(EXAMPLE, text) is None


def test_there_are_as_many_letters_as_options():
    example = {"options": ["yes", "no"], "answer": "A"}
    assert parse_mmlu_response(example, "The answer is B.") == "B"
    assert parse_mmlu_response(example, "The answer is C.") is None
    assert parse_mmlu_response({"options": ["same", "same", "x", "y"]}, "same") is None


LAST_NUMBER = {
    "Natalia sold 48/2 = 24 clips in May. Natalia sold 48+24 = 72 clips altogether in April and May.": "72",
    "Natalia sold twenty-four clips in May. Thus, Natalia sold seventy-two clips altogether.": None,
    "": None,
    "It costs $1,250.": "1250",
    "$1,234,567.89": "1234567.89",
    "#### -1,000": "-1000",
    "= −$3": "-3",
    "$-5": "-5",
    "it fell to -0.5 degrees.": "-0.5",
    "5-2": "2",
    "5 - 2": "2",
    "one of 1,2,3": "3",
    "half is .5": ".5",
    "3.50!": "3.50",
    "about 3.2e4": "3.2e4",
    "50%": "50",
    "7eggs": "7",
    "12.": "12",
}


@pytest.mark.parametrize("text", LAST_NUMBER)
def test_the_last_number(text):
    assert parse_gsm8k_response(text) == LAST_NUMBER[text]
    assert LAST_NUMBER[text] is None or float(LAST_NUMBER[text]) == float(LAST_NUMBER[text])


# Text -> the number of the rule gsm8k, the course's last number, and lm-eval's.
WRITTEN = {
    "$9{,}500$": ("9500", "500", "500$"),
    r"1\,200": ("1200", "200", ",200"),
    "1/2": ("1/2", "2", "2"),
    r"\frac{1}{2}": ("1/2", "2", "2"),
    r"3 \times 10^2": ("300", "2", "2"),
    "12 m^2": ("12", "2", "2"),
    "$1,250.": ("1250", "1250", "$1,250."),
}


@pytest.mark.parametrize("text", WRITTEN)
def test_only_the_rule_tidies_numbers(text):
    """The parsers of the course and of lm-eval keep their last number, whatever is written before it."""
    number, last, lm_evals = WRITTEN[text]
    said = f"So it is {text}"
    assert gsm8k(said, number).correct and parse_gsm8k_response(said) == last
    assert gsm8k_flexible(said, f"#### {last}") == Judgement(1.0, True, lm_evals)
    assert gsm8k_flexible(said, f"#### {number}").correct == (number == last)


def test_every_gold_answer_of_gsm8k_is_read(shared):
    """`#### N` ends each of the 1,319 solutions of the test set."""
    rows = [json.loads(line)["answer"] for line in (shared / "data/gsm8k/test.jsonl").read_text().splitlines()]
    wrong = [row for row in rows if parse_gsm8k_response(row) != row.rpartition("#### ")[2].replace(",", "")]
    assert len(rows) == 1319 and not wrong
