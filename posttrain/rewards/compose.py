"""Several rewards with weights: every part is kept, and a completion without a verdict has no reward.

with Rewards(settings, tags=data.tags) as rewards:
    rewarded = rewards(completions)          # rewarded.totals, rewarded[0].parts, rewarded.metrics()
"""

import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Self

from posttrain.base.errors import RewardError
from posttrain.base.log import log
from posttrain.base.words import counted
from posttrain.config import DevicesConfig, RunConfig, TagsConfig
from posttrain.config.schema.rewards import (
    ALL_ZERO,
    JudgeReward,
    LengthReward,
    ModelReward,
    OverlongReward,
    PythonReward,
    RepetitionReward,
    Reward,
    RuleReward,
    named_by_function,
    term_name,
)
from posttrain.grading.extract import THINK, after_thinking
from posttrain.grading.pool import DEADLINE_S, Pool
from posttrain.grading.verdict import NON_VERDICTS, Grade, GradeRequest
from posttrain.judges.judge import JudgeInput, SingleJudge
from posttrain.rewards.calls import OverdueError
from posttrain.rewards.parts import CompletionReward, Rewarded, RewardInput, RewardPart, TrainerState
from posttrain.rewards.python import RewardFunction
from posttrain.rewards.rules import NEEDS_ANSWER, RULES, modules_of, options_of, prove


class Rewards(ExitStack):
    """The rewards of a run, ready to use: models loaded, functions found, and rules verified on the known pairs.

    `environments`: classes of the environments, each a reward of its own. `pool`: grading workers to share; without it,
    rules start workers that `close` ends. `max_completion_length`: the rollout's limit, for `overlong`. `date`: the
    run's date, which the chat templates of reward models write. `sampled_ids`: reward models with the policy's
    tokenizer score the sampled tokens after a string prompt. Without `names_functions`, an unnamed function is called
    `python`, as before behavior_version 4. Two settings reproduce behavior_version 1: without
    `sampled_ids`, reward models score the text; with `zeros_count`, a reward of weight 0 adds 0 to totals, and a
    completion without its verdict is dropped.

    Raises RewardError, before the first rollout, if a reward cannot work. As a context manager, or by `close`, it ends
    the threads of functions and judges, and workers that are not shared.
    """

    def __init__(
        self,
        settings: Sequence[Reward],
        pool: Pool | None = None,
        *,
        tags: TagsConfig | None = None,
        devices: DevicesConfig | None = None,
        max_completion_length: int | None = None,
        workers: int | None = None,
        deadline: float = DEADLINE_S,
        zeros_count: bool = False,
        sampled_ids: bool = True,
        date: str | None = None,
        environments: Sequence[str] = (),
        names_functions: bool = True,
    ):
        super().__init__()
        settings = named_by_function(settings) if names_functions else settings
        self._environments = tuple(environments)
        names = [term_name(term) for term in settings]
        every = [*names, *environments]
        twice = next((name for name in every if every.count(name) > 1), None)
        if twice is not None:
            raise RewardError(f"two rewards are called {twice}: give one of them a different `name`")
        if settings and not any(term.weight for term in settings):
            raise RewardError(f"{ALL_ZERO} ({', '.join(names)})")
        self.settings, self._zeros_count = tuple(settings), zeros_count
        self._tags = tags or TagsConfig()
        self._functions: dict[str, Function] = {}
        self._python: dict[str, RewardFunction] = {}
        self._judges: dict[str, SingleJudge] = {}
        rules = list(dict.fromkeys(term.type for term in settings if isinstance(term, RuleReward)))
        try:
            for name, term in zip(names, settings, strict=True):
                if isinstance(term, PythonReward):
                    self._python[name] = RewardFunction(term.function, term.timeout, term.retries)
                    self.callback(self._python[name].close)
                elif isinstance(term, JudgeReward):
                    self._judges[name] = self.enter_context(SingleJudge(term))
                elif not isinstance(term, RuleReward):
                    limits = max_completion_length, sampled_ids, date
                    self._functions[name] = _function(term, devices or DevicesConfig(), *limits)
            if rules:
                pool = pool or self.enter_context(Pool(workers, deadline, modules=modules_of(rules)))
                for rule in rules:
                    prove(pool, rule, self._tags)
            self._pool = pool
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    @classmethod
    def of_run(cls, config: RunConfig, settings: Sequence[Reward], **others: Any) -> Self:
        """These rewards with the settings, the date and the behavior_version of a run, except for what `others`
        replaces."""
        own = {"tags": config.data.tags, "devices": config.devices, "date": config.data.date}
        own["max_completion_length"], version = config.rollout.max_completion_length, config.behavior_version
        own |= {"zeros_count": version < 2, "sampled_ids": version >= 2, "names_functions": version >= 4}
        return cls(settings, **own | others)

    def __call__(self, completions: Sequence[RewardInput], state: TrainerState | None = None) -> Rewarded:
        """Reward each completion. Rules grade and judges reply while other rewards compute. An episode whose
        environment failed is not graded. Functions may read the `state` of training. Raises RewardError."""
        has_verdict = [c.episode is None or c.episode.grade.verdict not in NON_VERDICTS for c in completions]
        graded = [completion for completion, has in zip(completions, has_verdict, strict=True) if has]
        order = sorted(self.settings, key=lambda term: isinstance(term, RuleReward | JudgeReward), reverse=True)
        parts_of = {term_name(term): self._started(term, graded, state) for term in order if graded}
        columns = [parts_of[term_name(term)]() for term in self.settings if graded]
        rows = iter(zip(*columns, strict=True) if columns else [()] * len(graded))
        none = tuple(map(_without_verdict, self.settings))
        parts = [
            (*(next(rows) if has else none), *_of_episode(completion, self._environments))
            for completion, has in zip(completions, has_verdict, strict=True)
        ]
        return Rewarded(CompletionReward(self._total(each), each) for each in parts)

    def _started(
        self, term: Reward, completions: Sequence[RewardInput], state: TrainerState | None
    ) -> Callable[[], list[RewardPart]]:
        """Start to grade or judge the completions, or compute their rewards. The returned function returns their parts,
        one per completion."""
        name = term_name(term)
        if isinstance(term, RuleReward | JudgeReward):
            grades = self._graded(term, completions)
            return lambda: [RewardPart(name, term.weight, grade.score, grade) for grade in grades()]
        if isinstance(term, PythonReward):
            try:
                values, notes = self._python[name].noted(_columns(completions), state or TrainerState())
            except OverdueError as error:
                values, notes = [None] * len(completions), None
                log.warning("%s: no reward for %s", error, counted(len(completions), "completion"))
            overdue = None if term.timeout is None else notes is None
            logged = notes.metrics if notes is not None else {}
            parts = [
                RewardPart(name, term.weight, value, None, overdue, True, notes.of(i) if notes else {}, logged)
                for i, value in enumerate(values)
            ]
        else:
            parts = [RewardPart(name, term.weight, value) for value in self._functions[name](completions)]
        return lambda: parts

    def _graded(
        self, term: RuleReward | JudgeReward, completions: Sequence[RewardInput]
    ) -> Callable[[], Iterable[Grade]]:
        if isinstance(term, JudgeReward):
            judge = self._judges[term_name(term)]
            texts = [_scored_text(one, term.strip_thinking) for one in completions]
            pairs = zip(completions, texts, strict=True)
            started = judge.start([JudgeInput(one.prompt, text, one.answer) for one, text in pairs])
            return lambda: judge.finish(started)
        assert self._pool is not None  # there is a rule
        pool, rule, options = self._pool, RULES[term.type], options_of(term.type, self._tags)
        jobs = [pool.submit(GradeRequest(rule, one.text, one.answer, options)) for one in completions]
        return lambda: pool.collect(jobs)

    def _total(self, parts: Sequence[RewardPart]) -> float | None:
        """The weighted sum; None if a part has no verdict, or if no part applies."""
        summed = [part for part in parts if part.weight or self._zeros_count]
        if not all(part.counts for part in summed):
            return None
        applicable = [(part.weight, part.value) for part in summed if part.value is not None]
        return sum(weight * value for weight, value in applicable) if applicable else None

    def right(self, rewarded: Rewarded) -> dict[str, list[bool | None]]:
        """Whether `format` and `answer` of each completion are right; None if there is no verdict.

        Each of the two comes from the first rule that grades it, and is missing if there is no such rule."""
        right: dict[str, list[bool | None]] = {}
        for index, term in enumerate(self.settings):
            grades = [grade for reward in rewarded if (grade := reward.parts[index].grade) is not None]
            first = next((grade for grade in grades if grade.counts), None)
            if first is None or not isinstance(term, RuleReward):
                continue
            names = ("format", "answer") if "format" in first.parts else ("answer",)
            for name in names if term.type in NEEDS_ANSWER else ("format",):
                apart = name in first.parts and term.type in NEEDS_ANSWER
                verdicts = [
                    None if not grade.counts else grade.parts[name] == 1 if apart else grade.verdict == "correct"
                    for grade in grades
                ]
                right.setdefault(name, verdicts)
        return right

    def accuracies(self, rewarded: Rewarded) -> dict[str, float]:
        """`format_accuracy` and `answer_accuracy`: shares of right ones among the completions with a verdict."""
        return {
            f"{name}_accuracy": statistics.fmean(verdict for verdict in verdicts if verdict is not None)
            for name, verdicts in self.right(rewarded).items()
        }


def _without_verdict(term: Reward) -> RewardPart:
    """The part of an episode whose environment failed."""
    is_graded, is_function = isinstance(term, RuleReward | JudgeReward), isinstance(term, PythonReward)
    grade = Grade("crashed", reason="the environment failed") if is_graded else None
    overdue = False if isinstance(term, PythonReward) and term.timeout is not None else None
    return RewardPart(term_name(term), term.weight, None, grade, overdue, may_not_apply=is_function)


def _of_episode(completion: RewardInput, environments: Sequence[str]) -> Iterator[RewardPart]:
    """A part for each class of environments, with TRL's weight of 1."""
    outcome = completion.episode
    for title in environments:
        own = outcome is not None and outcome.title == title
        grade = outcome.grade if outcome is not None and own and outcome.grade.verdict != "not_applicable" else None
        yield RewardPart(title, 1.0, grade.score if grade else None, grade, may_not_apply=True)


Function = Callable[[Sequence[RewardInput]], Sequence[float | None]]
Computed = LengthReward | OverlongReward | RepetitionReward | ModelReward


def _function(
    term: Computed, devices: DevicesConfig, max_completion_length: int | None, sampled_ids: bool, date: str | None
) -> Function:
    """The function that computes a reward in this process."""
    match term:
        case ModelReward():
            from posttrain.rewards.learned import LearnedReward  # imports torch, which rules do not need

            if term.path is None:  # a run with stages sets it
                raise RewardError(f"the reward model of a stage ({term.from_stage}) is not known here: give its `path`")
            model, strip = LearnedReward(term.path, devices, max_completion_length, date), term.strip_thinking
            return lambda completions: model(
                [c.prompt for c in completions],
                [_scored_text(c, strip) for c in completions],
                [c.truncated for c in completions],
                [c.tokens for c in completions] if sampled_ids else None,
            )
        case LengthReward():
            return lambda completions: [length_reward(len(c.tokens), term.target, term.scale) for c in completions]
        case OverlongReward():
            limit = term.max_completion_length or max_completion_length
            if limit is None or limit < term.cache:
                raise RewardError(
                    f"the reward {term_name(term)} penalises the last {term.cache} tokens (cache) before "
                    f"max_completion_length, which is {limit or 'not given'}"
                )
            return lambda completions: [overlong_reward(len(c.tokens), limit, term.cache) for c in completions]
        case RepetitionReward():
            return lambda completions: [
                repetition_reward(c.tokens, term.ngram_size, term.max_penalty) for c in completions
            ]


def _scored_text(completion: RewardInput, strip_thinking: bool) -> str:
    """The completion; with `strip_thinking`, the string after the thinking, empty if the thinking has not ended."""
    if not strip_thinking:
        return completion.text
    return after_thinking(THINK + completion.text if completion.thinking else completion.text).lstrip()


def _columns(completions: Sequence[RewardInput]) -> dict[str, list[Any]]:
    """The arguments of a function, under TRL's names, and the columns of the data; `full_answer` is its own `answer`,
    of which the argument may be a part."""
    names = dict.fromkeys(name for completion in completions for name in completion.columns)
    columns = {name: [completion.columns.get(name) for completion in completions] for name in names}
    columns |= {"full_answer": columns["answer"]} if "answer" in columns and "full_answer" not in columns else {}
    if episodes := [completion.episode for completion in completions if completion.episode is not None]:
        columns |= {
            "environments": [episode.environment for episode in episodes],
            "trajectories": [episode.trajectory for episode in episodes],
        }
    return columns | {
        "prompts": [completion.prompt for completion in completions],
        "completions": [c.text if c.episode is None else c.episode.trajectory.messages for c in completions],
        "completion_ids": [list(completion.tokens) for completion in completions],
        "answer": [completion.answer for completion in completions],
    }


def length_reward(tokens: int, target: int, scale: float) -> float:
    """-|tokens - target| * scale: L1's reward for a target length (Aggarwal and Welleck 2025, eq. 1)."""
    return -abs(tokens - target) * scale


def overlong_reward(tokens: int, max_completion_length: int, cache: int) -> float:
    """DAPO's soft overlong punishment (Yu et al. 2025, eq. 13).

    It is 0, then falls linearly to -1 over the last `cache` tokens before `max_completion_length`; beyond it, -1."""
    safe = max_completion_length - cache
    if tokens <= safe:
        return 0.0
    return (safe - tokens) / cache if tokens <= max_completion_length else -1.0


def repetition_reward(tokens: Sequence[int], ngram_size: int, max_penalty: float) -> float:
    """`max_penalty` times the share of n-grams that repeat an earlier one (Yeo et al. 2025, appendix C.2)."""
    total = len(tokens) - ngram_size + 1
    if total < 1:
        return 0.0
    distinct = len({tuple(tokens[start : start + ngram_size]) for start in range(total)})
    return (1 - distinct / total) * max_penalty
