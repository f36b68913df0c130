"""Templates: the built-in ones, the sandbox they are rendered in, and which tokens of a conversation are trained."""

import json
import signal
import time
import unicodedata

import pytest
from data_tokenizer import CHATML, byte_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain import helpers
from posttrain.cli import main
from posttrain.config.schema.data import DataConfig, TagsConfig
from posttrain.data import prepare, render
from posttrain.data.render import Process, RenderRequest, rendering
from posttrain.data.templates import choose_template
from posttrain.engines import stop_token_ids
from posttrain.errors import DataError

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


def test_a_process_renders_again_unless_it_owes_an_answer(monkeypatch):
    plain, endless = byte_tokenizer("{{ messages[0].content }}"), byte_tokenizer(HOSTILE["loops"][0])
    job = RenderRequest([{"role": "user", "content": "a"}])
    monkeypatch.setattr(render, "_idle", helpers.HelperPool())
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
    monkeypatch.setattr(helpers, "IDLE_SECONDS", 0.01)
    assert text(plain) == "a" and len(started) == 4
    for _ in range(500):
        if not started[3].is_free:
            break
        time.sleep(0.01)
    assert not started[3].is_free and text(plain) == "a" and len(started) == 5


def trained_text(prepared, tokenizer, index=0):
    """The trained tokens of an example as text, runs of them apart."""
    (tree,) = prepared.train[index].trees
    runs, before = [], False
    for token, trained in zip(tree.tokens, tree.trained, strict=True):
        if trained and not before:
            runs.append([])
        if trained:
            runs[-1].append(int(token))
        before = trained
    return [tokenizer.decode(run) for run in runs]


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


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text(CONVERSATION)
    rewriting = CHATML.replace("message.content", "(message.content if loop.last else '(old)')")
    with pytest.raises(DataError, match="writes earlier turns differently"):
        prepare(
            DataConfig(source=str(tmp_path / "rows.jsonl")),
            byte_tokenizer(rewriting),
            "sft",
            assistant_only_loss=True,
            cache_dir=tmp_path,
        )


def test_nothing_to_train_is_an_error_with_the_row(tmp_path):
    (tmp_path / "rows.jsonl").write_text(CONVERSATION + '{"messages": [{"role": "user", "content": "b"}]}\n')
    data = DataConfig(source=str(tmp_path / "rows.jsonl"))
    with pytest.raises(DataError, match=r"rows\.jsonl line 2: the conversation has no turn of the assistant"):
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


def base_tokenizer(tokens):
    """Of a base model: a beginning and an end of text, perhaps the tokens of a template, and no template."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": tokens})
    return tokenizer


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
    with pytest.raises(DataError, match="zephyr ends replies with the tokenizer's stop token, and it has none"):
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
