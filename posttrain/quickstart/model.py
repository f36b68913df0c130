"""The quickstart's model, a small Qwen3 with random weights and a tokenizer made for the task. Also samples a model's
replies to problems, grades them, makes preference pairs of them, and counts right replies on held-out problems."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from posttrain.base.console import counter, progress
from posttrain.base.files import table_beside
from posttrain.config import DataConfig, DevicesConfig, ModelConfig, TagsConfig
from posttrain.data import arithmetic_problems
from posttrain.data.render import RenderRequest, rendered
from posttrain.data.templates import choose_template
from posttrain.engines import EmbeddedEngine, Sampling, seed_of, stop_token_ids, text_of
from posttrain.evaluation.statistics import wilson
from posttrain.models.load import load_model, load_tokenizer
from posttrain.rewards.learned import LearnedReward

PAD, STOP = "<pad>", "<stop>"
EXAMPLES = 1000  # strings that the tokenizer is trained on
VOCABULARY = 512  # maximum size: all 256 bytes, so that any string can be encoded, and phrases of the task
LONGEST = 56  # maximum tokens of a reply; a right reply has at most 45
ROWS = 256  # replies scored at a time
PER_PROBLEM = 2  # maximum number of pairs per problem
TAGS = TagsConfig()
Problem = dict[str, str]  # problem, solution (the working), answer


def make_model(folder: Path, seed: int) -> int:
    """Write a model folder that transformers can read. Returns the number of weights. The tokenizer has the
    chat template `tags`: a reply has its working between two tags, then its solution between two."""
    tokenizer = make_tokenizer(seed)
    torch.manual_seed(seed)
    ids, sizes = tokenizer.get_vocab(), table_beside(__file__, "model.yaml")
    config = Qwen3Config(vocab_size=len(tokenizer), pad_token_id=ids[PAD], eos_token_id=ids[STOP], **sizes)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def make_tokenizer(seed: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer trained on the task. Every digit and every tag is a token."""
    data = DataConfig(source="builtin:arithmetic", template="tags")
    blank = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token=STOP)
    template = choose_template(data, blank)
    rows = arithmetic_problems("train", EXAMPLES, seed)
    replies = [(row["problem"], template.compose(row["solution"], row["answer"])) for row in rows]
    texts = rendered(blank, [RenderRequest(turns(*reply)) for reply in replies])
    tags = list(data.tags.model_dump().values())
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[0-9]"), "isolated"),
            *(pre_tokenizers.Split(mark, "removed") for mark in (STOP, *tags)),  # no phrase crosses a tag
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),  # whole phrases may become tokens
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, STOP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, eos_token=STOP, chat_template=blank.chat_template
    )


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's reply to a problem. `text` starts with the tag at the end of the prompt."""

    problem: str
    text: str
    formatted: bool  # working, then solution, each between its tags, and nothing else
    worked: bool  # formatted, and the working is not empty
    right: bool  # formatted, and the solution is exactly the answer
    finished: bool  # the reply ended with the stop token


PARTS = [re.escape(tag) for tag in TAGS.model_dump().values()]
FORMAT = re.compile("{}((?:(?!{tag}).)*){}{}((?:(?!{tag}).)*){}".format(*PARTS, tag="|".join(PARTS)), re.DOTALL)


def grade(text: str, answer: str) -> tuple[bool, bool, bool]:
    """Whether a reply follows the format (every tag once, in order), shows its working, and gives the answer."""
    match = FORMAT.fullmatch(text)
    return (True, match[1] != "", match[2] == answer) if match else (False, False, False)


def sample_replies(
    model: Path, problems: Sequence[Problem], what: str, *, samples: int = 1, seed: int | None = None
) -> list[Reply]:
    """Generate `samples` replies to every problem, grouped by problem; greedy, or at temperature 1 with a `seed`."""
    settings = ModelConfig(path=str(model))
    tokenizer = load_tokenizer(settings)
    policy = load_model(settings, "lm", torch.float32, torch.device("cpu"))
    sampling = Sampling(
        temperature=0.0 if seed is None else 1.0,
        max_completion_length=LONGEST,
        num_generations=samples,
        stop_token_ids=stop_token_ids(policy, tokenizer),
    )
    prompts = rendered(tokenizer, [RenderRequest(turns(problem["problem"]), generate=True) for problem in problems])
    tokens = tokenizer(prompts, add_special_tokens=False).input_ids
    seeds = [seed_of(seed or 0, index) for index in range(len(problems))]
    with counter(what, len(problems)) as count:
        groups = EmbeddedEngine(policy).generate(tokens, sampling, seeds=seeds, finished=lambda *_: count())
    replies = []
    for problem, prompt, group in zip(problems, tokens, groups, strict=True):
        for completion in group:
            text = TAGS.reasoning_start + text_of(completion, (), tokenizer, prompt)
            finished = completion.finish_reason == "stop"
            replies.append(Reply(problem["problem"], text, *grade(text, problem["answer"]), finished))
    return replies


def rewards(model: Path, replies: Sequence[Reply], what: str) -> list[float]:
    """The reward model's score for each reply."""
    judge, values = LearnedReward(str(model), DevicesConfig(type="cpu")), list[float]()
    for start in progress(range(0, len(replies), ROWS), what):
        chunk = replies[start : start + ROWS]
        texts = [reply.text for reply in chunk]
        values += judge([turns(reply.problem) for reply in chunk], texts, [False] * len(chunk))
    return values


def turns(problem: str, reply: str | None = None) -> list[dict[str, str]]:
    """A conversation: a problem, and its reply if there is one."""
    question = [{"role": "user", "content": problem}]
    return question if reply is None else [*question, {"role": "assistant", "content": reply}]


def make_pairs(replies: Sequence[Reply], samples: int) -> list[dict[str, str]]:
    """Make preference pairs from a model's own replies: a right reply is preferred to a wrong one to the same problem.
    A problem gives at most PER_PROBLEM pairs, each with a different wrong reply. Unfinished replies are dropped."""
    pairs = []
    for start in range(0, len(replies), samples):
        group = [reply for reply in replies[start : start + samples] if reply.finished]
        right = dict.fromkeys(reply.text for reply in group if reply.right)
        wrong = dict.fromkeys(reply.text for reply in group if not reply.right)
        for chosen, rejected in zip(cycle(right), list(wrong)[:PER_PROBLEM], strict=False):
            pairs.append({"prompt": replies[start].problem, "chosen": chosen, "rejected": rejected})
    return pairs


@dataclass(frozen=True, slots=True)
class Share:
    """The share `count` / `total`, with the 95 % interval for the true share."""

    count: int
    total: int

    @property
    def value(self) -> float:
        return self.count / self.total

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.value, self.total)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.1%} ({100 * low:.1f}–{100 * high:.1f})"


@dataclass(frozen=True, slots=True)
class Measured:
    """One model's results on the held-out problems."""

    right: Share
    right_greedy: Share
    formatted: Share
    worked: Share
    reward: float  # mean


def measure(replies: Sequence[Reply], greedy: Sequence[Reply], rewards: Sequence[float]) -> Measured:
    """Count right replies, sampled and greedy. `rewards` are the rewards of the sampled replies."""
    total = len(replies)
    return Measured(
        right=Share(sum(reply.right for reply in replies), total),
        right_greedy=Share(sum(reply.right for reply in greedy), total),
        formatted=Share(sum(reply.formatted for reply in replies), total),
        worked=Share(sum(reply.worked for reply in replies), total),
        reward=sum(rewards) / total,
    )


def paired(before: Sequence[Reply], after: Sequence[Reply]) -> tuple[int, int]:
    """The number of problems that only the first model solves, and the number that only the second model solves."""
    both = list(zip(before, after, strict=True))
    return sum(b.right and not a.right for b, a in both), sum(a.right and not b.right for b, a in both)


COLUMNS = ("right answer", "right, greedy", "working", "format", "reward")


def rows(measured: Mapping[str, Measured]) -> list[list[str]]:
    """The rows of the results table: one per model, with the cells in the order of COLUMNS."""
    return [
        [name, str(model.right), str(model.right_greedy), f"{model.worked.value:.1%}", f"{model.formatted.value:.1%}",
         f"{model.reward:+.2f}"]
        for name, model in measured.items()
    ]  # fmt: skip


def contrasting(replies: Mapping[str, Sequence[Reply]], first: str, second: str) -> list[int]:
    """Indices of up to four example problems: solved by only the second model, by both, by only the first, by none."""
    kinds = ((False, True), (True, True), (True, False), (False, False))
    pairs = [(b.right, a.right) for b, a in zip(replies[first], replies[second], strict=True)]
    return [pairs.index(kind) for kind in kinds if kind in pairs]
