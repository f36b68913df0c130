"""The models that a server hosts: a policy behind the live engine, its adapters, and a reward model."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import nn

from posttrain.base.errors import ConfigError, DataError, ModelError, PosttrainError
from posttrain.base.log import log
from posttrain.batch import Example, Node, pack
from posttrain.config import DataConfig, DevicesConfig, ModelConfig, RunConfig
from posttrain.data.codec import Codec
from posttrain.data.render import RenderRequest, rendered
from posttrain.data.rows import Row, RowError
from posttrain.data.templates import choose_template
from posttrain.data.tokenise import Tokeniser
from posttrain.engines import Sampling, stop_token_ids
from posttrain.engines.live import Alternatives, Event, Failed, Job, Live, Token
from posttrain.models.adapters import with_adapter
from posttrain.models.devices import compute_dtype, take_device
from posttrain.models.load import check_embeddings, is_reward_model, load_model, load_tokenizer
from posttrain.rewards.compose import Rewards as EpisodeRewards
from posttrain.rewards.learned import LearnedReward, Prompts
from posttrain.scoring import next_token_logits, row_chunks, scored_states, scores_of
from posttrain.serving.record import TITLE, Recorder
from posttrain.serving.texts import Bound

WARM_UP_TOKENS = 2
RENDERERS = 2  # processes that render conversations with the chat template
KEPT_S = 86_400.0  # seconds that an idle rendering process is kept: a conversation may pause
MOST_CODECS = 16  # sets of tools whose codecs are kept
MOST_REWARDED = 1 << 17  # maximum tokens of a text if the reward model has no limit
TokenScore = tuple[float | None, float | None, Alternatives]  # log-probability, entropy (nats), most likely tokens
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Served:
    """The models to serve, with their names in the HTTP API, and the limits for concurrent work."""

    model: ModelConfig
    name: str
    adapters: dict[str, str]  # name -> folder
    reward_model: str | None
    template: str | None  # None: the tokenizer's own template
    devices: DevicesConfig
    max_rows: int
    max_waiting: int
    context: int | None
    variables: Mapping[str, Any] = field(default_factory=dict)  # defaults for the chat template
    record: Path | None = None  # a folder for recorded episodes
    graded_by: RunConfig | None = None  # settings with rewards of recorded episodes


class Policy:
    """A causal model that completes prompts. It needs a running event loop."""

    def __init__(self, served: Served):
        device = take_device(served.devices)
        self.name, self.tokenizer = served.name, load_tokenizer(served.model)
        loaded = load_model(served.model, "lm", compute_dtype(served.model, device), device)
        check_embeddings(loaded, self.tokenizer, served.model.path)
        template = served.template or ("chat" if self.tokenizer.chat_template else "none")
        data = DataConfig(source="-", template=template, chat_template_kwargs=dict(served.variables))
        self.template = choose_template(data, self.tokenizer)
        if served.template is None and template == "none":
            log.warning("%s has no chat template: messages are simply joined; set one with --template", served.name)
        adapted = _adapted(loaded, served.adapters)
        self.stops = stop_token_ids(adapted, self.tokenizer, self.template.turns)
        self._texts = Tokeniser(self.tokenizer, None, assistant_only_loss=False)
        self._renderers = ThreadPoolExecutor(RENDERERS, "posttrain-templates")
        self._codec = lru_cache(MOST_CODECS)(lambda key: Codec(self.tokenizer, *json.loads(key)))
        self._queues: dict[Job, asyncio.Queue[Event]] = {}
        self._loop = asyncio.get_running_loop()
        self.live = Live(
            adapted,
            self.tokenizer,
            self._deliver,
            max_rows=served.max_rows,
            max_waiting=served.max_waiting,
            context=served.context,
        )
        self._bound = Bound(self.tokenizer, self.live.context)

    async def events(self, jobs: Sequence[Job]) -> AsyncGenerator[Event]:
        """Submit jobs and yield their events. Closing the iterator cancels them, and so does the refusal of any job."""
        queue: asyncio.Queue[Event] = asyncio.Queue()
        left = {job: job.sampling.num_generations for job in jobs}
        try:
            for job in jobs:
                self._queues[job] = queue
                self.live.submit(job)
            while any(left.values()):
                event = await queue.get()
                if not isinstance(event, Token):
                    left[event.job] = 0 if isinstance(event, Failed) else left[event.job] - 1
                yield event
        finally:
            for job in jobs:
                if self._queues.pop(job, None) is not None and left[job]:
                    with contextlib.suppress(PosttrainError):
                        self.live.cancel(job)

    async def warm_up(self) -> None:
        """Generate and render a short text, so that the first request need not wait for memory and processes.

        Raises the error of a model that cannot generate."""
        job = Job([self.stops[0] if self.stops else 0], Sampling(max_completion_length=WARM_UP_TOKENS))
        async for event in self.events([job]):
            if isinstance(event, Failed):
                raise event.error
        with contextlib.suppress(DataError):  # the template may refuse an empty message
            await self.in_thread(self.chat_tokens, [{"role": "user", "content": ""}], {}, renders=True)

    def adapter(self, model: str) -> str | None:
        """The adapter that a request's `model` names, or None: any other name means the model without adapters."""
        return model if model in self.live.adapters else None

    def close(self) -> None:
        self.live.close()
        self._renderers.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, work: Callable[..., T], *arguments: Any, renders: bool = False) -> T:
        """Run `work` in another thread, so that other requests are answered meanwhile. Work that `renders` with the
        chat template runs in a separate pool and does not delay other work."""
        return await self._loop.run_in_executor(self._renderers if renders else None, work, *arguments)

    def codec(self, tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Codec:
        """The codec of conversations with these tools. Raises DataError if the template cannot write them."""
        if not self.template.turns:
            raise DataError("tools need a chat template, and the model is served without one: start with --template")
        return self._codec(json.dumps([tools, variables]))

    def check_size(self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
        """Raise DataError for a conversation that cannot fit, without tokenising it."""
        calls = [json.dumps(turn["tool_calls"]) for turn in turns if turn.get("tool_calls")]
        self._bound.check(*(str(turn["content"]) for turn in turns), *calls, json.dumps(tools))

    def chat_tokens(
        self,
        turns: Sequence[dict[str, Any]],
        variables: Mapping[str, Any],
        continued: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """The prompt of a conversation as in training: rendered with the template, then tokenised unchanged.

        `variables`: additional template variables. `continued`: the last message is the start of the reply, as with
        `continue_final_message` in transformers.
        """
        if tools:
            self.check_size(turns, tools)
            return self.codec(tools, variables).first(turns)
        return self._tokens(self._chat(turns, variables, continued))

    def scored_tokens(
        self, turns: Sequence[dict[str, Any]], variables: Mapping[str, Any]
    ) -> tuple[list[int], list[int]]:
        """The prompt of the last message, and the prompt with that message, rendered as in `chat_tokens`. A message
        that the template would change is appended to the prompt unchanged."""
        prompt = self._chat(turns[:-1], variables)
        try:
            whole = self._chat(turns, variables, continued=True)
        except DataError:  # for example, the template removes a reply's thinking
            whole = ""
        whole = whole if whole.startswith(prompt) else prompt + turns[-1]["content"]
        return self._tokens(prompt), self._tokens(whole)

    def _chat(self, turns: Sequence[dict[str, Any]], variables: Mapping[str, Any], continued: bool = False) -> str:
        self._bound.check(*(turn["content"] for turn in turns))
        if not self.template.turns:
            if variables:
                raise DataError("chat_template_kwargs: the model is served without a chat template")
            return "".join(turn["content"] for turn in turns)
        request = RenderRequest(turns, generate=not continued, continued=continued, variables=variables)
        return rendered(self.tokenizer, [request], KEPT_S)[0]

    def _tokens(self, text: str) -> list[int]:
        if not self.template.turns:
            return self.text_tokens(text)
        self._bound.check(text)
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def text_tokens(self, text: str) -> list[int]:
        """The tokens of a text, as for a prompt without a template: with a begin token if the tokenizer adds one."""
        self._bound.check(text)
        [prompt] = self._texts.prompts([Row(text, "")])
        return [] if isinstance(prompt, RowError) else list(prompt[1])

    async def scores(self, tokens: Sequence[int], alternatives: int, model: str) -> list[TokenScore]:
        if len(tokens) > self.live.context:
            raise DataError(f"the text has {len(tokens):,} tokens; the server reads up to {self.live.context:,}")
        work = self.live.call(lambda policy: score(policy, tokens, alternatives), self.adapter(model))
        return await asyncio.wrap_future(work)

    def _deliver(self, events: Sequence[Event]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so no client is waiting
            self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: Sequence[Event]) -> None:
        for event in events:
            if (queue := self._queues.get(event.job)) is not None:
                queue.put_nowait(event)


def score(policy: nn.Module, tokens: Sequence[int], alternatives: int) -> list[TokenScore]:
    """For each token: its log-probability, the entropy at its position, and the most likely tokens there, among which
    it has the same log-probability. The first token has no scores."""
    result: list[TokenScore] = [(None, None, [])]
    if len(tokens) < 2:
        return result[: len(tokens)]
    example = Example((Node(tokens[:1], children=(Node(tokens[1:], trained=True),)),), 0)
    [packed] = pack([example], len(tokens))
    packed = packed.to(next(policy.parameters()).device)
    hidden_N = scored_states(policy, packed)
    scores = scores_of(policy, hidden_N, packed.target_N, 1.0)
    if not alternatives:
        pairs = zip(scores.logprob_N.tolist(), scores.entropy_N.tolist(), strict=True)
        return result + [(*pair, []) for pair in pairs]
    for part in row_chunks(policy, len(hidden_N)):
        logprobs = next_token_logits(policy, hidden_N[part]).log_softmax(-1)
        own = logprobs.gather(1, packed.target_N[part, None]).squeeze(1).tolist()
        values, ids = (top.tolist() for top in logprobs.topk(min(alternatives, logprobs.shape[-1])))
        likely = [[*zip(*pair, strict=True)] for pair in zip(ids, values, strict=True)]
        result += zip(own, scores.entropy_N[part].tolist(), likely, strict=True)
    return result


class Rewards:
    """A reward model, which runs in its own thread."""

    def __init__(self, path: str, devices: DevicesConfig):
        self._reward = LearnedReward(path, devices)
        self._thread = ThreadPoolExecutor(1, "posttrain-reward")
        self._bound = Bound(self._reward.tokenizer, int(min(self._reward.longest, MOST_REWARDED)))

    async def __call__(self, prompts: Prompts, completions: Sequence[str], truncated: Sequence[bool]) -> list[float]:
        def rewards() -> list[float]:
            for prompt, completion in zip(prompts, completions, strict=True):
                turns = [prompt] if isinstance(prompt, str) else [str(turn["content"]) for turn in prompt]
                self._bound.check(*turns, completion)
            return self._reward(prompts, completions, truncated)

        return await asyncio.get_running_loop().run_in_executor(self._thread, rewards)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Host:
    policy: Policy | None
    rewards: Rewards | None
    names: tuple[str, ...]  # the model's name, then the names of its adapters
    recorder: Recorder | None = None

    @classmethod
    async def start(cls, served: Served) -> Self:
        is_reward = is_reward_model(served.model)
        reward = served.reward_model or (served.model.path if is_reward else None)
        rewards = None if reward is None else Rewards(reward, served.devices)
        if reward == served.model.path and served.adapters:
            raise ConfigError("a reward model cannot be served with adapters: leave out --adapter")
        if is_reward and served.record is not None:
            raise ConfigError("--record needs a model that generates completions, but this is a reward model")
        recorder = None if served.record is None else _recorder(served, served.record)
        policy = None if is_reward else Policy(served)
        if policy is not None:
            await policy.warm_up()
            if recorder is not None:  # for those who read the tokens
                policy.tokenizer.save_pretrained(recorder.folder)
        return cls(policy, rewards, (served.name, *served.adapters), recorder)

    def close(self) -> None:
        for part in (self.policy, self.rewards, self.recorder):
            if part is not None:
                part.close()


def _recorder(served: Served, folder: Path) -> Recorder:
    config = served.graded_by
    if config is None:
        return Recorder(folder, EpisodeRewards((), environments=[TITLE]))
    rewards = EpisodeRewards.of_run(config, config.rewards, devices=served.devices, environments=[TITLE])
    return Recorder(folder, rewards)


def _adapted(loaded: Any, adapters: dict[str, str]) -> nn.Module:
    """The model with all adapters loaded."""
    policy: Any = loaded
    for name, folder in adapters.items():
        if not (Path(folder) / "adapter_config.json").is_file():
            raise ModelError(f"the adapter {name}: {folder} has no adapter_config.json")
        policy = with_adapter(policy, ModelConfig(path=folder), name)
    return policy.eval() if isinstance(policy, torch.nn.Module) else policy
