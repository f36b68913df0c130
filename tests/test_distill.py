"""Distillation: exact divergences, the chunked path equal to the dense one, whole steps, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from test_resume import assert_same_run
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl.experimental.gkd import GKDTrainer

from posttrain import distillation, runner
from posttrain.base.errors import ConfigError, DataError, ModelError
from posttrain.config import load
from posttrain.distillation import DIVERGENCES, compare_distributions, divergence_of
from posttrain.runs.files import load_json
from posttrain.runs.stored_rollouts import StoredRun

BETA = {"reverse_kl": 1.0, "forward_kl": 0.0, "jsd": 0.3}  # what TRL's beta is for each


def random_log_probs(rows: int, vocabulary: int, dtype=torch.float64, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (3 * torch.randn(rows, vocabulary, generator=generator, dtype=dtype) for _ in range(2))
    return student, teacher


# --- the divergences --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_and_its_gradient_are_those_of_autograd(name):
    student, teacher = random_log_probs(5, 11)
    student.requires_grad_(True)
    p, q, beta = student.softmax(-1), teacher.softmax(-1), BETA["jsd"]
    m = (1 - beta) * p + beta * q
    dense = {
        "reverse_kl": p * (p / q).log(),
        "forward_kl": q * (q / p).log(),
        "jsd": beta * q * (q / m).log() + (1 - beta) * p * (p / m).log(),
    }[name].sum(-1)
    (gradient,) = torch.autograd.grad(dense.sum(), student)
    value, by_logits = divergence_of(name, beta)(student.detach().log_softmax(-1), teacher.log_softmax(-1))
    torch.testing.assert_close(value, dense.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(by_logits, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_is_that_of_trl(name):
    student, teacher = random_log_probs(7, 13)
    student.requires_grad_(True)
    theirs = GKDTrainer.generalized_jsd_loss(student[None], teacher[None], beta=BETA[name], temperature=0.7)
    (gradient,) = torch.autograd.grad(theirs, student)
    log_p, log_q = ((one.detach() / 0.7).log_softmax(-1) for one in (student, teacher))
    value, by_logits = divergence_of(name, BETA["jsd"])(log_p, log_q)
    assert value.sum().item() == pytest.approx(theirs.item(), abs=1e-12)  # their mean is over a batch of one
    torch.testing.assert_close(by_logits / 0.7, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("beta", "limit"), [(1 - 1e-9, "reverse_kl"), (1e-9, "forward_kl")])
def test_jensen_shannon_goes_over_into_the_two_others(beta, limit):
    """Divided by the weight that vanishes, as GKD (arXiv 2306.13649, section 3) says of β → 0."""
    log_p, log_q = (one.log_softmax(-1) for one in random_log_probs(3, 9))
    value, _ = divergence_of("jsd", beta)(log_p, log_q)
    weight = min(beta, 1 - beta)
    torch.testing.assert_close(value / weight, divergence_of(limit, 0.5)(log_p, log_q)[0], rtol=1e-5, atol=1e-6)


def test_probabilities_near_zero_keep_values_and_gradients_finite():
    log_p, log_q = (torch.tensor([[0.0, -200.0, 200.0 * sign]]).log_softmax(-1) for sign in (-1, 1))
    for name in DIVERGENCES:
        value, gradient = divergence_of(name, 0.5)(log_p, log_q)
        assert value.isfinite().all() and gradient.isfinite().all() and value.item() > 0.3


# --- chunk by chunk ---------------------------------------------------------------------------------------------------


def model(vocabulary: int, hidden: int, seed: int, **settings) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=False, **settings,
    )  # fmt: skip
    made = LlamaForCausalLM(config)
    torch.nn.init.normal_(made.lm_head.weight, std=0.3)  # at 1 rounding to float32 is above 1e-6
    return made


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("chunk", [1 << 21, 200])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_chunks_give_the_dense_loss_and_gradient(monkeypatch, name, chunk, softcap):
    """In float32 beside float64, and the teacher's head has more rows: 37 token ids are compared."""
    monkeypatch.setitem(distillation.CHUNK_ELEMENTS, "cpu", chunk)
    student, teacher = model(37, 16, 1), model(41, 24, 2)
    student.config.final_logit_softcapping = softcap  # pyright: ignore[reportAttributeAccessIssue]
    student.lm_head.bias = torch.nn.Parameter(torch.randn(37))
    rows, temperature = 29, 0.8
    hidden_N = torch.randn(rows, 16, requires_grad=True)
    teacher_N, target_N, weight_N = torch.randn(rows, 24), torch.randint(37, (rows,)), torch.rand(rows)
    inputs = hidden_N, student.lm_head.weight, student.lm_head.bias

    found = compare_distributions(
        (student, hidden_N), (teacher, teacher_N), target_N, weight_N, divergence_of(name, 0.3), temperature
    )
    gradients = torch.autograd.grad(2 * found.loss, inputs)

    wide = [one.detach().double().requires_grad_(True) for one in inputs]
    logits = wide[0] @ wide[1].T + wide[2]
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    log_p = (logits / temperature).log_softmax(-1)
    log_q = (teacher_N.double() @ teacher.lm_head.weight[:37].detach().double().T / temperature).log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    log_m = (0.7 * p + 0.3 * q).log()
    dense_N = {
        "reverse_kl": p * (log_p - log_q),
        "forward_kl": q * (log_q - log_p),
        "jsd": 0.3 * q * (log_q - log_m) + 0.7 * p * (log_p - log_m),
    }[name].sum(-1)
    loss = (weight_N * dense_N).sum()
    assert found.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(found.divergence_N.double(), dense_N.detach(), rtol=1e-5, atol=1e-6)
    at = target_N[:, None]
    torch.testing.assert_close(found.logprob_N.double(), log_p.detach().gather(1, at)[:, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.teacher_logprob_N.double(), log_q.gather(1, at)[:, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.entropy_N.double(), -(p * log_p).sum(-1).detach(), rtol=1e-5, atol=1e-6)
    for ours, dense in zip(gradients, torch.autograd.grad(2 * loss, wide), strict=True):
        torch.testing.assert_close(ours.double(), dense, rtol=1e-5, atol=2e-6)


def test_a_second_backward_is_refused():
    """The gradients are scaled in place: what is left of them is not the gradient."""
    student, teacher = model(7, 8, 1), model(7, 8, 2)
    hidden_N = torch.randn(3, 8, requires_grad=True)
    found = compare_distributions(
        (student, hidden_N), (teacher, torch.randn(3, 8)), torch.zeros(3).long(), torch.ones(3),
        divergence_of("reverse_kl", 0.5),
    )  # fmt: skip
    found.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute it again"):
        found.loss.backward()


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def student(scratch_model, tmp_path_factory) -> Path:
    """The scratch model with other weights."""
    folder = tmp_path_factory.mktemp("student")
    made = AutoModelForCausalLM.from_pretrained(scratch_model)
    torch.manual_seed(7)
    for parameter in made.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter) * parameter.std()
    made.save_pretrained(folder)
    AutoTokenizer.from_pretrained(scratch_model).save_pretrained(folder)
    return folder


ROWS = [
    {"prompt": f"What is {a} and {b}?", "completion": f"It is {a + b}.", "answer": str(a + b)}
    for a in range(3, 7)
    for b in range(2, 5)
]


def train(tmp_path: Path, student: Path, method: dict, *overrides: str, resume: bool = False, rows=ROWS, **sections):
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "name": "run",
        "output_dir": str(tmp_path),
        "model": {"path": str(student)},
        "method": {"type": "distill", **method},
        "data": {"source": str(tmp_path / "rows.jsonl"), "max_length": 96},
        "rollout": {"max_completion_length": 10, "temperature": 0.9},
        "training": {"batch_size": 6, "max_steps": 1, "learning_rate": 1e-3, "warmup_steps": 0},
        "tracking": {"logging_steps": 1},
        "devices": {"type": "cpu"},
    } | sections
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings))
    assert runner.train(load(file, overrides).config, resume=resume) == 0
    return tmp_path / "run"


def lines(folder: Path) -> list[dict]:
    return [
        line for text in (folder / "metrics.jsonl").read_text().splitlines() if "loss" in (line := json.loads(text))
    ]


def dense_step(student: Path, teacher: Path, sequences, divergence: str, temperature: float = 0.9):
    """Loss and gradient norm of (student's prompt, teacher's prompt, completion), each computed alone and whole."""
    models = [AutoModelForCausalLM.from_pretrained(folder).double() for folder in (student, teacher)]
    losses, count = [], sum(len(completion) for *_, completion in sequences)
    for *prompts, completion in sequences:
        log_p, log_q = (
            made(torch.tensor([[*prompt, *completion]]))
            .logits[0, len(prompt) - 1 : -1]
            .div(temperature)
            .log_softmax(-1)
            for made, prompt in zip(models, prompts, strict=True)
        )
        log_q = log_q.detach()
        kl = {"reverse_kl": log_p.exp() * (log_p - log_q), "forward_kl": log_q.exp() * (log_q - log_p)}[divergence]
        losses.append(kl.sum() / count)
    loss = torch.stack(losses).sum()
    loss.backward()
    gradients = [p.grad.flatten() for p in models[0].parameters() if p.grad is not None]
    return loss.item(), torch.cat(gradients).norm().item()


def sampled(folder: Path) -> list[tuple[list[int], list[int]]]:
    with StoredRun(folder) as stored:
        prompts = [json.loads(one["tokens"]) if isinstance(one["tokens"], str) else one["tokens"]
                   for one in stored.prompts(1)]  # fmt: skip
        return [(list(prompts[one["prompt_index"]]), list(one["tokens"])) for one in stored.rollouts(1)]


@pytest.mark.parametrize("tokens_per_pack", [4096, 120])
def test_a_step_has_the_dense_loss_and_gradient(tmp_path, student, scratch_model, tokens_per_pack):
    method = {"teacher": str(scratch_model), "num_generations": 2}
    folder = train(tmp_path, student, method, f"training.tokens_per_pack={tokens_per_pack}")
    sequences = [(prompt, prompt, completion) for prompt, completion in sampled(folder)]
    assert len(sequences) == 12
    loss, norm = dense_step(student, scratch_model, sequences, "reverse_kl")
    [line] = lines(folder)
    assert line["loss"] == pytest.approx(loss, rel=1e-4)
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert "reward" not in line and "rewards/left_out_ratio" not in line


def test_given_completions_are_learned_from_beside_sampled_ones(tmp_path, student, scratch_model):
    method = {"teacher": str(scratch_model), "on_policy_fraction": 0.5, "divergence": "forward_kl"}
    folder = train(tmp_path, student, method, "data.shuffle=false")
    tokenizer = AutoTokenizer.from_pretrained(student)
    rows = []
    for row in ROWS[:6]:
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        whole = tokenizer.apply_chat_template(turns, return_dict=False)
        prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
        rows.append((prompt, whole[len(prompt) :]))
    drawn = sampled(folder)
    assert 0 < len(drawn) < 6
    prompts = [prompt for prompt, _ in drawn]
    sequences = [(p, p, c) for p, c in [*drawn, *((p, c) for p, c in rows if p not in prompts)]]
    assert len(sequences) == 6
    loss, norm = dense_step(student, scratch_model, sequences, "forward_kl")
    [line] = lines(folder)
    # A small divergence is a difference of log-probabilities, each rounded in float32.
    assert line["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["copy", "adapter"])
def test_the_model_itself_teaches_from_another_prompt(tmp_path, student, lora):
    """Of a fresh adapter the gradient is of the adapter alone: only the loss is compared."""
    method = {"teacher_system_prompt": "Answer in one word."}
    folder = train(
        tmp_path, student, method, "training.tokens_per_pack=160", model={"path": str(student), "lora": lora}
    )
    tokenizer = AutoTokenizer.from_pretrained(student)
    sequences = []
    for prompt, completion in sampled(folder):
        text = tokenizer.decode(prompt)
        asked = next(row["prompt"] for row in ROWS if row["prompt"] in text)
        turns = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": asked}]
        theirs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        assert theirs != prompt
        sequences.append((prompt, theirs, completion))
    loss, norm = dense_step(student, student, sequences, "reverse_kl")
    [line] = lines(folder)
    assert line["loss"] == pytest.approx(loss, rel=1e-4)
    if lora is None:
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_a_teacher_with_a_padded_vocabulary(tmp_path, student, scratch_model):
    """The same tokenizer with 100 more rows of the head, as larger models of a family have them."""
    padded = AutoModelForCausalLM.from_pretrained(scratch_model)
    before = len(padded.get_input_embeddings().weight)
    padded.resize_token_embeddings(before + 100, mean_resizing=False)
    padded.save_pretrained(tmp_path / "padded")
    AutoTokenizer.from_pretrained(scratch_model).save_pretrained(tmp_path / "padded")
    [line] = lines(train(tmp_path / "one", student, {"teacher": str(tmp_path / "padded")}))
    [same] = lines(train(tmp_path / "two", student, {"teacher": str(scratch_model)}))
    assert line["loss"] == pytest.approx(same["loss"], rel=1e-5)


def test_rewards_are_watched_and_evaluated_where_there_are_some(tmp_path, student, scratch_model):
    data = {"source": str(tmp_path / "rows.jsonl"), "max_length": 96, "validation": {"rows": 3}}
    folder = train(
        tmp_path, student, {"teacher": str(scratch_model), "num_generations": 2},
        data=data, rewards=[{"type": "math"}],
    )  # fmt: skip
    [line] = lines(folder)
    assert line["reward"] == 0.0 and line["rewards/left_out_ratio"] == 0.0
    assert "eval_reward" in load_json(folder / "results.json")["final"]


def test_resumed_equals_uninterrupted(tmp_path, student, scratch_model, power_cut):
    method = {"teacher": str(scratch_model), "on_policy_fraction": 0.7}
    training = {"batch_size": 4, "max_steps": 7, "learning_rate": 1e-3}
    sections = {"training": training, "checkpoint": {"save_steps": 2, "save_total_limit": None}}
    train(tmp_path / "whole", student, method, **sections)
    with power_cut(step=5):
        train(tmp_path / "broken", student, method, **sections)
    train(tmp_path / "broken", student, method, resume=True, **sections)
    assert_same_run(tmp_path / "whole/run", tmp_path / "broken/run")


def test_another_tokenizer_is_refused(tmp_path, student, shared):
    with pytest.raises(ModelError, match=r"has a different tokenizer from .* tokens differ, e\.g\. .*student's family"):
        train(tmp_path, student, {"teacher": str(shared / "models/stories260K")})


def test_rows_without_a_completion_are_refused_where_they_are_needed(tmp_path, student, scratch_model):
    rows = [{"prompt": row["prompt"]} for row in ROWS]
    train(tmp_path / "sampled", student, {"teacher": str(scratch_model)}, rows=rows)
    with pytest.raises(DataError, match=r"has no completion, which is needed if method.on_policy_fraction is below 1"):
        train(tmp_path / "given", student, {"teacher": str(scratch_model), "on_policy_fraction": 0.5}, rows=rows)


@pytest.mark.parametrize(
    ("method", "sections", "message"),
    [
        ({}, {}, "method.teacher is missing: name a model to learn from"),
        ({"teacher": "x", "jsd_beta": 0.2}, {}, "is read by divergence: jsd only"),
        ({"teacher": "x"}, {"data": {"source": "x", "validation": {"rows": 2}}}, "rewards are needed to evaluate"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path, method, sections, message):
    file = tmp_path / "config.json"
    settings = {"model": "x", "method": {"type": "distill", **method}, "data": {"source": "x"}} | sections
    file.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=message):
        load(file)


def test_a_run_saved_under_the_former_names_loads(tmp_path, scratch_model):
    saved = {"type": "distill", "teacher": "t", "divergence": "jensen_shannon", "jensen_shannon_beta": 0.25}
    file = tmp_path / "a.json"
    data = {"source": "rows.jsonl"}
    file.write_text(json.dumps({"name": "a", "model": str(scratch_model), "method": saved, "data": data}))
    method = load(file).config.method
    assert (method.divergence, method.jsd_beta) == ("jsd", 0.25)
