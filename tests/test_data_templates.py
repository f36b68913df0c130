"""Templates: the built-in ones, the sandbox they are rendered in, and which tokens of a conversation are trained."""

import json
import re
import shutil
import signal
import time
import unicodedata
from copy import deepcopy
from datetime import date

import numpy as np
import pytest
import torch
from data_tokenizer import CHATML, base_tokenizer, byte_tokenizer, prepare, trained_text
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    ByT5Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from posttrain import runner
from posttrain.base import child
from posttrain.base.errors import DataError, ModelError, RunError
from posttrain.batch import Node, sequences
from posttrain.cli import main
from posttrain.config import DevicesConfig, ModelConfig, load
from posttrain.config.schema.data import DataConfig, TagsConfig
from posttrain.config.schema.suite import SuiteConfig
from posttrain.data import prepare_run, render
from posttrain.data.prompts import Prompt, prompts_of
from posttrain.data.readers import Record
from posttrain.data.render import Process, RenderRequest, rendering
from posttrain.data.templates import choose_template
from posttrain.engines import stop_token_ids
from posttrain.evaluation.answering import ask, stops_of, written_by
from posttrain.evaluation.items import Item
from posttrain.models.files import adapter_stops
from posttrain.models.load import load_model, load_tokenizer
from posttrain.rewards.learned import LearnedReward
from posttrain.runs.inputs import as_recorded

TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def rendered(template, messages, tokenizer=None, **more):
    tokenizer = tokenizer or byte_tokenizer()
    choose_template(DataConfig(source="x", template=template, **more), tokenizer)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    return prompt, whole


def test_tags():
    reply = "<start_working_out>2+2=4<end_working_out><SOLUTION>4</SOLUTION>"
    prompt, whole = rendered("tags", [TURNS[0], {"role": "assistant", "content": reply}])
    assert prompt.endswith("2+2?\n<start_working_out>") and "between <SOLUTION></SOLUTION>" in prompt
    assert whole == prompt.removesuffix("<start_working_out>") + reply + "<|im_end|>"
    prompt, _ = rendered("tags", TURNS, tags=TagsConfig(reasoning_start='{{ "<a>" }}'))
    assert prompt.endswith('{{ "<a>" }}')


def test_r1_zero():
    prompt, whole = rendered("r1_zero", [TURNS[0], {"role": "assistant", "content": "<think> x"}])
    assert prompt.startswith("A conversation between User and Assistant.")
    assert prompt.endswith("User: 2+2?\nAssistant: <think>") and whole == prompt + " x<|im_end|>"


def test_question_only():
    assert rendered("question_only", TURNS) == ("2+2?\n", "2+2?\n4<|im_end|>")


def test_alpaca():
    prompt, whole = rendered("alpaca", TURNS)
    assert prompt.endswith("completes the request.\n\n### Instruction:\n2+2?\n\n### Response:\n")
    assert whole == prompt + "4<|im_end|>"
    message = {"role": "user", "content": "Add.\n2 2", "instruction": "Add.", "input": "2 2"}
    prompt, _ = rendered("alpaca", [message, TURNS[1]])
    assert "provides further context" in prompt
    assert prompt.endswith("### Instruction:\nAdd.\n\n### Input:\n2 2\n\n### Response:\n")


def test_a_system_message_takes_the_place_of_the_preamble():
    prompt, _ = rendered("r1_zero", [{"role": "system", "content": "Be brief."}, *TURNS])
    assert prompt == "Be brief.\n\nUser: 2+2?\nAssistant: <think>"


def test_text_begins_as_the_tokenizer_begins_it(shared):
    """stories260K puts <s> before a text, so the template must: it is tokenised without special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "stories260K")
    assert rendered("question_only", TURNS, tokenizer)[1] == "<s>2+2?\n4</s>"


def test_the_template_is_saved_with_the_tokenizer(tmp_path):
    tokenizer = byte_tokenizer()
    choose_template(DataConfig(source="x", template="tags"), tokenizer)
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == tokenizer.chat_template
    with pytest.raises(DataError, match=r"missing\.jinja"):
        choose_template(DataConfig(source="x", template="missing.jinja"), tokenizer)


HOSTILE = {
    "loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "0.5 seconds"),
    "power": ("{{ 10 ** (10 ** 10) }}", "0.5 seconds|memory"),
    "size": ("{{ 'a' * 2000000 }}", "1 MB"),
    "memory": ("{{ 'a' * 10 ** 11 }}", "memory"),
    "escape": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    "file": ("{% include '/etc/passwd' %}", "fails"),
    "syntax": ("{% if %}", "TemplateSyntaxError"),
    "refuses": ("{{ raise_exception('no such roles') }}", "no such roles"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_in_an_error(name, tmp_path, monkeypatch):
    template, reason = HOSTILE[name]
    if "seconds" in reason:
        monkeypatch.setattr(render, "SECONDS", 0.5)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    data = DataConfig(source=str(tmp_path / "rows.jsonl"))
    start = time.monotonic()
    with pytest.raises(DataError, match=reason):
        prepare(data, byte_tokenizer(template), "sft", cache_dir=tmp_path)
    assert time.monotonic() - start < 2 + 8, "the limit on time, and starting the process on a busy machine"


def test_rendering_is_that_of_transformers(shared):
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "qwen3")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": "é"}}}]
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    turns = [
        *TURNS,
        TURNS[0],
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call], "name": None},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nfive ✓"},
    ]
    with rendering(tokenizer) as renderer:
        jobs = [RenderRequest(turns), RenderRequest(turns, tools), RenderRequest(turns[:3], generate=True)]
        texts = [done.text for done in renderer.render(jobs)]
    assert texts == [
        tokenizer.apply_chat_template(turns, tokenize=False),
        tokenizer.apply_chat_template(turns, tools=tools, tokenize=False),
        tokenizer.apply_chat_template(turns[:3], tokenize=False, add_generation_prompt=True),
    ]


@pytest.mark.slow
def test_a_process_renders_again_unless_it_owes_an_answer(monkeypatch):
    plain, endless = byte_tokenizer("{{ messages[0].content }}"), byte_tokenizer(HOSTILE["loops"][0])
    job = RenderRequest([{"role": "user", "content": "a"}])
    monkeypatch.setattr(render, "_idle", child.HelperPool())
    started = []
    monkeypatch.setattr(render, "Process", lambda: started.append(Process()) or started[-1])

    def text(tokenizer):
        with rendering(tokenizer) as renderer:
            return renderer.render([job])[0].text

    assert text(plain) == "a"
    started[0]._process.send_signal(signal.SIGINT)  # as Ctrl-C does, to all of a terminal's processes
    assert text(plain) == "a" and len(started) == 1
    with rendering(plain) as one, rendering(plain) as other:  # both at once
        assert one.render([job]) == other.render([job])
    assert len(started) == 2
    with monkeypatch.context() as patch, pytest.raises(DataError, match=r"0\.2 seconds"):
        patch.setattr(render, "SECONDS", 0.2)
        with rendering(endless) as renderer:
            renderer.render([job] * 2000)  # more than a pipe holds
    started[1].end()  # as if it had been killed meanwhile; the other was ended above
    assert text(plain) == "a" and len(started) == 3
    with pytest.raises(KeyError), rendering(plain):
        raise KeyError
    assert not started[2].is_free
    monkeypatch.setattr(child, "IDLE_SECONDS", 0.01)
    assert text(plain) == "a" and len(started) == 4
    for _ in range(500):
        if not started[3].is_free:
            break
        time.sleep(0.01)
    assert not started[3].is_free and text(plain) == "a" and len(started) == 5


SAID = (("system", "s"), ("user", "a"), ("assistant", "é one"), ("user", "b"), ("assistant", "two"))
CONVERSATION = json.dumps({"messages": [{"role": role, "content": content} for role, content in SAID]}) + "\n"
UNENDED = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_assistant_only_loss_without_marks(tmp_path):
    """The assistant's turns are found by rendering up to each; they are trained with their end of turn."""
    (tmp_path / "rows.jsonl").write_text(CONVERSATION)
    tokenizer = byte_tokenizer(CHATML)
    data = DataConfig(source=str(tmp_path / "rows.jsonl"))
    prepared = prepare(data, tokenizer, "sft", assistant_only_loss=True, cache_dir=tmp_path)
    assert trained_text(prepared, tokenizer) == ["é one<|im_end|>\n", "two<|im_end|>\n"]
    whole = prepare(data, tokenizer, "sft", cache_dir=tmp_path)
    assert list(whole.train[0].trees[0].tokens) == list(prepared.train[0].trees[0].tokens)
    last = prepare(data, tokenizer, "sft", completion_only_loss=True, cache_dir=tmp_path)
    assert trained_text(last, tokenizer) == ["two<|im_end|>\n"]


def test_a_template_that_rewrites_earlier_turns(tmp_path):
    """What stands in the whole is trained, whatever the turn would be as the last one."""
    (tmp_path / "rows.jsonl").write_text(CONVERSATION)
    rewriting = CHATML.replace("message.content", "(message.content if loop.last else '(old)')")
    data, tokenizer = DataConfig(source=str(tmp_path / "rows.jsonl")), byte_tokenizer(rewriting)
    with pytest.raises(DataError, match="has nothing to train"):
        prepare(data, byte_tokenizer("nothing"), "sft", assistant_only_loss=True, cache_dir=tmp_path)
    trimmed = CHATML.replace("message.content", "(message.content if loop.last else message.content[:3])")
    tokenizer.chat_template = trimmed
    prepared = prepare(data, tokenizer, "sft", assistant_only_loss=True, cache_dir=tmp_path)
    assert trained_text(prepared, tokenizer) == ["é o<|im_end|>\n", "two<|im_end|>\n"]


def test_nothing_to_train_is_an_error_with_the_row(tmp_path):
    (tmp_path / "rows.jsonl").write_text(CONVERSATION + '{"messages": [{"role": "user", "content": "b"}]}\n')
    data = DataConfig(source=str(tmp_path / "rows.jsonl"))
    with pytest.raises(DataError, match=r"rows\.jsonl line 2: the conversation has no assistant turn"):
        prepare(data, byte_tokenizer(CHATML), "sft", assistant_only_loss=True, cache_dir=tmp_path)


def test_stop_token_is_appended_unless_it_is_there(tmp_path):
    rows = '{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": "b<|im_end|>"}\n'
    (tmp_path / "rows.jsonl").write_text(rows + '{"prompt": "a", "completion": ""}\n')
    tokenizer = byte_tokenizer()
    data = DataConfig(source=str(tmp_path / "rows.jsonl"), template="none")
    prepared = prepare(data, tokenizer, "sft", cache_dir=tmp_path)
    assert [trained_text(prepared, tokenizer, i) for i in range(3)] == [
        ["b<|im_end|>"],
        ["b<|im_end|>"],
        ["<|im_end|>"],
    ]
    unended = byte_tokenizer(UNENDED)
    data = DataConfig(source=str(tmp_path / "rows.jsonl"))
    assert trained_text(prepare(data, unended, "sft", cache_dir=tmp_path), unended) == ["b<|im_end|>"]


def test_a_tokenizer_without_stop_token(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    tokenizer = byte_tokenizer(stop=False)
    data = DataConfig(source=str(tmp_path / "rows.jsonl"), template="none")
    assert trained_text(prepare(data, tokenizer, "sft", cache_dir=tmp_path), tokenizer) == ["b"]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": ""}\n')
    with pytest.raises(DataError, match="nothing to train"):
        prepare(data, tokenizer, "sft", cache_dir=tmp_path)


def test_no_chat_template_says_what_else_there_is(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(DataError, match=r"no chat template: set data\.template to none"):
        prepare(DataConfig(source=str(tmp_path / "rows.jsonl")), byte_tokenizer(), "sft", cache_dir=tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"chosen": "a b", "rejected": "a c"}\n')
    with pytest.raises(DataError, match="the pair has no prompt"):
        prepare(DataConfig(source=str(tmp_path / "rows.jsonl")), byte_tokenizer(CHATML), "pair", cache_dir=tmp_path)


def test_system_prompt_is_put_where_there_is_none(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    tokenizer = byte_tokenizer(CHATML)
    data = DataConfig(source=str(tmp_path / "rows.jsonl"), system_prompt="Be.")
    tree = prepare(data, tokenizer, "sft", cache_dir=tmp_path).train[0].trees[0]
    assert tokenizer.decode(tree.tokens).startswith("<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\na")
    (tmp_path / "rows.jsonl").write_text(CONVERSATION)
    tree = prepare(data, tokenizer, "sft", cache_dir=tmp_path).train[0].trees[0]
    assert tokenizer.decode(tree.tokens).startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na")


TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi "},
    {"role": "assistant", "content": "Ho "},
    {"role": "user", "content": "So?"},
]
# name -> (its tokens, the talk as its published template writes it, and the opening of the next reply)
PUBLISHED_TEXTS = {
    "chatml": (
        ["<|im_start|>", "<|im_end|>"],
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n"
        "<|im_start|>assistant\nHo <|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n",
        "<|im_start|>assistant\n",
    ),
    "llama3": (
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHo<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nSo?<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "zephyr": (
        [],
        "<|system|>\nBe brief.</s>\n<|user|>\n Hi </s>\n<|assistant|>\nHo </s>\n<|user|>\nSo?</s>\n",
        "<|assistant|>\n",
    ),
    "gemma": (
        ["<start_of_turn>", "<end_of_turn>"],
        "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHo<end_of_turn>\n"
        "<start_of_turn>user\nSo?<end_of_turn>\n",
        "<start_of_turn>model\n",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED_TEXTS)
def test_published_templates(name, tmp_path):
    """Text for text as published; a reply with its stop token is what is trained, and the stop token is saved."""
    tokens, text, opening = PUBLISHED_TEXTS[name]
    tokenizer, stop = base_tokenizer(tokens), tokens[-1] if tokens else "</s>"
    size = len(tokenizer)
    data = DataConfig(source=str(tmp_path / "rows.jsonl"), template=name)
    choose_template(data, tokenizer)
    talk = TALK[1:] if name == "gemma" else TALK
    assert tokenizer.apply_chat_template(talk, tokenize=False) == text
    assert tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) == text + opening
    assert tokenizer.eos_token == stop and len(tokenizer) == size

    tokenizer.save_pretrained(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved.eos_token == stop and saved.apply_chat_template(talk, tokenize=False) == text

    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": talk[:-1]}) + "\n")
    reply = "Ho" if "trim" in tokenizer.chat_template else "Ho "
    masked = prepare(data, tokenizer, "sft", assistant_only_loss=True, cache_dir=tmp_path)
    assert trained_text(masked, tokenizer) == [reply + stop]
    last = prepare(data, tokenizer, "sft", completion_only_loss=True, cache_dir=tmp_path)
    assert trained_text(last, tokenizer) == [reply + stop + ("" if name == "llama3" else "\n")]


def test_a_published_template_needs_its_tokens(tmp_path):
    """A stop token of several pieces would stop nothing, and one that is new would have no embedding."""
    for name, (tokens, *_) in PUBLISHED_TEXTS.items():
        if not tokens or name == "chatml":
            continue
        lacking = f"{name} needs {', '.join(tokens)}, which the tokenizer lacks: .*zephyr".replace("|", r"\|")
        with pytest.raises(DataError, match=lacking):
            choose_template(DataConfig(source="x", template=name), byte_tokenizer())
    with pytest.raises(DataError, match="zephyr ends replies with the stop token, but this tokenizer has none"):
        choose_template(DataConfig(source="x", template="zephyr"), byte_tokenizer(stop=False))
    tokenizer = byte_tokenizer()
    choose_template(DataConfig(source="x", template="zephyr"), tokenizer)
    with rendering(tokenizer) as renderer:
        job = RenderRequest([{"role": "tool", "content": "5"}])
        assert "zephyr has no tool turns" in (renderer.render([job])[0].error or "")
    gemma = base_tokenizer(PUBLISHED_TEXTS["gemma"][0])
    choose_template(DataConfig(source="x", template="gemma"), gemma)
    with rendering(gemma) as renderer:
        assert "gemma has only turns of user and assistant" in (renderer.render([RenderRequest(TALK)])[0].error or "")


def test_generation_stops_where_a_published_template_ends(scratch_model, tmp_path):
    """A base model that knows another stop token: what is trained ends in the template's, here and in transformers."""
    base, rows = tmp_path / "base", tmp_path / "rows.jsonl"
    tokenizer = AutoTokenizer.from_pretrained(scratch_model)
    other = next(token for token in tokenizer.all_special_tokens if token not in ("<|im_start|>", "<|im_end|>"))
    tokenizer.eos_token, tokenizer.chat_template = other, None
    model = AutoModelForCausalLM.from_pretrained(scratch_model)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    tokenizer.save_pretrained(base)
    model.save_pretrained(base)
    rows.write_text(json.dumps({"prompt": "2 + 2?", "completion": "4"}) + "\n")
    settings = {"model": base, "data.source": rows, "data.template": "chatml", "output_dir": tmp_path, "name": "run"}
    settings |= {"method": "sft", "training.max_steps": 1, "devices.type": "cpu"}
    assert main(["train", *(f"{key}={value}" for key, value in settings.items())]) == 0
    final = tmp_path / "run/final"
    trained, saved = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    stop = saved.convert_tokens_to_ids("<|im_end|>")
    assert saved.eos_token_id == stop != tokenizer.eos_token_id
    assert trained.generation_config.eos_token_id == [stop, tokenizer.eos_token_id]
    assert stop_token_ids(trained, saved) == (stop, tokenizer.eos_token_id)


MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}|{% endfor %}"
)


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "minimind6400", "stories260K"])
@pytest.mark.parametrize("said", ["ok 🦙", "🦙", "é", "e\u0301", "龥", "ok 👩‍👩‍👧", "x"])
def test_marks_that_end_inside_a_character(name, said, shared, tmp_path):
    """Every token of the last character is trained, also where a character has several."""
    tokenizer = AutoTokenizer.from_pretrained(shared / ("models" if name == "stories260K" else "tokenizers") / name)
    turns = [{"role": "user", "content": "a🦙"}, {"role": "assistant", "content": said}] * 2
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [*turns, turns[0]]}) + "\n")
    template = tmp_path / "marked.jinja"
    template.write_text(MARKED)
    data = DataConfig(source=str(tmp_path / "rows.jsonl"), template=str(template))
    prepared = prepare(data, tokenizer, "sft", assistant_only_loss=True, cache_dir=tmp_path)
    (tree,) = prepared.train[0].trees
    assert (
        list(tree.tokens)
        == tokenizer(tokenizer.apply_chat_template([*turns, turns[0]], tokenize=False), add_special_tokens=False)[
            "input_ids"
        ]
    )
    same = unicodedata.normalize("NFC", said) if name == "qwen3" else said
    assert [text.strip() for text in trained_text(prepared, tokenizer)] == [same, same]
    if said == "ok 🦙":
        old = prepare(data, tokenizer, "sft", assistant_only_loss=True, cache_dir=tmp_path, behavior_version=1)
        assert "\ufffd" in trained_text(old, tokenizer)[0]


# The shapes of published base models, whose stop token is not their chat template's end of turn: the stop token of the
# tokenizer, what the template writes after a reply, and the stop tokens that inference needs.
TINY = {
    "vocab_size": 151_936, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip
BASE_SHAPES = {
    "qwen2.5": ("<|endoftext|>", "<|im_end|>\\n", ["<|endoftext|>", "<|im_end|>"]),
    "smollm, of a template that ends in both": (
        "<|endoftext|>",
        "<|im_end|><|endoftext|>",
        ["<|endoftext|>", "<|im_end|>"],
    ),
    "glm, of turns that only the next one ends": ("<|endoftext|>", "", ["<|endoftext|>"]),
    "llama3, of one that is known": ("<|im_end|>", "<|im_end|>", ["<|im_end|>"]),
}


def chat_template(end: str) -> str:
    return (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '" + end + "' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


@pytest.mark.parametrize(("eos", "end", "stops"), BASE_SHAPES.values(), ids=BASE_SHAPES)
def test_a_reply_is_trained_with_a_token_that_inference_stops_at(eos, end, stops, shared, tmp_path):
    """Of every shape, in SFT on replies and on whole conversations with the assistant's turns alone, with Qwen's
    tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers/qwen3")
    tokenizer.eos_token, tokenizer.chat_template = eos, chat_template(end)
    ids = tokenizer.convert_tokens_to_ids(stops)
    model = Qwen3ForCausalLM(Qwen3Config(**TINY, eos_token_id=tokenizer.eos_token_id))
    assert stop_token_ids(model, tokenizer, turns=True) == tuple(ids)
    for settings in ({"completion_only_loss": True}, {"assistant_only_loss": True}):
        rows = [{"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}]}]
        (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]))
        data = DataConfig(source=str(tmp_path / "rows.jsonl"))
        [example] = prepare(data, tokenizer, "sft", cache_dir=tmp_path, **settings).train
        [(tokens, marked)] = sequences(example.trees[0])
        trained = tokens[marked].tolist()
        assert tokenizer.decode(trained).startswith("Ho.") and any(token in ids for token in trained), settings


@pytest.fixture(scope="module")
def base_model(scratch_model, tmp_path_factory):
    """A base model whose tokenizer and generation_config.json stop at <|endoftext|>, and its template at <|im_end|>."""
    folder = tmp_path_factory.mktemp("models") / "base"
    tokenizer, model = (kind.from_pretrained(scratch_model) for kind in (AutoTokenizer, AutoModelForCausalLM))
    tokenizer.eos_token, tokenizer.chat_template = "<|endoftext|>", CHATML
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


REWARDS = [{"type": "length", "target": 4}]
SAMPLED = {"rollout": {"max_completion_length": 4}}
METHODS = {
    "sft": {},
    "dpo": {},
    "orpo": {},
    "kto": {},
    "grpo": {"rewards": REWARDS, **SAMPLED},
    "ppo": {"rewards": REWARDS, **SAMPLED},
    "distill": SAMPLED,
}


@pytest.mark.parametrize(("method", "lora"), [*((name, False) for name in METHODS), ("sft", True), ("ppo", True)])
def test_every_method_saves_the_templates_end_of_turn(method, lora, base_model, tmp_path, capsys):
    """In every folder of the run, of adapters too, where our commands and a merge read it."""
    rows = [{"prompt": f"{n} + 1?", "chosen": "4", "rejected": "3"} for n in range(4)]
    if method in ("sft", "distill", "grpo", "ppo"):
        rows = [{"prompt": row["prompt"], "completion": "4"} for row in rows]
    elif method == "kto":
        rows = [{"prompt": row["prompt"], "completion": "4", "label": n % 2 == 0} for n, row in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "name": "run", "output_dir": str(tmp_path), "model": {"path": str(base_model)}, "devices": {"type": "cpu"},
        "data": {"source": str(tmp_path / "rows.jsonl"), "max_prompt_length": None},
        "training": {"max_steps": 1, "batch_size": 2}, "method": {"type": method}, **METHODS[method],
    }  # fmt: skip
    if method == "distill":
        settings["method"] |= {"teacher": str(base_model)}
    if lora:
        settings["model"] |= {"lora": {"r": 2}}
    (tmp_path / "a.json").write_text(json.dumps(settings))
    assert runner.train(load(tmp_path / "a.json").config) == 0
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    stops = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    for folder in (tmp_path / "run/final", tmp_path / "run/checkpoint-1"):
        assert (folder / "adapter_config.json").exists() == lora
        assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == stops
        model = ModelConfig(path=str(folder))
        loaded = load_model(model, "lm", torch.float32, torch.device("cpu"))
        assert stop_token_ids(loaded, load_tokenizer(model)) == tuple(stops)
    assert "added '<|im_end|>', which ends a turn in the chat template" in (tmp_path / "run/training.log").read_text()
    assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == stops


def test_a_run_of_an_earlier_version_samples_on_as_it_began(base_model, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1 + 1?"}) + "\n")
    settings = {"model": base_model, "data.source": tmp_path / "rows.jsonl", "output_dir": tmp_path, "name": "run"}
    settings |= {"method": "grpo", "rewards": json.dumps(REWARDS), "rollout.max_completion_length": 4}
    settings |= {"training.max_steps": 1, "behavior_version": 1, "training.batch_size": 1}
    assert main(["train", *(f"{key}={value}" for key, value in settings.items())]) == 0
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run/final").generation_config.eos_token_id == (
        tokenizer.eos_token_id
    )
    log = " ".join((tmp_path / "run/training.log").read_text().split())
    assert "ends a turn with '<|im_end|>', which is not a stop token ('<|endoftext|>')" in log


def test_a_suite_with_its_own_template_stops_at_its_turns_and_leaves_the_tokenizer(base_model):
    model = ModelConfig(path=str(base_model))
    tokenizer, policy = load_tokenizer(model), load_model(model, "lm", torch.float32, torch.device("cpu"))
    before = tokenizer.chat_template
    own, end = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")
    for template, stops in (("auto", (own, end)), ("chatml", (own, end)), ("none", (own,)), ("question_only", (own,))):
        suite = SuiteConfig(name="s", source="x", template=template)
        assert stops_of(suite, policy, tokenizer) == stops, template
        items = [Item(0, "0", "", "Hi.", None, {}, {})] if template == "chatml" else []
        assert all(isinstance(one, Prompt) for one in ask(suite, items, tokenizer, policy).values())
    assert stops_of(SuiteConfig(name="s", source="x"), policy, tokenizer, turns=False) == (own,)
    assert (tokenizer.chat_template, tokenizer.eos_token_id) == (before, own)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"eos_token_id": [[1]]}', "eos_token_id: [[1]]; it must be a token id or a list of them"),
        ('{"eos_token_id": true}', "eos_token_id: True; it must be"),
        ('{"eos_token_id": -1}', "eos_token_id: -1; it must be"),
        ("[]", "it must be a token id"),
        ("{", "generation_config.json cannot be read"),
        ("{}", None),
        ('{"eos_token_id": null}', None),
        ('{"eos_token_id": 7}', None),
    ],
)
def test_the_stop_tokens_of_an_adapters_folder_are_checked(content, problem, tmp_path):
    (tmp_path / "generation_config.json").write_text(content)
    if problem is None:
        assert adapter_stops(str(tmp_path)) == ([7] if "7" in content else [])
        return
    with pytest.raises(ModelError, match=re.escape(problem)):
        adapter_stops(str(tmp_path))


QUESTION, BEGUN = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is "}
TRIMMED = CHATML.replace("message.content", "message.content | trim")


def read_rows(tmp_path, rows, tokenizer, kind="sft", template="chat", **options):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(source=str(path), template=template, max_length=10_000)
    return prepare(data, tokenizer, kind, cache_dir=tmp_path / "cache", **options)


@pytest.mark.parametrize("template", [CHATML, TRIMMED, "qwen3"])
def test_a_reply_continues_the_prefill_of_its_prompt(template, tmp_path, shared):
    """The prompt is what `continue_final_message` gives; the reply is joined to it in one turn and trained alone."""
    chat = [QUESTION, BEGUN]
    if template == "qwen3":
        tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "qwen3")
    else:
        tokenizer = byte_tokenizer(template)
    opening = tokenizer.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    joined = [QUESTION, {"role": "assistant", "content": "It is 4"}]
    whole = tokenizer.apply_chat_template(joined, tokenize=False)
    [prompt] = read_rows(tmp_path, [{"prompt": chat}], tokenizer, "prompt").train[0].trees
    assert tokenizer.decode(prompt.tokens) == opening and "assistant\n" in opening

    def texts(data):
        [tree] = data.train[0].trees
        return [tokenizer.decode([*tree.tokens, *child.tokens]) for child in tree.children or (Node([]),)]

    for four, five in (("4", "5"), ([{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "5"}])):
        sft = read_rows(tmp_path, [{"prompt": chat, "completion": four}], tokenizer)
        assert texts(sft) == [whole] and trained_text(sft, tokenizer) == [whole[len(opening) :]]
        labelled = [{"prompt": chat, "completion": four, "label": label} for label in (True, False)]
        assert texts(read_rows(tmp_path, labelled, tokenizer, "unpaired")) == [whole]
        pair = {"prompt": chat, "chosen": four, "rejected": five}
        assert texts(read_rows(tmp_path, [pair], tokenizer, "pair")) == [whole, whole.replace("is 4", "is 5")]
    before = read_rows(tmp_path, [{"prompt": chat}], tokenizer, "prompt", behavior_version=1)  # version 1
    closed = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(before.train[0].trees[0].tokens) == closed
    if template == CHATML:
        masked = read_rows(tmp_path, [{"prompt": chat, "completion": "4"}], tokenizer, assistant_only_loss=True)
        assert trained_text(masked, tokenizer) == ["4<|im_end|>\n"]


def test_two_turns_of_the_assistant_in_a_transcript_are_two_turns(tmp_path):
    said = "\n\nHuman: 2+2?\n\nAssistant: It is\n\nAssistant: "
    tokenizer = byte_tokenizer(CHATML)
    data = read_rows(tmp_path, [{"chosen": said + "4", "rejected": said + "5"}], tokenizer, "pair")
    turns = [QUESTION, {"role": "assistant", "content": "It is"}]
    closed = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(data.train[0].trees[0].tokens) == closed


def test_replies_of_alpacas_history_are_trained(tmp_path):
    row = {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be.", "history": [["q", "a"], ["r", "b"]]}
    tokenizer = byte_tokenizer(CHATML)
    rows = [row, {**row, "history": None}]
    data = read_rows(tmp_path, rows, tokenizer)
    assert trained_text(data, tokenizer) == ["a<|im_end|>\n", "b<|im_end|>\n", "3<|im_end|>\n"]
    assert trained_text(data, tokenizer, 1) == ["3<|im_end|>\n"]
    whole = tokenizer.decode(data.train[0].trees[0].tokens)
    said = (
        ("system", "Be."),
        ("user", "q"),
        ("assistant", "a"),
        ("user", "r"),
        ("assistant", "b"),
        ("user", "Add.\n1 2"),
    )
    turns = [{"role": role, "content": content} for role, content in (*said, ("assistant", "3"))]
    assert whole == tokenizer.apply_chat_template(turns, tokenize=False)
    for option, trained in ((True, "3<|im_end|>\n"), (False, whole.removeprefix("<|im_start|>"))):
        last = read_rows(tmp_path, rows, tokenizer, completion_only_loss=option)
        assert [text.removeprefix("<|im_start|>") for text in trained_text(last, tokenizer)] == [trained]
        assert tokenizer.decode(last.train[0].trees[0].tokens) == whole
    masked = read_rows(tmp_path, rows, tokenizer, assistant_only_loss=True)
    assert trained_text(masked, tokenizer) == trained_text(data, tokenizer)
    slow = ByT5Tokenizer()
    slow.chat_template = CHATML
    for options in ({}, {"assistant_only_loss": True}):
        with pytest.raises(DataError, match="assistant_only_loss and history need a fast tokenizer"):
            read_rows(tmp_path, rows, slow, **options)
    assert len(read_rows(tmp_path, rows[1:], slow).train) == 1
    before = read_rows(tmp_path, rows, tokenizer, behavior_version=1)  # version 1 had no history
    assert list(before.train[0].trees[0].tokens) == list(data.train[1].trees[0].tokens)


JOINED = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name + ' ' + c.function.arguments }}</call>{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
ARGUMENT_TEMPLATES = {  # how a template writes the arguments {"city": "Bern", "n": 2}
    "joined": (JOINED, '{"city": "Bern", "n": 2}'),
    "printed": (JOINED.replace("c.function.name + ' ' + c.function.arguments", "c.function.arguments"), None),
    "tojson": (JOINED.replace("c.function.arguments", "(c.function.arguments | tojson)"), None),
    "iterated": (
        JOINED.replace(
            "{{ c.function.name + ' ' + c.function.arguments }}",
            "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",
        ),
        "city=Bern;n=2;",
    ),
}


@pytest.mark.parametrize("name", ARGUMENT_TEMPLATES)
def test_arguments_as_the_template_writes_them(name, tmp_path):
    """The first rows have no calls, or are refused: how arguments are written does not hang on them."""
    template, written = ARGUMENT_TEMPLATES[name]
    tokenizer = byte_tokenizer(
        template.replace("[{{ m.role }}]", "[{{ m.role }}]{{ raise_exception('no') if m.name }}")
    )

    def row(arguments, **more):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call], **more}]}

    given = {"city": "Bern", "n": 2}
    good = [row(given), row(json.dumps(given)), row('{"city":"Bern","n":2}')]
    data = read_rows(
        tmp_path, [row(given, name="x"), {"messages": TURNS}, *good, *[{"messages": TURNS}] * 100], tokenizer
    )
    found = [tokenizer.decode(data.train[index].trees[0].tokens) for index in (1, 2, 3)]
    shown = written or '{"city": "Bern", "n": 2}'
    assert all(text.split("<call>")[1].split("</call>")[0].endswith(shown) for text in found[:2])
    if name in ("joined", "printed"):
        assert '{"city":"Bern","n":2}' in found[2]  # the string as it stands in the row
    else:
        assert found[2] == found[0]
    assert [bad.row for bad in data.report.malformed] == [0]


def test_one_begin_token(tmp_path, shared):
    """Rows that begin with the begin token have it once, whoever else writes one; others in the text stay."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "stories260K")
    begin = tokenizer.bos_token_id

    def begins(rows, kind="sft", template="none", **options):
        data = read_rows(tmp_path, rows, tokenizer, kind, template, **options)
        trees = [tree for index in range(len(data.train)) for tree in data.train[index].trees]
        return [[i for i, token in enumerate(tree.tokens) if token == begin] for tree in trees]

    for with_it, without in (
        ({"prompt": "<s>Once", "completion": " upon"}, {"prompt": "Once", "completion": " upon"}),
        ({"text": "<s>Once"}, {"text": "Once"}),
    ):
        assert begins([with_it, without]) == [[0], [0]]
        assert begins([with_it, without], behavior_version=1) == [[0, 1], [0]]  # a run of version 1 goes on as it began
    assert begins([{"prompt": "<s>Once", "chosen": "a", "rejected": "b"}], "pair") == [[0]]
    assert begins([{"prompt": "<s>"}, {"prompt": "<s>a"}], "prompt") == [[0], [0]]
    assert begins([{"prompt": "<s>a<s>b", "completion": "<s>c"}])[0][0] == 0
    assert len(begins([{"prompt": "<s>a<s>b", "completion": "<s>c"}])[0]) == 3
    for options in ({}, {"assistant_only_loss": True}):
        [found] = begins([{"prompt": "<s>Once", "completion": "upon"}], template="question_only", **options)
        assert found == [0]
    data = read_rows(tmp_path, [{"prompt": "<s>2?", "completion": "4"}], tokenizer, template="question_only",
                     assistant_only_loss=True)  # fmt: skip
    assert trained_text(data, tokenizer) == ["4</s>"]


# --- variables of the chat template -----------------------------------------------------------------------------------

VARIABLES = {
    "flag": False, "number": -1.5, "large": 1e30, "nothing": None,
    "text": "a 'b' \"c\" \\\\ \\n {{ x }} %} {% if %}\n🙂 é \u2028",
    "list": [1, "two", None, [True]], "mapping": {"k": {"x": [0.5]}, "a b": "c"},
}  # fmt: skip
SHOWS = (
    "{%- macro shown(x) %}{{ x | tojson }}|{{ text }}{% endmacro %}\n  {% for name in [1] %}"
    + "".join(f"{{{{ {name} | tojson if {name} is defined else '-' }}}};" for name in VARIABLES)
    + "{% endfor %}{{ shown(list) }}\n{% for m in messages %}{{ m.content }}{% endfor %}\n"
)


@pytest.mark.parametrize("start", ["", "\n", "  \n\n x", "{%- if true %}a{% endif %}\n"])
def test_defaults_of_variables_are_the_template_with_them_given(start):
    """Of every kind of value, whatever the template begins with: the text of transformers, given the same variables."""
    tokenizer = byte_tokenizer(start + SHOWS)
    want = tokenizer.apply_chat_template(TURNS, tokenize=False, **VARIABLES)
    other = tokenizer.apply_chat_template(TURNS, tokenize=False, **VARIABLES | {"flag": 3, "text": ""})
    data = DataConfig(source="x", chat_template_kwargs=VARIABLES)
    for _ in range(2):  # a later stage begins with the saved template
        choose_template(data, tokenizer)
        assert tokenizer.chat_template.count("set flag =") == 1
        assert tokenizer.apply_chat_template(TURNS, tokenize=False) == want
        given = {"flag": 3, "text": ""}
        assert tokenizer.apply_chat_template(TURNS, tokenize=False, **given) == other, "what is given has priority"
        assert render.rendered(tokenizer, [RenderRequest(TURNS), RenderRequest(TURNS, variables=given)]) == [
            want,
            other,
        ]
    choose_template(DataConfig(source="x", chat_template_kwargs={"flag": 3, "text": ""}), tokenizer)
    assert tokenizer.apply_chat_template(TURNS, tokenize=False) == other, "another stage's defaults replace these"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"messages": []}, "messages is set for every chat template and cannot be changed"),
        ({"tools": []}, "tools is set for"),
        ({"add_generation_prompt": True}, "add_generation_prompt is set for"),
        ({"eos_token": "x"}, "eos_token is set for"),
        ({"strftime_now": 1}, "strftime_now is set for"),
        ({"if": 1}, "if is set for"),
        ({"a b": 1}, "'a b' cannot be the name"),
        ({"x": float("nan")}, "has a value that is not JSON"),
        ({"x": {1, 2}}, "has a value that is not JSON"),
        ({"x": "\ud800"}, "has a value that is not JSON"),
        ([1], "must be a mapping of names to values"),
        ("no", "must be a mapping of names to values"),
    ],
)
def test_variables_that_a_template_cannot_have(given, problem, tmp_path):
    with pytest.raises(ValueError, match=re.escape(problem)):
        DataConfig(source="x", chat_template_kwargs=given)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW | {"chat_template_kwargs": given}, default=list))
    if problem.startswith("has a value") and "ud800" not in repr(given):
        return  # a file has no such values
    with pytest.raises(DataError, match="chat_template_kwargs" if problem.startswith("has") else re.escape(problem)):
        prepare(DataConfig(source=str(tmp_path / "rows.jsonl")), byte_tokenizer(SHOWS), "sft", cache_dir=tmp_path)


ROW = {"messages": TURNS}


def test_a_variable_that_nothing_reads_is_refused():
    with pytest.raises(DataError, match="the chat template has no variable enable_thinkin; remove it"):
        choose_template(DataConfig(source="x", chat_template_kwargs={"enable_thinkin": True}), byte_tokenizer(CHATML))
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        choose_template(DataConfig(source="x", chat_template_kwargs={"x": True}), byte_tokenizer())
    with pytest.raises(ValueError, match="have no effect with template: none"):
        DataConfig(source="x", template="none", chat_template_kwargs={"x": True})


@pytest.mark.parametrize("kind", ["sft", "pair", "unpaired", "prompt"])
def test_a_rows_variables_override_the_settings_key_by_key(kind, shared, tmp_path):
    """With Qwen3's own template: the tokens are those of transformers given each row's variables, in every kind of
    data; as a mapping, as JSON, with nulls that typed columns have, and none."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers/qwen3")
    said = [{"role": "user", "content": "Hi."}]
    row = {
        "sft": {"prompt": said, "completion": "Ho."},
        "pair": {"prompt": said, "chosen": "Ho.", "rejected": "No."},
        "unpaired": {"prompt": said, "completion": "Ho.", "label": True},
        "prompt": {"prompt": said},
    }[kind]
    given = [{}, {"enable_thinking": True}, '{"enable_thinking": true}', {"enable_thinking": None, "y": 1}, None, ""]
    rows = [row | {"chat_template_kwargs": one, "n": n} for n, one in enumerate(given)]
    if kind == "unpaired":
        rows.append(row | {"label": False})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    opened, closed = (
        tokenizer.apply_chat_template(
            said, tokenize=False, add_generation_prompt=True, enable_thinking=thinking, return_dict=False
        )
        for thinking in (True, False)
    )
    assert closed == opened + "<think>\n\n</think>\n\n"
    data = DataConfig(
        source=str(tmp_path / "rows.jsonl"), chat_template_kwargs={"enable_thinking": False}, shuffle=False
    )
    made = prepare(data, tokenizer, kind, cache_dir=tmp_path).train
    trunks = {}
    for number, which in enumerate(made.rows):
        tree = made[number].trees[0]
        trained = np.broadcast_to(np.asarray(tree.trained, bool), len(tree.tokens))
        trunks[int(which)] = tokenizer.decode(np.asarray(tree.tokens)[~trained])
    for number, one in enumerate([False, True, True, False, False, False]):
        want = opened if one else closed
        # a reply to an open prompt begins with the thinking that the template writes
        assert trunks[number] == want, (number, trunks[number])


def test_a_run_saves_its_variables_where_all_find_them(scratch_model, tmp_path, capsys):
    """The prompts that RL samples from are those of the saved model in plain transformers, in `sample`, in a suite of
    the run and in the export; a second stage keeps them."""
    base = tmp_path / "base"
    tokenizer = AutoTokenizer.from_pretrained(scratch_model)
    tokenizer.chat_template = THINKS
    tokenizer.save_pretrained(base)
    AutoModelForCausalLM.from_pretrained(scratch_model).save_pretrained(base)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1 + 1?"}) + "\n")
    settings = {
        "name": "run", "output_dir": str(tmp_path), "model": {"path": str(base)}, "devices": {"type": "cpu"},
        "data": {"source": str(tmp_path / "rows.jsonl"), "chat_template_kwargs": {"enable_thinking": False}},
        "training": {"max_steps": 1, "batch_size": 1}, "rewards": REWARDS, **SAMPLED,
        "stages": {"one": {"method": "grpo"}, "two": {"method": "grpo", "data": {"chat_template_kwargs": {}}}},
    }  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(settings))
    assert main(["train", str(tmp_path / "a.json")]) == 0
    said = [{"role": "user", "content": "1 + 1?"}]
    want = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    for stage in ("one", "two"):
        saved = AutoTokenizer.from_pretrained(tmp_path / "run" / stage / "final")
        assert saved.apply_chat_template(said, tokenize=False, add_generation_prompt=True) == want
        run = load(tmp_path / "run" / stage / "config.yaml").config
        for tokens in (saved, tokenizer)[: 2 if stage == "one" else 1]:  # as `why` and the loss lab read the rows
            [example] = prepare_run(run, deepcopy(tokens)).train
            assert saved.decode(example.trees[0].tokens) == want
        suite = SuiteConfig(name="s", source="x", prompt="1 + 1?")
        assert written_by(suite, saved)[1].chat_template == saved.chat_template
        capsys.readouterr()
        assert main(["sample", str(tmp_path / "run" / stage), "--prompts", "1", "-n", "2"]) == 0
        assert "<think></think>" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "run/one"), "--output", str(tmp_path / "out")]) == 0
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported.apply_chat_template(said, tokenize=False, add_generation_prompt=True) == want
    assert "trained with `enable_thinking=false`" in (tmp_path / "out/README.md").read_text()


# As in Qwen's later templates: the thinking of earlier turns is left out unless the variable is true.
KEEPS = CHATML.replace(
    "message.content +",
    "(message.content if loop.last or preserve_thinking is defined and preserve_thinking "
    "else message.content.split('</think>') | last) +",
)


def test_the_cache_follows_the_variables(tmp_path):
    """Each value of a variable has its own tokens and its own key; equal values share one."""
    turns = [{"role": role, "content": f"<think>{role[0]}</think>4"} for role in ("user", "assistant") * 2]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}))
    given: dict
    for given in ({"preserve_thinking": True}, {}, {"preserve_thinking": False}, {"preserve_thinking": True}):
        tokenizer = byte_tokenizer(KEEPS)
        data = DataConfig(source=str(tmp_path / "rows.jsonl"), chat_template_kwargs=given)
        [(tokens, _)] = sequences(prepare(data, tokenizer, "sft", cache_dir=tmp_path).train[0].trees[0])
        want = str(byte_tokenizer(KEEPS).apply_chat_template(turns, tokenize=False, **given))
        assert tokenizer.decode(tokens) == want
        assert want.count("<think>a") == (2 if given.get("preserve_thinking") else 1)
    assert len([*(tmp_path / "data").iterdir()]) == 3


@pytest.mark.parametrize(
    ("command", "without"),
    [
        (["generate"], "1 of 1 rows have no usable prompt"),
        (["sample"], "the chat template fails: TemplateError: not given"),
        (["eval", "--suite", "gsm8k", "--data"], "2 the chat template fails"),
    ],
    ids=["generate", "sample", "eval"],
)
def test_the_flag_gives_the_template_its_variables(command, without, scratch_model, tmp_path, capsys):
    """With a template that cannot be rendered without them."""
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    shutil.copytree(scratch_model, model)
    needs = "{% if preserve_thinking is not defined or not preserve_thinking %}{{ raise_exception('not given') }}"
    (model / "chat_template.jinja").write_text(needs + "{% endif %}" + CHATML)
    rows.write_text(json.dumps({"question": "2+2?", "answer": "#### 4"}) + "\n")
    asked = [command[0], str(model), *command[1:], str(rows), "-n", "2", "--max-completion-length", "2"]
    for value in ("true", "false"):
        more = ["-o", str(tmp_path / value)] if command[0] != "sample" else []
        main([*asked, *more, "--chat-template-kwargs", f"{{preserve_thinking: {value}}}"])
        assert (without in " ".join("".join(capsys.readouterr()).split())) == (value == "false")


THINKS = CHATML.replace(
    "<|im_start|>assistant\\n' }}",
    "<|im_start|>assistant\\n' }}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}",
)


def test_suites_with_variables_leave_the_tokenizer(base_model):
    tokenizer = load_tokenizer(ModelConfig(path=str(base_model)))
    tokenizer.chat_template = THINKS
    suite = SuiteConfig(name="s", source="x", chat_template_kwargs={"enable_thinking": False})
    policy = load_model(ModelConfig(path=str(base_model)), "lm", torch.float32, torch.device("cpu"))
    [asked] = ask(suite, [Item(0, "0", "", "Hi.", None, {}, {})], tokenizer, policy).values()
    assert asked.text.endswith("<|im_start|>assistant\n<think></think>") and tokenizer.chat_template == THINKS


# --- the date ---------------------------------------------------------------------------------------------------------

DATED = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') + '\\n' }}{% endif %}" + CHATML


def test_the_date_of_a_template_is_that_of_the_settings_in_every_rendering(tmp_path):
    """Its key in the cache has the date; that of a template without one has not."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW))
    tokenizer = byte_tokenizer(DATED)
    notes = {}
    for day in ("2024-02-29", None, "2031-12-01"):
        data = DataConfig(source=str(tmp_path / "rows.jsonl"), date=day)
        made = prepare(data, tokenizer, "sft", cache_dir=tmp_path / "dated")
        [(tokens, _)] = sequences(made.train[0].trees[0])
        shown = date.fromisoformat(day) if day else date.today()
        assert tokenizer.decode(tokens).startswith(f"{shown:%d %b %Y}\n<|im_start|>user"), day
        notes[day] = [line for line in made.report.lines() if "writes the date" in line]
        [asked] = prompts_of([Record(0, "f", 1, {"prompt": "Hi."})], data, tokenizer, "f")
        assert asked.text.startswith(f"{shown:%d %b %Y}\n")
        plain = prepare(data, byte_tokenizer(CHATML), "sft", cache_dir=tmp_path / "plain")
        assert not any("date" in line for line in plain.report.lines())
    assert [len(list((tmp_path / name / "data").iterdir())) for name in ("dated", "plain")] == [3, 1]
    assert "the chat template writes the date, 2024-02-29 in this run" in notes["2024-02-29"][0]
    for wrong in ("today", "2024-13-01", 5):
        with pytest.raises(ValueError, match="must be a date such as 2026-01-31"):
            DataConfig(source="x", date=wrong)
    assert DataConfig(source="x", date=date(2026, 1, 31)).date == "2026-01-31", "as YAML reads it"


@pytest.mark.parametrize("day", ["2020-05-17", None])
def test_explore_and_plan_show_the_date_of_the_template(day, scratch_model, tmp_path, capsys):
    """The date of the settings, or today's; none for a template without one."""
    shutil.copytree(scratch_model, tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2+2?", "completion": "4"}) + "\n")
    settings = [f"model.path={tmp_path / 'model'}", f"data.source={tmp_path / 'rows.jsonl'}", "method=sft"]
    settings += [f"data.date={day}"] if day else []
    shown = f"the chat template writes the date, {day or date.today()} in this run (data.date)"
    for template, times in ((DATED, 1), (CHATML, 0)):
        (tmp_path / "model/chat_template.jinja").write_text(template)
        for command in ("explore", "plan"):
            assert main([command, *settings]) == 0
            assert " ".join(capsys.readouterr().out.split()).count(shown) == times, command


def test_dates_of_suites_and_reward_models(base_model, scratch_model, tmp_path):
    """Given by the run; the process that renders keeps none for the next rendering."""
    model = ModelConfig(path=str(base_model))
    tokenizer, policy = load_tokenizer(model), load_model(model, "lm", torch.float32, torch.device("cpu"))
    tokenizer.chat_template = DATED
    items = [Item(0, "0", "", "Hi.", None, {}, {})]
    for day, shown in (("2020-05-17", "17 May 2020\n"), (None, f"{date.today():%d %b %Y}\n")):
        [asked] = ask(SuiteConfig(name="s", source="x"), items, tokenizer, policy, day).values()
        assert asked.text.startswith(shown)
    AutoModelForSequenceClassification.from_pretrained(scratch_model, num_labels=1).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    said = [{"role": "user", "content": "Hi."}]
    rewards = [
        LearnedReward(str(tmp_path), DevicesConfig(), date=day)([said], ["Ho."], [False])
        for day in ("2020-05-17", "2020-05-17", "1999-12-31")
    ]
    assert rewards[0] == rewards[1] != rewards[2]


@pytest.mark.parametrize("version", [2, 1])
def test_a_resumed_run_writes_the_date_of_its_start(version, scratch_model, tmp_path, power_cut, monkeypatch, capsys):
    """Days later and with an empty cache: the rows, an evaluation suite's and a reward model's prompts; `why`, `sample`
    and the loss lab read them, too. A run of an earlier version has no record: its data is that of the day, and
    resuming it says that the data differs."""
    base = tmp_path / "base"
    tokenizer = AutoTokenizer.from_pretrained(scratch_model)
    tokenizer.chat_template = DATED
    tokenizer.save_pretrained(base)
    AutoModelForCausalLM.from_pretrained(scratch_model).save_pretrained(base)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}?", "completion": "4"}) + "\n" for n in "ab")
    )
    settings = {
        "name": "run", "output_dir": str(tmp_path), "model": {"path": str(base)}, "devices": {"type": "cpu"},
        "data": {"source": str(tmp_path / "rows.jsonl")}, "method": "sft", "checkpoint": {"save_steps": 1},
        "training": {"max_steps": 2, "batch_size": 1}, "behavior_version": version,
    }  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(settings))
    config = load(tmp_path / "a.json").config
    with power_cut(step=1):
        runner.train(config)
    facts = json.loads((tmp_path / "run/run.json").read_text())["provenance"]
    assert facts.get("date") == (date.today().isoformat() if version == 2 else None)
    assert load(tmp_path / "run/config.yaml").config.data.date is None, "what was set, stays"
    if version == 1:
        assert as_recorded(config, tmp_path / "run").data == config.data
        return
    run = json.loads((tmp_path / "run/run.json").read_text())
    run["provenance"]["date"] = "2020-05-17"  # as if it had begun then
    (tmp_path / "run/run.json").write_text(json.dumps(run))
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / "cache"))
    with pytest.raises(RunError, match="the training data differs"):
        runner.train(config, resume=True)  # it has today's text in its checkpoint
    shutil.rmtree(tmp_path / "run/checkpoint-1")
    assert runner.train(config, resume=True) == 0, "from the start, on the date of its start"
    assert json.loads((tmp_path / "run/run.json").read_text())["provenance"]["date"] == "2020-05-17"
    saved = AutoTokenizer.from_pretrained(tmp_path / "run/final")
    assert saved.chat_template == DATED, "inference writes its own date"
    of_run = as_recorded(load(tmp_path / "run/config.yaml").config, tmp_path / "run")
    [(tokens, _), *_] = sequences(prepare_run(of_run, saved).train[0].trees[0])
    assert saved.decode(tokens).startswith("17 May 2020\n")
    assert main(["sample", str(tmp_path / "run"), "--prompts", "1", "-n", "2", "--max-completion-length", "2"]) == 0
    assert "17 May 2020" in capsys.readouterr().out
