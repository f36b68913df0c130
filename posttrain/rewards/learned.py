"""A trained reward model as a reward: the model's score of a prompt with its completion."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import compress

from posttrain.base.errors import ModelError, RewardError
from posttrain.base.log import log
from posttrain.base.pieces import Pieces
from posttrain.batch import Example, Node
from posttrain.config import DevicesConfig, ModelConfig
from posttrain.data.render import rendering
from posttrain.data.rows import Row, RowError, Turns
from posttrain.data.tokenise import Ids, Tokeniser, Trained
from posttrain.models.devices import compute_dtype, device_of
from posttrain.models.load import check_embeddings, is_reward_model, load_config, load_model, load_tokenizer
from posttrain.scoring import RewardScorer, of_sequences

TOKENS_PER_PACK = 8192
Prompts = Sequence[str | Turns]


class LearnedReward:
    """A loaded reward model. It reads strings, so its tokenizer may differ from the policy's tokenizer.

    Conversations are rendered with the reward model's chat template; a completion directly follows a string prompt. A
    completion ends with the stop token, or with the template's end of turn, unless it is truncated. After a string
    prompt, sampled tokens are scored unchanged if the reward model's tokenizer decodes them to the completion.
    """

    def __init__(
        self, path: str, devices: DevicesConfig, max_completion_length: int | None = None, date: str | None = None
    ):
        model = ModelConfig(path=path)
        if not is_reward_model(model):
            raise ModelError(
                f"{path} is not a reward model: it has no classification head; `method: reward` trains one"
            )
        self.path, self._date = path, date
        self.longest = getattr(load_config(model), "max_position_embeddings", None) or math.inf
        if max_completion_length and max_completion_length >= self.longest:
            log.warning(
                "the reward model %s reads %d tokens, prompt and completion together, but completions may have %d: a "
                "completion that is too long stops the run; lower rollout.max_completion_length",
                path, self.longest, max_completion_length,
            )  # fmt: skip
        self._device = device_of(devices)
        self.tokenizer = load_tokenizer(model)
        loaded = load_model(model, "reward", compute_dtype(model, self._device), self._device)
        self._embeddings = check_embeddings(loaded, self.tokenizer, path)
        self._scorer = RewardScorer(loaded)

    def __call__(
        self,
        prompts: Prompts,
        completions: Sequence[str],
        truncated: Sequence[bool],
        sampled: Sequence[Ids] | None = None,
    ) -> list[float]:
        """The reward of each completion; `sampled`: the token ids of each completion, if known.

        Raises RewardError if a completion is too long or its reward is not finite."""
        encoded = self._encode(prompts, completions, truncated, sampled)
        budget = max([TOKENS_PER_PACK, *(len(item.tokens) for item in encoded)])
        examples = list(map(_example, encoded))
        scored = of_sequences(examples, lambda packed: self._scorer(packed).tolist(), self._device, budget, True)
        rewards = [value for [value] in scored]
        for index, value in enumerate(rewards):
            if not math.isfinite(value):
                raise RewardError(f"the reward model {self.path} gives {value} to completion {index}: it is damaged")
        return rewards

    def _encode(
        self, prompts: Prompts, completions: Sequence[str], truncated: Sequence[bool], sampled: Sequence[Ids] | None
    ) -> list[Trained]:
        rows = [Row(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        kinds = {isinstance(prompt, str) for prompt in prompts}
        if len(kinds) > 1:
            raise RewardError("prompts must all be strings or all be lists of messages")
        with ExitStack() as stack:
            renderer = None
            if kinds == {False}:
                if self.tokenizer.chat_template is None:
                    raise RewardError(f"the reward model {self.path} has no chat template for conversations")
                renderer = stack.enter_context(rendering(self.tokenizer, date=self._date))
            tokeniser = Tokeniser(self.tokenizer, renderer, False)
            cut = iter(tokeniser.unfinished(list(compress(rows, truncated))))
            whole = iter(tokeniser.completions(list(compress(rows, (not short for short in truncated))), True))
            tokenised = [next(cut if short else whole) for short in truncated]
            if sampled is not None and renderer is None:
                before = tokeniser.prompts(rows)
                tokenised = list(map(self._as_sampled, tokenised, before, completions, truncated, sampled))
        encoded = []
        for index, item in enumerate(tokenised):
            if isinstance(item, RowError):
                raise RewardError(f"completion {index} cannot be read by the reward model: {item}")
            if not len(item.tokens):
                raise RewardError(f"completion {index} and its prompt are empty: the reward model has nothing to read")
            if max(item.tokens) >= self._embeddings:
                raise RewardError(
                    f"completion {index} or its prompt has the token {max(item.tokens):,} with the tokenizer of the "
                    f"reward model {self.path}, which has {self._embeddings:,} embeddings: use the tokenizer that it "
                    "was trained with"
                )
            if len(item.tokens) > self.longest:
                raise RewardError(
                    f"completion {index} has {len(item.tokens)} tokens with its prompt, but the reward model "
                    f"{self.path} reads at most {self.longest:g}: lower rollout.max_completion_length or "
                    "data.max_prompt_length"
                )
            encoded.append(item)
        return encoded

    def _as_sampled(
        self, read: Trained | RowError, prompt: tuple[str, Ids] | RowError, text: str, short: bool, sampled: Ids
    ) -> Trained | RowError:
        """The prompt with the sampled tokens, if they decode to `text` with this tokenizer; otherwise `read`."""
        if isinstance(read, RowError) or isinstance(prompt, RowError):
            return read
        before = list(prompt[1])
        # The last sampled token is a stop token, or completes a stop string.
        for ids in (sampled,) if short else (sampled[:-1], sampled):
            if len(sampled) and Pieces(self.tokenizer, before).whole(ids) == text:
                stop = self.tokenizer.eos_token_id
                end = [] if short or not isinstance(stop, int) else [stop]
                tokens = [*before, *ids, *end]
                return Trained(tokens, ((len(before), len(tokens)),), len(before))
        return read


def _example(item: Trained) -> Example:
    """A prompt with its completion, which is not empty. A pack computes a prompt that several share once."""
    trunk = list(item.tokens[: min(item.prompt, len(item.tokens) - 1)])
    leaf = Node(item.tokens[len(trunk) :], trained=True)
    return Example((Node(trunk, children=(leaf,)) if trunk else leaf,), row=0)
