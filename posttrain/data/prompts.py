"""Prompts for sampling completions, from rows of any format, tokenised as in training; and checks of tokenisation.

The faults found, such as missing stop tokens and tags that are split differently, do not stop training. A check
returns one message per fault, which says what to do.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError
from posttrain.base.pieces import CHARACTER, LOST, pieces
from posttrain.config.reading.interpolation import leaves
from posttrain.config.schema.data import DataConfig
from posttrain.config.schema.run import RunConfig
from posttrain.data.kinds import Prompts, facts_of, with_context
from posttrain.data.layouts import Layout
from posttrain.data.readers import Record
from posttrain.data.reading import Reader, malformed_of
from posttrain.data.render import RenderRequest, rendering
from posttrain.data.report import Malformed
from posttrain.data.rows import VARIABLES, Row, RowError, tools_of, variables_of

MANY = 0.1  # minimum share of completions for a report; a few that are split differently do no harm
TURNS = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "reply"}]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row's prompt. `text`: the rendered prompt; `facts`: the prompt, answer and columns for rewards."""

    row: int
    text: str
    tokens: list[int]
    facts: dict[str, Any]


def prompts_of(
    records: Sequence[Record],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    behavior_version: int = 2,
    positions: int | None = None,
) -> list[Prompt | Malformed]:
    """Return each record's prompt, or the reason why it has none, in order. Sets the template on the tokenizer.

    `name` is the name of the source in messages; format, columns, template and system prompt are read from `data`, but
    `data.source` is not. `behavior_version` is the run's version, `positions` the number of positions of the model
    (None: not limited). Raises DataError if no record can be read or the columns fit no format.
    """
    reader = Reader(data, tokenizer, Prompts(), behavior_version=behavior_version)
    layout = reader.layout_of_rows(records, name)
    results: dict[int, Prompt | Malformed] = {}
    rows, kept = [], []
    for record in records:
        try:
            rows.append(reader.row(record, layout))
            kept.append(record)
        except RowError as error:
            results[record.row] = malformed_of(record, error)
    with reader.tokeniser(layout) as tokeniser:
        for record, row, item in zip(kept, rows, tokeniser.prompts(rows), strict=True):
            if isinstance(item, RowError):
                results[record.row] = malformed_of(record, item)
            elif not len(item[1]):
                results[record.row] = malformed_of(record, "the prompt has no tokens")
            elif positions is not None and len(item[1]) > positions:
                size = f"it has {len(item[1]):,} tokens, but the model {positions:,} positions"
                results[record.row] = malformed_of(record, f"the prompt leaves no room: {size}")
            else:
                facts = json.loads(facts_of(record, row, reader.template.turns))
                results[record.row] = Prompt(record.row, item[0], list(item[1]), facts)
    return [results[record.row] for record in records]


class Reprompt:
    """Writes prompts of training rows again, each with a context in its last message (`with_context`)."""

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, template: str):
        self._template, version = template, config.behavior_version
        self._reader = Reader(config.data, tokenizer, Prompts(), seed=config.seed, behavior_version=version)

    def __call__(self, prompts: Sequence[tuple[Mapping[str, Any], str]]) -> list[Sequence[int]]:
        """The tokens of each prompt, which is given by the facts of its row and the context."""
        rows = []
        for facts, context in prompts:
            columns = facts["columns"]
            tools = tools_of(columns.get(self._reader.data.columns.get("tools", "tools")))
            prompt = with_context(facts["prompt"], context, self._template)
            rows.append(Row(prompt, "", tools=tools, variables=variables_of(columns.get(VARIABLES))))
        with self._reader.tokeniser(Layout("prompt", {}, frozenset())) as tokeniser:
            written = tokeniser.prompts(rows)
        for item in written:
            if isinstance(item, RowError):
                raise DataError(f"a prompt of the teacher cannot be written: {item}")
        return [item[1] for item in written if not isinstance(item, RowError)]


def stop_faults(
    tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int], stop: Sequence[str], turns: bool
) -> list[str]:
    """Report stop tokens that are missing or cannot occur. With `turns`, the chat template's end of turn must be a stop
    token or a stop string."""
    faults = []
    text = tokenizer.eos_token
    if text is not None and text not in tokenizer.get_vocab():
        faults.append(
            f"The tokenizer's stop token {text!r} is not in its vocabulary, so no completion ends with it: add it "
            "there, or set eos_token in tokenizer_config.json to the token that the model writes."
        )
    for id in stop_token_ids:
        if id >= len(tokenizer):
            faults.append(
                f"The stop token {id:,} of generation_config.json is not in the tokenizer's vocabulary of "
                f"{len(tokenizer):,}: correct eos_token_id there."
            )
    if not stop_token_ids and not stop:
        faults.append(
            "There is no stop token, neither in the tokenizer nor in generation_config.json, so every completion runs "
            "to the limit: set eos_token_id in generation_config.json, or stop strings (rollout.stop, --stop)."
        )
    end = end_of_turn(tokenizer) if turns else None
    if end is not None and end[0] not in stop_token_ids and end[1] not in stop:
        known = ", ".join(repr(tokenizer.convert_ids_to_tokens(id)) for id in stop_token_ids if id < len(tokenizer))
        faults.append(
            f"The chat template ends a turn with {end[1]!r}, which is not a stop token ({known or 'there is none'}): "
            f"completions continue after their turn. Add {end[0]:,} to eos_token_id in generation_config.json, or make "
            "its text a stop string (rollout.stop, --stop)."
        )
    return faults


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[int, str] | None:
    """The id and text of the special token with which the chat template ends an assistant turn; None if it has none."""
    if tokenizer.chat_template is None:
        return None
    with rendering(tokenizer) as renderer:
        [done] = renderer.render([RenderRequest(TURNS)])
    after = done.text.rpartition(TURNS[-1]["content"])[2]
    special = {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    here = [(after.index(text), id, text) for text, id in special.items() if text in after]
    return min(here)[1:] if here and not done.error else None


def completion_faults(
    sampled: Sequence[tuple[Prompt, Sequence[int]]], tags: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Report prompts and tags that are split differently when the text of prompt and completion is tokenised again.

    `sampled` has pairs of a prompt and the tokens of a completion, without the stop token. Tokenising their text again,
    as SFT does, then gives tokens that differ from those that the model was given and has sampled.
    """
    borders: list[tuple[str, str]] = []  # tokens at the end of a prompt: alone, and before a completion
    odd: dict[str, list[tuple[str, str]]] = {}  # by tag: its tokens as sampled, and as tokenised
    for prompt, tokens in sampled:
        base = _encode(prompt.text, tokenizer)
        written = list(pieces(tokens, tokenizer, prompt.tokens[-CHARACTER:]))
        text = "".join(piece for _, piece in written)
        if LOST in text:  # cut within a character: the lost part cannot be tokenised
            continue
        whole = _encode(prompt.text + text, tokenizer)
        same = next((i for i, (a, b) in enumerate(zip(base, whole, strict=False)) if a != b), len(base))
        if same < len(base) or len(whole) < len(base):
            borders.append((_shown(base[same:], tokenizer), _shown(whole[same : same + 2], tokenizer)))
            continue
        again = list(pieces(whole[len(base) :], tokenizer, base[-CHARACTER:]))
        for tag in tags:
            for start in (match.start() for match in re.finditer(f"(?={re.escape(tag)})", text)):
                split = [_around(parts, start, start + len(tag)) for parts in (written, again)]
                if split[0] != split[1]:
                    odd.setdefault(tag, []).append((" ".join(map(repr, split[0])), " ".join(map(repr, split[1]))))
                    break
    faults = []
    if borders and len(borders) >= MANY * len(sampled):
        faults.append(
            f"{len(borders)} of {len(sampled)} prompts end in different tokens when their completion follows: "
            f"{borders[0][0]} becomes {borders[0][1]}. End the prompt where a token ends, such as after a line break "
            "or a tag that is one token."
        )
    for tag, cases in odd.items():
        if len(cases) >= MANY * len(sampled):
            faults.append(
                f"{len(cases)} of {len(sampled)} completions write {tag!r} as {cases[0][0]}, but it is tokenised "
                f"as {cases[0][1]}: training on such texts teaches tokens that are not sampled. Choose tags that are "
                "always split in the same way (data.tags), preferably of one token each."
            )
    return faults


def tokens_within(tokenizer: PreTrainedTokenizerBase, most: int) -> Callable[[object], bool]:
    """A test whether all texts of a row together have at most so many tokens, without those that a template adds."""
    return lambda row: sum(len(_encode(leaf, tokenizer)) for leaf in leaves(row) if isinstance(leaf, str)) <= most


def _encode(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _shown(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return " ".join(repr(piece) for _, piece in pieces(ids, tokenizer))


def _around(parts: Sequence[tuple[int, str]], start: int, end: int) -> list[str]:
    """The pieces that contain the characters from `start` to `end`."""
    inside, position = [], 0
    for _, piece in parts:
        if position < end and position + len(piece) > start:
            inside.append(piece)
        position += len(piece)
    return inside
