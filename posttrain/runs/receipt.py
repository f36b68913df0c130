"""The receipt of a step's gradient, from stored numbers: groups, their completions, and the numbers of each token.

The policy loss of a token is -A r, with the ratio r = π_new / π_old. Its derivative with respect to the logit of the
sampled token is -A r (1 - p), where p = π_new is the token's probability; the *push* is its negative, A r (1 - p). The
push is 0 where the ratio was clipped, and near 0 where the token was already almost certain. `posttrain why` and the
pages show the same receipt.
"""

import json
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np

from posttrain.base.errors import RunError
from posttrain.base.pieces import Decoder, pieces
from posttrain.base.words import by_key
from posttrain.runs.checkpoint import list_checkpoints
from posttrain.runs.files import as_mapping
from posttrain.runs.stored_rollouts import StoredRun, trained_tokens
from posttrain.runs.summary import RunSummary

# Label -> column of the file. Log-probabilities (nats): engine, policy before and after the step, reference.
STORED = {
    "sampler": "sampler_logprobs", "old": "old_logprobs", "new": "new_logprobs", "ref": "ref_logprobs",
    "entropy": "entropies", "value": "old_values", "return": "returns",
}  # fmt: skip
LONGEST = 64 << 20  # maximum bytes of a tokenizer.json
NOT_SAMPLED = "not sampled: a tool's output or another speaker's turn"
_loading = threading.Lock()


@dataclass(frozen=True, slots=True)
class TokenNumbers:
    """The numbers of a completion's tokens. None: not stored by the method, or by the version that wrote the file.

    `push` is 0 and `clipped` is False if they are unknown. Tokens that were not sampled (a tool's output) are not
    `trained`, and their numbers are 0.
    """

    trained: np.ndarray  # bool
    push: np.ndarray
    clipped: np.ndarray  # bool
    advantage: np.ndarray | None
    ratio: np.ndarray | None
    mismatch: np.ndarray | None  # log-probability of the sampler minus the trainer's
    reference: np.ndarray | None  # log-probability of the policy minus the reference's
    stored: dict[str, np.ndarray]  # by the labels of STORED

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Read a row of `StoredRun.rollouts`."""
        count, trained = len(row["tokens"]), trained_tokens(row)

        def array(name: str) -> np.ndarray | None:
            values = row.get(name)
            if values is None or len(values) != count:
                return None
            return np.where(trained, np.asarray(values, dtype=np.float64), 0.0)

        stored = {label: values for label, name in STORED.items() if (values := array(name)) is not None}
        new, old, sampler, reference = (stored.get(label) for label in ("new", "old", "sampler", "ref"))
        advantage, flags, zeros = array("advantages"), array("clipped"), np.zeros(count)
        clipped = zeros.astype(bool) if flags is None else flags != 0
        ratio = None if new is None or old is None else np.exp(np.clip(new - old, -50, 50))
        uncertain = 1.0 if new is None else 1 - np.exp(np.minimum(new, 0))
        pushed = zeros if advantage is None else advantage * (1.0 if ratio is None else ratio) * uncertain
        return cls(
            trained=trained,
            push=np.where(clipped, 0.0, np.nan_to_num(pushed)),
            clipped=clipped,
            advantage=advantage,
            ratio=ratio,
            mismatch=None if sampler is None or old is None else np.nan_to_num(sampler - old),
            reference=None if reference is None or new is None else new - reference,
            stored=stored,
        )

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The columns of a table of tokens, by label."""
        numbers = {"advantage": self.advantage, "ratio": self.ratio, **self.stored}
        return {label: values for label, values in numbers.items() if values is not None}

    @property
    def furthest_ratio(self) -> float:
        """The ratio furthest from 1, measured as a factor: 0.5 is as far as 2."""
        return 1.0 if self.ratio is None else float(max(self.ratio, key=factor, default=1.0))


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a completion's reward; for a rule, also the verdict and the extracted answer."""

    value: float | None
    weight: float
    verdict: str | None
    extracted: str | None
    extra: Mapping[str, Any]  # what a function noted about the completion

    def __str__(self) -> str:
        """weight × value, with the verdict and the extracted answer of a rule."""
        value = f"{self.value:.4g}" if isinstance(self.value, int | float) else "–"
        written = value if self.weight == 1 else f"{self.weight:.4g} × {value}"
        return " ".join(filter(None, (written, self.verdict, f"({self.extracted})" if self.extracted else None)))

    @classmethod
    def of(cls, part: Any) -> Self:
        names = ("value", "weight", "verdict", "extracted", "extra")
        value, weight, verdict, extracted, extra = map(as_mapping(part).get, names)
        return cls(value, 1.0 if weight is None else weight, verdict, extracted, as_mapping(extra))


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of an episode: what its author wrote in tokens `start` to `stop` of the completion."""

    author: str  # model, tool or user
    start: int
    stop: int
    text: str
    calls: tuple[str, ...]  # name(arguments) of the model's calls
    failed: int  # number of calls that failed
    reward: float | None  # that the environment gave the reply, if it rewards replies


def shown_turns(episode: Mapping[str, Any] | None) -> list[Turn]:
    """The turns of a stored episode (`Trajectory.stored`); none of a completion without one."""
    if not episode:
        return []
    made: list[Turn] = []
    messages, rewards = list(episode["messages"]), iter(episode.get("turn_rewards") or ())
    for part in episode["turns"]:
        is_model, own = part["author"] == "model", []
        while messages and (messages[0]["role"] == "assistant") == is_model and not (is_model and own):
            own.append(messages.pop(0))
        calls = tuple(_called(call["function"]) for message in own for call in message.get("tool_calls") or ())
        # Failures are stored with the results or, if these had no room, with the reply.
        failed = sum(bool(failed) for *_, failed in part["calls"])
        if not is_model and made:
            made[-1], failed = replace(made[-1], failed=failed), 0
        reward = next(rewards, None) if is_model else None
        before = [] if part.get("keep") is None else ["(earlier turns rewritten by the template)"]
        text = "\n".join([*before, *map(_said, own)])
        made.append(Turn(part["author"], part["start"], part["stop"], text, calls, failed, reward))
    return made


def _said(message: Mapping[str, Any]) -> str:
    reasoning = message.get("reasoning_content")
    content = str(message.get("content") or "")
    return f"<think>{reasoning}</think>\n{content}" if reasoning else content


def _called(function: Mapping[str, Any]) -> str:
    """A call as text: name(argument=value)."""
    arguments = function["arguments"]
    if not isinstance(arguments, Mapping):
        return f"{function['name']}({arguments})"
    written = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    return f"{function['name']}({', '.join(written)})"


@dataclass(frozen=True, slots=True)
class CompletionReceipt:
    """A completion of a step. `reward` is None without a verdict; `advantage` is None outside the loss."""

    rollout: int
    text: str
    tokens: np.ndarray
    reward: float | None
    advantage: float | None
    finish_reason: str
    parts: dict[str, StoredPart]
    numbers: TokenNumbers
    turns: Sequence[Turn]
    trunk: int | None  # of an episode that branches: the completion whose first turns it shares

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Read a row of `StoredRun.rollouts`. The `finish_reason` of an episode is its stop reason."""
        columns = ("rollout_index", "completion", "tokens", "reward", "advantage")
        parts = {name: StoredPart.of(part) for name, part in (row.get("parts") or {}).items()}
        episode = row.get("turns") or None
        ended = episode["stop_reason"] if episode else row["finish_reason"]
        facts, trunk = [*(row[column] for column in columns), ended], (episode or {}).get("trunk")
        return cls(*facts, parts=parts, numbers=TokenNumbers.of(row), turns=shown_turns(episode), trunk=trunk)

    def of_turn(self, turn: Turn) -> tuple[float | None, float]:
        """The mean advantage of a turn's tokens, None outside the loss, and the sum of their absolute pushes."""
        span, advantage = slice(turn.start, turn.stop), self.numbers.advantage
        inside = self.numbers.trained[span]
        mean = None if advantage is None or not inside.any() else float(advantage[span][inside].mean())
        return mean, float(np.abs(self.numbers.push[span]).sum())

    @property
    def push(self) -> float:
        """The sum of the absolute pushes of the tokens."""
        return float(np.abs(self.numbers.push).sum())

    @property
    def verdict(self) -> str:
        """The first verdict among the parts of the reward."""
        return next((part.verdict for part in self.parts.values() if part.verdict), "")


@dataclass(frozen=True, slots=True)
class GroupReceipt:
    """A prompt of a step with its completions. `row`: its row in the data; None if the prompt itself is not stored."""

    step: int
    prompt: int
    row: int | None
    text: str
    tokens: np.ndarray
    completions: Sequence[CompletionReceipt]

    @property
    def push(self) -> float:
        return sum(completion.push for completion in self.completions)

    @property
    def clipped(self) -> int:
        """The number of tokens with a clipped ratio."""
        return sum(int(completion.numbers.clipped.sum()) for completion in self.completions)

    @property
    def furthest_ratio(self) -> float:
        return max((completion.numbers.furthest_ratio for completion in self.completions), key=factor)

    @property
    def rewards(self) -> list[float]:
        """The rewards of the completions that have one."""
        return [completion.reward for completion in self.completions if completion.reward is not None]

    @property
    def part_names(self) -> list[str]:
        return list(dict.fromkeys(name for completion in self.completions for name in completion.parts))

    def completion(self, rollout: int) -> CompletionReceipt:
        """The completion with number `rollout`. Raises RunError if there is none."""
        by_number = {completion.rollout: completion for completion in self.completions}
        if rollout in by_number:
            return by_number[rollout]
        last = max(by_number)
        raise RunError(f"prompt {self.prompt} of step {self.step} has rollouts 0 to {last}, but not {rollout}")


def step_receipt(stored: StoredRun, step: int) -> list[GroupReceipt]:
    """The groups of a step, largest push first. Raises RunError if the step is not stored."""
    stored.require(step)
    return sorted(_groups(stored, step, None), key=lambda group: -group.push)


def group_receipt(stored: StoredRun, step: int, prompt: int) -> GroupReceipt:
    """The group of a prompt. Raises RunError if there is none."""
    stored.require(step)
    for group in _groups(stored, step, prompt):
        return group
    raise RunError(f"step {step} has no prompt {prompt}: its prompts are 0 to {len(stored.prompts(step)) - 1}")


def _groups(stored: StoredRun, step: int, prompt: int | None) -> Iterator[GroupReceipt]:
    members = by_key((row["prompt_index"], CompletionReceipt.of(row)) for row in stored.rollouts(step, prompt))
    prompts = {row["prompt_index"]: row for row in stored.prompts(step)}
    for index, completions in members.items():
        facts = prompts.get(index, {"row": None, "prompt": "", "tokens": np.zeros(0, np.int32)})
        yield GroupReceipt(step, index, facts["row"], facts["prompt"], facts["tokens"], completions)


def factor(ratio: float) -> float:
    """The distance of a ratio from 1 as a factor of at least 1."""
    return float(max(ratio, 1 / max(ratio, 1e-30)))


class RunTokenizer:
    """A decoder for `pieces` that wraps a tokenizer of the library `tokenizers`, which does not need torch."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def decode(self, token_ids: Sequence[int], /, *, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token for token in token_ids if 0 <= token < 2**32]  # a damaged store may have any
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def token_texts(tokens: Sequence[int], decoder: Decoder | None, prompt: Sequence[int] = ()) -> list[str | None]:
    """The text of each token after a prompt. If several tokens encode one character, the last token has it, and the
    others are None. Without a decoder, the token ids."""
    if decoder is None:
        return list(map(str, tokens))
    return [shown for count, text in pieces(tokens, decoder, prompt) for shown in (*[None] * (count - 1), text)]


def decoder_of(run: Path) -> RunTokenizer | None:
    """The tokenizer of the run: of its final or best model, a checkpoint or its initial model; None if it has none."""
    model = next(iter(RunSummary(run).model_settings), {})
    started, added = model.get("path"), model.get("new_tokens")
    new_tokens = tuple(token for token in added if isinstance(token, str)) if isinstance(added, list) else ()
    folders = [run, run / "final", run / "best", *reversed(list_checkpoints(run))]  # itself: recorded episodes
    if isinstance(started, str):
        folders += [Path(started).expanduser(), run / started]
    for folder in folders:
        file = folder / "tokenizer.json"
        try:
            facts = file.stat()
        except (OSError, ValueError):
            continue
        usable = stat.S_ISREG(facts.st_mode) and facts.st_size <= LONGEST
        if usable and (tokenizer := _loaded(file, facts.st_mtime_ns, new_tokens)) is not None:
            return tokenizer
    return None


@lru_cache(maxsize=4)
def _loaded(file: Path, changed: int, new_tokens: tuple[str, ...]) -> RunTokenizer | None:
    from tokenizers import Tokenizer

    with _loading:
        try:
            tokenizer = Tokenizer.from_file(str(file))
            tokenizer.add_tokens([*new_tokens])  # tokens that it already has keep their ids
            return RunTokenizer(tokenizer)
        except BaseException as error:  # for a damaged file, the library raises bare Exception, or panics in Rust
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            return None  # tokens are shown as numbers
