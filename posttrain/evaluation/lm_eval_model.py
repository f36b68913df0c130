"""Runs lm-eval's tasks with posttrain's engines and scorer behind lm-eval's model interface (docs/eval-export.md).

lm-eval makes the prompts and grades the answers. It is an optional package; without it, importing this module raises
ConfigError.
"""

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import ConfigError, DataError
from posttrain.base.imports import need
from posttrain.base.threads import sharing_cores
from posttrain.base.words import by_key, first_line
from posttrain.config import DevicesConfig, ModelConfig
from posttrain.config.schema.rollout import RolloutConfig
from posttrain.data.render import RenderRequest, rendered
from posttrain.evaluation.answering import Reply
from posttrain.evaluation.lm_eval_requests import Requests
from posttrain.evaluation.records import Answer
from posttrain.models.devices import compute_dtype, take_device
from posttrain.models.load import check_embeddings, load_model, load_tokenizer

TemplateLM: Any = need("lm_eval.api.model", "lm-eval", "a suite lm-eval:TASK").TemplateLM
_strings, _windows = import_module("lm_eval.models.utils"), import_module("lm_eval.utils")


class PosttrainLM(TemplateLM):
    """A model for `lm_eval.simple_evaluate(model=…)`. Strings are tokenised as in lm-eval's `hf` models."""

    backend = "causal"

    def __init__(self, model: Requests):
        super().__init__()
        self.model, self.max_length = model, model.positions
        self.tokenizer: Any = model.tokenizer
        self.generated: dict[tuple[str, int], list[Reply]] = {}  # by task and document

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that serves as context for strings without one."""
        first = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        request = RenderRequest(chat_history, generate=add_generation_prompt, continued=not add_generation_prompt)
        return rendered(self.tokenizer, [request])[0]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:
            marked = _strings.has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
            return self.tokenizer.encode(string, **({"add_special_tokens": False} if marked else {}))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        return self.model.logprobs([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        pairs, owners = [], []
        for index, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in _windows.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
                pairs.append(_windows.make_disjoint_window(window))
                owners.append(index)
        totals = [0.0] * len(requests)
        for index, (logprob, _) in zip(owners, self.model.logprobs(pairs), strict=True):
            totals[index] += logprob
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        completions: list[str] = [""] * len(requests)
        # prompts, with the indices of their requests, by generation settings (JSON) and number of completions
        asked = [(json.dumps(settings, sort_keys=True), prompt) for prompt, settings in (one.args for one in requests)]
        members = by_key((one, index) for index, one in enumerate(asked))
        alike = by_key(((settings, len(own)), (prompt, own)) for (settings, prompt), own in members.items())
        for (settings, count), prompts in alike.items():
            known = _strings.normalize_gen_kwargs(json.loads(settings))
            sampling = self.model.sampling(known, count)
            groups = self.model.complete([self.tok_encode(prompt) for prompt, _ in prompts], sampling)
            for (_, members), group in zip(prompts, groups, strict=True):
                for index, done in zip(members, group, strict=True):
                    # Without the stop string that ended the completion, and without the rest of the last token.
                    completions[index] = _strings.postprocess_generated_text(done.text, list(sampling.stop), None)
                    request = requests[index]
                    self.generated.setdefault((request.task_name, request.doc_id), []).append(done)
        return completions


def manager_of(model: ModelConfig, tasks: Sequence[str], chat: bool) -> tuple[Any, PreTrainedTokenizerBase]:
    """lm-eval's task manager, and the tokenizer. Raises ConfigError if a task or chat template is missing."""
    manager = import_module("lm_eval.tasks").TaskManager()
    unknown = [task for task in tasks if task not in manager.all_tasks and not Path(task).is_file()]
    if unknown:
        raise ConfigError(f"lm-eval has no task {', '.join(unknown)}: see `lm-eval ls tasks`, or give a .yaml file")
    tokenizer = load_tokenizer(model)
    if chat and not tokenizer.chat_template:
        raise ConfigError(f"model {model.path} has no chat template: evaluate it without chat")
    return manager, tokenizer


@sharing_cores()
def run_lm_eval(
    model: ModelConfig,
    tasks: Sequence[str],
    rollout: RolloutConfig | None = None,
    devices: DevicesConfig | None = None,
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
    system_instruction: str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Evaluate a model on lm-eval's tasks: names, or paths of task files (`.yaml`).

    Args:
        rollout: engine settings; sampling settings come from the task.
        limit: maximum number of documents per task; None: all.
        num_fewshot: worked examples in each prompt; None: the task's number.
        chat: whether prompts are messages, written with the tokenizer's chat template.

    Returns the results of `lm_eval.simple_evaluate` with its samples, which `answers_of` reads, and `generated`.

    Raises ConfigError for an unknown task, for chat without a chat template, and for generation settings that
    engines do not support, and DataError if a task's rows cannot be loaded.
    """
    rollout, device = rollout or RolloutConfig(), take_device(devices or DevicesConfig())
    manager, tokenizer = manager_of(model, tasks, chat)
    policy = load_model(model, "lm", compute_dtype(model, device), device)
    check_embeddings(policy, tokenizer, model.path)
    with Requests(policy, tokenizer, rollout, seed) as requests:
        lm = PosttrainLM(requests)
        try:
            results = import_module("lm_eval").simple_evaluate(
                model=lm,
                tasks=list(tasks),
                task_manager=manager,
                limit=limit,
                num_fewshot=num_fewshot,
                apply_chat_template=chat,
                system_instruction=system_instruction,
                fewshot_as_multiturn=chat,
                random_seed=seed,
            )
        except OSError as error:  # from datasets: not reachable, not found
            raise DataError(f"lm-eval cannot load the rows of {', '.join(tasks)}: {first_line(error)}") from error
    return {**results, "generated": lm.generated}


def answers_of(results: dict[str, Any]) -> list[Answer]:
    """Convert samples of `run_lm_eval` to answers: the suite is the task; the setting is the filter, "" for `none`.

    The score is the task's first numeric metric: 1 is correct, 0 wrong. A sample without a numeric metric is ungraded.
    So are all completions of a document except the first, because lm-eval has one verdict for all of them.
    """
    return [
        answer
        for task, samples in results["samples"].items()
        for sample in samples
        for answer in _answers(task, sample, results["generated"].get((task, sample["doc_id"]), []))
    ]


def _answers(task: str, sample: dict[str, Any], generated: Sequence[Reply]) -> list[Answer]:
    score = next((float(sample[name]) for name in sample["metrics"] if isinstance(sample[name], int | float)), None)
    reason = None if score is not None else "the task has no numeric metric for single samples"
    if generated:
        extracted, completions = sample["filtered_resps"][0], list(zip(sample["resps"][0], generated, strict=True))
    else:  # continuations by log-probability: the answer is the likeliest
        likeliest = max(range(len(sample["resps"])), key=lambda i: sample["resps"][i][0][0])
        extracted = sample["arguments"][likeliest][-1]
        completions = [(extracted, Reply(extracted))]
    return [
        Answer(
            suite=task,
            setting="" if sample["filter"] == "none" else f"filter={sample['filter']}",
            item=str(sample["doc_id"]),
            sample=number,
            prompt=sample["arguments"][0][0],
            gold=str(sample["target"]),
            completion=text,
            extracted=str(extracted),
            verdict="ungraded" if number or score is None else {1.0: "correct", 0.0: "wrong"}.get(score, "scored"),
            score=None if number else score,
            tokens=done.tokens,
            finish_reason=done.finish_reason,
            seconds=done.seconds,
            reason="lm-eval has one verdict for all completions of a document" if number else reason,
        )
        for number, (text, done) in enumerate(completions)
    ]
