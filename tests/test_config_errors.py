"""Wrong settings: each is refused with its file, line, path, and what was probably meant."""

import json
import re

import pytest
from pydantic import ValidationError

from posttrain.base.errors import ConfigError
from posttrain.config import DPOMethod, load
from posttrain.config.schema.methods import METHOD_NAMES
from posttrain.config.schema.offline import F_DIVERGENCE_LOSSES, LABEL_SMOOTHING_LOSSES, PreferenceLoss
from posttrain.losses import keywords_of
from posttrain.losses.preference import F_DIVERGENCES, PREFERENCE_LOSSES

GOOD = {"model": "gpt2", "method": "sft", "data": {"source": "rows.jsonl"}}


def refused(tmp_path, text, name="a.yaml", overrides=()):
    """The message for a file with this text, with the folder's path taken out."""
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value).replace(f"{tmp_path}/", "")


def refused_values(tmp_path, **sections):
    """The message for settings given as Python values."""
    return refused(tmp_path, json.dumps({**GOOD, **sections}), "a.json")


NAMES = ", ".join(METHOD_NAMES)
DPO = "model: gpt2\ndata: {source: x}\nmethod:\n  type: dpo\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "training:\n  max_step: 3\n",
            "a.yaml:5: training.max_step is not a setting; did you mean training.max_steps?",
        ),
        ("max_steps: 3\n", "a.yaml:4: max_steps is not a setting; did you mean training.max_steps?"),
        ("traning: {}\n", "a.yaml:4: traning is not a setting; did you mean training?"),
        ("training: {eval_steps: 5}\n", "training.eval_steps is not a setting; did you mean evaluation.eval_steps?"),
        ("training: {lr: 1}\n", "a.yaml:4: training.lr is not a setting; write training.learning_rate"),
        ("training:\n  batch_size: 0\n", "a.yaml:5: training.batch_size is 0; it must be a whole number of 1 or more"),
        ("training: {batch_size: true}\n", "training.batch_size is true; it must be a whole number of 1 or more"),
        ("training: {batch_size: 1.5}\n", "training.batch_size is 1.5; it must be a whole number of 1 or more"),
        (
            "training: {learning_rate: .inf}\n",
            "training.learning_rate is inf; it must be a number of 0 or more or null",
        ),
        ("training: {optimizer: adam}\n", "training.optimizer is 'adam'; did you mean adamw? it must be one of adamw"),
        ("training: 5\n", "a.yaml:4: training is 5; it must be a mapping with batch_size, tokens_per_pack"),
        ("training: {warmup_steps: 1.5}\n", "training.warmup_steps is 1.5; give a share below 1, or a whole number"),
        ("seed: -1\n", "seed is -1; it must be a whole number of 0 or more"),
        ("name: a/b\n", "name is 'a/b'; it must be text of at most 200 bytes that can name a folder or null"),
        ("rewards: [{type: python, function: mine}]\n", "function is 'mine'; it must be text such as module:function"),
        ("name: 2024\n", "name is 2024; it must be text"),
        ("evaluation: {eval_steps: 0}\n", "evaluation.eval_steps is 0; give 1 or more, or -1"),
        ("devices: {type: cpu, ids: [0]}\n", "devices.ids number GPUs, but type is cpu"),
        ("checkpoint: {best_metric: eval_loss}\n", "checkpoint.best_metric needs an evaluation: set data.validation"),
        (
            "checkpoint: {best_metric: loss}\n",
            "checkpoint.best_metric is 'loss'; it must be text that begins with eval_",
        ),
        ("checkpoint: {early_stopping_patience: 2}\n", "early_stopping_patience needs data.validation"),
        ("evaluation: {num_batches: 2}\n", "evaluation.num_batches has nothing to evaluate on"),
        ("evaluation: {with_replacement: true}\n", "evaluation.with_replacement is true, but num_batches is null"),
        (
            "evaluation: {datasets: [{name: a, source: b, with_replacement: true}]}\n",
            "evaluation.datasets.0.with_replacement is true, but num_batches is null",
        ),
        ("evaluation: {num_generations: 4}\n", "evaluation.num_generations has no effect: it needs completions"),
        ("evaluation: {temperature: 0.5}\n", "evaluation.temperature has no effect: it needs completions"),
        (
            "evaluation: {num_generations: 4, temperature: 0, datasets: [{name: a, source: b}]}\n"
            "rewards: [{type: math}]\n",
            "evaluation.num_generations is 4, but with temperature 0 all completions of a prompt are the same",
        ),
        (
            "evaluation: {datasets: [{name: a, source: b, rewards: [{type: math}, {type: math}]}]}\n",
            "evaluation.datasets.0.rewards.1.name would be 'math', which is the name of an earlier reward",
        ),
        (
            "evaluation: {datasets: [{name: a, source: b, template: chatt}]}\n",
            "evaluation.datasets.0.template is 'chatt'; it must be one of chat, chatml",
        ),
        ("training: {tokens_per_pack: 512}\n", "tokens_per_pack is 512, but an example may have 1024 tokens"),
    ],
)
def test_one_wrong_setting(tmp_path, text, message):
    assert message in refused(tmp_path, "model: gpt2\nmethod: sft\ndata: {source: x}\n" + text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {source: x, format: hh}\n", "data.format is hh, which has no labels; kto needs kto"),
        ("training: {batch_size: 1}\n", "training.batch_size is 1, but loss_type: kto estimates the KL from"),
        ("training: {tokens_per_pack: 2000}\n", "but an example with another completion may have 2048 tokens"),
    ],
)
def test_wrong_settings_with_kto(tmp_path, text, message):
    data = "" if text.startswith("data") else "data: {source: x}\n"
    assert message in refused(tmp_path, f"model: gpt2\nmethod: kto\n{data}{text}")


def test_a_method_that_no_adapter_has_is_refused_once(tmp_path):
    models = [{"path": name, "lora": True} for name in ("gpt2", "distilgpt2")]
    wrong = {"models": models, "method": {"type": "dpo", "sync_ref_model": True}, "data": GOOD["data"]}
    said = refused(tmp_path, json.dumps(wrong), "a.json")
    assert said.count("method.sync_ref_model mixes all weights, but with model.lora only an adapter is trained") == 1


def test_labels_are_read_by_kto_alone(tmp_path):
    said = refused(tmp_path, "model: gpt2\nmethod: sft\ndata: {source: x, format: kto}\n")
    assert "data.format is kto, whose labels sft does not read" in said


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"format": "alpca"}, "data.format is 'alpca'; did you mean alpaca? it must be one of auto, preference"),
        ({"max_length": "abc"}, "data.max_length is 'abc'; it must be a whole number of 1 or more"),
        ({"max_prompt_length": "p0"}, "it must be auto or a whole number of 1 or more or text such as p90 or null"),
        ({"max_prompt_length": 1024}, "data.max_prompt_length is 1024, which leaves no room for a completion"),
        ({"validation": {"ratio": 2}}, "data.validation.ratio is 2; it must be a number above 0 and below 1 or null"),
        ({"validation": {"ratio": 0.1, "rows": 2}}, "needs one of ratio, rows and source, not ratio and rows"),
        ({"validation": {}}, "data.validation needs one of ratio, rows and source, not none"),
        ({"validation": {"rows": 2, "split": "dev"}}, "data.validation.split has no effect without source"),
        ({"source": []}, "data.source is a list; it must be text or a list of mappings with source, split"),
        (
            {"source": [{"source": "x", "weigt": 2}]},
            "data.source.0.weigt is not a setting; did you mean data.source.0.weight",
        ),
        ({"source": [{"source": "x"}], "skip_rows": 3}, "data.skip_rows must not be set if source is a list"),
        ({"template": "chatt"}, "data.template is 'chatt'; it must be one of chat, chatml"),
        ({"tags": {"solution_start": "<a>"}}, "data.tags are read by template: tags only, not by chat"),
    ],
)
def test_wrong_data_settings(tmp_path, data, message):
    assert message in refused_values(tmp_path, data={**GOOD["data"], **data})


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("maths", "rewards.0 is 'maths'; did you mean math? it must be one of match_format_exactly, "),
        ("my rewards:x", "judge, a function FILE.py:FUNCTION, or a mapping with type and its settings"),
        (3, "rewards.0 is 3; it must be one of match_format_exactly, "),
        (None, "rewards.0 is null; it must be one of match_format_exactly, "),
        ({"type": "maths"}, "rewards.0.type is 'maths'; did you mean math?"),
        ({"weight": 2}, "rewards.0.type is missing"),
        ("length", "rewards.0.target is missing"),
    ],
)
def test_wrong_rewards(tmp_path, reward, message):
    assert message in refused_values(tmp_path, method="grpo", rewards=[reward])


GDPO = {"type": "grpo", "multi_objective_aggregation": "normalize_then_sum"}


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"type": "dpoo"}, f"method.type is 'dpoo'; did you mean dpo? it must be one of {NAMES}"),
        ({}, "method.type is missing"),
        ({"type": "trpo"}, f"method.type is 'trpo'; did you mean orpo? it must be one of {NAMES}"),
        (["sft", "dpo"], f"method is a list; it must be one of {NAMES}, or a mapping with type"),
        ({"type": "sft", "beta": 1}, "method.beta is not a setting of sft, but of dpo, orpo"),
        ({"type": "orpo", "simpo_gamma": 1}, "method.simpo_gamma is not a setting of orpo, but of cpo, simpo"),
        ({"type": "cpo", "simpo_gamma": 1}, "method.simpo_gamma is read by loss_type: simpo only, not by sigmoid"),
        ({"type": "cpo", "loss_type": "ipo", "label_smoothing": 0.1}, "by loss_type: sigmoid, simpo only, not by ipo"),
        ({"type": "cpo", "loss_type": ["ipo"]}, "method.loss_type is a list; it must be sigmoid or hinge"),
        (
            {"type": "simpo", "loss_type": "ipo"},
            "method.loss_type is not a setting of simpo, but of sft, dpo, cpo, kto, grpo",
        ),
        ({"type": "dpo", "bta": 1}, "method.bta is not a setting of dpo; did you mean method.beta?"),
        ({"type": "dpo", "loss_type": "sigmod"}, "did you mean sigmoid? it must be one of sigmoid, hinge"),
        ({"type": "dpo", "loss_type": ["sigmoid", "hing"]}, "method.loss_type.1 is 'hing'; did you mean hinge?"),
        ({"type": "dpo", "loss_type": []}, "method.loss_type is a list"),
        ({"type": "dpo", "loss_weights": [1, 2]}, "method.loss_weights has 2 weights for 1 losses"),
        ({"type": "dpo", "loss_type": ["hinge", "hinge"]}, "method.loss_type names a loss twice"),
        ({"type": "dpo", "loss_type": "robust", "label_smoothing": 0.5}, "set it below 0.5"),
        ({"type": "dpo", "loss_type": "exo_pair"}, "exo_pair takes its logarithm and needs more than 0"),
        ({"type": "dpo", "loss_type": "hinge", "label_smoothing": 0.1}, "is read by loss_type: aot, aot_unpaired,"),
        ({"type": "dpo", "discopop_tau": 0.1}, "discopop_tau is read by loss_type: discopop only, not by sigmoid"),
        ({"type": "dpo", "f_alpha_divergence_coef": 0.1}, "is for alpha_divergence, not for"),
        ({"type": "dpo", "f_divergence_type": "forward_kl", "loss_type": "aot"}, "not for aot"),
        ({"type": "dpo", "f_divergence_type": "js_divergence", "loss_type": "sft"}, "is not read by sft"),
        ({"type": "dpo", "reference_free": True, "loss_type": "bco_pair"}, "bco_pair cannot do without a reference"),
        ({"type": "dpo", "reference_free": True, "precompute_ref_log_probs": True}, "there is no reference to compute"),
        ({"type": "dpo", "reference_free": True, "ref_model": "x"}, "names a reference, but reference_free is true"),
        ({"type": "dpo", "use_ref_model": False, "ref_model": "x"}, "names a reference, but with use_ref_model: false"),
        (
            {"type": "sft", "completion_only_loss": True, "assistant_only_loss": True},
            "conflicts with completion_only_loss",
        ),
        ({"type": "grpo", "loss_type": "no_baseline", "epsilon": 0.1}, "gspo, luspo only, not by no_baseline"),
        ({"type": "grpo", "loss_type": "reinforce_with_baseline", "epsilon_high": 1}, "epsilon_high is read by"),
        ({"type": "grpo", "delta": 1.2}, "it bounds ratios beyond the clip range"),
        ({"type": "grpo", "sapo_temperature_pos": 2.0}, "is read by loss_type: sapo only, not by grpo"),
        ({"type": "grpo", "loss_type": "vespo", "epsilon": 0.1}, "luspo only, not by vespo"),
        ({"type": "grpo", "entropy_target": 1.0}, "has no effect without use_adaptive_entropy"),
        ({"type": "grpo", "beta": 0, "use_bias_correction_kl": True}, "changes the KL as a term of the loss"),
        ({"type": "ppo", "importance_sampling": {"clip_max": None}}, "are both null"),
        ({"type": "rloo", "importance_sampling": {"clip_min": 4.0}}, "not below clip_max"),
        ({"type": "grpo", "loss_type": "cispo", "epsilon_high": 5, "epsilon": 0.1}, "epsilon is not read by cispo"),
        ({"type": "grpo", "beta": 0, "kl_estimator": "k1"}, "kl_estimator applies to the KL to a reference"),
        ({"type": "ppo", "kl_coef": 0, "kl_estimator": "k3"}, "kl_estimator applies to the KL to a reference"),
        ({"type": "grpo", "beta": 0, "sync_ref_model": True}, "sync_ref_model mixes the policy into a reference"),
        ({"type": "ppo", "kl_coef": 0, "sync_ref_model": True}, "but the reference is not read: its weight is 0"),
        ({"type": "dpo", "reference_free": True, "sync_ref_model": True}, "but the reference is not read"),
        ({"type": "dpo", "precompute_ref_log_probs": True, "sync_ref_model": True}, "but the reference is precomputed"),
        ({"type": "dpo", "use_ref_model": False, "sync_ref_model": True}, "but the reference is precomputed"),
        ({"type": "kto", "ref_model_mixup_alpha": 0.5}, "has no effect without sync_ref_model"),
        ({"type": "grpo", "sync_ref_model": True, "ref_model_mixup_alpha": 0}, "must be a number above 0"),
        ({"type": "grpo", "sync_ref_model": True, "ref_model_sync_steps": 0}, "must be a whole number of 1 or more"),
        (GDPO | {"loss_type": "no_baseline"}, "multi_objective_aggregation is read by loss_type"),
        (GDPO | {"scale_rewards": "none"}, "method.scale_rewards is for sums of rewards, but normalize_then_sum"),
        (GDPO | {"kl_in": "reward"}, "method.kl_in is for sums of rewards"),
        (GDPO | {"advantage_level": "turn"}, "method.advantage_level is for sums of rewards"),
        (GDPO | {"num_trees": 2}, "method.num_trees is for sums of rewards"),
        (GDPO | {"resampling_rounds": 2}, "method.resampling_rounds is for sums of rewards"),
        ({"type": "rloo", "multi_objective_aggregation": "normalize_then_sum"}, "not a setting of rloo, but of grpo"),
        ({"type": "reward", "center_rewards_coefficient": -1}, "must be a number of 0 or more or null"),
        ({"type": "kto", "loss_type": "bcoo"}, "method.loss_type is 'bcoo'; did you mean bco?"),
        ({"type": "kto", "desirable_weight": 0, "undesirable_weight": 0}, "are both 0; nothing would be trained"),
        ({"type": "kto", "label_smoothing": 0.1}, "method.label_smoothing is not a setting of kto, but of dpo, cpo"),
    ],
)
def test_wrong_method_settings(tmp_path, method, message):
    assert message in refused_values(tmp_path, method=method)


def test_the_checks_of_losses_agree_with_the_losses_themselves():
    """The losses say which of them reads which setting; the configuration, torch-free, repeats it."""
    reads = {name: keywords_of(loss.function) for name, loss in PREFERENCE_LOSSES.items()}
    assert set(PreferenceLoss.__args__) == set(reads)
    assert set(DPOMethod.model_fields["f_divergence_type"].annotation.__args__) == set(F_DIVERGENCES)
    assert {name for name, settings in reads.items() if "label_smoothing" in settings} == LABEL_SMOOTHING_LOSSES
    # `sft` takes no score but tolerates any: TRL's list has it, so that it can be mixed in.
    assert {name for name, settings in reads.items() if "score" in settings} | {"sft"} == F_DIVERGENCE_LOSSES
    assert {name for name, settings in reads.items() if "discopop_tau" in settings} == {"discopop"}
    for name, settings in reads.items():
        method = DPOMethod(loss_type=(name,), label_smoothing=0.001 if name == "exo_pair" else 0.0)
        known = {setting for setting in ("beta", "label_smoothing", "discopop_tau") if method.reads(setting)}
        assert known == settings & {"beta", "label_smoothing", "discopop_tau"}


@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "ipo", "robust", "sigmoid_norm", "aot", "discopop", "sft"])
def test_losses_of_a_difference_do_without_a_reference(loss):
    assert DPOMethod(loss_type=(loss,), reference_free=True).reference_free is True


def test_pairs_need_twice_the_tokens_and_a_format_with_pairs(tmp_path):
    message = refused_values(tmp_path, method="dpo", data={"source": "x", "max_length": 5000, "format": "text"})
    assert "training.tokens_per_pack is 8192, but a pair may have 10000 tokens" in message
    assert "data.format is text, which has no pairs of completions" in message
    with pytest.raises(ValidationError):  # in Python too, not only from files
        DPOMethod(loss_weights=(1.0, 2.0))


def test_all_mistakes_are_listed_in_the_order_of_the_lines(tmp_path):
    text = "seeed: 1\nmodel: gpt2\nmethod: {type: sft, beta: 1}\ndata:\n  sorce: x\n  format: hhh\n"
    lines = refused(tmp_path, text).splitlines()
    assert lines[0] == "4 settings are wrong:"
    assert [re.match(r"  a\.yaml:(\d+)", line).group(1) for line in lines[1:]] == ["1", "3", "5", "6"]


def test_missing_things_say_what_to_write(tmp_path):
    message = refused(tmp_path, "")
    assert "models is missing; name one" in message
    assert f"method is missing; choose one of {NAMES}" in message
    assert "data is missing; set the data to train on" in message


def test_models_in_one_folder_are_refused(tmp_path):
    message = refused(tmp_path, "models: [a/gpt2, b/gpt2]\nmethod: sft\ndata: {source: x}\n")
    assert message == "a.yaml:1: models.1.path would use the same folder 'gpt2' as an earlier model; give it a name"


def test_the_line_is_that_of_the_file_that_says_it(tmp_path):
    (tmp_path / "base.yaml").write_text("model: gpt2\nmethod: sft\n\ntraining: {max_step: 1}\n")
    message = refused(tmp_path, "extends: base.yaml\ndata: {source: x}\ntraining: {batch_sise: 1}\n")
    assert "base.yaml:4: training.max_step" in message and "a.yaml:3: training.batch_sise" in message
    message = refused(tmp_path, "extends: base.yaml\n", overrides=["data.sorce=x"])
    assert "override data.sorce=x: data.sorce is not a setting; did you mean data.source?" in message


def test_a_line_that_was_replaced_is_not_blamed(tmp_path):
    """The value in question is the upper file's, or a default of what it chose."""
    base = "model: gpt2\nmethod:\n  type: cpo\n  label_smoothing: 0.1\n"
    (tmp_path / "base.yaml").write_text(base + "data:\n  source:\n    - source: a\n      weight: 2\n")
    message = refused(tmp_path, "extends: base.yaml\n\n\nmethod:\n  type: dpo\n  loss_type: exo_pair\n")
    assert "a.yaml:4: method.label_smoothing is 0" in message and "base.yaml" not in message
    message = refused(tmp_path, "extends: base.yaml\n\n\ndata:\n  source:\n    - weight: 3\n")
    assert "a.yaml:6: data.source.0.source is missing" in message and "base.yaml" not in message


def test_settings_that_are_not_read_but_may_be_elsewhere_are_told(tmp_path):
    """A dropout of adapters that stages share, a warm-up that an override makes needless."""
    lora = {"model": {"path": "gpt2", "lora": {"dropout": 0.3}}}
    (tmp_path / "a.json").write_text(json.dumps(GOOD | lora))
    assert load(tmp_path / "a.json").notes == []
    notes = ["model.lora.dropout is not read by dpo, which scores its policy with dropout off"]
    assert load(tmp_path / "a.json", ["method=dpo"]).notes == notes
    assert load(tmp_path / "a.json", ["method=dpo", "model.lora.dropout=0"]).notes == []
    stages = {"sft": {"method": "sft"}, "dpo": {"method": "dpo", "init_from": "sft"}}
    (tmp_path / "b.json").write_text(json.dumps(GOOD | lora | {"stages": stages}))
    assert load(tmp_path / "b.json").notes == [f"stage dpo: {notes[0]}"]
    constant = ["training.lr_scheduler_type=constant"]
    assert load(tmp_path / "a.json", constant).notes == []
    notes = ["training.warmup_steps is not read: constant has no warm-up, but constant_with_warmup does"]
    assert load(tmp_path / "a.json", [*constant, "training.warmup_steps=5"]).notes == notes


def test_an_entry_of_a_list_is_blamed_on_the_override_that_gave_it(tmp_path):
    text = "model: gpt2\nmethod: grpo\ndata: {source: x}\nrewards:\n  - type: math\n"
    message = refused(tmp_path, text, overrides=["rewards.0={type: nope}"])
    assert "override rewards.0={type: nope}: rewards.0.type is 'nope'" in message
    assert "a.yaml:3: data is missing" in refused(tmp_path, "model: gpt2\nmethod: sft\ndata:\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: gpt2\nmethod: sft\nmethod: dpo\n", "a.yaml:3: method is given twice, first on line 2; keep one"),
        ("training:\n\tmax_steps: 3\n", "a.yaml:2: not valid YAML at column 1: the line is indented with a tab"),
        ("model: gpt2\n  method: sft\n", "a.yaml:2: not valid YAML at column 9"),
        ("model: [gpt2\n", "not valid YAML"),
        ("model: a: b\n", "a.yaml:1: not valid YAML at column 9: mapping values are not allowed here (text that"),
        ("data:\n  source: x\n training: 1\n", "is the line indented like its neighbours?"),
        ("model: {lora: {rank: 8}}\n", "model.lora.rank is not a setting; write model.lora.r"),
        ("model: {lora: 4, lora_r: 3}\n", "a.yaml:1: lora_r means lora.r, but lora is also given and is not a mapping"),
        (
            "model: !!python/object/apply:os.system [ls]\n",
            "a.yaml:1: the YAML tag !!python/object/apply:os.system is refused",
        ),
        ("model: !load x\n", "a.yaml:1: the YAML tag !load is refused"),
        ("seed: !!int abc\n", "a.yaml:1: 'abc' is not a !!int"),
        (
            "- a\n- b\n",
            "a.yaml contains a list, but must be a mapping of settings; a file of rows is given with --data",
        ),
        ("just text\n", "a.yaml contains a string, but must be a mapping"),
        ("a: &a {<<: *a}\n", "not"),
        ("base: &b {x: 1}\nmodel: {<<: *b}\n", "a.yaml:2: `<<` is not supported; use `extends: other.yaml`"),
        ("a: &a [*a]\n", "a.yaml"),
        (
            "a: &a [x,x,x,x,x,x,x,x,x]\n"
            + "".join(f"{c}: &{c} [{','.join(['*' + p] * 9)}]\n" for p, c in zip("abcdefg", "bcdefgh", strict=True)),
            "aliases expand too far",
        ),
        ("model: \x00gpt2\n", "a.yaml is not plain text"),
        (b"model: gpt2\xff\n", "a.yaml is not UTF-8 text (byte 11)"),
        ("a: " + "[" * 3000, "a.yaml"),
        ("model: gpt2\nmodels: [gpt2]\n", "a.yaml:2: both model and models are given; keep one"),
    ],
)
def test_bad_yaml(tmp_path, text, message):
    assert message in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model": "gpt2",\n "seed": }', "a.json:2: not valid JSON at column 10"),
        ('{"seed": 1,\n\t"seed": 2}', "a.json:2: seed is given twice, first on line 1; keep one"),
        ("[1]", "a.json contains a list"),
        (
            '{"model": "m", "method": "sft",\n\n"data": {"source": "x"}, "sed": 1}',
            "a.json:3: sed is not a setting; did you mean seed?",
        ),
    ],
)
def test_bad_json(tmp_path, text, message):
    assert message in refused(tmp_path, text, "a.json")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.max_steps", "'training.max_steps' is not an override such as training.max_steps=200"),
        ("b.yaml", "only one configuration file can be given"),
        ("=3", "'=3' is not an override"),
        ("training..x=3", "'training..x' is not the path of a setting"),
        ("data.validation={ratio: 0.1", "does not close its bracket"),
        ("training.max_steps=a", "override training.max_steps=a: training.max_steps is 'a'; it must be"),
        ("evaluation.datasets.0.name=x", "evaluation.datasets is not a list with entries to change"),
        ("seed.a=3", "seed is a mapping"),
    ],
)
def test_bad_overrides(tmp_path, override, message):
    assert message in refused(tmp_path, json.dumps(GOOD), "a.json", [override])


def test_missing_file_and_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("")
    for source, message in {
        "mne.yaml": "there is no file or preset mne.yaml; did you mean mine.yaml?",
        "dpo-hhh": "there is no file or preset dpo-hhh; did you mean dpo-hh?",
        "zzzzzzzz": "there is no file or preset zzzzzzzz; presets are cpo-ultrafeedback, ",
        ".": ". is a folder",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load(source)
        assert message in str(caught.value)
