"""Any text, mapping, override or flag gives settings or the package's own error; settings read back equal."""

import json

import yaml
from fuzzing import JSON, SCALAR, TEXT, damaged, fuzzed, outcome
from hypothesis import strategies as st

from posttrain.base.errors import ConfigError, PosttrainError
from posttrain.config import Loaded, dump, find, load, preset_names
from posttrain.config.reading.fields import all_settings
from posttrain.config.reading.files import parse_value, read_settings, write_yaml

STAGES = """\
name: two
extends: sft
model: {path: some/model, lora: {r: 8}}
data: {source: a.jsonl, max_length: 512}
training: {learning_rate: 1e-5, max_steps: 20}
stages:
  sft: {method: sft}
  dpo:
    init_from: sft
    method: {type: dpo, beta: 0.1, loss_type: [sigmoid, ipo]}
    data: {source: "${data.validation}.jsonl", validation: {ratio: 0.1}}
"""
GRPO = """\
models: [&one {path: a/b, name: one}, {path: "${models.0.path}-x", name: two}]
seed: 0x10
method: {type: grpo, num_generations: 4}
rewards: [{type: length, target: 5}, {type: math, weight: "${method.beta}"}]
data: {source: {source: x.jsonl, split: "train"}, columns: {prompt: q}}
rollout: {temperature: .5}
"""
TEXTS = [STAGES, GRPO, *(find(name).read_text(encoding="utf-8") for name in preset_names())]
PATHS = [setting.path for setting in all_settings()]
REFERENCES = st.sampled_from([*PATHS, "models.0.path", "a", "", "name.x"]).map("${{{}}}".format)
VALUES = (
    JSON
    | REFERENCES
    | st.sampled_from(["sft", "dpo", "ppo", "grpo", "kto", "ipo", "distill", "auto", "cpu", "math", "none", 0.5, 2, 64])
    | st.sampled_from([setting.default for setting in all_settings() if not setting.group])
)
NAMES = (
    st.sampled_from(
        [
            *PATHS,
            "extends",
            "stages",
            "models",
            "models.0",
            "models.0.path",
            *(path.rsplit(".", 1)[-1] for path in PATHS),
        ]
    )
    | TEXT
)


def nested(assignments: list[tuple[str, object]]) -> dict:
    """Assignments to dotted paths as one mapping."""
    whole: dict = {}
    for path, value in assignments:
        node = whole
        *parents, last = path.split(".")
        for name in parents:
            node = node.setdefault(name, {}) if isinstance(node.get(name, {}), dict) else node
        node[last] = value
    return whole


MAPPINGS = st.lists(st.tuples(NAMES, VALUES), max_size=5).map(nested)


def checked(found: object, folder) -> None:
    """Settings that were read are written, and read back equal."""
    if isinstance(found, PosttrainError):
        assert isinstance(found, ConfigError)
        return
    assert isinstance(found, Loaded)
    path = folder / "again.yaml"
    path.write_text(dump(found.stages), encoding="utf-8")
    assert load(path).stages == found.stages


@fuzzed(60, 2500, content=st.sampled_from(TEXTS).flatmap(lambda text: damaged(text.encode())) | st.binary(max_size=60))
def test_any_file_of_yaml(tmp_path, content):
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    checked(outcome(lambda: load(path)), tmp_path)


@fuzzed(
    30, 1500, content=MAPPINGS.map(json.dumps).flatmap(lambda text: st.just(text.encode()) | damaged(text.encode()))
)
def test_any_file_of_json(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    checked(outcome(lambda: load(path)), tmp_path)


@fuzzed(60, 2000, base=st.sampled_from(TEXTS[:2]).map(yaml.safe_load) | st.just({}), changes=MAPPINGS)
def test_any_mapping(tmp_path, base, changes):
    checked(outcome(lambda: load({**base, **changes})), tmp_path)


@fuzzed(
    60,
    2500,
    overrides=st.lists(
        TEXT | st.tuples(NAMES | NAMES.map("stages.dpo.{}".format), VALUES).map(lambda pair: f"{pair[0]}={pair[1]}"),
        max_size=3,
    ),
    flags=st.dictionaries(NAMES, SCALAR, max_size=2),
    text=st.sampled_from(TEXTS),
)
def test_any_overrides_and_flags(tmp_path, overrides, flags, text):
    path = tmp_path / "b.yaml"
    path.write_text(text, encoding="utf-8")
    checked(outcome(lambda: load(path, overrides, flags)), tmp_path)


@fuzzed(60, 2000, value=JSON)
def test_any_value_is_written_and_read_back(tmp_path, value):
    """Of keys that are the same text only once; numbers of thousands of digits are refused."""
    text = outcome(lambda: write_yaml({"value": value}))
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    found = outcome(lambda: read_settings(path))
    if not isinstance(found, ConfigError):
        assert repr(found.values["value"]) == repr(value)


@fuzzed(60, 3000, text=TEXT | st.text("[]{}&*!|>'\",:#-? \n\t%@`~a1", max_size=30))
def test_any_value_of_an_override(text):
    found = outcome(lambda: parse_value(text, "override"))
    assert isinstance(found, ConfigError) or set(found.values) == {"value"}
