"""Loading settings: precedence, inheritance, short forms, and saved settings that load back."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.base.errors import ConfigError
from posttrain.config import (
    EvaluationDataset,
    LoraConfig,
    ModelConfig,
    RunConfig,
    SourceConfig,
    dump,
    learning_rate,
    load,
    preset_names,
)
from posttrain.config.reading.fields import all_settings, choices
from posttrain.config.render import EXAMPLES
from posttrain.config.schema.methods import METHOD_NAMES, METHODS
from posttrain.config.schema.types import is_name
from posttrain.training.state import as_started

ROOT = Path(__file__).parent.parent / "posttrain"
ONLINE = "data: {source: x}\nrewards: [{type: math}]\n"
BASE = "model: gpt2\nmethod: sft\ndata: {source: rows.jsonl}\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write files into the working folder: write(name=text) or write({name: text})."""
    monkeypatch.chdir(tmp_path)

    def _write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text, encoding="utf-8")

    return _write


def test_a_short_file_and_the_documented_defaults(write):
    write({"a.yaml": BASE})
    config = load("a.yaml").config
    assert config.models == (ModelConfig(path="gpt2"),)
    assert (config.method.type, config.data.source, config.data.max_length) == ("sft", "rows.jsonl", 1024)
    assert (config.training.batch_size, config.training.tokens_per_pack) == (16, 8192)
    assert (config.evaluation.eval_steps, config.checkpoint.save_steps, config.tracking.logging_steps) == (100, 500, 10)


def test_no_file_at_all():
    config = load(None, ["method=dpo", "data.source=rows.jsonl"], {"model.path": "gpt2"}).config
    assert (config.method.type, config.models[0].path) == ("dpo", "gpt2")


def test_precedence_flag_override_file_preset_default(write):
    write({"a.yaml": "extends: dpo-hh\ndata: {max_length: 300}\ntraining: {max_steps: 1, batch_size: 2}\n"})
    loaded = load("a.yaml", ["training.max_steps=3", "training.batch_size=4"], {"training.max_steps": "5"})
    config = loaded.config
    assert config.training.max_steps == 5  # flag over override over file
    assert config.training.batch_size == 4  # override over file
    assert config.data.max_length == 300  # file over preset (512)
    assert config.data.source == "Anthropic/hh-rlhf"  # preset over nothing
    assert config.training.weight_decay == 0.0  # default


def test_a_flag_beats_overrides_of_one_stage_and_by_number_and_says_so(write):
    stages = "stages:\n  sft: {method: sft}\n  dpo: {method: dpo, training: {batch_size: 4}}\n"
    write({"a.yaml": f"model: gpt2\ndata: {{source: x}}\n{stages}"})
    overrides = ["stages.dpo.training.max_steps=5", "training.max_steps=6", "models.0.lora.r=4"]
    flags = {"training.max_steps": "10", "training.batch_size": "8", "model.lora.r": "2"}
    loaded = load("a.yaml", overrides, flags)
    assert [(s.config.training.max_steps, s.config.training.batch_size) for s in loaded.stages] == [(10, 8), (10, 8)]
    assert [s.config.models[0].lora.r for s in loaded.stages] == [2, 2]
    assert loaded.notes == [
        "stage sft: --training.max-steps: training.max_steps is 10, not 6 (override training.max_steps=6)",
        "--model.lora.r: model.lora.r is 2, not 4 (override models.0.lora.r=4)",
        "stage dpo: --training.batch-size: training.batch_size is 8, not 4 (a.yaml:5)",
        "stage dpo: --training.max-steps: training.max_steps is 10, not 5 (override stages.dpo.training.max_steps=5)",
    ]
    assert load("a.yaml", overrides[:2]).notes == [] == load("a.yaml", ["training.max_steps=6"]).notes
    write({"b.yaml": BASE + "training: {max_steps: 1}\n"})
    assert load("b.yaml", ["models.0.lora.r=4"], {"model.lora.r": 2}).config.models[0].lora == LoraConfig(r=2)
    assert load("b.yaml", flags={"training.max_steps": 2}).notes == []  # what a file says is there to be replaced


def test_a_setting_and_the_method_it_is_of_belong_together(write):
    write({"a.yaml": BASE})
    assert load("a.yaml", ["method.beta=0.3"], {"method.type": "dpo"}).config.method.beta == 0.3


def test_extends_is_relative_to_the_file_and_chains(write):
    write(
        {
            "sub/root.yaml": BASE + "training: {max_steps: 1, weight_decay: 0.1}\n",
            "sub/middle.yaml": "extends: root.yaml\ntraining: {max_steps: 2}\n",
            "top.yaml": "extends: sub/middle.yaml\nseed: 7\n",
        }
    )
    config = load("top.yaml").config
    assert (config.training.max_steps, config.training.weight_decay, config.seed) == (2, 0.1, 7)


def test_extends_a_list_the_later_over_the_earlier(write):
    write({"a.yaml": BASE + "seed: 1\n", "b.yaml": "seed: 2\n", "c.yaml": "extends: [a.yaml, b.yaml]\n"})
    assert load("c.yaml").config.seed == 2


def test_extends_in_a_circle_is_named(write):
    write({"a.yaml": "extends: b.yaml\n", "b.yaml": "extends: a.yaml\n"})
    with pytest.raises(ConfigError, match="a cycle"):
        load("a.yaml")


def test_extends_something_missing_names_the_line_and_the_nearest(write):
    write({"base.yaml": BASE, "a.yaml": "seed: 1\nextends: bse.yaml\n"})
    with pytest.raises(ConfigError, match=r"a\.yaml:2: extends: .*did you mean base\.yaml\?"):
        load("a.yaml")


def test_another_method_drops_the_settings_of_the_old_one(write):
    write({"a.yaml": "model: gpt2\nmethod: {type: dpo, beta: 0.5}\ndata: {source: x}\n"})
    assert load("a.yaml", ["method.type=sft"]).config.method.type == "sft"
    # The order of overrides does not matter, and the same method keeps its settings.
    method = load("a.yaml", ["method.label_smoothing=0.2", "method.type=dpo"]).config.method
    assert method.type == "dpo" and (method.beta, method.label_smoothing) == (0.5, 0.2)


def test_another_kind_of_validation_replaces_the_old_one(write):
    write({"a.yaml": "model: gpt2\nmethod: sft\ndata: {source: x, validation: {ratio: 0.1}}\n"})
    validation = load("a.yaml", ["data.validation.rows=5"]).config.data.validation
    assert validation is not None and (validation.ratio, validation.rows) == (None, 5)
    assert load("a.yaml", ["data.validation=null"]).config.data.validation is None


def test_ipo_is_dpo_with_the_ipo_loss(write):
    write({"a.yaml": "model: gpt2\nmethod: ipo\ndata: {source: x}\n"})
    for overrides in ([], ["method.type=ipo", "method.beta=0.2"]):
        method = load("a.yaml", overrides).config.method
        assert method.type == "dpo" and method.loss_type == ("ipo",)
    direct = RunConfig.model_validate({"models": [{"path": "m"}], "method": {"type": "ipo"}, "data": {"source": "x"}})
    assert direct.method.type == "dpo" and direct.method.loss_type == ("ipo",)


def test_aliases_are_read_with_a_note_that_names_the_line(write):
    write({"a.yaml": "model:\n  path: gpt2\n  lora_r: 8\nmethod: {type: dpo, kl_coef: 0.3}\ndata: {source: x}\n"})
    loaded = load("a.yaml", ["model.lora_alpha=9"])
    lora, method = loaded.config.models[0].lora, loaded.config.method
    assert lora is not None and (lora.r, lora.alpha) == (8, 9)
    assert method.type == "dpo" and method.beta == 0.3
    assert loaded.notes == [
        "a.yaml:3: lora_r is read as lora.r",
        "a.yaml:4: kl_coef is read as beta",
        "override model.lora_alpha=9: lora_alpha is read as lora.alpha",
    ]


def test_aliases_of_online_methods_come_to_each_ones_own_names(write):
    write({"a.yaml": "model: gpt2\nmethod: {type: grpo, group_size: 4, cliprange: 0.1, kl_coef: 0.3}\n" + ONLINE})
    grpo = load("a.yaml").config.method
    assert grpo.type == "grpo" and (grpo.num_generations, grpo.epsilon, grpo.beta) == (4, 0.1, 0.3)
    ppo = load("a.yaml", ["method.type=ppo", "method.kl_coef=0.2", "method.ppo_epochs=3"]).config.method
    assert ppo.type == "ppo" and (ppo.kl_coef, ppo.num_ppo_epochs, ppo.cliprange) == (0.2, 3, 0.2)
    write({"b.yaml": "model: gpt2\nmethod: {type: ppo, clip_ratio: 0.3, kl_coef: 0.1}\n" + ONLINE})
    loaded = load("b.yaml")
    assert loaded.config.method.cliprange == 0.3 and loaded.notes == ["b.yaml:2: clip_ratio is read as epsilon"]


def test_an_alias_beside_its_own_name_is_an_error(write):
    write({"a.yaml": "model: gpt2\nmethod: {type: dpo, beta: 0.1, kl_coef: 0.3}\ndata: {source: x}\n"})
    with pytest.raises(ConfigError, match=r"a\.yaml:2: kl_coef is another name for beta"):
        load("a.yaml")


def test_ppo_names_given_before_the_method_are_its_own_too(write):
    """A file that does not say the method cannot know them; the upper layer wins all the same."""
    write({"base.yaml": "method: {kl_coef: 0.2}\n"})
    write({"a.yaml": "extends: base.yaml\nmodel: gpt2\nmethod: {type: ppo, kl_coef: 0.1}\n" + ONLINE})
    assert load("a.yaml").config.method.kl_coef == 0.1
    assert load("a.yaml", ["method.kl_coef=0.3"]).config.method.kl_coef == 0.3
    assert load("a.yaml", flags={"method.kl_coef": "0.4"}).config.method.kl_coef == 0.4
    write({"base.yaml": "method:\n  kl_coef: -1\n"})
    write({"b.yaml": "extends: base.yaml\nmodel: gpt2\nmethod: {type: ppo}\n" + ONLINE})
    with pytest.raises(ConfigError, match=r"base\.yaml:2: method\.kl_coef is -1"):
        load("b.yaml")


TEXTS = [
    "Answer with a tag like #1 or #2",
    "# Role: tutor",
    "You are helpful.\nBe brief.\n\nSay no.",
    "- be brief",
    "&x hi",
    "Say: yes",
    "'Be' brief",
    "a  b",
]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_on_the_command_line_are_taken_whole(text):
    settings = ["model.path=m", "data.source=x.jsonl", "method=sft"]
    assert load(None, [*settings, f"data.system_prompt={text}"]).config.data.system_prompt == text
    assert load(None, settings, {"data.system_prompt": text}).config.data.system_prompt == text
    quoted = load(None, [*settings, "data.system_prompt='a # b'", "seed= 3 "]).config
    assert (quoted.data.system_prompt, quoted.seed) == ("a # b", 3)


def test_entries_of_any_list_by_number(write):
    write({"a.yaml": "model: gpt2\nmethod: {type: grpo}\nrewards: [{type: math}]\ndata: {source: x}\n"})
    assert load("a.yaml", ["rewards.0.weight=2"]).config.rewards[0].weight == 2
    assert load("a.yaml", ["rewards=[math]"]).config == load("a.yaml").config
    method = "{type: dpo, loss_type: [sigmoid, ipo], loss_weights: [1, 2]}"
    write({"b.yaml": f"model: gpt2\nmethod: {method}\ndata: {{source: x}}\n"})
    assert load("b.yaml", ["method.loss_weights.0=3"]).config.method.loss_weights == (3, 2)


def test_models_by_number_and_all_at_once(write):
    write({"a.yaml": "models: [gpt2, {path: opt, name: b}]\nmethod: sft\ndata: {source: x}\n"})
    overrides = ["models.1.path=bloom", "models.0.lora=true", "models.1.lora_r=4", "model.dtype=float32"]
    first, second = load("a.yaml", overrides).config.models
    assert (first.path, first.dtype, first.lora is not None and first.lora.r) == ("gpt2", "float32", 16)
    assert (second.path, second.name, second.dtype, second.lora is not None and second.lora.r) == (
        "bloom",
        "b",
        "float32",
        4,
    )
    with pytest.raises(ConfigError, match="there are 2 models; say which"):
        load("a.yaml", ["model.path=x"])
    with pytest.raises(ConfigError, match="models has entries 0 to 1, not 2"):
        load("a.yaml", ["models.2.path=x"])
    assert [m.path for m in load("a.yaml", ["models=[opt]"]).config.models] == ["opt"]


def test_model_by_a_short_override_keeps_the_other_settings(write):
    write({"a.yaml": "model: {path: gpt2, lora: {r: 4}}\nmethod: sft\ndata: {source: x}\n"})
    for overrides in (["model=opt"], ["model.path=opt"]):
        model = load("a.yaml", overrides).config.models[0]
        assert model.path == "opt" and model.lora is not None and model.lora.r == 4
    assert load("a.yaml", ["model.lora=null"]).config.models[0].lora is None


def test_interpolation_names_settings_also_those_at_their_default(write):
    text = "name: run-${model.path}-${seed}\ntraining: {max_steps: '${training.batch_size}'}\n"
    write({"a.yaml": BASE + text})
    config = load("a.yaml", ["seed=3"]).config
    assert (config.name, config.training.max_steps) == ("run-gpt2-3", 16)


@pytest.mark.parametrize("text", ["${oc.env:HOME}", "${nothing.there}", "${seed", "${training.max_steps}"])
def test_interpolation_of_anything_else_is_refused_with_the_line(write, text):
    write({"a.yaml": BASE + f"training:\n  max_steps: '{text}'\n"})
    with pytest.raises(ConfigError, match=r"(a\.yaml:5|cannot be read)"):
        load("a.yaml")


def test_an_empty_section_is_as_good_as_none(write):
    write({"a.yaml": BASE + "training:\n  # max_steps: 5\nevaluation:\n"})
    assert load("a.yaml").config.training.max_steps is None


def test_json_and_numbers_of_yaml_1_2(write):
    write({"a.json": '{\n\t"model": "gpt2", "method": "sft",\n\t"data": {"source": "x"}, "seed": 5}'})
    assert load("a.json").config.seed == 5
    write({"a.yaml": BASE + "training: {learning_rate: 1e-6, max_steps: 010}\nname: no\n"})
    config = load("a.yaml").config
    assert (config.training.learning_rate, config.training.max_steps, config.name) == (1e-6, 10, "no")


def test_learning_rate_follows_method_and_lora(write):
    write({"a.yaml": "models: [gpt2, {path: b, lora: true}]\nmethod: sft\ndata: {source: x}\n"})
    expected = {"sft": [2e-5, 2e-4], "reward": [1e-5, 1e-4], "dpo": [1e-6, 1e-5], "orpo": [8e-6, 8e-5]}
    expected |= {"cpo": [8e-6, 8e-5], "simpo": [1e-6, 1e-5], "kto": [1e-6, 1e-5]}
    for method, rates in expected.items():
        config = load("a.yaml", [f"method={method}"]).config
        assert [learning_rate(config, model) for model in config.models] == rates
        before = load("a.yaml", [f"method={method}", "behavior_version=2"]).config
        assert learning_rate(before, before.models[1]) == (1e-6 if method in ("dpo", "simpo", "kto") else rates[1])
    config = load("a.yaml", ["training.learning_rate=0.5"]).config
    assert [learning_rate(config, model) for model in config.models] == [0.5, 0.5]


@pytest.mark.parametrize("name", preset_names())
def test_presets_load_alone_and_with_source_and_model_replaced(name):
    for stage in load(name).stages:
        assert stage.config.data.validation is not None and stage.config.data.source.count("/") >= 1
    for stage in load(name, ["data.source=rows.jsonl", "models=[tiny]", "training.max_steps=2"]).stages:
        config = stage.config
        assert (config.data.source, config.models[0].path, config.training.max_steps) == ("rows.jsonl", "tiny", 2)


def test_every_setting_has_a_description_of_one_line():
    for setting in all_settings():
        assert setting.description and "\n" not in setting.description, setting.path
        assert len(setting.description) < 110, setting.path
        assert setting.description.endswith("."), setting.path


def test_the_methods_are_told_alike_everywhere():
    (kind,) = [setting for setting in all_settings() if setting.path == "method.type"]
    assert tuple(choices(kind.annotation)) == METHOD_NAMES == tuple(EXAMPLES)
    assert all(len(method.learning_rates) == 2 for method in METHODS.values())


def test_every_setting_is_read_by_the_code_outside_the_configuration():
    """No dead knobs: each setting's name is read as an attribute somewhere below posttrain/, config and cli aside, or
    by a property of the settings that is."""

    def attributes(tree):
        nodes = list(ast.walk(tree))
        read = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
        calls = [
            n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "getattr"
        ]
        keywords = {arg.arg for n in nodes if isinstance(n, ast.FunctionDef) for arg in n.args.kwonlyargs}  # of losses
        return read | keywords | {call.args[1].value for call in calls if isinstance(call.args[1], ast.Constant)}

    trees = {path.relative_to(ROOT).parts: ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}
    read = set().union(*(attributes(tree) for parts, tree in trees.items() if parts[0] not in ("config", "cli")))
    schema = [node for parts, tree in trees.items() if parts[:2] == ("config", "schema") for node in ast.walk(tree)]
    facts = [node for node in schema if isinstance(node, ast.FunctionDef) and ast.unparse(node).startswith("@property")]
    for _ in range(2):  # a property may read another
        read |= set().union(*(attributes(fact) for fact in facts if fact.name in read))
    entries = [*SourceConfig.model_fields, *EvaluationDataset.model_fields]
    names = {setting.path.rsplit(".", 1)[-1] for setting in all_settings()} | set(entries)
    assert names <= read, f"never read: {sorted(names - read)}"


# --- saved settings -------------------------------------------------------------------------------------------------

words = st.text(min_size=1, max_size=20)
tricky = st.sampled_from(
    [
        "no",
        "1e5",
        "1_0",
        "0x1F",
        "null",
        "~",
        "2024-01-01",
        "1:30",
        "${a}",
        "\\${a}",
        "\\\\${",
        "a: b",
        "- x",
        "true",
        "???",
    ]
)
text = words | tricky
names = text.filter(is_name)
paths = text.filter(lambda path: is_name(ModelConfig(path=path).folder_name))
floats = st.floats(min_value=1e-30, max_value=1e30, allow_nan=False)


@st.composite
def configs(draw):
    """Any configuration: texts that look like something else, every method, floats of any size."""
    method = draw(
        st.one_of(
            st.just({"type": "sft"}),
            st.fixed_dictionaries({"type": st.just("reward"), "center_rewards_coefficient": st.none() | floats}),
            st.fixed_dictionaries({"type": st.just("dpo"), "beta": floats, "ref_model": st.none() | text}),
            st.fixed_dictionaries({"type": st.just("orpo"), "beta": floats, "completion_only_loss": st.booleans()}),
            st.fixed_dictionaries({"type": st.just("cpo"), "beta": floats, "alpha": floats}),
            st.fixed_dictionaries({"type": st.just("simpo"), "simpo_gamma": floats}),
            st.fixed_dictionaries({"type": st.just("ppo"), "kl_coef": floats, "cliprange": floats}),
            st.fixed_dictionaries({"type": st.just("grpo"), "beta": floats, "epsilon_high": st.none() | floats}),
        )
    )
    validation = st.none() | st.fixed_dictionaries({"source": text, "split": text, "max_rows": st.integers(1, 10**30)})
    data = draw(
        st.fixed_dictionaries(
            {
                "source": text
                | st.lists(st.fixed_dictionaries({"source": text, "weight": floats}), min_size=1, max_size=2),
                "columns": st.dictionaries(text, text, max_size=3),
                "system_prompt": st.none() | st.text(),
                "validation": validation,
                "max_prompt_length": st.sampled_from([None, 5, "p90", "auto"]),
            }
        )
    )
    lora = st.none() | st.fixed_dictionaries(
        {"target_modules": st.just("auto") | st.lists(text, max_size=2), "alpha": floats}
    )
    model = draw(st.fixed_dictionaries({"path": paths, "name": st.none() | names, "lora": lora}))
    training = draw(st.fixed_dictionaries({"learning_rate": st.none() | floats, "adam_epsilon": floats}))
    name = draw(st.none() | names)
    settings = {"name": name, "models": [model], "method": method, "data": data, "training": training}
    if METHODS[method["type"]].kind == "prompt":
        settings["rewards"] = [{"type": "length", "target": 5, "weight": draw(floats)}, {"type": "model", "path": "m"}]
    return RunConfig.model_validate(settings)


@settings(max_examples=150, deadline=None)
@given(config=configs())
def test_a_dumped_configuration_loads_back_equal(config, tmp_path_factory):
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(dump(config), encoding="utf-8")
    loaded = load(path)
    assert loaded.config == config
    assert loaded.notes == []


def test_importing_and_asking_for_help_loads_no_torch():
    code = (
        "import sys, posttrain.config, posttrain.cli\n"
        "for args in (['--help'], ['config', 'list'], ['config', 'show', 'sft'], ['train', '--help']):\n"
        "    posttrain.cli.main(args)\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_graders_and_receipts_load_no_torch():
    """Rules are imported by every grading worker, the receipt by `posttrain why` and the pages."""
    modules = ("rewards.maths", "rewards.tagged", "evaluation.rules", "grading.pool", "grading.worker", "runs.receipt")
    code = f"import sys, {', '.join(f'posttrain.{module}' for module in modules)}\n"
    code += "print([name for name in ('torch', 'transformers', 'datasets', 'pyarrow') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_home_folders_are_meant_by_their_short_name(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    settings = ["model=~/tiny", "data.source=x", "method={type: dpo, ref_model: ~/other}"]
    config = load(None, settings).config
    assert (config.models[0].path, config.method.ref_model) == ("/home/me/tiny", "/home/me/other")


def test_short_forms_of_the_data_and_of_rewards(write):
    write({"a.yaml": "model: m\nmethod: grpo\ndata: {max_length: 640}\n"})
    mine = {"type": "python", "function": "my_rewards:right"}
    config = load("a.yaml", ["rewards=[my_rewards:right, sub/my.py:good, math]"], {"data": "rows.jsonl"}).config
    assert (config.data.source, config.data.max_length) == ("rows.jsonl", 640), "merged with the other settings"
    assert [reward.type for reward in config.rewards] == ["python", "python", "math"]
    assert config.rewards[1].function == "sub/my.py:good"
    for rewards in ("my_rewards:right", [mine], mine):
        same = load({"model": "m", "method": "grpo", "data": ["a.jsonl", "b.jsonl"], "rewards": rewards}).config
        assert same.rewards[0].model_dump(include=mine) == mine
        assert [entry.source for entry in same.data.source] == ["a.jsonl", "b.jsonl"]


def test_a_run_stands_for_its_final_model_wherever_a_model_is_named(tmp_path, monkeypatch):
    """The settings record the model's own folder; a model's folder and a hub id stay as they are."""
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/sft/final", "runs/open", "model/final"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "model/config.json").write_text("{}")
    rewards = f"rewards=[{{type: model, path: {tmp_path}/runs/sft/}}]"
    config = load(
        None, ["model=runs/sft", "data.source=x", "method={type: grpo, ref_model: ./runs/sft}", rewards]
    ).config
    assert (config.models[0].path, config.method.ref_model) == ("runs/sft/final", "./runs/sft/final")
    assert config.rewards[0].path == f"{tmp_path}/runs/sft/final" and config.models[0].folder_name == "sft"
    assert load(
        None, ["model=a", "data.source=x", "method={type: distill, teacher: runs/sft}"]
    ).config.method.teacher == ("runs/sft/final")
    for path in ("model", "runs/open", "owner/name"):
        assert load({"model": path, "data": {"source": "x"}, "method": "sft"}).config.models[0].path == path
    assert load(None, (), {"model.path": "runs/sft", "data.source": "x", "method": "sft"}).config == (
        load({"model": "runs/sft/final", "data": {"source": "x"}, "method": "sft"}).config
    )


def test_sources_of_a_mixture_by_name_alone():
    config = load(None, ["model=m", "method=sft", "data.source=[a.jsonl, {source: b.jsonl, weight: 2}]"]).config
    assert [(part.source, part.weight) for part in config.data.source] == [("a.jsonl", 1), ("b.jsonl", 2)]


def test_a_saved_run_keeps_the_rules_that_it_started_with(write):
    """Settings of a run from before the record are read as version 1; a file of the user's is new."""
    old = dump(load({"model": "gpt2", "method": "sft", "data": {"source": "x"}}).config).replace(
        "version: 4", "version: 1"
    )
    without = "".join(line for line in old.splitlines(True) if not line.startswith("behavior_version"))
    for beside in ("run/run.json", "checkpoint-1/state.json", "stages/sft/run.json", "both/model/sft/run.json"):
        write({beside: "{}", f"{beside.split('/')[0]}/config.yaml": without})
        assert load(f"{beside.split('/')[0]}/config.yaml").config.behavior_version == 1
    write(
        {
            "recorded/run.json": "{}",
            "recorded/config.yaml": old.replace("version: 1", "version: 2"),
            "config.yaml": BASE,
        }
    )
    assert load("recorded/config.yaml").config.behavior_version == 2
    assert load("config.yaml").config.behavior_version == 4
    write({"new.yaml": "extends: run/config.yaml\n"})
    assert load("new.yaml").config.behavior_version == 4

    given = load("config.yaml").config
    assert as_started(given, Path("run")).behavior_version == 1
    assert as_started(given, Path("none yet")).behavior_version == 4
    asked = load("config.yaml", ["behavior_version=2"]).config
    assert as_started(asked, Path("run")).behavior_version == 2


@pytest.mark.parametrize(
    ("better", "names"),
    [
        (
            "lower",
            "loss nll_loss aux_loss entropy kl reverse_kl jsd clip_ratio clip_ratio/high_mean "
            "completions/clipped_ratio completions/mean_length completions/max_length reward_std rewards/rejected "
            "logps/rejected "
            "rewards/left_out rewards/left_out_ratio rewards/no_verdict_ratio rewards/not_applicable "
            "frac_reward_zero_std rewards/math/wrong rewards/math/std rewards/math/timeout reasoning_length",
        ),
        (
            "higher",
            "accuracy mean_token_accuracy answer_accuracy format_accuracy margin reward mean_reward rewards/accuracies "
            "rewards/margins rewards/chosen logps/chosen log_odds_ratio pass@4 maj@4 reasoning_share rewards/math/mean "
            "rewards/math/correct rewards/length/mean",
        ),
    ],
)
def test_every_metric_has_a_direction(better, names):
    """Of the validation set and of others, whatever these are called; once it went by the name's last letters."""
    config = load({"model": "gpt2", "method": "sft", "data": {"source": "x"}}).config
    old = config.model_copy(update={"behavior_version": 1})
    for name in names.split():
        for prefix in ("eval_", "eval_gsm8k_", "eval_my_loss_", "eval_kl_"):
            assert config.lower_is_better(prefix + name) is (better == "lower"), prefix + name
            assert old.lower_is_better(prefix + name) is name.endswith("loss")


def test_a_metric_of_others_needs_a_direction():
    settings = {"model": "gpt2", "method": "sft", "data": {"source": "x", "validation": {"rows": 30}}}
    with pytest.raises(ConfigError, match=r"eval_chrf, which is not a metric of posttrain: set checkpoint\.best_dir"):
        load(settings | {"checkpoint": {"best_metric": "eval_chrf"}})
    for direction in ("higher", "lower"):
        config = load(settings | {"checkpoint": {"best_metric": "eval_chrf", "best_direction": direction}}).config
        assert config.lower_is_better("eval_chrf") is (direction == "lower") and config.lower_is_better("eval_kl")
    turned = load(settings | {"checkpoint": {"best_metric": "eval_entropy", "best_direction": "higher"}}).config
    assert turned.lower_is_better("eval_entropy") is False
    suites = {"evaluation": {"suites": ["gsm8k", "suites/my_loss.yaml"]}, "checkpoint": {"best_metric": "eval_other"}}
    config = load(settings | suites).config
    assert [config.lower_is_better(f"eval_{name}") for name in ("gsm8k", "my_loss", "other", "loss")] == [
        False, False, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "watched"),
    [("sft", "loss"), ("reward", "accuracy"), ("simpo", "rewards/accuracies"), ("kto", "rewards/margins"),
     ("grpo", "reward")],
)  # fmt: skip
def test_early_stopping_alone_watches_the_main_metric(method, watched):
    """Which is the first of those that lists of runs show."""
    from posttrain.runs.metrics import of_method

    settings = ["model=m", f"method={method}", "data={source: x, validation: {rows: 5}}"]
    settings += ["rewards=[{type: math}]"] if method == "grpo" else []
    config = load(None, [*settings, "checkpoint.early_stopping_patience=2"]).config
    assert config.best_metric == f"eval_{watched}" and watched == (*of_method(method), "loss")[0]
    assert load(None, settings).config.best_metric == ("eval_accuracy" if method == "reward" else None)


@pytest.mark.parametrize(
    ("model", "sections", "message"),
    [
        ({}, {"training": {"loraplus_lr_ratio": 16}}, "loraplus_lr_ratio is for LoRA's matrices"),
        (
            {"lora": True},
            {"training": {"loraplus_lr_ratio": 16, "optimizer": "muon"}},
            "loraplus_lr_ratio cannot be combined with optimizer: muon",
        ),
        ({"dtype": "float16"}, {"devices": {"strategy": "fsdp"}}, "strategy is fsdp, which cannot scale"),
        (
            {"dtype": "float16"},
            {"training": {"optimizer": "adamw_cpu_offload"}},
            "is adamw_cpu_offload, which cannot scale",
        ),
        ({}, {"training": {"ema_decay": 1.0}}, "ema_decay"),
        ({}, {"training": {"ema_decay": 0}}, "ema_decay"),
    ],
)
def test_training_that_a_model_or_its_dtype_cannot_have(model, sections, message, tmp_path):
    file = tmp_path / "a.json"
    rest = {"method": "sft", "data": {"source": "rows.jsonl"}}
    file.write_text(json.dumps({"model": {"path": "gpt2", **model}} | rest | sections))
    with pytest.raises(ConfigError, match=message):
        load(file)
