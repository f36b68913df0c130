"""Distillation: exact divergences, the chunked path equal to the dense one, whole steps, and what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_resume import assert_same_run
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl.experimental.gkd import GKDTrainer
from trl.experimental.sdft.sdft_trainer import DemonstrationTeacherContextBuilder
from trl.experimental.sdpo import SDPOConfig
from trl.experimental.sdpo.loss_utils import (
    add_tail_bucket,
    compute_divergence,
    compute_full_logit_self_distillation_loss,
)
from trl.experimental.sdpo.sdpo_trainer import SuccessfulRolloutTeacherContextBuilder

from posttrain import distillation, runner
from posttrain.base.errors import ConfigError, DataError, ModelError
from posttrain.cli import main
from posttrain.config import load
from posttrain.config.schema.distill import SDFT_TEMPLATE
from posttrain.data.teacher import teacher_prompts
from posttrain.distillation import Head, Top, compare_distributions, divergence_of
from posttrain.inspection.losslab import losses
from posttrain.planning.estimate import holds_reference
from posttrain.runs.files import load_json
from posttrain.runs.stored_rollouts import StoredRun

BETA = {"reverse_kl": 1.0, "forward_kl": 0.0, "jsd": 0.3}  # what TRL's beta is for each


def random_log_probs(rows: int, vocabulary: int, dtype=torch.float64, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (3 * torch.randn(rows, vocabulary, generator=generator, dtype=dtype) for _ in range(2))
    return student, teacher


# --- the divergences --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BETA)
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


@pytest.mark.parametrize("name", BETA)
def test_a_divergence_is_that_of_trl(name):
    student, teacher = random_log_probs(7, 13)
    student.requires_grad_(True)
    theirs = GKDTrainer.generalized_jsd_loss(student[None], teacher[None], beta=BETA[name], temperature=0.7)
    (gradient,) = torch.autograd.grad(theirs, student)
    log_p, log_q = ((one.detach() / 0.7).log_softmax(-1) for one in (student, teacher))
    value, by_logits = divergence_of(name, BETA["jsd"])(log_p, log_q)
    assert value.sum().item() == pytest.approx(theirs.item(), abs=1e-12)  # their mean is over a batch of one
    torch.testing.assert_close(by_logits / 0.7, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", BETA)
def test_a_divergence_is_that_of_self_distillation_in_trl(name):
    """SDFT and SDPO with distillation_mode: full_logits, whose distillation_alpha is GKD's beta."""
    student, teacher = random_log_probs(7, 13)
    theirs_N = compute_full_logit_self_distillation_loss(student, teacher, distillation_alpha=BETA[name])
    ours_N, _ = divergence_of(name, BETA["jsd"])(student.log_softmax(-1), teacher.log_softmax(-1))
    torch.testing.assert_close(ours_N, theirs_N, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("beta", "limit"), [(1 - 1e-9, "reverse_kl"), (1e-9, "forward_kl")])
def test_jensen_shannon_goes_over_into_the_two_others(beta, limit):
    """Divided by the weight that vanishes, as GKD (arXiv 2306.13649, section 3) says of β → 0."""
    log_p, log_q = (one.log_softmax(-1) for one in random_log_probs(3, 9))
    value, _ = divergence_of("jsd", beta)(log_p, log_q)
    weight = min(beta, 1 - beta)
    torch.testing.assert_close(value / weight, divergence_of(limit, 0.5)(log_p, log_q)[0], rtol=1e-5, atol=1e-6)


def test_probabilities_near_zero_keep_values_and_gradients_finite():
    log_p, log_q = (torch.tensor([[0.0, -200.0, 200.0 * sign]]).log_softmax(-1) for sign in (-1, 1))
    for name in BETA:
        value, gradient = divergence_of(name, 0.5)(log_p, log_q)
        assert value.isfinite().all() and gradient.isfinite().all() and value.item() > 0.3


@pytest.mark.parametrize("name", BETA)
@pytest.mark.parametrize("k", [1, 4, 13])
def test_a_divergence_over_the_teachers_top_tokens_is_that_of_trl(name, k):
    """With TRL's tail bucket, and its gradient by autograd. With all tokens (k = V) it is the divergence over all."""
    student, teacher = random_log_probs(7, 13)
    student.requires_grad_(True)
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    log_q_k, ids = log_q.topk(k)
    theirs_N = compute_divergence(add_tail_bucket(log_p.gather(1, ids)), add_tail_bucket(log_q_k), BETA[name])
    (gradient,) = torch.autograd.grad(theirs_N.sum(), student)
    whole = Top(ids, log_q_k).log_probs(slice(None), log_p.detach())
    value_N, by_logits = divergence_of(name, BETA["jsd"])(log_p.detach(), whole)
    torch.testing.assert_close(value_N, theirs_N.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(by_logits, gradient, rtol=0, atol=1e-6)
    torch.testing.assert_close(whole.gather(1, ids), log_q_k, rtol=0, atol=0)
    assert k == 13 or whole.exp().sum(1).sub(1).abs().max() < 1e-9
    if k == 13:
        full_N, _ = divergence_of(name, BETA["jsd"])(log_p.detach(), log_q)
        torch.testing.assert_close(value_N, full_N, rtol=0, atol=1e-12)


def test_tokens_may_have_different_numbers_of_top_tokens():
    student, teacher = (one.log_softmax(-1) for one in random_log_probs(2, 9))
    log_q, ids = teacher.topk(3)
    log_q[1, 1:], ids[1, 1:] = -torch.inf, ids[1, 0]
    apart = [Top(ids[n : n + 1, :k], log_q[n : n + 1, :k]).log_probs(slice(None), student[n : n + 1])
             for n, k in ((0, 3), (1, 1))]  # fmt: skip
    together = Top(ids, log_q).log_probs(slice(None), student)
    torch.testing.assert_close(together, torch.cat(apart), rtol=0, atol=1e-12)


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


@pytest.mark.parametrize("name", BETA)
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
        (Head.of(student, temperature), hidden_N),
        (Head.of(teacher, temperature), teacher_N),
        target_N,
        weight_N,
        divergence_of(name, 0.3),
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
        (Head.of(student), hidden_N), (Head.of(teacher), torch.randn(3, 8)), torch.zeros(3).long(), torch.ones(3),
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
    if loss.requires_grad:  # not of saved adapters
        loss.backward()
    gradients = [p.grad.flatten() for p in models[0].parameters() if p.grad is not None]
    return loss.item(), torch.cat([torch.zeros(1), *gradients]).norm().item()


def sampled(folder: Path, step: int = 1) -> list[tuple[list[int], list[int]]]:
    with StoredRun(folder) as stored:
        prompts = [json.loads(one["tokens"]) if isinstance(one["tokens"], str) else one["tokens"]
                   for one in stored.prompts(step)]  # fmt: skip
        return [(list(prompts[one["prompt_index"]]), list(one["tokens"])) for one in stored.rollouts(step)]


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


# --- self-distillation ------------------------------------------------------------------------------------------------

TWO_STEPS = {
    "training": {"batch_size": 6, "max_steps": 2, "learning_rate": 1e-2, "warmup_steps": 0},
    "checkpoint": {"save_steps": 1, "save_total_limit": None},
}


def in_trl(prompt: list[dict], context: str, template: str = SDFT_TEMPLATE) -> list[dict]:
    """The teacher's prompt as TRL's SDFT writes it."""
    args = SimpleNamespace(teacher_prompt_template=template)
    builder = DemonstrationTeacherContextBuilder(SimpleNamespace(args=args))
    return builder._compose_teacher_prompt(prompt, context)


@pytest.mark.parametrize("kind", ["base", "live"])
@pytest.mark.parametrize("lora", [None, {"r": 4, "dropout": 0.1}], ids=["full", "adapter"])
def test_the_model_teaches_itself_with_a_demonstration(tmp_path, student, kind, lora):
    """SDFT. The second step's teacher has the weights of checkpoint-1 if it is live, and otherwise the initial ones."""
    method = {"teacher_model_kind": kind, "privileged_context": "completion", "num_generations": 2}
    folder = train(tmp_path, student, method, model={"path": str(student), "lora": lora}, **TWO_STEPS)
    tokenizer = AutoTokenizer.from_pretrained(student)
    sequences = []
    for prompt, completion in sampled(folder, 2):
        row = next(row for row in ROWS if row["prompt"] in tokenizer.decode(prompt))
        turns = in_trl([{"role": "user", "content": row["prompt"]}], row["completion"])
        theirs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        sequences.append((prompt, theirs, completion))
    now = folder / "checkpoint-1"
    loss, norm = dense_step(now, now if kind == "live" else student, sequences, "reverse_kl")
    line = lines(folder)[1]
    assert line["loss"] == pytest.approx(loss, rel=1e-4, abs=3e-7)
    if lora is None:
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-3)


def test_a_head_that_is_trained_beside_an_adapter_is_not_the_teachers(tmp_path, student):
    """PEFT's copy of a tied head: the teacher has the head of the model before training."""
    model = {"path": str(student), "lora": {"r": 4, "modules_to_save": ["embed_tokens"]}}
    folder = train(tmp_path, student, {"teacher_system_prompt": "Add."}, model=model, **TWO_STEPS)
    tokenizer, sequences = AutoTokenizer.from_pretrained(student), []
    for prompt, completion in sampled(folder, 2):
        asked = next(row["prompt"] for row in ROWS if row["prompt"] in tokenizer.decode(prompt))
        turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": asked}]
        theirs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        sequences.append((prompt, theirs, completion))
    loss, _ = dense_step(folder / "checkpoint-1", student, sequences, "reverse_kl")
    assert lines(folder)[1]["loss"] == pytest.approx(loss, rel=1e-4)


def shown(tmp_path: Path, scratch_model: Path, row: dict, method: dict, **data) -> str:
    """The teacher's prompt of a row."""
    (tmp_path / "one.jsonl").write_text(json.dumps(row) + "\n")
    settings = {
        "model": str(scratch_model), "method": {"type": "distill", **method},
        "data": {"source": str(tmp_path / "one.jsonl"), "max_length": 96, **data},
        "rollout": {"max_completion_length": 9},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = load(tmp_path / "config.json").config
    tokenizer = AutoTokenizer.from_pretrained(scratch_model)
    own = teacher_prompts(config, tokenizer, config.method, 500)
    assert own is not None
    [tokens] = own[0].values()
    return str(tokenizer.decode(tokens))


TURNS = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "It is {5}."}]


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"messages": TURNS}, "completion"),
        ({"prompt": "2 + 3?", "completion": "It is {5}."}, "completion"),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, "completion"),
        ({"instruction": "2 + 3?", "output": "It is {5}."}, "completion"),
        ({"instruction": "2 +", "input": "3?", "output": "It is {5}."}, "completion"),
        ({"prompt": "2 + 3?", "hint": "It is {5}."}, "hint"),
        ({"prompt": TURNS[:1], "hint": TURNS[1:]}, "hint"),
    ],
)
def test_the_demonstration_is_a_column_or_the_completion_in_every_format(tmp_path, scratch_model, row, column):
    method = {"privileged_context": column, "teacher_prompt_template": "Q: {prompt} A: {privileged_context} {x}"}
    system = {"system_prompt": "Add."} if column == "hint" else {}
    text = shown(tmp_path, scratch_model, row, method, **system)
    assert "Q: 2 + 3? A: It is {5}. {x}" in " ".join(text.split()) and ("Add." in text) == bool(system)


def test_a_template_with_fields_of_its_own_shows_the_demonstration(tmp_path, scratch_model):
    """The template writes an Alpaca row's instruction and input apart, and not the message's content."""
    row = {"instruction": "Add.", "input": "2 + 3?", "output": "It is {5}."}
    text = shown(tmp_path, scratch_model, row, {"privileged_context": "completion"}, template="alpaca")
    assert "### Instruction:\nAdd.\n2 + 3?\n\nIt is {5}." in text


def test_teacher_prompts_are_found_for_the_rows_of_every_source(tmp_path, student):
    """A run has half of a source's rows and holds some out; which half, the teacher's prompts need not know."""
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    sources = [{"source": str(tmp_path / f"{name}.jsonl"), "weight": w} for name, w in (("rows", 0.5), ("more", 1))]
    data = {"source": sources, "max_length": 96, "validation": {"rows": 3}}
    rewards = successes(tmp_path, "1.0")
    folder = train(tmp_path, student, {"privileged_context": "completion"}, data=data, **rewards)
    assert len(lines(folder)) == 1


def test_a_column_that_only_the_teacher_reads_is_read(tmp_path, student):
    folder = train(tmp_path, student, {"privileged_context": "hint"}, rows=[{**row, "hint": "Add."} for row in ROWS])
    assert "hint" not in (folder / "training.log").read_text().partition("step 1/")[0]


@pytest.mark.parametrize("bad", [{"hint": {"a": 1}}, {"hint": " "}])
def test_one_bad_demonstration_of_many_is_named(tmp_path, student, bad):
    """In the second of two sources."""
    rows = [{**ROWS[0], "prompt": f"{n} + 1?", "hint": "Add."} for n in range(150)]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows[99] |= bad
    data = {"source": [{"source": str(tmp_path / f"{name}.jsonl")} for name in ("more", "rows")], "max_length": 96}
    with pytest.raises(DataError, match=r"1 training prompt cannot be written .*\n.*rows.jsonl line 100.*: .*hint"):
        train(tmp_path, student, {"privileged_context": "hint"}, rows=rows, data=data)


def test_a_model_without_a_limit_of_positions(tmp_path, student, monkeypatch):
    for module in ("job", "reference"):
        monkeypatch.setattr(f"posttrain.training.{module}.positions_of", lambda config: None)
    assert len(lines(train(tmp_path, student, {"privileged_context": "completion"}))) == 1


def test_a_demonstration_is_read_without_a_chat_template_and_with_another_system_prompt(tmp_path, scratch_model):
    row = {"prompt": "2 + 3 =", "completion": " 5"}
    text = shown(tmp_path, scratch_model, row, {"privileged_context": "completion"}, template="none")
    assert text == "2 + 3 =\n\n 5"
    both = {"privileged_context": "completion", "teacher_system_prompt": "Short."}
    assert (
        "Short." in (text := shown(tmp_path, scratch_model, row, both, system_prompt="Long.")) and "Long." not in text
    )


@pytest.mark.parametrize("bad", [{}, {"hint": None}, {"hint": ""}, {"hint": []}])
def test_a_row_without_the_teachers_column_is_named(tmp_path, student, bad):
    rows = [{**row, "hint": "Add."} for row in ROWS]
    rows[7] = {**ROWS[7], **bad}
    with pytest.raises(
        DataError, match=r"rows.jsonl line 8: the column hint .* missing or empty; the row has prompt, "
    ):
        train(tmp_path, student, {"privileged_context": "hint"}, rows=rows)


def test_a_prompt_that_does_not_end_with_a_user_is_refused(tmp_path, student):
    rows = [{"prompt": [*TURNS[:1], {"role": "assistant", "content": "It"}], "completion": "is 5."}] * 6
    with pytest.raises(DataError, match=r"rows.jsonl line 1: .* ends with one of the assistant"):
        train(tmp_path, student, {"privileged_context": "completion"}, rows=rows)


def test_a_demonstration_that_does_not_fit_a_pack_is_refused_before_the_first_step(tmp_path, student):
    rows = [{**row, "completion": "It is so. " * (60 if n == 4 else 1)} for n, row in enumerate(ROWS)]
    with pytest.raises(DataError, match=r"1 prompt for which the teacher's prompt .* 10 tokens, in 200 .* rows 4 "):
        train(tmp_path, student, {"privileged_context": "completion"}, "training.tokens_per_pack=200", rows=rows)
    assert not (tmp_path / "run/metrics.jsonl").exists() or not lines(tmp_path / "run")


def test_the_datas_completions_must_fit_behind_the_teachers_prompts(tmp_path, student):
    """A row's completion stands in the teacher's prompt and after it."""
    rows = [{**row, "completion": "It is so. " * (16 if n == 4 else 1)} for n, row in enumerate(ROWS)]
    method = {"privileged_context": "completion", "on_policy_fraction": 0.5}
    with pytest.raises(DataError, match=r"1 prompt for .* no room for the data's completion .* in 120 .* rows 4 "):
        train(tmp_path, student, method, "training.tokens_per_pack=120", rows=rows)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": f"Once there were {n}."} for n in range(12)], "rows of format text have none: give the data a"),
        (
            [*ROWS, {"prompt": [*TURNS[:1], {"role": "assistant", "content": "It"}], "completion": "is 5."}],
            "1 prompt whose last message, which the teacher's replaces, is not the user's: remove the rows 12 ",
        ),
    ],
)
def test_prompts_without_a_place_for_a_success_are_refused_before_the_first_step(tmp_path, student, rows, message):
    with pytest.raises(DataError, match=message):
        train(tmp_path, student, SDPO, rows=rows, **successes(tmp_path, "1.0"))


def successes(tmp_path: Path, rule: str) -> dict:
    """A run's rewards: 1 for completions that a rule chooses."""
    name = f"rewards_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(f"def right(completions, **_):\n    return [{rule} for text in completions]\n")
    return {"rewards": [{"type": "python", "function": f"{name}:right"}]}


SDPO = {"use_successful_as_teacher": True, "teacher_model_kind": "live", "num_generations": 4}
SOME = "0.0 if len(str(text)) % 3 else 2.0"


def test_successful_completions_of_the_same_prompt_teach_the_others(tmp_path, student):
    """SDPO. Texts, and which completions are in the loss, are those of TRL's builder."""
    folder = train(tmp_path, student, SDPO, **successes(tmp_path, SOME), **TWO_STEPS)
    tokenizer = AutoTokenizer.from_pretrained(student)
    with StoredRun(folder) as stored:
        rows, asked = stored.rollouts(2), stored.prompts(2)
    found = sampled(folder, 2)
    trl, prompts = trl_builder(tokenizer), []
    for prompt, _ in found:
        text = next(row["prompt"] for row in ROWS if row["prompt"] in tokenizer.decode(prompt))
        prompts.append([{"role": "user", "content": text}])
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(c) for _, c in found], True, tokenizer.pad_token_id)
    rewards = torch.tensor([row["reward"] for row in rows])
    built = trl.build({"completion_ids": ids, "completion_mask": torch.ones_like(ids)}, prompts, rewards)
    kept = built["self_distillation_mask"].bool().tolist()
    assert any(kept) and not all(kept) and len(asked) == 6
    assert [row["advantages"] is not None for row in rows] == kept
    assert [row["old_logprobs"] is not None for row in rows] == kept  # others were not scored
    sequences = []
    for index, (prompt, completion) in enumerate(found):
        if kept[index]:
            mask = built["teacher_attention_mask"][index].bool()
            theirs = built["teacher_input_ids"][index][mask].tolist()[: -ids.shape[1]]
            sequences.append((prompt, theirs, completion))
    now = folder / "checkpoint-1"
    loss, norm = dense_step(now, now, sequences, "reverse_kl")
    line = lines(folder)[1]
    assert line["loss"] == pytest.approx(loss, rel=1e-4) and line["grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name in ("success_sample_fraction", "reprompt_sample_fraction"):
        name = f"self_distillation/{name}"
        assert line[name] == pytest.approx(trl.last_metrics[name])


def trl_builder(tokenizer) -> SuccessfulRolloutTeacherContextBuilder:
    """TRL's builder of the teacher's prompts, without its trainer."""
    args = SDPOConfig(output_dir="unused", report_to=[], use_cpu=True, bf16=False)
    alone = SimpleNamespace(
        gather=lambda one: one, process_index=0, device=torch.device("cpu"), pad_across_processes=lambda one, **_: one
    )

    def tokens(prompts):
        return [tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False) for p in prompts]

    trainer = SimpleNamespace(
        args=args, accelerator=alone, model=SimpleNamespace(training=True), num_generations=SDPO["num_generations"],
        _tokenizer=tokenizer, processing_class=tokenizer, _tokenize_prompts_untruncated=tokens,
    )  # fmt: skip
    return SuccessfulRolloutTeacherContextBuilder(trainer)


def shares(folder: Path) -> list[tuple[float, float]]:
    """The shares of completions with a successful one beside, and of those in the loss, by step."""
    names = ("success_sample_fraction", "reprompt_sample_fraction")
    found = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (line[f"self_distillation/{names[0]}"], line[f"self_distillation/{names[1]}"])
        for line in found
        if f"self_distillation/{names[0]}" in line
    ]


@pytest.mark.parametrize(("rule", "share"), [("0.0", 0.0), ("1.0", 1.0)])
def test_a_step_in_which_no_or_every_completion_is_successful(tmp_path, student, rule, share):
    """Without successes nothing is learned; the weights stay as they are."""
    folder = train(tmp_path, student, SDPO, **successes(tmp_path, rule), **TWO_STEPS)
    assert shares(folder) == [(share, share)] * 2
    assert ('"alarms/no_success": 2' in (folder / "metrics.jsonl").read_text()) == (share == 0)
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (student, folder / "final"))
    assert all(torch.equal(before[name], after[name]) for name in before) == (share == 0)


def test_the_loss_lab_has_the_loss_of_a_step_of_self_distillation(tmp_path, student):
    folder = train(tmp_path, student, SDPO, **successes(tmp_path, SOME), **TWO_STEPS)
    line, [own, *others] = lines(folder)[1], losses(folder, 2).rows
    assert own.loss == pytest.approx(line["loss"], rel=1e-5) and own.norm == pytest.approx(line["grad_norm"], rel=1e-5)
    assert [other.variant.name for other in others] == ["forward_kl", "jsd"]


def test_a_successful_completion_that_leaves_no_room_is_counted(tmp_path, student):
    method = SDPO | {"teacher_prompt_template": "{prompt}" + " so" * 150 + "{privileged_context}"}
    folder = train(tmp_path, student, method, "training.tokens_per_pack=120", **successes(tmp_path, "1.0"))
    assert shares(folder) == [(1, 0)]
    assert '"alarms/no_room": 1' in (folder / "metrics.jsonl").read_text()


@pytest.mark.parametrize("kind", ["live", "base"])
def test_the_live_model_is_no_second_model_in_memory(tmp_path, scratch_model, kind):
    settings = {"method": {"type": "distill", "teacher_model_kind": kind, "privileged_context": "completion"}}
    settings |= {"model": {"path": str(scratch_model)}, "data": {"source": "x"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = load(tmp_path / "config.json").config
    assert holds_reference(config, config.models[0]) == (kind == "base")
    assert config.method.refers_to_itself == (kind == "base")


def test_a_demonstration_is_learned(tmp_path, student):
    """The policy without the demonstration approaches itself with it."""
    method = {"privileged_context": "completion", "num_generations": 2}
    training = {"batch_size": 6, "max_steps": 16, "learning_rate": 1e-3, "warmup_steps": 0}
    losses = [line["loss"] for line in lines(train(tmp_path, student, method, training=training))]
    print("nats per token:", losses)
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])


# --- log-probabilities from a file ------------------------------------------------------------------------------------


def with_logprobs(student: Path, teacher: Path, k: int, rows=ROWS) -> list[dict]:
    """The rows with the teacher's `k` most likely tokens at each token of the completion, in TRL's names."""
    tokenizer, made = AutoTokenizer.from_pretrained(student), AutoModelForCausalLM.from_pretrained(teacher)
    written = []
    for row in rows:
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        whole = tokenizer.apply_chat_template(turns, return_dict=False)
        prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
        with torch.no_grad():
            logits = made(torch.tensor([whole])).logits[0, len(prompt) - 1 : -1]
        values, ids = logits.div(0.9).log_softmax(-1).topk(k)
        given = {"token_ids": whole[len(prompt) :], "logprob_token_ids": ids.tolist(), "logprobs": values.tolist()}
        written.append({**row, "teacher": given})
    return written


FILE = {"teacher_logprobs": "teacher", "on_policy_fraction": 0}


@pytest.mark.parametrize("format", ["completion", "messages"])
def test_score_writes_the_log_probabilities_that_a_student_learns_from(tmp_path, student, scratch_model, format):
    rows = ROWS
    if format == "messages":
        rows = [{"messages": [{"role": role, "content": row[name]} for role, name in
                              (("user", "prompt"), ("assistant", "completion"))]} for row in ROWS]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["score", str(scratch_model), str(tmp_path / "in.jsonl"), "--top-logprobs", "6400"]
    assert main([*command, "--output", str(tmp_path / "out.jsonl"), "--device", "cpu"]) == 0
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [{name: row[name] for name in rows[0]} for row in written] == rows
    for row in written:
        top = row["teacher_logprobs"]
        found = [dict(zip(*pair, strict=True)) for pair in zip(top["logprob_token_ids"], top["logprobs"], strict=True)]
        own = [one[token] for one, token in zip(found, top["token_ids"], strict=True)]
        assert (
            own == pytest.approx(row["logprobs"], abs=1e-5) and top["logprobs"][0] == sorted(top["logprobs"][0])[::-1]
        )
    method, exact = {"on_policy_fraction": 0, "divergence": "forward_kl"}, "rollout.temperature=1"
    [file] = lines(
        train(tmp_path / "a", student, method | {"teacher_logprobs": "teacher_logprobs"}, exact, rows=written)
    )
    [whole] = lines(train(tmp_path / "b", student, method | {"teacher": str(scratch_model)}, exact, rows=rows))
    assert file["loss"] == pytest.approx(whole["loss"], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_log_probabilities_of_all_tokens_in_a_file_are_as_good_as_the_teacher(
    tmp_path, student, scratch_model, divergence
):
    from_model = {"teacher": str(scratch_model), "on_policy_fraction": 0, "divergence": divergence}
    [whole] = lines(train(tmp_path / "model", student, from_model))
    [file] = lines(
        train(tmp_path / "file", student, FILE | {"divergence": divergence},
              rows=with_logprobs(student, scratch_model, 6400))
    )  # fmt: skip
    assert file["loss"] == pytest.approx(whole["loss"], rel=1e-3, abs=1e-6)
    assert file["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-3)


def test_a_few_log_probabilities_from_a_file_are_learned(tmp_path, student, scratch_model):
    training = {"batch_size": 12, "max_steps": 8, "learning_rate": 3e-3, "warmup_steps": 0, "tokens_per_pack": 120}
    rows = with_logprobs(student, scratch_model, 20)
    rows[3]["teacher"]["logprobs"][0], rows[3]["teacher"]["logprob_token_ids"][0] = [-2.0], [5]  # fewer than elsewhere
    method = FILE | {"divergence": "forward_kl"}
    losses = [line["loss"] for line in lines(train(tmp_path, student, method, rows=rows, training=training))]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "is missing"),
        ({"logprobs": "x"}, "must be an object with the lists"),
        ({"token_ids": [1, 2]}, "but the completion has .*: tokenizer, template or text differ"),
        ({"token_ids": 5}, "has the token_ids 5, but the completion has"),
        ({"token_ids": None, "logprobs": [[-1.0]]}, "lists of . and 1 tokens, but the completion has"),
        ((1, [], []), "at token 2 must have two lists of the same length"),
        ((1, [1, 2], [-1.0]), "at token 2 must have two lists of the same length"),
        ((0, [1, 1], [-1.0, -1.0]), "at token 1 must have different token ids"),
        ((0, [-1], [-1.0]), "at token 1 must have different token ids"),
        ((0, [1], [0.5]), "at token 1 must have finite log-probabilities of at most 0"),
        ((0, [1], [float("nan")]), "at token 1 must have finite log-probabilities"),
        ((0, [1], [float("-inf")]), "at token 1 must have finite log-probabilities"),
        ((0, [1, 2], [-0.1, -0.1]), "probabilities whose sum is 1.81"),
    ],
)
def test_wrong_log_probabilities_are_named_with_file_and_row(tmp_path, student, scratch_model, change, message):
    rows = with_logprobs(student, scratch_model, 2)
    if isinstance(change, tuple):
        at, ids, values = change
        rows[5]["teacher"]["logprob_token_ids"][at], rows[5]["teacher"]["logprobs"][at] = ids, values
    else:
        rows[5]["teacher"] = None if change is None else rows[5]["teacher"] | change
    with pytest.raises(
        DataError, match=rf"rows.jsonl line 6 \(row 5\): teacher \(method.teacher_logprobs\) .*{message}"
    ):
        train(tmp_path, student, FILE, rows=rows)


def test_a_separate_validation_set_needs_no_log_probabilities(tmp_path, student, scratch_model):
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:3]))
    held = {"source": str(tmp_path / "held.jsonl")}
    data = {"source": str(tmp_path / "rows.jsonl"), "max_length": 96, "validation": held}
    rows = with_logprobs(student, scratch_model, 2)
    folder = train(tmp_path, student, FILE, rows=rows, data=data, **successes(tmp_path, "1.0"))
    assert '"eval_reward": 1.0' in (folder / "metrics.jsonl").read_text()


def test_a_token_id_that_the_model_lacks_is_named(tmp_path, student, scratch_model):
    rows = with_logprobs(student, scratch_model, 2)
    rows[5]["teacher"]["logprob_token_ids"][0][1] = 6400
    with pytest.raises(
        DataError, match=r"row 5, counted from 0: teacher has the token id 6,400, but the model's are below 6,400"
    ):
        train(tmp_path, student, FILE, rows=rows, training={"batch_size": 12, "max_steps": 1})


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


@pytest.mark.parametrize("variant", ["teacher", "sdft", "sdpo"])
def test_resumed_equals_uninterrupted(tmp_path, student, scratch_model, power_cut, monkeypatch, variant):
    monkeypatch.chdir(tmp_path)
    method = {
        "teacher": {"teacher": str(scratch_model), "on_policy_fraction": 0.7},
        "sdft": {"privileged_context": "completion", "teacher_model_kind": "live", "on_policy_fraction": 0.7},
        "sdpo": SDPO,
    }[variant]
    training = {"batch_size": 4, "max_steps": 7, "learning_rate": 1e-3}
    sections = {"training": training, "checkpoint": {"save_steps": 2, "save_total_limit": None}}
    if variant == "sdpo":
        sections |= successes(tmp_path, SOME)
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
    with pytest.raises(DataError, match=r"has no completion, whose tokens a teacher scores"):
        train(tmp_path / "given", student, {"teacher": str(scratch_model), "on_policy_fraction": 0.5}, rows=rows)


RIGHT = {"rewards": [{"type": "math"}]}


@pytest.mark.parametrize(
    ("method", "sections", "message"),
    [
        ({}, {}, "method.teacher is missing: name a model to learn from"),
        ({"teacher": "x", "jsd_beta": 0.2}, {}, "is read by divergence: jsd only"),
        ({"teacher_model_kind": "live"}, {}, "method.teacher is missing"),
        ({"teacher": "x", "teacher_model_kind": "live"}, {}, "is live, but teacher names another model"),
        ({"teacher": "x", "teacher_prompt_template": "{privileged_context}"}, {}, "has no effect without privileged"),
        (
            {"privileged_context": "a", "teacher_prompt_template": "{prompt}"},
            {},
            r"must contain {prompt} and {privileged_context}",
        ),
        ({"teacher": "x", "success_reward_threshold": 2}, {}, "has no effect without use_successful_as_teacher"),
        ({**SDPO, "num_generations": 1}, RIGHT, "num_generations is 1, but use_successful_as_teacher needs other"),
        ({**SDPO, "on_policy_fraction": 0.5}, RIGHT, "must be 1 with use_successful_as_teacher"),
        ({**SDPO, "privileged_context": "a"}, RIGHT, "cannot be combined with use_successful_as_teacher"),
        (SDPO, {}, "rewards are needed by method.use_successful_as_teacher"),
        ({"teacher_logprobs": "a"}, {}, "on_policy_fraction must be 0 with teacher_logprobs"),
        ({**FILE, "teacher": "x"}, {}, "teacher has no effect with teacher_logprobs"),
        ({"privileged_context": "a"}, {"tools": ["x.py:f"]}, "tools cannot be combined with prompts of the teacher's"),
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
