"""The receipt of a gradient: the groups of a step, the completions of a group, the tokens of a completion."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.base.errors import RunError
from posttrain.base.words import counted
from posttrain.reports.gradient import Numbers, groups_of
from posttrain.reports.markup import Markup, el, join, link, message, number, short, table
from posttrain.reports.series import Series
from posttrain.runs.stored_rollouts import StoredRun
from posttrain.runs.summary import RunSummary
from posttrain.ui.address import Query, address
from posttrain.ui.search import verdict_of
from posttrain.ui.tokens import texts_of

PATH = "/rollouts"
MOST = 5  # tokens that are named as the most responsible
TOKENS = 2_000  # on one page
FIRST = ("reward", "reward_std", "loss", "kl", "entropy", "grad_norm", "frac_reward_zero_std", "max_ratio")
PUSH = (
    "Push: how strongly the step raised (above 0) or lowered the logit of the sampled token, A r (1 − p): advantage × "
    "ratio × what the token's probability leaves. 0 where the ratio was clipped."
)
# Colouring -> what a token's number is, and whether it has a sign.
COLOURINGS = {
    "push": True, "advantage": True, "ratio": True, "sampler − trainer": True, "entropy": False,
    "policy − reference": True, "clipped": False,
}  # fmt: skip


def step_view(stored: StoredRun, series: Series, row: RunSummary, step: int) -> Markup:
    """The step's metrics, and its groups with the largest push on the gradient first."""
    groups = groups_of(stored.rollouts(step))
    prompts = {one["prompt_index"]: one for one in stored.prompts(step)}
    whole = sum(group.push for group in groups)
    rows = []
    for group in groups:
        asked = prompts.get(group.prompt)
        rows.append(
            [
                link(f"prompt {group.prompt}", address(PATH, run=row.name, step=step, prompt=group.prompt)),
                share_bar(group.push, whole),
                *_mean_and_spread([one["reward"] for one, _ in group.members]),
                str(group.clipped),
                f"{group.furthest_ratio:.3f}",
                f"{np.mean([len(one['tokens']) for one, _ in group.members]):.0f}",
                el("span", short(asked["prompt"] if asked else "", 110)),
            ]
        )
    names = ["group", "share of the push", "reward", "lowest to highest", "clipped", "ratio furthest from 1", "tokens"]
    shown = table([*names, "prompt"], rows, numbers=(2, 4, 5, 6))
    return join([_metrics(series, step), shown, el("p", PUSH, class_="quiet")])


def group_view(stored: StoredRun, row: RunSummary, step: int, prompt: int) -> Markup:
    """The completions of a group with the parts of their rewards."""
    group, asked = _group(stored, step, prompt)
    numbers = [Numbers.of(one) for one in group]
    weights = [float(np.abs(one.push).sum()) for one in numbers]
    names = list(dict.fromkeys(name for one in group for name in (one.get("parts") or {})))
    rows = []
    for at in sorted(range(len(group)), key=lambda at: -weights[at]):
        one = group[at]
        where = address(PATH, run=row.name, step=step, prompt=prompt, rollout=one["rollout_index"])
        parts = [_part((one.get("parts") or {}).get(name)) for name in names]
        rows.append(
            [
                link(f"completion {one['rollout_index']}", where),
                share_bar(weights[at], sum(weights)),
                number(one["reward"]),
                signed(one["advantage"]),
                *parts,
                f"{len(one['tokens']):,}",
                one["finish_reason"],
                short(one["completion"], 120),
            ]
        )
    header = ["", "share of the push", "reward", "advantage", *names, "tokens", "ended by", "completion"]
    shown = el(
        "details", el("summary", f"Prompt (row {asked['row']} of the data)"), el("pre", asked["prompt"]), open=True
    )
    return join([shown, table(header, rows, numbers=(2, 3, 4 + len(names)))])


def completion_view(stored: StoredRun, row: RunSummary, step: int, prompt: int, rollout: int, query: Query) -> Markup:
    """The completion's tokens in colour, those that pushed most, and the numbers of the chosen one."""
    group, asked = _group(stored, step, prompt)
    one = next((one for one in group if one["rollout_index"] == rollout), None)
    if one is None:
        raise RunError(f"prompt {prompt} of step {step} has {counted(len(group), 'completion')}, no {rollout}")
    numbers, tokens = Numbers.of(one), one["tokens"].tolist()
    there = {name: value for name in COLOURINGS if (value := _values(numbers, name)) is not None}
    colouring = query.choice("colour", tuple(there))
    texts = texts_of(row.folder, tokens, asked["tokens"].tolist())
    pushed = [int(at) for at in np.argsort(-np.abs(numbers.push), kind="stable")[:MOST] if numbers.push[at]]
    chosen = query.integer("token")
    if chosen is None or chosen >= len(tokens):
        chosen = pushed[0] if pushed else 0 if tokens else None
    cards = (el("div", el("dt", name), el("dd", value)) for name, value in _facts(one, tokens).items())
    choices = []
    for name in there:
        current = "true" if name == colouring else None
        choices.append(el("span", link(name, query.but(PATH, colour=name, token=chosen), aria_current=current)))
    return join(
        [
            el("dl", *cards, class_="cards"),
            el("details", el("summary", f"Prompt (row {asked['row']} of the data)"), el("pre", asked["prompt"])),
            el("p", el("span", "Colour by", class_="quiet"), *choices, class_="choices"),
            heat(texts, there[colouring], COLOURINGS[colouring], numbers.clipped, pushed, chosen, query),
            _legend(colouring, there[colouring], COLOURINGS[colouring]),
            _responsible(one, numbers, texts, pushed, chosen, query),
        ]
    )


def heat(
    texts: Sequence[str],
    values: np.ndarray,
    signed_: bool,
    clipped: np.ndarray,
    pushed: Sequence[int],
    chosen: int | None,
    query: Query,
) -> Markup:
    """The tokens, each a link that shows its numbers; the stronger the colour the larger the number."""
    largest = float(np.abs(values).max(initial=0.0)) or 1.0
    start = 0 if chosen is None or chosen < TOKENS else chosen - chosen % TOKENS
    most, parts = set(pushed), []
    for at in range(start, min(start + TOKENS, len(texts))):
        value = float(values[at])
        level = round(6 * min(1.0, abs(value) / largest)) if np.isfinite(value) else 0
        looks = [f"h{level}"] if level else []
        looks += ["down"] if signed_ and value < 0 else []
        looks += ["clipped"] if clipped[at] else []
        looks += ["most"] if at in most else []
        looks += ["chosen"] if at == chosen else []
        parts.append(
            link(
                _written(texts[at]),
                query.but(PATH, token=at),
                class_=" ".join(looks) or None,
                title=f"{at}: {value:+.4g}" if signed_ else f"{at}: {value:.4g}",
                tabindex=None if at in most else "-1",
            )
        )
    shown = el("div", *parts, class_="tokens")
    if len(texts) <= TOKENS:
        return shown
    stretches = [
        link(f"{first:,} to {min(first + TOKENS, len(texts)) - 1:,}", query.but(PATH, token=first))
        for first in range(0, len(texts), TOKENS)
    ]
    return join([shown, el("p", "Tokens ", *(part for one in stretches for part in (one, " · ")), class_="quiet")])


def _written(said: str) -> str:
    """A token so that its blanks are seen."""
    return said.replace("\n", "⏎\n").replace("\t", "⇥\t") or "·"


def _legend(name: str, values: np.ndarray, signed_: bool) -> Markup:
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    middle = f"{name}: from {low:.4g} to {high:.4g}"
    keys = ["blue above 0, orange below" if signed_ else "stronger is larger", "struck out: clipped"]
    return el("p", f"{middle}; {'; '.join(keys)}; underlined: the largest pushes.", class_="quiet")


def _responsible(
    one: Mapping[str, Any],
    numbers: Numbers,
    texts: Sequence[str],
    pushed: Sequence[int],
    chosen: int | None,
    query: Query,
) -> Markup:
    columns = {
        "advantage": numbers.advantage, "ratio": numbers.ratio, "sampler": one.get("sampler_logprobs"),
        "old": one.get("old_logprobs"), "new": one.get("new_logprobs"), "reference": one.get("ref_logprobs"),
        "entropy": numbers.entropy, "value": one.get("old_values"), "return": one.get("returns"),
    }  # fmt: skip
    there = {name: values for name, values in columns.items() if values is not None}
    rows, whole = [], float(np.abs(numbers.push).sum())
    for at in [*([] if chosen is None or chosen in pushed else [chosen]), *pushed]:
        cells = [
            signed(values[at]) if name == "advantage" else number(float(values[at])) for name, values in there.items()
        ]
        label = link(_written(texts[at]), query.but(PATH, token=at), class_="token")
        clipped = "clipped" if numbers.clipped[at] else ""
        rows.append([str(at), label, share_bar(abs(float(numbers.push[at])), whole), *cells, clipped])
    if not rows:
        return message("This completion has no tokens.")
    header = ["", "token", "share of the push", *there, ""]
    nothing = "This completion pushed nothing: its advantage is 0, or it is not in the loss"
    said = "The tokens that pushed most" if pushed else nothing
    means = " Log-probabilities (nats) are those of the engine, and of the policy before and after."
    about = el("p", PUSH, means, class_="quiet")
    return join([el("h3", said), table(header, rows, numbers=(0, *range(3, 3 + len(there)))), about])


def _values(numbers: Numbers, colouring: str) -> np.ndarray | None:
    if colouring == "ratio":
        return np.log(np.maximum(numbers.ratio, 1e-30))
    return {
        "push": numbers.push,
        "advantage": numbers.advantage,
        "sampler − trainer": numbers.mismatch,
        "entropy": numbers.entropy,
        "policy − reference": numbers.reference,
        "clipped": numbers.clipped.astype(float),
    }[colouring]


def _group(stored: StoredRun, step: int, prompt: int) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
    group = stored.rollouts(step, prompt)
    asked = next((one for one in stored.prompts(step) if one["prompt_index"] == prompt), None)
    if not group or asked is None:
        raise RunError(f"step {step} has no prompt {prompt}")
    return group, asked


def _metrics(series: Series, step: int) -> Markup | None:
    found = series.at(step)
    if not found:
        return message("The metrics of this step have not been logged.")
    first = [name for name in FIRST if name in found]
    at = int(found.pop("step"))
    cards = [el("div", el("dt", name), el("dd", number(found[name]))) for name in first]
    rows = [[name, number(value)] for name, value in found.items()]
    mean = f" They are means of the steps up to {at}." if at != step else ""
    every = el(
        "details", el("summary", f"All {len(rows)} metrics.{mean}"), table(["metric", "value"], rows, numbers=(1,))
    )
    return join([el("dl", *cards, class_="cards"), every])


def _facts(one: Mapping[str, Any], tokens: Sequence[int]) -> dict[str, object]:
    facts: dict[str, object] = {"reward": number(one["reward"]), "advantage": signed(one["advantage"])}
    for name, part in (one.get("parts") or {}).items():
        facts[name] = _part(part)
    facts |= {"tokens": f"{len(tokens):,}", "ended by": one["finish_reason"]}
    verdict = verdict_of(one.get("parts") or {})
    return facts | ({"verdict": verdict} if verdict else {})


def _part(part: object) -> str:
    """A reward's part: weight × value, what a rule found."""
    if not isinstance(part, dict):
        return "–"
    weight, value = part.get("weight", 1.0), part.get("value")
    said = f"{number(value)}" if weight == 1 else f"{number(weight)} × {number(value)}"
    extracted = part.get("extracted")
    said += f" {part['verdict']}" if part.get("verdict") else ""
    return said + (f" ({short(str(extracted), 40)})" if extracted else "")


def share_bar(value: float, whole: float) -> Markup:
    """A share as a bar with its number."""
    share = value / whole if whole > 0 else 0.0
    filled = el("rect", width=f"{60 * share:.1f}", height=8, rx=2)
    bar = el("svg", filled, viewBox="0 0 60 8", class_="bar", aria_hidden="true")
    return el("span", bar, f" {share:.0%}", class_="nowrap")


def signed(value: object) -> str:
    return f"{float(value):+.3g}" if isinstance(value, int | float | np.floating) else "–"


def _mean_and_spread(values: Sequence[float | None]) -> tuple[str, str]:
    there = [value for value in values if value is not None]
    if not there:
        return "–", "no reward"
    same = min(there) == max(there)
    spread = "no spread" if same else f"{number(min(there), 3)} to {number(max(there), 3)}"
    return number(sum(there) / len(there)), spread
