"""Mixture-of-experts models: the loss that balances their routers, what these choose, as metrics; and whole runs."""

import json
import re

import numpy as np
import pytest
import torch
from test_equivalence import assert_close_gradients, gradients
from test_gpu_path import Recording
from test_online import EXACT
from test_recipes import metrics, run
from test_trl import BATCH, assert_same_losses, labelled, pairs, train_ours, train_trl
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.families import CONFIGS, GQA, forest, make
from benchmarks.models import write_model
from posttrain.base.errors import ConfigError, ModelError
from posttrain.batch import Example, Node, pack, sequences
from posttrain.cli import main
from posttrain.config import load
from posttrain.data import prepare_run
from posttrain.models.experts import RouterLoad, RouterLoss
from posttrain.models.lean import enable_gradient_checkpointing, lean
from posttrain.models.load import load_tokenizer
from posttrain.planning.largest import FirstEpoch, with_completions
from posttrain.rewards.parts import CompletionReward
from posttrain.rollout import Rollout, SampledCompletion
from posttrain.runs.stored_rollouts import StoredRun
from posttrain.runs.summary import read_run
from posttrain.scoring import RewardScorer, Scorer
from posttrain.training.job import router_weight

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "qwen3_next"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_load_is_that_of_the_tokens_one_by_one(family):
    """A pack without shared prompts, padded: the padding counts for nothing, and forwards without gradients neither."""
    chains = [example for example in forest() if not any(tree.children for tree in example.trees)]
    model = make(family)
    model.set_attn_implementation("packed")
    if family == "qwen3_next":
        lean(model)  # forks its states; in other families it limits the last layer to what is read
    load = RouterLoad(model)
    assert load.take() == {}
    [whole] = pack(chains, 1000, pad_to=100)
    assert whole.num_tokens < 100
    with torch.no_grad():
        Scorer(model)(whole)
    assert load.take() == {}
    Scorer(model)(whole)
    found = load.take()
    assert load.take() == {}

    model.set_attn_implementation("eager")
    counts = 0
    for tree in (tree for example in chains for tree in example.trees):
        tokens = torch.tensor([tree.tokens[:-1]])  # a pack has no last token, which predicts nothing
        logits = model(input_ids=tokens, use_cache=False, output_router_logits=True).router_logits
        top = model.config.num_experts_per_tok
        counts = counts + torch.stack([
            torch.bincount(one.topk(top).indices.flatten(), minlength=one.shape[-1]) for one in logits
        ])  # fmt: skip
    assert counts.sum() == whole.num_tokens * top * len(logits)
    assert found["router/load_max"] == pytest.approx((counts.amax(1) / counts.double().mean(1)).mean().item())
    assert found["router/idle_experts"] == pytest.approx((counts == 0).double().mean().item())


def counted(model, sequences) -> torch.Tensor:
    """The choices of each layer's experts over the tokens of each sequence, by transformers; of the last layer's, those
    of the kept tokens."""
    counts, top = 0, model.config.num_experts_per_tok
    for tokens, kept in sequences:
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False, output_router_logits=True).router_logits
        counts = counts + torch.stack([
            torch.bincount(one.topk(top).indices.flatten(), minlength=one.shape[-1])
            for one in (*logits[:-1], logits[-1][kept])
        ])  # fmt: skip
    return counts


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
@pytest.mark.parametrize("length", [3, 9, 30])
def test_copies_of_the_last_read_token_do_not_count(family, length):
    """Of a long prompt the last layer continues with the few tokens that are read, and copies of the last of them."""
    prompt = [5 + n % 50 for n in range(90)]
    completion = [7 + 3 * n % 50 for n in range(length)]
    whole = pack([Example((Node(prompt, False, (Node(completion, True),)),), 0)], 1000, pad_to=64)[0]
    model = make(family)
    tokens, read = [*prompt, *completion[:-1]], slice(89, None)
    counts = counted(model, [(tokens, read)])
    model.set_attn_implementation("packed")
    lean(model)
    load = RouterLoad(model)
    Scorer(model)(whole)
    found = load.take()
    assert found["router/load_max"] == pytest.approx((counts.amax(1) / counts.double().mean(1)).mean().item())
    assert found["router/idle_experts"] == pytest.approx((counts == 0).double().mean().item())


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_of_rows_does_not_count(family):
    """A model whose packs are rows: each sequence with its prompt, without the padding, and a GPU is not waited for."""
    examples, waits = forest(), Recording()
    model = make(family)
    rows = [(ids.tolist()[:-1], slice(None)) for one in examples for tree in one.trees for ids, _ in sequences(tree)]
    counts = counted(model, rows)
    load = RouterLoad(model)
    [whole] = pack(examples, 1000)
    with waits:
        Scorer(model)(whole)
    found = load.take()
    assert not [one for one in waits.found if "models/experts.py" in one]
    assert found["router/load_max"] == pytest.approx((counts.amax(1) / counts.double().mean(1)).mean().item())
    assert found["router/idle_experts"] == pytest.approx((counts == 0).double().mean().item())


# --- the loss ---------------------------------------------------------------------------------------------------------

# Families whose packs are rows, with routers of their own.
CONFIGS["granitemoe"] = GQA | dict(num_local_experts=4, num_experts_per_tok=2)
CONFIGS["phimoe"] = GQA | dict(num_local_experts=4, num_experts_per_tok=2)
CONFIGS["gpt_oss"] = GQA | dict(num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 3)
OF_ROWS = ["granitemoe", "phimoe", "gpt_oss"]


def padded(rows) -> dict[str, torch.Tensor]:
    """Sequences as transformers and TRL take them: right padded, with a mask."""
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for number, row in enumerate(rows):
        tokens[number, : len(row)], mask[number, : len(row)] = torch.as_tensor(row), 1
    return {"input_ids": tokens, "attention_mask": mask}


def balance(model, rows) -> torch.Tensor:
    """The load-balancing loss of whole sequences in one forward, by transformers."""
    return model(**padded(rows), use_cache=False, output_router_logits=True).aux_loss


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", [*FAMILIES, *OF_ROWS])
def test_the_loss_is_transformers_for_all_sequences(family, packed, checkpointing):
    """Trees with shared prompts in one padded pack, or in rows: value and every gradient, through the routers and below
    them. A forward without gradients before and after it is not read."""
    if packed and family in OF_ROWS:
        return
    examples = forest()
    model = make(family)
    rows = [ids for example in examples for tree in example.trees for ids, _ in sequences(tree)]
    want = balance(model, rows)
    want.backward()
    want_gradients = gradients(model)
    if packed:
        model.set_attn_implementation("packed")
        lean(model)
    if checkpointing:
        enable_gradient_checkpointing(model)
    routers, scorer = RouterLoss(model, 0.5), Scorer(model)
    [whole] = pack(examples, 1000, keep_last=True, pad_to=100 if packed else None)
    [other] = pack(examples[:1], 1000, keep_last=True)
    with routers.reading():
        with torch.no_grad():
            scorer(other)
        scorer(whole)
        with torch.no_grad():
            scorer(other)
        found = routers.loss()
    found.backward()
    assert found.item() == pytest.approx(want.item(), rel=1e-5)
    assert_close_gradients(gradients(model), want_gradients)
    with torch.no_grad(), routers.reading():
        scorer(whole)
        scorer(other)
        assert routers.loss().item() == pytest.approx(want.item(), rel=1e-5), "in an evaluation the first is read"


def test_the_loss_by_hand():
    """Two layers' routers of two experts, one choice each: E sum_e f_e P_e over four tokens, of which one is shared."""
    model = make("mixtral", num_local_experts=2, num_experts_per_tok=1, num_hidden_layers=2)
    one = Example((Node([5, 6], False, (Node([7], True), Node([8], True))),), 0)
    logits = []
    for tokens in ([5, 6, 7], [5, 6, 8]):
        logits += model(input_ids=torch.tensor([tokens]), use_cache=False, output_router_logits=True).router_logits
    p = torch.cat(logits).softmax(-1)  # 2 layers x 2 sequences x 3 tokens
    share = torch.stack([(p.argmax(-1) == expert).float().mean() for expert in (0, 1)])
    want = 2 * (share * p.mean(0)).sum()
    model.set_attn_implementation("packed")
    lean(model)
    routers = RouterLoss(model, 1.0)
    with routers.reading():
        Scorer(model)(pack([one], 100, keep_last=True)[0])
        assert routers.loss().item() == pytest.approx(want.item(), rel=1e-5)


def test_reward_models_have_the_loss_too():
    model = make("mixtral", auto=AutoModelForSequenceClassification, num_labels=1)
    language = make("mixtral")
    language.model.load_state_dict(model.model.state_dict())
    examples = forest()
    rows = [ids for example in examples for tree in example.trees for ids, _ in sequences(tree)]
    want = balance(language, rows)
    model.set_attn_implementation("packed")
    lean(model)
    routers = RouterLoss(model, 1.0)
    with routers.reading():
        RewardScorer(model)(pack(examples, 1000, keep_last=True)[0])
        assert routers.loss().item() == pytest.approx(want.item(), rel=1e-5)


def test_families_without_such_a_loss(caplog):
    """Dense models, and mixtures that transformers has no function for: an error where one asks, else a word."""
    dense = make("qwen3")
    with pytest.raises(ModelError, match="no load-balancing loss for Qwen3ForCausalLM"):
        RouterLoss(dense, 0.1)
    assert RouterLoss(dense, 0.1, is_explicit=False).coefficient == 0.0
    assert "its routers are trained without this loss" in caplog.text


@pytest.fixture(scope="module")
def mixture(shared, tmp_path_factory):
    """A Mixtral with random weights, sharp routers and the vocabulary of the stories' model."""
    folder = tmp_path_factory.mktemp("mixture")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 48, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
             "max_position_embeddings": 1024, "router_aux_loss_coef": 0.3}  # fmt: skip
    model = write_model(folder, shared / "models/stories260K", "mixtral", **sizes)
    for name, parameter in model.named_parameters():
        if "gate.weight" in name:
            parameter.data *= 50
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("method", "coefficient"), [("sft", None), ("sft", 2.0), ("dpo", None), ("kto", 1.0), ("sft", 0.0), ("cpo", 1.0)]
)
def test_runs_equal_trls(tmp_path, shared, mixture, method, coefficient):
    """Every step's loss, in one pack: the config's coefficient, another, none. Weights move by it."""
    rows = pairs(shared, 8 * BATCH) if method not in ("kto",) else labelled(pairs(shared, BATCH))
    epochs, settings = 1 if len(rows) > BATCH else 8, {}
    if method == "sft":
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
        settings = {"loss_type": "nll"}
    asked = {} if coefficient is None else {"router_aux_loss_coef": coefficient}
    folder, ours = train_ours(tmp_path, method, mixture, rows, epochs, **asked)
    if method == "cpo":  # reads the coefficient from the model's config
        model = AutoModelForCausalLM.from_pretrained(mixture)
        model.config.router_aux_loss_coef, model.config.output_router_logits = coefficient, True
        changed = tmp_path / "changed"
        model.save_pretrained(changed)
        AutoTokenizer.from_pretrained(mixture).save_pretrained(changed)
        _, theirs = train_trl(tmp_path, method, changed, rows, epochs)
    else:
        _, theirs = train_trl(tmp_path, method, mixture, rows, epochs, **asked, **settings)
    assert_same_losses(ours, theirs)
    assert bool(metrics(folder.parent, "aux_loss")) == (coefficient != 0)


def runs_of(sums_home, mixture):
    """Every method: its settings, and those of its data."""
    built_in = {
        "data": {"source": "builtin:arithmetic-preference", "template": "none", "max_rows": 12, "max_length": 300}
    }
    built_in["data"]["validation"] = {"rows": 3}
    kto = {"data": {"source": "builtin:arithmetic-kto", "template": "none", "max_rows": 12, "max_length": 300}}
    sums = {"source": str(sums_home / "train.jsonl"), "template": "none", "max_length": 24, "max_rows": 12}
    online = {"data": sums, "rollout": {"max_completion_length": 6}, "rewards": [EXACT]}
    teacher = {"type": "distill", "teacher": str(mixture), "divergence": "forward_kl", "num_generations": 2}
    return {
        "sft": built_in | {"method": {"type": "sft"}},
        "dpo": built_in | {"method": {"type": "dpo"}},
        "dpo-lora": built_in | {"method": {"type": "dpo"}, "model": {"lora": {"r": 2}}},
        "orpo": built_in | {"method": {"type": "orpo"}},
        "cpo": built_in | {"method": {"type": "cpo"}},
        "simpo": built_in | {"method": {"type": "simpo"}},
        "reward": built_in | {"method": {"type": "reward"}},
        "kto": kto | {"method": {"type": "kto"}},
        "grpo": online | {"method": {"type": "grpo", "num_generations": 3, "num_minibatches": 2}},
        "rloo": online | {"method": {"type": "rloo", "num_generations": 3}},
        "reinforce_plus_plus": online | {"method": {"type": "reinforce_plus_plus", "num_generations": 3}},
        "ppo": online | {"method": {"type": "ppo", "num_generations": 2, "num_ppo_epochs": 1, "num_minibatches": 1}},
        "distill": {"data": sums, "rollout": online["rollout"], "method": teacher},
    }


METHODS = ["sft", "dpo", "dpo-lora", "orpo", "cpo", "simpo", "reward", "kto"]
METHODS += ["grpo", "rloo", "reinforce_plus_plus", "ppo", "distill"]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_adds_the_loss(tmp_path, sums_home, mixture, name):
    """Beside a run without it, whose weights hardly move either: the difference is the coefficient times `aux_loss`, in
    evaluations, too. Both for the packs of a step and in one pack."""
    settings = runs_of(sums_home, mixture)[name]
    settings["model"] = {"path": str(mixture), **settings.get("model", {})}
    settings |= {"tracking": {"logging_steps": 1}, "evaluation": {"eval_steps": 2}}
    training = {"batch_size": 4, "max_steps": 2, "learning_rate": 1e-12, "tokens_per_pack": 4096}
    found = {}
    for coefficient in (0.0, 0.5):
        method = settings["method"] | {"router_aux_loss_coef": coefficient}
        folder = run(tmp_path, f"name=at-{coefficient}", **settings | {"method": method, "training": training})
        found[coefficient] = {
            key: metrics(folder, key) for key in ("loss", "aux_loss", "eval_loss", "eval_aux_loss", "router/load_max")
        }
    without, with_it = found[0.0], found[0.5]
    assert not without["aux_loss"] and len(with_it["aux_loss"]) == len(with_it["loss"]) == 2
    for kind in ("", "eval_") if with_it["eval_loss"] else ("",):
        for plain, aux, whole in zip(*(one[f"{kind}{key}"] for one, key in (
            (without, "loss"), (with_it, "aux_loss"), (with_it, "loss"))), strict=True):  # fmt: skip
            assert whole == pytest.approx(plain + 0.5 * aux, abs=2e-5) and 1 < aux < 8
    assert len(with_it["router/load_max"]) == 2
    if name in ("grpo", "rloo", "reinforce_plus_plus", "ppo"):  # the sequences of the step, by transformers
        model = AutoModelForCausalLM.from_pretrained(mixture)
        with StoredRun(tmp_path / "at-0.5") as stored:
            prompts = {one["prompt_index"]: one["tokens"].tolist() for one in stored.prompts(1)}
            rows = [(one["prompt_index"], one["tokens"].tolist()) for one in stored.rollouts(1)]
        if name != "grpo":  # whose two minibatches have packs of their own
            want = balance(model, [[*prompts[index], *tokens] for index, tokens in rows]).item()
            assert with_it["aux_loss"][0] == pytest.approx(want, rel=1e-4)


def test_several_packs_are_averaged(tmp_path, shared, mixture):
    """As TRL averages micro-batches: each pack's loss counts alike, whatever its tokens."""
    source = tmp_path / "rows.jsonl"
    text = (shared / "data/tinystories/sample.txt").read_text()
    lengths = (300, 60, 50)
    source.write_text("".join(json.dumps({"prompt": text[:20], "completion": text[20:n]}) + "\n" for n in lengths))
    common = {
        "model": {"path": str(mixture)}, "method": {"type": "sft"}, "tracking": {"logging_steps": 1},
        "data": {"source": str(source), "template": "none", "max_length": 160, "shuffle": False},
        "training": {"batch_size": 3, "max_steps": 1, "learning_rate": 1e-12, "tokens_per_pack": 160},
    }  # fmt: skip
    folder = run(tmp_path, **common)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(mixture), AutoTokenizer.from_pretrained(mixture)
    rows = [[*tokenizer(text[:n]).input_ids, tokenizer.eos_token_id] for n in lengths]
    assert len(rows[0]) + len(rows[1]) > 160 > sum(map(len, rows[1:]))
    alone, together = balance(model, rows[:1]).item(), balance(model, rows[1:]).item()
    assert abs(alone - together) > 1e-2
    assert metrics(folder, "aux_loss") == pytest.approx([(alone + together) / 2], rel=1e-4)


@pytest.mark.parametrize("feeds_last", [False, True])
def test_planned_completions_are_divided_as_sampled_ones(feeds_last):
    """The sizes around each that holds one completion more, with a prompt of three tokens."""
    prompt = Example((Node(np.arange(3)),), 0)
    sampled = [SampledCompletion(0, [7] * 5, [0.0] * 5, "", "stop", 0, CompletionReward()) for _ in range(5)]
    for size in range(8, 30):
        planned = with_completions(prompt, 5, 5, size, feeds_last)
        _, divided = Rollout([prompt], sampled).examples(range(5), size, feeds_last)
        assert [len(one.trees[0].children) for one in planned] == [len(some) for some in divided]
        assert len(pack(planned, size, feeds_last)) == -(-5 // ((size - 3) // (5 if feeds_last else 4)))


ROUTERS = "method.router_aux_loss_coef"


def test_which_coefficient(tmp_path, shared, mixture, capsys):
    """null is the config's own, in runs of behaviour version 1 none; a dense model is refused at the start."""
    settings = {
        "model": {"path": str(mixture)}, "method": {"type": "sft"}, "tracking": {"logging_steps": 1},
        "data": {"source": "builtin:arithmetic", "template": "none", "max_length": 200, "max_rows": 4},
        "training": {"batch_size": 4, "max_steps": 1, "learning_rate": 1e-12},
    }  # fmt: skip
    own, none, off = (
        run(tmp_path, f"name={name}", *more, **settings)
        for name, more in (
            ("own", ()), ("none", ("behavior_version=1",)), ("off", ("method.router_aux_loss_coef=0",)),
        )
    )  # fmt: skip
    [loss], [aux], [plain] = metrics(own, "loss"), metrics(own, "aux_loss"), metrics(off, "loss")
    assert loss == pytest.approx(plain + 0.3 * aux, abs=1e-5)
    assert metrics(none, "loss") == metrics(off, "loss") and not metrics(none, "aux_loss") + metrics(off, "aux_loss")
    asked = run(tmp_path, "name=asked", "behavior_version=1", "method.router_aux_loss_coef=0.3", **settings)
    assert metrics(asked, "loss") == pytest.approx([loss], abs=1e-6)
    recorded = [read_run(folder).provenance["resolved"].get(ROUTERS) for folder in (own, none, off)]
    assert recorded == [0.3, None, None]
    for folder in (own, none, off, asked):  # a plan packs what the run did
        config = load(folder / "config.yaml").config
        data, [model] = prepare_run(config, load_tokenizer(config.models[0])), config.models
        feeds_last = router_weight(config, model) > 0
        planned = FirstEpoch(config, data, feeds_last).largest(config.training.tokens_per_pack)
        assert feeds_last == (folder in (own, asked)) and metrics(folder, "num_tokens") == [planned[0].num_tokens]
        assert main(["plan", str(folder / "config.yaml")]) == 0
        assert f"about {planned[0].num_tokens:,} tokens (" in capsys.readouterr().out
    settings["model"] = {"path": str(shared / "models/stories260K")}
    with pytest.raises(ConfigError, match=re.escape("method.router_aux_loss_coef is 0.1, but llama is not a mixture")):
        run(tmp_path, "name=dense", "method.router_aux_loss_coef=0.1", **settings)
    assert run(tmp_path, "name=dense", "method.router_aux_loss_coef=0", overwrite=True, **settings)


@pytest.fixture(scope="module")
def hybrid_model(scratch_model, tmp_path_factory):
    """A Qwen3-Next with random weights: linear attention, full attention, and experts."""
    folder = tmp_path_factory.mktemp("hybrid")
    write_model(
        folder, scratch_model, "qwen3_next", hidden_size=48, num_hidden_layers=2, intermediate_size=96,
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24, layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        tie_word_embeddings=True,
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("lora", ["null", pytest.param("true", marks=pytest.mark.slow)])
def test_a_hybrid_of_experts_trains_and_resumes(hybrid_model, shared, tmp_path, capsys, lora):
    """With gradient checkpointing; the step's metrics have the load. Online it samples with transformers' engine."""
    prompts = ["data.max_rows=6", "rewards=[{type: length, target: 9}]", "rollout.max_completion_length=6"]
    common = [f"model.path={hybrid_model}", f"model.lora={lora}", "training.batch_size=2", "training.max_steps=2",
              "tracking.logging_steps=1", "data.max_length=1024", f"output_dir={tmp_path}"]  # fmt: skip
    pairs = f"data.source={shared / 'data/preference-demo/dpo_en_demo.json'}"
    arguments = ["train", "method=dpo", pairs, "data.format=sharegpt", "data.max_rows=20", "name=dpo", *common]
    assert main([*arguments, "training.gradient_checkpointing=true"]) == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "dpo/metrics.jsonl").read_text().splitlines()]
    assert all(line["router/load_max"] >= 1 and 0 <= line["router/idle_experts"] < 1 for line in lines[:2])

    online = ["train", "method=grpo", "method.num_generations=2", f"data.source={shared / 'data/gsm8k/train.jsonl'}",
              "name=grpo", *prompts, *common]  # fmt: skip
    assert main(online) == 1
    assert "set rollout.engine: transformers" in capsys.readouterr().err
    assert main([*online, "rollout.engine=transformers", "name=other"]) == 0, capsys.readouterr().err
