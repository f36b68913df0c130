"""Rows for training from stored rollouts: the best completions, pairs of a better and a worse one, or labelled ones."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any, Literal, get_args

from posttrain.base.errors import UsageError
from posttrain.runs.stored_rollouts import StoredRun

Target = Literal["sft", "pairs", "kto"]
TARGETS = get_args(Target)
Row = dict[str, Any]
Member = tuple[float, Any]  # a completion with its reward


def select(
    stored: StoredRun, to: Target, steps: Sequence[int], best: int | None = None, above: float | None = None
) -> tuple[list[Row], Counter[str]]:
    """Rows that `posttrain train` reads, and how many completions were read, and dropped for which reason.

    sft: the `best` completions of each prompt (1), if their reward is above `above`. pairs: the `best` most rewarded
    completions of each prompt (1), each with one of the least rewarded ones. kto: every completion, desirable if its
    reward is above `above` or, by default, above the mean of its prompt. The completions of a prompt are those of all
    `steps`, each text once. Completions without a reward and truncated ones are dropped. Raises UsageError if no row
    is left.
    """
    counts: Counter[str] = Counter()
    rows: list[Row] = []
    for prompt, tools, completions in _by_prompt(stored, steps, counts):
        made = [*_rows(to, prompt, completions, best or 1, above, counts)]
        rows += [row | {"tools": tools} for row in made] if tools else made
    if not rows:
        left = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
        raise UsageError(f"nothing is left to train on: {left}")
    return rows, counts


def _by_prompt(
    stored: StoredRun, steps: Sequence[int], counts: Counter[str]
) -> Iterator[tuple[Any, Any, list[Member]]]:
    """Each prompt with its tools and its completions with their rewards, most rewarded first."""
    groups: dict[str, tuple[Any, Any, dict[str, Member]]] = {}
    for step in steps:
        prompts = {row["prompt_index"]: row for row in stored.prompts(step)}
        for row in stored.rollouts(step):
            counts["completions"] += 1
            facts = prompts[row["prompt_index"]]["facts"]
            asked = (row["turns"] or {}).get("asked") or facts.get("prompt")
            asked = prompts[row["prompt_index"]]["prompt"] if asked is None else asked
            key = json.dumps([asked, facts.get("answer"), facts.get("tools")], sort_keys=True)
            *_, members = groups.setdefault(key, (asked, facts.get("tools"), {}))
            done = row["turns"]["messages"] if row["turns"] else row["completion"]
            if row["reward"] is None:
                counts["without a reward"] += 1
            elif row["finish_reason"] == "length":
                counts["truncated"] += 1
            elif (text := json.dumps(done, sort_keys=True)) in members:
                counts["repeated"] += 1
            else:
                members[text] = row["reward"], done
    for asked, tools, members in groups.values():
        yield asked, tools, sorted(members.values(), key=lambda member: -member[0])


def _rows(
    to: Target, prompt: Any, completions: Sequence[Member], best: int, above: float | None, counts: Counter[str]
) -> Iterator[Row]:
    chat = not isinstance(prompt, str) or any(not isinstance(done, str) for _, done in completions)
    asked = [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt

    def completed(done: Any) -> Any:
        return [{"role": "assistant", "content": done}] if chat and isinstance(done, str) else done

    if to == "sft":
        good = [done for reward, done in completions if above is None or reward > above]
        counts["not among the best"] += len(completions) - len(good[:best])
        for done in good[:best]:
            yield {"prompt": asked, "completion": completed(done)}
        return
    if to == "pairs":
        pairs = [*zip(completions[:best], reversed(completions), strict=False)]
        pairs = [(good, bad) for good, bad in pairs if good[0] > bad[0]]
        counts["not in a pair"] += len(completions) - 2 * len(pairs)
        for (_, good), (_, bad) in pairs:
            yield {"prompt": asked, "chosen": completed(good), "rejected": completed(bad)}
    elif completions:
        least = fmean(reward for reward, _ in completions) if above is None else above
        for reward, done in completions:
            if above is None and reward == least:
                counts["equal to the mean"] += 1
            else:
                yield {"prompt": asked, "completion": completed(done), "label": reward > least}
