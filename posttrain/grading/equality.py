r"""Decides whether an answer equals the reference: as a string, as a number, part by part, finally by computer algebra.

There are no false positives: answers that cannot be shown to be equal count as different. Order matters in tuples and
intervals, but not in sets and lists; the kind of bracket matters; a known unit may be omitted but not changed; nothing
is rounded.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TypeVar

from posttrain.base.words import last_box
from posttrain.grading import forms
from posttrain.grading.notation import brackets, compact, is_balanced, split_top, tidy
from posttrain.grading.numbers import read_number, same_number
from posttrain.grading.sets import Interval, chain, is_set_like, read_set
from posttrain.grading.units import NO_UNIT, split_unit, sum_of_units, without_pounds

T = TypeVar("T")

LONGEST = 5000  # characters; a longer string is not an answer
DEEPEST = 5  # maximum nesting of brackets
_MATRICES = {"pmatrix": "matrix", "bmatrix": "matrix", "array": "matrix", "smallmatrix": "matrix"}
_LETTERS = re.compile(r"\\text\{([A-Z](?:(?:,| and|, and) ?[A-Z])+)\}")  # several lettered choices
_COUNTED = re.compile(r"\\text\{((?=[-+]?[$€£]?\.?\d)[^{}]*)\}")
_NUMBER = re.compile(r"(?<![\w.])([-+]?[$€£]?\.?\d(?:[\d.,:/]*\d)?%?)(?!\w)")
_GAP = r"(?:\\text\{|[\s{}])*"
_KIND = rf"(?:(?:non-?)?(?:real|integer|natural|rational|complex|positive|negative|zero)s?{_GAP})+(?:number)?s?"
_LETTER = r"(?P<{}>[a-zA-Z]|\\(?:theta|alpha|beta|lambda))(?:,\s*[a-zA-Z])*"
_DOMAIN = re.compile(
    rf",?\s*(?:\\text\{{)?[,\s]*\(?(?:(?:for{_GAP}(?:all|any|every|each)|\\forall|where){_GAP}(?P<domain>{_KIND})?"
    rf"{_GAP}(?:numbers?|values?)?{_GAP}(?:of\b)?{_GAP}{_LETTER.format('name')}"
    rf"(?:{_GAP}\\in{_GAP}\\mathbb\{{?(?P<set>[CNQRZ])\}}?|{_GAP}(?:is|are){_GAP}(?:an?|any)?{_GAP}(?P<kind>{_KIND}))?"
    rf"|(?<=,){_GAP}{_LETTER.format('other')}{_GAP}\\in{_GAP}\\mathbb\{{?(?P<listed>[CNQRZ])\}}?)\)?[\s}}]*$"
)
_ENDS_IN_DOMAIN = re.compile(r"\\forall|\\mathbb|\b(?:for|where)\b")
_SETS = {"C": "complex", "N": "natural", "Q": "rational", "R": "real", "Z": "integer"}
_PLACEHOLDER = re.compile(r"\s*\$\{[^$]*\}\s*")  # in a template: a program would insert a value
_WRITTEN = re.compile(r"[\w∞∅]|\\[a-zA-Z{]")  # something besides signs
_LEAD_IN = re.compile(r"(?:\\text\{)?\s*(?:the )?(?:final |correct )?answer(?: is)?\s*:?\s*\}?\s*(?=[^\s}])", re.I)


def same_answer(gold: str, answer: str) -> bool:
    """Whether `answer` equals `gold`. Both are the content of a box or tag; only `gold` is trusted to be an answer.

    A `gold` with a sum, a product, an integral or a limit, or one that is no mathematics, is only compared letter by
    letter."""
    if len(answer) > LONGEST or len(gold) > LONGEST or _PLACEHOLDER.fullmatch(answer):
        return False
    gold, answer = _bare(gold), _bare(answer)
    return _same(gold, answer, DEEPEST) or _same_but_for_domain(gold, answer)


def _same_but_for_domain(gold: str, answer: str) -> bool:
    """Equality in which `for all real x` may be omitted; any other domain may be omitted only by the answer."""
    (value, domain), (other, their) = _domain(gold), _domain(answer)
    if domain is None and their is None:
        return False
    anything = ("", "real")
    same = domain == their or (domain in anything and their in anything)
    return (their is None or same or (domain is None and their in anything)) and _same(value, other, DEEPEST)


def _domain(text: str) -> tuple[str, str | None]:
    r"""(value, domain): `integer` in `2n \text{ for all integers } n`, empty in `for all x`, None without a domain."""
    found = _DOMAIN.search(text) if _ENDS_IN_DOMAIN.search(text) else None
    value = text[: found.start()].strip() if found else ""
    if found is None or not is_balanced(value) or sum((c in "([") - (c in ")]") for c in value):
        return text, None
    words = re.findall(r"[a-z]+", f"{found['domain'] or ''} {found['kind'] or ''}".lower())
    words += [_SETS[name] for name in (found["set"], found["listed"]) if name]
    return value, " ".join(sorted({word.removesuffix("s") for word in words} - {"number"}))


def _bare(text: str) -> str:
    inner = last_box(text)
    text = tidy(inner if inner is not None and text.strip().startswith(("\\boxed", "$\\boxed", "\\fbox")) else text)
    if (lead := _LEAD_IN.match(text)) and is_balanced(text[lead.end() :]):
        text = text[lead.end() :]
    if counted := _COUNTED.fullmatch(text):
        text = tidy(_NUMBER.sub(r"}\1\\text{", counted[0]))  # move the number out of the words
    if several := _LETTERS.fullmatch(text):
        text = several[1]
    return re.sub(r"^(?:=|\\approx(?![a-zA-Z]))\s*", "", text)


def _same(gold: str, answer: str, depth: int) -> bool:
    if not gold or not answer or depth < 0:
        return False
    if compact(gold) == compact(answer):
        return True
    if not (is_balanced(gold) and is_balanced(answer) and _WRITTEN.search(gold)):
        return False
    numbers = read_number(gold), read_number(answer)
    if numbers[0] and numbers[1] and "$" not in gold + answer:
        return same_number(numbers[0], numbers[1])
    for compare in (_as_choices, _as_occasions, _as_sets):
        decided = compare(gold, answer, depth)
        if decided is not None:
            return decided
    if _is_words(gold) or _is_words(answer):
        return False
    for compare in (_as_quantities, _as_named, _as_plus_minus, _as_lists, _as_brackets, _as_matrices, _as_figures):
        decided = compare(gold, answer, depth)
        if decided is not None:
            return decided
    from posttrain.grading import symbolic  # runs in a worker, which has imported it

    if forms.is_equation(gold) or forms.is_equation(answer):
        return symbolic.same_relation(gold, answer)
    return symbolic.same_expression(gold, answer)


def is_readable(gold: str) -> bool:
    """Whether there is a reference answer to compare with. Takes as long as a comparison with it."""
    bare = _bare(gold)
    _same(bare, "0", DEEPEST)
    return bool(compact(bare))


def _is_words(text: str) -> bool:
    if re.fullmatch(r"\\text\{[^{}]*[A-Za-z]{2}[^{}]*\}", text):
        return True
    is_function = text in ("inf", "infinity") or re.match(r"(?:sqrt|sin|cos|tan|log|exp|pi)(?![a-z])", text)
    return not is_function and re.fullmatch(r"[A-Za-z]{3,}(?:[ '-][A-Za-z]+)*", text) is not None


def _same_each(left: Sequence[str], right: Sequence[str], depth: int) -> bool:
    return len(left) == len(right) and all(_same(g, a, depth) for g, a in zip(left, right, strict=True))


# --- answers that are not expressions ---------------------------------------------------------------------------------


def _as_choices(gold: str, answer: str, depth: int) -> bool | None:
    """Compare labelled choices: the label or the answer may be omitted, but neither may be changed."""
    left, right = forms.read_choice(gold), forms.read_choice(answer)
    if left and right:
        return left[0] == right[0] and not (left[1] and right[1] and not _same(left[1], right[1], depth - 1))
    if left and left[1]:
        return _same(left[1], answer, depth - 1)
    return _same(gold, right[1], depth - 1) if right and right[1] else None


def _as_occasions(gold: str, answer: str, depth: int) -> bool | None:
    """Compare dates, times, telephone numbers and ratios: none is a difference; only a two-term ratio is a quotient."""
    left, right = forms.read_occasion(gold), forms.read_occasion(answer)
    ratio, other = forms.read_ratio(gold), forms.read_ratio(answer)
    if left and right:
        return left.same(right)
    if ratio and other:
        ours, theirs = ([_quotient(term, terms[0]) for term in terms] for terms in (ratio, other))
        return _same_each(ours, theirs, depth - 1)
    if left or right:
        return False
    if ratio or other:
        pair = ratio or other or []
        quotient = _quotient(pair[0], pair[1])
        return len(pair) == 2 and _same(quotient if ratio else gold, answer if ratio else quotient, depth - 1)
    return None


def _quotient(over: str, under: str) -> str:
    return rf"\frac{{{over}}}{{{under}}}"


def _as_sets(gold: str, answer: str, depth: int) -> bool | None:
    """Compare sets: inequalities, intervals, unions, conditions in braces, names. The two sides may differ in form."""
    if not is_set_like(gold) and not is_set_like(answer):
        return None
    left, right = read_set(gold), read_set(answer)
    if left and right:
        if left.name and right.name and left.name != right.name:
            return False
        return _pair_off(left.intervals, right.intervals, lambda one, other: _same_interval(one, other, depth - 1))
    if max(len(forms.elements(gold)), len(forms.elements(answer))) > 1:
        return None
    chains = chain(gold), chain(answer)
    if not chains[0] or not chains[1]:
        return False if chains[0] or chains[1] else None
    (terms, signs), (others, their_signs) = chains[0], chains[1]
    if signs != their_signs:
        return False
    if _same_each(terms, others, depth - 1):
        return True
    from posttrain.grading import symbolic

    return len(signs) == 1 and symbolic.same_relation(signs[0].join(terms), signs[0].join(others), symbolic.LESS)


def _same_interval(one: Interval, other: Interval, depth: int) -> bool:
    closed = (one.low_closed, one.high_closed) == (other.low_closed, other.high_closed)
    return closed and _same_each((one.low, one.high), (other.low, other.high), depth)


def _pair_off(left: Sequence[T], right: Sequence[T], same: Callable[[T, T], bool]) -> bool:
    """Whether the elements of the two sides match one to one."""
    rest = list(right)
    for item in left:
        match = next((other for other in rest if same(item, other)), None)
        if match is None:
            return False
        rest.remove(match)
    return not rest


def _as_quantities(gold: str, answer: str, depth: int) -> bool | None:
    """Compare values with units: in the same unit if both have one; as written if only one has a unit."""
    left, right = split_unit(gold), split_unit(answer)
    if not left and not right:
        return None
    left, right = left or split_unit(gold, letters=True), right or split_unit(answer, letters=True)
    sums = sum_of_units(gold), sum_of_units(answer)
    (value, unit), (other, their) = left or (gold, NO_UNIT), right or (answer, NO_UNIT)
    if sums[0]:
        value, unit = _plain(sums[0][0]), sums[0][1]
    if sums[1]:
        other, their = _plain(sums[1][0]), sums[1][1]
    if unit.dimensions and their.dimensions:
        unit, their = without_pounds(unit, their), without_pounds(their, unit)
        if unit.dimensions != their.dimensions or (unit.which and their.which and unit.which != their.which):
            return False
        factors = unit.size * unit.scale, their.size * their.scale
    else:
        percent = read_number(other if unit.dimensions else value)
        if any(sums) or (percent and percent.percent):
            return False
        factors = Fraction(unit.size), Fraction(their.size)
    if factors[0] != factors[1]:
        value, other = _times(value, factors[0]), _times(other, factors[1])
    return _same(value, other, depth - 1)


def _times(value: str, factor: Fraction) -> str:
    number = read_number(value)
    return _plain(number.exact * factor) if number else rf"{_plain(factor)}\cdot({value})"


def _plain(value: Fraction) -> str:
    return _quotient(str(value.numerator), str(value.denominator))


def _as_figures(gold: str, answer: str, depth: int) -> bool | None:
    """Compare numbers in other bases digit by digit, and remainders together with their modulus."""
    for read in (forms.read_base, forms.read_residue):
        left, right = read(gold), read(answer)
        if left or right:
            return left == right
    return None


# --- names, lists, brackets -------------------------------------------------------------------------------------------


def _as_named(gold: str, answer: str, depth: int) -> bool | None:
    """Compare `x = 5` with 5, `(x, y) = (1, 2)` with `x = 1, y = 2`, and each side of `3 + 4 = 7` with 7."""
    left, right = forms.assignments(gold), forms.assignments(answer)
    if left and right:
        return left.keys() == right.keys() and all(_same(left[name], right[name], depth - 1) for name in left)
    if left or right:
        return _same_each(forms.in_order(left, gold), forms.in_order(right, answer), depth - 1)
    if any(text.count("=") > 1 and len(forms.elements(text)) > 1 for text in (gold, answer)):
        return None  # a list whose members have different names
    one, other = forms.ASSIGNED.fullmatch(gold), forms.ASSIGNED.fullmatch(answer)
    if one and other:
        names = one["name"], other["name"]
        same_name = compact(names[0]) == compact(names[1])
        if same_name or any(map(forms.FIGURE.fullmatch, names)):
            same_name = same_name or _as_drawn(names[0]) == _as_drawn(names[1])
            return same_name and _same(one["value"], other["value"], depth - 1)
    if forms.is_equation(gold) and forms.is_equation(answer):
        return None
    if (one is None) != (other is None):
        return _same(one["value"] if one else gold, other["value"] if other else answer, depth - 1)
    for sides, whole in ((split_top(gold, "="), answer), (split_top(answer, "="), gold)):
        if len(sides) > 1:
            return all(_same(whole, side.strip(), depth - 1) for side in sides)
    return None


def _as_drawn(name: str) -> str:
    """The name of a length or an angle, normalised because it can be read from either end."""
    points = re.sub(r"\\(?:overline|angle|measuredangle|text)|^m\b|[\s{}|∠]", "", name)
    return min(points, points[::-1]) if re.fullmatch(r"[A-Z]{2,3}", points) else points


def _as_plus_minus(gold: str, answer: str, depth: int) -> bool | None:
    if not forms.PLUS_MINUS.search(gold) and not forms.PLUS_MINUS.search(answer):
        return None
    return _as_lists(forms.both_signs(gold), forms.both_signs(answer), depth - 1) or False


def _as_lists(gold: str, answer: str, depth: int) -> bool | None:
    left, right = forms.elements(gold), forms.elements(answer)
    sets = [inside[1] for text in (gold, answer) if (inside := brackets(text)) and inside[0] == r"\{"]
    if len(sets) == 2 or (sets and max(len(left), len(right)) > 1):
        # Braces around one or both: these are sets. A list without brackets may also be a set.
        left, right = forms.members(gold), forms.members(answer)
    elif max(len(left), len(right)) == 1:
        return None
    if {forms.junction(gold), forms.junction(answer)} == {"and", "or"}:
        return False
    return _pair_off(left, right, lambda one, other: _same(one, other, depth - 1))


def _as_brackets(gold: str, answer: str, depth: int) -> bool | None:
    left, right = brackets(gold), brackets(answer)
    for one, other, swap in ((left, answer, False), (right, gold, True)):
        # (x) is x
        if one and one[0] == "(" and one[2] == ")" and len(split_top(one[1])) == 1:
            return _same(other, one[1], depth - 1) if swap else _same(one[1], other, depth - 1)
    if left is None and right is None:
        return None
    if left is None or right is None:
        # a product such as (x+1)(x+2) is not a bracket, (1,234) is not a number, and [x] is not an expression
        opening, inside, _ = left or right or ("", "", "")
        return None if len(split_top(inside)) == 1 and opening != "[" else False
    if (left[0], left[2]) != (right[0], right[2]):
        return False
    return _same_each(split_top(left[1]), split_top(right[1]), depth - 1)


def _as_matrices(gold: str, answer: str, depth: int) -> bool | None:
    left, right = forms.MATRIX.fullmatch(gold), forms.MATRIX.fullmatch(answer)
    if left is None or right is None:
        return None if left is right else False
    if _MATRICES.get(left["kind"], left["kind"]) != _MATRICES.get(right["kind"], right["kind"]):
        return False  # a determinant (vmatrix) is not a matrix
    ours, theirs = forms.rows(left), forms.rows(right)
    return len(ours) == len(theirs) and all(_same_each(*both, depth - 1) for both in zip(ours, theirs, strict=True))
