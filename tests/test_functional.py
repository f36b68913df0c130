"""posttrain.functional: tokens, log-probabilities, masks and the DPO of a pair, by hand, brute force, transformers."""

import copy
import inspect
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from trl.trainer.utils import selective_log_softmax as trl_selective_log_softmax

from posttrain import functional as pf
from posttrain.data.templates import alpaca_prompt, choose_template
from posttrain.models.attention import NAME as PACKED

SIGNATURES = {
    "tokenize_prompt_and_output": "prompt_strs output_strs tokenizer",
    "compute_entropy": "logits chunk_size",
    "selective_log_softmax": "logits index chunk_size",
    "get_response_log_probs": "model input_ids labels return_token_entropy",
    "masked_mean": "tensor mask dim",
    "masked_normalize": "tensor mask dim normalize_constant",
    "sft_microbatch_train_step": "policy_log_probs response_mask gradient_accumulation_steps normalize_constant",
    "compute_group_normalized_rewards": "reward_fn rollout_responses repeated_ground_truths group_size advantage_eps "
    "normalize_by_std",
    "compute_naive_policy_gradient_loss": "raw_rewards_or_advantages policy_log_probs",
    "compute_grpo_clip_loss": "advantages policy_log_probs old_log_probs cliprange",
    "compute_policy_gradient_loss": "policy_log_probs loss_type raw_rewards advantages old_log_probs cliprange",
    "grpo_microbatch_train_step": "policy_log_probs response_mask gradient_accumulation_steps loss_type raw_rewards "
    "advantages old_log_probs cliprange",
    "compute_per_instance_dpo_loss": "lm lm_ref tokenizer beta prompt response_chosen response_rejected",
    "get_packed_sft_dataset": "tokenizer dataset_path seq_length shuffle",
    "iterate_batches": "dataset batch_size shuffle",
    "parse_mmlu_response": "mmlu_example model_output",
    "parse_gsm8k_response": "model_output",
    "r1_zero_reward_fn": "response ground_truth fast",
    "question_only_reward_fn": "response ground_truth fast",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_and_docstrings(name):
    """Argument names are the course's, and each docstring teaches."""
    function = getattr(pf, name)
    assert " ".join(inspect.signature(function).parameters) == SIGNATURES[name] and name in pf.__all__
    assert len(inspect.getdoc(function).splitlines()) > 3 or "Like `r1_zero_reward_fn`" in function.__doc__


def test_defaults():
    for name, defaults in {
        "masked_mean": {"dim": None},
        "r1_zero_reward_fn": {"fast": True},
        "masked_normalize": {"dim": None, "normalize_constant": 1.0},
        "sft_microbatch_train_step": {"normalize_constant": 1.0},
        "grpo_microbatch_train_step": dict.fromkeys(("raw_rewards", "advantages", "old_log_probs", "cliprange")),
    }.items():
        parameters = inspect.signature(getattr(pf, name)).parameters.values()
        assert {p.name: p.default for p in parameters if p.default is not p.empty} == defaults, name


# --- tokens ---------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of one id a letter, a = 1."""

    pad_token_id: int | None = 0
    eos_token_id: int | None = 99

    def __call__(self, text, add_special_tokens, verbose):
        assert not add_special_tokens
        return {"input_ids": [ord(letter) - 96 for letter in text]}


def test_tokens_by_hand():
    out = pf.tokenize_prompt_and_output(["ab", "c", "", "abcd"], ["cd", "d", "ef", ""], Letters())
    assert list(out) == ["input_ids", "labels", "response_mask"]
    assert out["input_ids"].tolist() == [[1, 2, 3], [3, 4, 0], [5, 6, 0], [1, 2, 3]]
    assert out["labels"].tolist() == [[2, 3, 4], [4, 0, 0], [6, 0, 0], [2, 3, 4]]
    # A row without a prompt: its first token is predicted from nothing, so it is no label.
    assert out["response_mask"].tolist() == [
        [False, True, True],
        [True, False, False],
        [True, False, False],
        [False] * 3,
    ]


def test_padding_without_a_pad_token():
    tokenizer = Letters()
    tokenizer.pad_token_id = None
    assert pf.tokenize_prompt_and_output(["a", "a"], ["bcd", "b"], tokenizer)["labels"][1].tolist() == [2, 99, 99]
    tokenizer.eos_token_id = None
    assert pf.tokenize_prompt_and_output(["a", "a"], ["bcd", "b"], tokenizer)["labels"][1].tolist() == [2, 0, 0]


def test_lists_that_do_not_match_are_refused():
    for prompts, outputs, match in (
        (["a"], [], "1 prompts and 0"),
        ([], [], "0 prompts"),
        (["a", ""], ["b", ""], "row 1"),
    ):
        with pytest.raises(ValueError, match=match):
            pf.tokenize_prompt_and_output(prompts, outputs, Letters())


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "minimind6400"])
def test_rows_are_prompt_and_output_tokenised_apart(shared, name):
    """Also where a tokenizer would merge them: "un" and "happy" stay two pieces."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / name)
    prompts, outputs = ["un", "What is 2 + 2? ", "你好"], ["happy", "4", " world, world, world"]
    out = pf.tokenize_prompt_and_output(prompts, outputs, tokenizer)
    lengths = []
    for b, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        p, o = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, output))
        row = torch.tensor(p + o)
        n = len(row) - 1
        lengths.append(n)
        assert out["input_ids"][b, : n + 1].tolist() == row[: out["input_ids"].shape[1]].tolist()
        assert out["labels"][b, :n].tolist() == row[1:].tolist()
        assert out["labels"][b][out["response_mask"][b]].tolist() == o
    assert out["labels"].shape == out["input_ids"].shape == out["response_mask"].shape == (3, max(lengths))


# --- log-probabilities and entropy ----------------------------------------------------------------------------------


def test_entropy_by_hand():
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [0.0, math.log(3), -math.inf, -math.inf], [1e30, 0, 0, 0]]])
    want = [math.log(4), -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), 0.0]
    assert pf.compute_entropy(logits)[0].tolist() == pytest.approx(want, abs=1e-6)


def test_entropy_is_stable():
    """Shifting logits changes nothing, however far; −∞ poisons neither value nor gradient."""
    logits = torch.randn(2, 3, 50, dtype=torch.float64)
    assert torch.allclose(pf.compute_entropy(logits + 1e8), pf.compute_entropy(logits), atol=1e-6)
    want = torch.distributions.Categorical(logits=logits).entropy()
    assert torch.allclose(pf.compute_entropy(logits), want)
    assert torch.isfinite(pf.compute_entropy(1e37 * torch.randn(4, 50))).all()
    barred = torch.tensor([1.0, 2.0, -math.inf, 0.5], requires_grad=True)
    pf.compute_entropy(barred).backward()
    free = torch.tensor([1.0, 2.0, 0.5], requires_grad=True)
    torch.distributions.Categorical(logits=free).entropy().backward()
    assert torch.allclose(barred.grad[[0, 1, 3]], free.grad) and barred.grad[2] == 0
    half = pf.compute_entropy(logits.bfloat16())
    assert half.dtype == torch.float32
    assert torch.allclose(half, pf.compute_entropy(logits.bfloat16().float()))


def of_full_logits(logits, index):
    """Both by way of the whole log softmax, and the gradient of a weighted sum of both."""
    logprob = logits.log_softmax(-1)
    chosen = logprob.gather(-1, index if index.ndim == logits.ndim else index[..., None])
    return chosen.view(index.shape), torch.distributions.Categorical(logits=logits).entropy()


@pytest.mark.parametrize("chunk_size", [1, 4, 128])
@pytest.mark.parametrize(("shape", "index"), [((3, 5, 40), (3, 5)), ((7, 40), (7, 3)), ((40,), ()), ((0, 40), (0,))])
def test_chunks_change_neither_value_nor_gradient(chunk_size, shape, index):
    logits = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 40, index)
    ours = pf.selective_log_softmax(logits, tokens, chunk_size), pf.compute_entropy(logits, chunk_size)
    theirs = of_full_logits(logits, tokens)
    weights = [torch.randn(value.shape, dtype=torch.float64) for value in theirs]
    for got, want, weight in zip(ours, theirs, weights, strict=True):
        assert got.shape == want.shape and torch.allclose(got, want, atol=1e-12)
        by_ours, by_theirs = (torch.autograd.grad((v * weight).sum(), logits, retain_graph=True) for v in (got, want))
        assert torch.allclose(by_ours[0], by_theirs[0], atol=1e-12)


def test_selective_log_softmax_is_trls():
    logits, index = 10 * torch.randn(2, 9, 50), torch.randint(0, 50, (2, 9))
    assert torch.allclose(pf.selective_log_softmax(logits, index), trl_selective_log_softmax(logits, index), atol=1e-5)
    half = logits.bfloat16().requires_grad_()
    got = pf.selective_log_softmax(half, index)
    assert got.dtype == torch.float32 and torch.allclose(got, of_full_logits(half.float(), index)[0], atol=1e-5)
    got.sum().backward()
    assert half.grad.dtype == torch.bfloat16
    for wrong, size, match in ((index[:, 1:], 4, "does not fit"), (index[None], 4, "does not fit"), (index, 0, "is 0")):
        with pytest.raises(ValueError, match=match):
            pf.selective_log_softmax(logits, wrong, size)


@pytest.mark.parametrize("what", ["compute_entropy", "selective_log_softmax"])
def test_chunks_save_memory(what):
    """Of 8 MB of logits, forward holds chunks of 64 kB, backward the gradient: largest allocations, by the profiler."""
    logits = torch.randn(2, 1024, 1024)[:, :-1].requires_grad_()  # not contiguous: nothing of its size is copied
    arguments = (logits,) if what == "compute_entropy" else (logits, torch.zeros(2, 1023, dtype=torch.long))
    with torch.profiler.profile(profile_memory=True) as forward:
        value = getattr(pf, what)(*arguments, chunk_size=16)
    assert largest(forward) <= 2 * 16 * 1024 * 4
    with torch.profiler.profile(profile_memory=True) as backward:
        value.sum().backward()
    assert 2 * 1023 * 1024 * 4 <= largest(backward) <= 2 * 1024 * 1024 * 4 + 4096


def largest(profile) -> int:
    return max(event.cpu_memory_usage for event in profile.events())


@pytest.fixture(scope="module")
def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_positions=512, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3)
    return GPT2LMHeadModel(config).eval()


def plain(model, input_ids, labels):
    """Log-probabilities and entropies as transformers' full logits give them."""
    distribution = torch.distributions.Categorical(logits=model(input_ids).logits.float())
    return distribution.log_prob(labels), distribution.entropy()


@pytest.mark.parametrize("attention", ["sdpa", "eager", PACKED])
def test_log_probs_are_those_of_full_logits(gpt2, attention):
    """Values and gradients, also for labels that are not the next inputs, whichever attention the model has."""
    model = copy.deepcopy(gpt2)
    model.set_attn_implementation(attention)
    input_ids, labels = torch.randint(0, 300, (2, 3, 11))
    weight = torch.randn(2, 3, 11)
    got = pf.get_response_log_probs(model, input_ids, labels, return_token_entropy=True)
    (torch.stack([got["log_probs"], got["token_entropy"]]) * weight).sum().backward()
    reference = copy.deepcopy(gpt2)
    reference.zero_grad()
    want = plain(reference, input_ids, labels)
    (torch.stack(want) * weight).sum().backward()
    assert list(got) == ["log_probs", "token_entropy"]
    assert torch.allclose(got["log_probs"], want[0], atol=1e-4) and torch.allclose(
        got["token_entropy"], want[1], atol=1e-4
    )
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)


def test_log_probs_of_any_module_with_logits(gpt2):
    class Wrapped(nn.Module):
        def forward(self, input_ids):
            return SimpleNamespace(logits=gpt2(input_ids).logits)

    input_ids, labels = torch.randint(0, 300, (2, 2, 7))
    ours = pf.get_response_log_probs(gpt2, input_ids, labels, True)
    theirs = pf.get_response_log_probs(Wrapped(), input_ids, labels, True)
    for name in ("log_probs", "token_entropy"):
        assert torch.allclose(ours[name], theirs[name], atol=1e-4)
    assert list(pf.get_response_log_probs(Wrapped(), input_ids, labels, False)) == ["log_probs"]
    with pytest.raises(ValueError, match=r"\[2, 7\] and \[2, 6\]"):
        pf.get_response_log_probs(gpt2, input_ids, labels[:, 1:], False)


def test_padding_on_the_right_changes_nothing(shared):
    """Each row of a padded batch of a really trained model = that row alone, and a story is likely under it."""
    folder = shared / "models/stories260K"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompts = ["<s>Once upon a time,", "<s>One day, a girl named Lily"]
    outputs = [" there was a little girl named Lily. She loved to play outside in the park.", " went out."]
    batch = pf.tokenize_prompt_and_output(prompts, outputs, tokenizer)
    got = pf.get_response_log_probs(model, batch["input_ids"], batch["labels"], False)["log_probs"]
    for b in range(2):
        alone = pf.tokenize_prompt_and_output(prompts[b : b + 1], outputs[b : b + 1], tokenizer)
        value = pf.get_response_log_probs(model, alone["input_ids"], alone["labels"], False)["log_probs"]
        assert torch.equal(batch["labels"][b][batch["response_mask"][b]], alone["labels"][alone["response_mask"]])
        assert torch.allclose(got[b][batch["response_mask"][b]], value[alone["response_mask"]], atol=1e-4)
    assert -2.0 < pf.masked_mean(got, batch["response_mask"], dim=1)[0] < 0


# --- masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [None, 0, 1, 2, -1])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_masking_is_choosing(dim, dtype):
    """Against a loop over the chosen elements; what is not chosen may be anything."""
    torch.manual_seed(0)
    tensor, mask = torch.randn(3, 4, 5), torch.rand(3, 4, 5) > 0.4
    mask[0, 0], mask[:, 1, 2] = True, True
    mask[0, :, 0] = True
    dirty = tensor.clone()
    dirty[~mask] = torch.tensor([math.nan, math.inf, -math.inf]).repeat(20)[: int((~mask).sum())]
    mean = pf.masked_mean(dirty, mask.to(dtype), dim)
    total = pf.masked_normalize(dirty, mask.to(dtype), dim, normalize_constant=2.5)
    if dim is None:
        assert mean == pytest.approx(tensor[mask].mean().item()) and total == pytest.approx(
            tensor[mask].sum().item() / 2.5
        )
        return
    rows, keeps = tensor.movedim(dim, -1), mask.movedim(dim, -1)
    for index in torch.cartesian_prod(*(torch.arange(size) for size in rows.shape[:-1])).tolist():
        chosen = rows[tuple(index)][keeps[tuple(index)]]
        if len(chosen):
            assert mean[tuple(index)] == pytest.approx(chosen.mean().item(), abs=1e-6)
        else:
            assert mean[tuple(index)].isnan()
        assert total[tuple(index)] == pytest.approx(chosen.sum().item() / 2.5, abs=1e-6)


def test_masks_at_the_edges():
    tensor = torch.tensor([[1.0, 2.0], [math.nan, -math.inf]], requires_grad=True)
    mask = torch.tensor([[1, 1], [0, 0]])
    mean = pf.masked_mean(tensor, mask, dim=1)
    assert mean[0] == 1.5 and mean[1].isnan()  # the mean of nothing, as torch's own
    assert pf.masked_normalize(tensor, mask, dim=1).tolist() == [3, 0]
    pf.masked_normalize(tensor, mask).backward()
    assert tensor.grad.tolist() == [[1, 1], [0, 0]]
    assert (
        pf.masked_mean(torch.tensor([[1, 2], [3, 5]]), torch.tensor([[0, 1]])) == 3.5
    )  # integers, a mask that broadcasts
    with pytest.raises(ValueError, match=r"mask \[3\] does not fit tensor \[2, 2\]"):
        pf.masked_mean(tensor, torch.ones(3))
    with pytest.raises(ValueError, match="normalize_constant is 0"):
        pf.masked_normalize(tensor, mask, normalize_constant=0)


# --- DPO ------------------------------------------------------------------------------------------------------------

PAIR = ("The quick brown fox jumps over", "the lazy dog.", "their crazy frog.")


def test_the_alpaca_prompt_is_the_template(shared):
    from posttrain.config import DataConfig

    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers/gpt2")
    choose_template(DataConfig(source="builtin:arithmetic", template="alpaca"), tokenizer)
    turns = [{"role": "user", "content": "Say it."}]
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == alpaca_prompt("Say it.")


@pytest.fixture(scope="module")
def two_models(shared):
    """Two small GPT-2s that disagree, and the real tokenizer."""
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=128, initializer_range=0.3)
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(GPT2LMHeadModel(config).eval())
    return *models, AutoTokenizer.from_pretrained(shared / "tokenizers/gpt2")


def test_dpo_equals_full_sequences_by_transformers(two_models):
    """log π of prompt and response with its stop token, by full logits: the prompt's part cancels out."""
    lm, lm_ref, tokenizer = two_models
    prompt, *responses = PAIR

    def log_prob(model, response):
        ids = torch.tensor([tokenizer.encode(alpaca_prompt(prompt) + response + tokenizer.eos_token)])
        return plain(model, ids[:, :-1], ids[:, 1:])[0].sum()

    (cw, cl), (rw, rl) = ([log_prob(model, response) for response in responses] for model in (lm, lm_ref))
    want = -F.logsigmoid(0.5 * ((cw - rw) - (cl - rl)))
    lm.zero_grad()
    got = pf.compute_per_instance_dpo_loss(lm, lm_ref, tokenizer, 0.5, *PAIR)
    assert got.shape == () and got.item() == pytest.approx(want.item(), rel=1e-4)
    got.backward()
    assert all(p.grad is None for p in lm_ref.parameters())
    ours = [p.grad.clone() for p in lm.parameters()]
    lm.zero_grad()
    want.backward()
    assert all(torch.allclose(a, p.grad, rtol=1e-2, atol=1e-4) for a, p in zip(ours, lm.parameters(), strict=True))


def test_dpo_at_the_edges(two_models):
    lm, lm_ref, tokenizer = two_models
    assert pf.compute_per_instance_dpo_loss(lm, lm, tokenizer, 0.1, *PAIR).item() == pytest.approx(math.log(2))
    loss = pf.compute_per_instance_dpo_loss(lm, lm_ref, tokenizer, 0.1, *PAIR)
    swapped = pf.compute_per_instance_dpo_loss(lm, lm_ref, tokenizer, 0.1, PAIR[0], PAIR[2], PAIR[1])
    assert math.exp(-loss.item()) + math.exp(-swapped.item()) == pytest.approx(1)  # σ(x) + σ(−x)
    stopped = [response + tokenizer.eos_token for response in PAIR[1:]]
    assert pf.compute_per_instance_dpo_loss(lm, lm_ref, tokenizer, 0.1, PAIR[0], *stopped) == loss  # not twice
    empty = pf.compute_per_instance_dpo_loss(lm, lm_ref, tokenizer, 0.1, PAIR[0], "", PAIR[2])
    assert torch.isfinite(empty)  # an empty response is its stop token
    with pytest.raises(ValueError, match="beta is 0"):
        pf.compute_per_instance_dpo_loss(lm, lm_ref, tokenizer, 0, *PAIR)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no eos_token"):
        pf.compute_per_instance_dpo_loss(lm, lm_ref, tokenizer, 0.1, *PAIR)
