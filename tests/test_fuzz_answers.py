r"""Answers of any text: reading them never fails, tidying twice changes nothing, equality holds either way round."""

import re

from fuzzing import ANY_CHARACTER, fuzzed
from hypothesis import strategies as st

from posttrain.base.words import last_box
from posttrain.config import TagsConfig
from posttrain.grading import extract, forms, notation, numbers, sets, units
from posttrain.grading.equality import _bare, same_answer
from posttrain.grading.verdict import GradeRequest
from posttrain.rewards.rules import RULES, options_of

NOTATION = r"""
\frac \dfrac \sqrt \text \boxed \fbox \left( \right) \{ \} \le \ge < > = \ne \cup \cap \pm \pi \infty ^ _ { }
( ) [ ] | , ; : . - + * / ! % $ \% \$ \, \! {,} \ 1 2 3 10 0.5 1,000 00 1e3 x y a b i e A B (A) cm m kg km/h
\circ ^{\circ} ° \begin{pmatrix} \end{pmatrix} & \\ \mod \pmod to and or in of base inches hours PM 3:45
Monday January 2024 1/2 {1}{2} {x} \overline{3} ... \cdot \times sqrt sin pi √ ½ ² ₃ − × <answer> </answer>
<think> </think> #### A: \n answer is the (B) **C** 1_{2} \mathbb{R} \emptyset x= (x,y)= {a|b} ∪ ∞ \gcd \log €
£
"""
PIECES = st.sampled_from(NOTATION.split())
GLUE = st.sampled_from(["", "", " "])
ANY = st.text(ANY_CHARACTER, max_size=12)
MATHS = st.lists(st.tuples(PIECES, GLUE).map("".join), max_size=9).map("".join)
ANSWERS = (
    MATHS | st.text(ANY_CHARACTER, max_size=12) | st.builds("{}{}".format, MATHS, st.text(ANY_CHARACTER, max_size=4))
)
NUMBERS = st.one_of(
    st.integers(-(10**12), 10**12).map(str),
    st.decimals(-(10**6), 10**6, places=3).map(str),
    st.fractions(-100, 100, max_denominator=50).map(str),
    st.fractions(-100, 100, max_denominator=50).map(lambda f: rf"\frac{{{f.numerator}}}{{{f.denominator}}}"),
    st.sampled_from(
        ["50%", "1/3", "0.333...", r"0.\overline{3}", r"3.2\times10^4", "1e5", r"\frac12", "½", "$5", "1,000"]
    ),
)
READERS = [
    numbers.read_number, forms.read_choice, forms.read_ratio, forms.read_base, forms.read_residue,
    forms.read_occasion, units.split_unit, units.sum_of_units, sets.read_set, sets.is_set_like, sets.chain,
    forms.elements, forms.assignments, forms.members, notation.brackets, notation.split_top,
]  # fmt: skip
OPTIONS = st.lists(st.text(ANY_CHARACTER, max_size=5) | st.integers(), max_size=5)


@fuzzed(150, 6000, text=ANSWERS)
def test_an_answer_is_found_in_any_text(text):
    for find in (extract.final_answer, extract.marked_answer, extract.last_number, extract.first_number,
                 extract.last_answer_tag, extract.after_thinking, last_box):  # fmt: skip
        found = find(text)
        assert found is None or found in text
    number = extract.parse_gsm8k_response(text)
    if number is not None:
        float(number)


@fuzzed(150, 6000, text=ANSWERS, answer=ANSWERS)
def test_the_box_at_the_end_is_the_answer(text, answer):
    """Whatever stands before it, unless a backslash hides the box; a box within is an answer of its own."""
    if text.endswith("\\") or not _closed(answer):
        return
    boxed = rf"{text}\boxed{{{answer}}}"
    assert last_box(boxed) == answer.strip()
    if "think>" not in boxed and extract.ANSWER_END not in answer:
        assert extract.final_answer(boxed) == answer.strip()


def _closed(answer: str) -> bool:
    """Whether the braces of an answer are its own."""
    return notation.is_balanced(answer) and re.fullmatch(r"(?:[^\\]|\\.)*", answer, re.DOTALL) is not None


@fuzzed(150, 5000, text=ANSWERS, options=OPTIONS)
def test_a_choice_is_one_of_the_letters(text, options):
    letter = extract.parse_mmlu_response({"options": options}, text)
    assert letter is None or letter in extract.LETTERS[: len(options)]


@fuzzed(200, 20_000, text=ANSWERS)
def test_tidying_twice_changes_nothing(text):
    """But a pair of dollar signs that were escaped, and so are amounts of money, reads as delimiters of LaTeX."""
    tidy = notation.tidy(text)
    assert notation.tidy(tidy) == tidy or tidy.count("$") > 1
    notation.compact(tidy)


@fuzzed(150, 6000, text=ANSWERS)
def test_every_reader_takes_any_text(text):
    tidy = notation.tidy(text)
    for given in (text, tidy):
        for read in READERS:
            read(given)
    number = numbers.read_number(text)
    if number is not None:
        assert numbers.same_number(number, number)


@fuzzed(100, 5000, text=ANSWERS)
def test_every_answer_is_its_own_equal(text):
    assert same_answer(text, text) or not _bare(text)


@fuzzed(150, 4000, one=NUMBERS, other=NUMBERS)
def test_numbers_are_equal_either_way_round(one, other):
    """Also through computer algebra; but a percent sign, which only a right answer may leave out."""
    if "%" in one + other:
        return
    assert same_answer(one, other) == same_answer(other, one)


@fuzzed(
    3, 200, pairs=st.lists(st.tuples(st.sampled_from(sorted(RULES)), MATHS | NUMBERS, ANSWERS), min_size=8, max_size=8)
)
def test_every_rule_has_a_verdict_for_any_completion(grading_pool, pairs):
    """In the workers with deadlines, as in training: computer algebra may need longer than anyone has."""
    tags = TagsConfig()
    jobs = [
        GradeRequest(RULES[rule], dressed, gold, options_of(rule, tags))
        for rule, gold, answer in pairs
        for dressed in (answer, rf"</think> <answer>\boxed{{{answer}}}</answer>", f"#### {answer}")
    ]
    grades = grading_pool.grade(jobs)
    crashed = [(job, grade) for job, grade in zip(jobs, grades, strict=True) if grade.verdict == "crashed"]
    assert not crashed, "a rule has raised an exception"
