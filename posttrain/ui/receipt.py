"""Where a step's gradient comes from (its receipt): the step's groups, their completions, and the tokens of each."""

from collections.abc import Sequence

import numpy as np

from posttrain.base.words import counted
from posttrain.reports.markup import Markup, cards, el, join, link, message, number, short, table
from posttrain.reports.series import Series
from posttrain.runs.receipt import (
    NOT_SAMPLED,
    CompletionReceipt,
    GroupReceipt,
    TokenNumbers,
    Turn,
    decoder_of,
    group_receipt,
    step_receipt,
    token_texts,
)
from posttrain.runs.stored_rollouts import StoredRun
from posttrain.runs.summary import RunSummary
from posttrain.ui.parts import Query, address, seen

PATH = "/rollouts"
MOST = 5  # tokens listed with the largest push
TOKENS = 2_000  # tokens per page
FIRST = ("reward", "reward_std", "loss", "kl", "entropy", "grad_norm", "frac_reward_zero_std", "max_ratio")
PUSH = (
    "Push: how strongly the step raised (above 0) or lowered the logit of the sampled token, A r (1 − p): advantage × "
    "ratio × (1 − the token's probability). 0 where the ratio was clipped."
)
LOGPROBS = (
    " Log-probabilities (nats) come from the engine (sampler), the policy before and after the step (old, new), and "
    "the reference model (ref)."
)


def step_view(stored: StoredRun, series: Series, run: RunSummary, step: int) -> Markup:
    """The step's metrics and groups. The group with the largest push comes first."""
    groups = step_receipt(stored, step)
    whole, most = sum(group.push for group in groups), max((group.push for group in groups), default=0.0)
    rows = [
        [
            link(f"prompt {group.prompt}", address(PATH, run=run.name, step=step, prompt=group.prompt)),
            share_bar(group.push, whole, most),
            *_mean_and_spread(group.rewards),
            str(group.clipped),
            f"{group.furthest_ratio:.3f}",
            f"{np.mean([len(completion.tokens) for completion in group.completions]):.0f}",
            el("span", short(group.text, 110)),
        ]
        for group in groups
    ]
    names = ["group", "share of the push", "reward", "lowest to highest", "clipped", "ratio furthest from 1", "tokens"]
    shown = table([*names, "prompt"], rows, numbers=(2, 4, 5, 6))
    return join([_metrics(series, step), shown, el("p", PUSH, class_="quiet")])


def group_view(stored: StoredRun, run: RunSummary, step: int, prompt: int) -> Markup:
    """The completions of a group with the parts of their rewards. The completion with the largest push comes first."""
    group = group_receipt(stored, step, prompt)
    most = max((completion.push for completion in group.completions), default=0.0)
    rows = [
        [
            link(
                f"completion {completion.rollout}",
                address(PATH, run=run.name, step=step, prompt=prompt, rollout=completion.rollout),
            ),
            share_bar(completion.push, group.push, most),
            number(completion.reward),
            signed(completion.advantage),
            *(short(str(completion.parts.get(name, "–")), 60) for name in group.part_names),
            f"{len(completion.tokens):,}",
            completion.finish_reason,
            short(completion.text, 120),
        ]
        for completion in sorted(group.completions, key=lambda completion: -completion.push)
    ]
    header = ["", "share of the push", "reward", "advantage", *group.part_names, "tokens", "ended by", "completion"]
    return join([_prompt(group, shown=True), table(header, rows, numbers=(2, 3, 4 + len(group.part_names)))])


def _prompt(group: GroupReceipt, shown: bool = False) -> Markup:
    title = "Prompt" if group.row is None else f"Prompt (row {group.row} of the data)"
    return el("details", el("summary", title), el("pre", group.text), open=shown)


def completion_view(stored: StoredRun, run: RunSummary, step: int, prompt: int, rollout: int, query: Query) -> Markup:
    """The completion's tokens in colour, the tokens with the largest push, and the numbers of the chosen token."""
    group = group_receipt(stored, step, prompt)
    completion = group.completion(rollout)
    numbers, tokens = completion.numbers, completion.tokens.tolist()
    colours = _colours(numbers)
    colouring = query.choice("colour", tuple(colours))
    decoder = decoder_of(run.folder)
    texts = [(text or "") if decoder else f"{text} " for text in token_texts(tokens, decoder, group.tokens.tolist())]
    pushed = [int(at) for at in np.argsort(-np.abs(numbers.push), kind="stable")[:MOST] if numbers.push[at]]
    chosen = query.integer("token")
    if chosen is None or chosen >= len(tokens):
        chosen = pushed[0] if pushed else 0 if tokens else None
    addresses = {name: query.but(PATH, colour=name, token=chosen) for name in colours}
    choices = [
        el("span", link(name, at, aria_current="true" if name == colouring else None)) for name, at in addresses.items()
    ]
    return join(
        [
            cards(_facts(completion)),
            _prompt(group),
            _turns(completion, query) if completion.turns else None,
            el("p", el("span", "Colour by", class_="quiet"), *choices, class_="choices"),
            heat(texts, colouring, numbers, pushed, chosen, query),
            _legend(colouring, numbers),
            _responsible(completion, texts, pushed, chosen, query),
        ]
    )


def _turns(completion: CompletionReceipt, query: Query) -> Markup:
    """The turns of an episode, each with a link to its first token."""
    shown, most = [], max(completion.of_turn(turn)[1] for turn in completion.turns)
    for number_of, turn in enumerate(completion.turns):
        advantage, push = completion.of_turn(turn)
        place = link(f"turn {number_of}", query.but(PATH, token=turn.start)) if turn.stop > turn.start else "turn"
        facts = [counted(turn.stop - turn.start, "token")]
        if turn.author == "model":
            facts.append(f"advantage {signed(advantage)}")
            facts += [] if turn.reward is None else [f"reward {number(turn.reward)}"]
        bar = share_bar(push, completion.push, most) if turn.author == "model" and completion.push else None
        shown.append(said(turn, place, " · ".join(facts), bar))
    return el("section", el("h3", "Turns"), *shown, class_="turns")


def said(turn: Turn, *about: object) -> Markup:
    """A turn of an episode: its author, facts about it, its text and the calls that it makes."""
    failed = el("span", f" {counted(turn.failed, 'call')} failed", class_="badge alarm") if turn.failed else None
    head = el("p", el("b", turn.author), *(part for each in about if each for part in (" · ", each)), failed)
    calls = [el("p", "calls ", el("code", call)) for call in turn.calls]
    return el("div", head, el("div", turn.text, class_="text") if turn.text else None, *calls, class_=turn.author)


def heat(
    texts: Sequence[str], colouring: str, numbers: TokenNumbers, pushed: Sequence[int], chosen: int | None, query: Query
) -> Markup:
    """The tokens as links that show their numbers; the stronger the colour, the larger the number."""
    values, has_sign = _colours(numbers)[colouring]
    largest = float(np.abs(values).max(initial=0.0)) or 1.0
    start = 0 if chosen is None or chosen < TOKENS else chosen - chosen % TOKENS
    most, parts = set(pushed), []
    for at in range(start, min(start + TOKENS, len(texts))):
        value = float(values[at])
        level = round(6 * min(1.0, abs(value) / largest)) if np.isfinite(value) else 0
        looks = {
            f"h{level}": level, "down": has_sign and value < 0, "clipped": numbers.clipped[at],
            "other": not numbers.trained[at], "most": at in most, "chosen": at == chosen,
        }  # fmt: skip
        written = f"{value:+.4g}" if has_sign else f"{value:.4g}"
        parts.append(
            link(
                seen(texts[at]),
                query.but(PATH, token=at),
                class_=" ".join(look for look, applies in looks.items() if applies) or None,
                title=f"{at}: {written if numbers.trained[at] else NOT_SAMPLED}",
                tabindex=None if at in most else "-1",
            )
        )
    shown = el("div", *parts, class_="tokens")
    if len(texts) <= TOKENS:
        return shown
    pages = [
        link(f"{first:,} to {min(first + TOKENS, len(texts)) - 1:,}", query.but(PATH, token=first))
        for first in range(0, len(texts), TOKENS)
    ]
    return join([shown, el("p", "Tokens ", *(part for page in pages for part in (page, " · ")), class_="quiet")])


def _legend(name: str, numbers: TokenNumbers) -> Markup:
    values, has_sign = _colours(numbers)[name]
    finite = values[np.isfinite(values) & numbers.trained]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    keys = [f"{name}: from {low:.4g} to {high:.4g}", "blue above 0, orange below" if has_sign else "stronger is larger"]
    keys += ["struck out: clipped", *([] if numbers.trained.all() else [f"grey: {NOT_SAMPLED}"])]
    return el("p", f"{'; '.join(keys)}; underlined: the largest pushes.", class_="quiet")


def _responsible(
    completion: CompletionReceipt, texts: Sequence[str], pushed: Sequence[int], chosen: int | None, query: Query
) -> Markup:
    numbers, columns = completion.numbers, completion.numbers.columns
    rows, most = [], float(np.abs(numbers.push).max(initial=0.0))
    for at in [*([] if chosen is None or chosen in pushed else [chosen]), *pushed]:
        values = {name: float(each[at]) for name, each in columns.items()}
        cells = [signed(value) if name == "advantage" else number(value) for name, value in values.items()]
        label = link(seen(texts[at]), query.but(PATH, token=at), class_="token")
        note = "clipped" if numbers.clipped[at] else ""
        if not numbers.trained[at]:
            cells, note = ["–"] * len(columns), NOT_SAMPLED
        rows.append([str(at), label, share_bar(abs(float(numbers.push[at])), completion.push, most), *cells, note])
    if not rows:
        return message("This completion has no tokens.")
    header = ["", "token", "share of the push", *columns, ""]
    none = "No token has a push: the completion's advantage is 0, or the completion is not in the loss"
    title = "The tokens with the largest push" if pushed else none
    about = el("p", PUSH, LOGPROBS, class_="quiet")
    return join([el("h3", title), table(header, rows, numbers=(0, *range(3, 3 + len(columns)))), about])


def _colours(numbers: TokenNumbers) -> dict[str, tuple[np.ndarray, bool]]:
    """The stored quantities by which tokens can be coloured: the values, and whether they have a sign."""
    quantities = {
        "push": (numbers.push, True),
        "advantage": (numbers.advantage, True),
        "ratio": (None if numbers.ratio is None else np.log(np.maximum(numbers.ratio, 1e-30)), True),
        "sampler − trainer": (numbers.mismatch, True),
        "entropy": (numbers.stored.get("entropy"), False),
        "policy − reference": (numbers.reference, True),
        "clipped": (numbers.clipped.astype(float), False),
    }
    return {name: (values, has_sign) for name, (values, has_sign) in quantities.items() if values is not None}


def _metrics(series: Series, step: int) -> Markup:
    metrics = series.at(step)
    if not metrics:
        return message("The metrics of this step have not been logged.")
    logged = int(metrics.pop("step"))
    rows = [[name, number(value)] for name, value in metrics.items()]
    summary = f"All {len(rows)} metrics." + (f" They are means of the steps up to {logged}." if logged != step else "")
    every = el("details", el("summary", summary), table(["metric", "value"], rows, numbers=(1,)))
    return join([cards({name: number(metrics[name]) for name in FIRST if name in metrics}), every])


def _facts(completion: CompletionReceipt) -> dict[str, object]:
    facts: dict[str, object] = {"reward": number(completion.reward), "advantage": signed(completion.advantage)}
    facts |= {name: short(str(part), 60) for name, part in completion.parts.items()}
    facts |= {"tokens": f"{len(completion.tokens):,}", "ended by": completion.finish_reason}
    extras = [(f"{name}: {key}", value) for name, part in completion.parts.items() for key, value in part.extra.items()]
    facts |= {name: short(str(value), 60) for name, value in extras}
    if completion.turns:
        facts["replies"] = str(sum(turn.author == "model" for turn in completion.turns))
    if completion.trunk is not None:
        facts["branch of"] = f"completion {completion.trunk}"
    return facts | ({"verdict": completion.verdict} if completion.verdict else {})


def share_bar(value: float, whole: float, most: float) -> Markup:
    """The share `value` / `whole` as a percentage, with a bar that the list's largest value, `most`, fills."""
    share = value / whole if whole > 0 else 0.0
    filled = el("rect", width=f"{60 * value / most if most > 0 else 0:.1f}", height=8, rx=2)
    bar = el("svg", filled, viewBox="0 0 60 8", class_="bar", aria_hidden="true")
    return el("span", bar, f" {share:.0%}", class_="nowrap")


def signed(value: object) -> str:
    return f"{float(value):+.3g}" if isinstance(value, int | float | np.floating) else "–"


def _mean_and_spread(rewards: Sequence[float]) -> tuple[str, str]:
    if not rewards:
        return "–", "no reward"
    lowest, highest = min(rewards), max(rewards)
    spread = "no spread" if lowest == highest else f"{number(lowest, 3)} to {number(highest, 3)}"
    return number(sum(rewards) / len(rewards)), spread
