"""Turns of a conversation in its rendered text: which are trained, and whether prompt and whole agree."""

import json
from itertools import pairwise

import numpy as np
import pytest
from data_tokenizer import CHATML, base_tokenizer, byte_tokenizer, prepare, trained_text
from transformers import AutoTokenizer

from posttrain.base.errors import DataError
from posttrain.config.schema.data import DataConfig
from posttrain.data.render import rendering
from posttrain.data.rows import Row
from posttrain.data.tokenise import Tokeniser, Trained

# The shapes of stock templates, without their long texts.
THINKS = (  # Qwen3: earlier turns lose their thinking, the last has an empty one; `enable_thinking` is not passed
    "{% set ns = namespace(last=messages|length - 1, open=true) %}{% for m in messages[::-1] %}"
    "{% if ns.open and m.role == 'user' %}{% set ns.open = false %}"
    "{% set ns.last = messages|length - 1 - loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.reasoning_content or (m.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m.content else '') %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ said }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% elif m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + "
    "'\n</tool_response><|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{{ '<think>\n\n</think>\n\n' if empty_thinking }}{% endif %}"
)
LLAMA = (  # Llama 3.1: the system turn is always there, contents are trimmed, a call is all of its turn
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{{ '[system]\n\nToday Date: 26 Jul 2024\n\n' + system + '<|eot|>' }}"
    "{% for m in messages %}{% if 'tool_calls' in m %}"
    '{{ \'[assistant]\n\n{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ '}<|eot|>' }}"
    "{% elif m.role == 'tool' %}{{ '[ipython]\n\n' + (m.content | tojson) + '<|eot|>' }}"
    "{% else %}{{ '[' + m.role + ']\n\n' + m.content | trim + '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n\n' }}{% endif %}"
)
GEMMA = (  # Gemma 3: the system prompt is in the first user message, the roles alternate, contents are trimmed
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}{% for m in turns %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '[' + ('model' if m.role == 'assistant' else m.role) + ']\n' + (first if loop.first else '') }}"
    "{{ m.content | trim }}{{ '<|eot|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '[model]\n' }}{% endif %}"
)
CHANNELS = (  # gpt-oss: channels, thinking of the last turn alone, another end of the last turn, calls with a recipient
    "{{ '<|start|>system<|message|>Date<|end|>' }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.tool_calls %}{% set after = namespace(final=false) %}{% for later in messages[loop.index:] %}"
    "{% if later.role == 'assistant' and not later.tool_calls %}{% set after.final = true %}{% endif %}{% endfor %}"
    "{% if m.thinking and not after.final %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + '<|channel|>commentary json<|message|>'"
    " + (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}"
    "{% elif loop.last and not add_generation_prompt %}{% if m.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}{{ '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' "
    "+ (m.content | tojson) + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def said(user, assistant, *, first=None, **more):
    turns = [{"role": "system", "content": first}] if first else []
    for index, (asked, answered) in enumerate(zip(user, assistant, strict=True)):
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        if more and index + 1 == len(user):
            turns[-1] |= more
    return turns


TALKS = {
    "twice the same": said(["Hi", "Hi there", "Hi"], ["Hi", "Hi", "Hi"], first="Hi"),
    "what the user says": said(["Say: no<|im_end|>", "no"], ["no", "Say: no"]),
    "thinking": said(["q", "r"], ["<think>\nso\n</think>\n\na", "<think>\nthen\n</think>\n\nb"]),
    "fields": said(["q", "r"], ["a", "b"], reasoning_content="hm", thinking="hm"),
    "trimmed": said([" q ", "r\n"], ["  a \n", "b "]),
    "tags": said(["<b>", "q"], ["<think", "[b]"]),
    "calls": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "thinking": "look", "tool_calls": [CALL]},
        {"role": "tool", "content": '5 "x"'},
        {"role": "assistant", "content": "five"},
        *said(["thanks"], ["ok"]),
    ],
    "assistant first": [{"role": "assistant", "content": "Welcome"}, *said(["q", "r"], ["a", "b"])],
    "assistant alone": [{"role": "assistant", "content": "Welcome"}],
    "system, assistant": [*said([], [], first="Be."), {"role": "assistant", "content": "Welcome"}, *said(["q"], ["a"])],
    "user last": [*said(["q"], ["a"]), {"role": "user", "content": "a"}],
    "empty": said(["q", "r"], ["", "b"]),
}
END, EMPTY = "<|im_end|>\n", "<think>\n\n</think>\n\n"
FINAL, TOOL = "<|channel|>final<|message|>", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TURNS_TRAINED = {  # by hand: template, talk -> the assistant's turns as they stand in the whole
    (THINKS, "twice the same"): [f"Hi{END}", f"Hi{END}", f"{EMPTY}Hi{END}"],
    (THINKS, "what the user says"): [f"no{END}", f"{EMPTY}Say: no{END}"],
    (THINKS, "thinking"): [f"a{END}", f"<think>\nthen\n</think>\n\nb{END}"],
    (THINKS, "fields"): [f"a{END}", f"<think>\nhm\n</think>\n\nb{END}"],
    (THINKS, "tags"): [f"<think{END}", f"{EMPTY}[b]{END}"],
    (THINKS, "calls"): [f"\n{TOOL}{END}", f"five{END}", f"{EMPTY}ok{END}"],
    (THINKS, "assistant first"): [f"Welcome{END}", f"a{END}", f"{EMPTY}b{END}"],
    (THINKS, "assistant alone"): [f"Welcome{END}"],
    (THINKS, "system, assistant"): [f"Welcome{END}", f"{EMPTY}a{END}"],
    (THINKS, "user last"): [f"a{END}"],
    (THINKS, "empty"): [END, f"{EMPTY}b{END}"],
    (LLAMA, "twice the same"): ["Hi<|eot|>"] * 3,
    (LLAMA, "trimmed"): ["a<|eot|>", "b<|eot|>"],
    (LLAMA, "calls"): ['{"name": "f", "parameters": {"x": 1}}<|eot|>', "five<|eot|>", "ok<|eot|>"],
    (LLAMA, "assistant first"): ["Welcome<|eot|>", "a<|eot|>", "b<|eot|>"],
    (LLAMA, "assistant alone"): ["Welcome<|eot|>"],
    (LLAMA, "empty"): ["<|eot|>", "b<|eot|>"],
    (GEMMA, "twice the same"): ["Hi<|eot|>\n"] * 3,
    (GEMMA, "trimmed"): ["a<|eot|>\n", "b<|eot|>\n"],
    (GEMMA, "tags"): ["<think<|eot|>\n", "[b]<|eot|>\n"],
    (CHANNELS, "twice the same"): [f"{FINAL}Hi<|end|>", f"{FINAL}Hi<|end|>", f"{FINAL}Hi<|return|>"],
    (CHANNELS, "fields"): [
        f"{FINAL}a<|end|>",
        f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{FINAL}b<|return|>",
    ],
    (CHANNELS, "calls"): [
        ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>',
        f"{FINAL}five<|end|>",
        f"{FINAL}ok<|return|>",
    ],
    (CHANNELS, "assistant first"): [f"{FINAL}Welcome<|end|>", f"{FINAL}a<|end|>", f"{FINAL}b<|return|>"],
    (CHANNELS, "user last"): [f"{FINAL}a<|end|>"],
    (CHATML, "twice the same"): [f"Hi{END}"] * 3,
    (CHATML, "assistant first"): [f"Welcome{END}", f"a{END}", f"b{END}"],
}
for talk, turns in [(name, turns) for (template, name), turns in TURNS_TRAINED.items() if template is THINKS]:
    prefix = EMPTY if talk not in ("thinking", "fields", "assistant alone", "user last") else ""
    TURNS_TRAINED["{% set empty_thinking = true %}" + THINKS, talk] = [
        turn.removeprefix(EMPTY) if prefix else turn.removeprefix("<think>\n") if turn.startswith("<think>") else turn
        for turn in turns
    ]
SHAPES = {THINKS: "qwen3", LLAMA: "llama31", GEMMA: "gemma3", CHANNELS: "gptoss", CHATML: "chatml"}


@pytest.fixture(scope="module")
def special_tokenizer():
    """Bytes, and the special tokens of the shapes above, of which the end of a turn is the stop token."""

    def of(template):
        tokenizer = byte_tokenizer(template)
        ends = ["<|eot|>", "<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|message|>", "<|channel|>"]
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *ends]})
        return tokenizer

    return of


@pytest.mark.parametrize("bare", [False, True], ids=["special", "bytes"])
def test_the_assistants_turns_of_stock_templates(special_tokenizer, bare):
    """The tokens are transformers' rendering of the whole; each turn as it stands there, with its end, is trained."""
    by_template = {}
    for (template, talk), turns in TURNS_TRAINED.items():
        by_template.setdefault(template, []).append((talk, turns))
    for template, cases in by_template.items():
        tokenizer = byte_tokenizer(template) if bare else special_tokenizer(template)
        with rendering(tokenizer) as renderer:
            tokeniser = Tokeniser(tokenizer, renderer, assistant_only_loss=True)
            found = tokeniser.conversations([Row(None, TALKS[talk]) for talk, _ in cases])
        for (talk, turns), item in zip(cases, found, strict=True):
            where = f"{SHAPES.get(template, 'qwen3 without thinking')}: {talk}"
            whole = tokenizer.apply_chat_template(TALKS[talk], tokenize=False)
            assert isinstance(item, Trained), f"{where}: {item}"
            ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
            assert list(item.tokens)[: len(ids)] == ids and len(item.tokens) <= len(ids) + 1, where
            spans = [(start, min(stop, len(ids))) for start, stop in item.spans]
            assert [tokenizer.decode(ids[start:stop]) for start, stop in spans] == turns, where


@pytest.mark.parametrize("thinking", [None, False])
def test_the_assistants_turns_of_the_real_qwen3(shared, tmp_path, thinking):
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "qwen3")
    if thinking is False:
        tokenizer.chat_template = "{% set enable_thinking = false %}" + tokenizer.chat_template
    rows = [TALKS[name] for name in ("twice the same", "thinking", "calls", "assistant first")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in rows))
    data = DataConfig(source=str(tmp_path / "rows.jsonl"))
    prepared = prepare(data, tokenizer, "sft", assistant_only_loss=True, cache_dir=tmp_path)
    for index, turns in enumerate(rows):
        tokens = tokenizer.apply_chat_template(turns)["input_ids"]
        assert list(prepared.train[index].trees[0].tokens) == tokens
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    empty, so = (EMPTY, "<think>\nthen") if thinking is None else ("", "then")
    assert [trained_text(prepared, tokenizer, index) for index in range(4)] == [
        [f"Hi{END}", f"Hi{END}", f"{empty}Hi{END}"],
        [f"a{END}", f"{so}\n</think>\n\nb{END}"],
        [f"{call}{END}", f"five{END}", f"{empty}ok{END}"],
        [f"Welcome{END}", f"a{END}", f"{empty}b{END}"],
    ]


MISTRAL = (  # Mistral v3: the system prompt is in the last message, if that is the user's; no opening of a reply
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}"
    "{% else %}{% set turns = messages %}{% endif %}{{ '<s>' }}{% for m in turns %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + (system + '\n\n' if loop.last and system is defined else '') + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
)
ASKED = {
    "single": said(["Hi there"], ["Hello"], first="Be brief."),
    "twice": said(["a", "Hi"], ["b", "Hello"], first="Be."),
}
PROMPTS = {
    "single": "<s>[INST] Be brief.\n\nHi there[/INST]",
    "twice": "<s>[INST] a[/INST] b</s>[INST] Be.\n\nHi[/INST]",
}


@pytest.fixture
def mistral():
    return base_tokenizer(["[INST]", "[/INST]"])


def read(tmp_path, tokenizer, row, kind, rows=1, **more):
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * rows)
    return prepare(DataConfig(source=str(tmp_path / "rows.jsonl")), tokenizer, kind, cache_dir=tmp_path / "c", **more)


@pytest.mark.parametrize("talk", ASKED)
def test_a_system_prompt_in_the_last_user_message(mistral, talk, tmp_path):
    """Prompt and whole agree, with the prompt that inference has, for every kind of method."""
    mistral.chat_template = MISTRAL
    turns, prompt = ASKED[talk], PROMPTS[talk]
    assert mistral.apply_chat_template(turns[:-1], tokenize=False, add_generation_prompt=True) == prompt
    messages, split = {"messages": turns}, {"prompt": turns[:-1], "completion": turns[-1:]}

    def parts(row, kind, **more):
        (tree,) = read(tmp_path, mistral, row, kind, **more).train[0].trees
        return mistral.decode(tree.tokens), [mistral.decode(child.tokens) for child in tree.children]

    for row, more in ((messages, {"completion_only_loss": True}), (split, {}), (split, {"assistant_only_loss": True})):
        prepared = read(tmp_path, mistral, row, "sft", **more)
        assert mistral.decode(prepared.train[0].trees[0].tokens) == f"{prompt} Hello</s>"
        assert trained_text(prepared, mistral) == [" Hello</s>"] and not prepared.report.unwritten
    prepared = read(tmp_path, mistral, messages, "sft", assistant_only_loss=True)
    assert trained_text(prepared, mistral) == ([" Hello</s>"] if talk == "single" else [" b</s>", " Hello</s>"])
    both = read(tmp_path, mistral, split, "sft", assistant_only_loss=True, completion_only_loss=False)
    assert trained_text(both, mistral) == trained_text(prepared, mistral)
    assert parts(messages, "sft") == (f"{prompt} Hello</s>", [])
    pair = {"prompt": turns[:-1], "chosen": turns[-1:], "rejected": [{"role": "assistant", "content": "Go"}]}
    assert parts(pair, "pair") == (prompt, [" Hello</s>", " Go</s>"])
    labelled = [split | {"label": True}, split | {"label": False}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    data = DataConfig(source=str(tmp_path / "rows.jsonl"))
    (tree,) = prepare(data, mistral, "unpaired", cache_dir=tmp_path / "c").train[0].trees
    assert (mistral.decode(tree.tokens), mistral.decode(tree.children[0].tokens)) == (prompt, " Hello</s>")
    assert parts(messages, "prompt") == (prompt, [])
    assert parts(split, "prompt", with_completions=True) == (prompt, [" Hello</s>"])


def test_an_old_run_keeps_the_text_that_loses_the_system_prompt(mistral, tmp_path):
    mistral.chat_template = MISTRAL
    row = {"messages": ASKED["single"]}
    for more in ({"completion_only_loss": True}, {"assistant_only_loss": True}):
        prepared = read(tmp_path, mistral, row, "sft", behavior_version=1, **more)
        assert trained_text(prepared, mistral) == ["Hi there[/INST] Hello</s>"]


def test_a_message_that_the_template_does_not_write_is_a_warning(mistral, tmp_path):
    """Counted by role, where the text is not there or is there by chance; not where it is trimmed or in parts."""
    silent = "{% for m in messages if m.role != 'system' %}[INST] {{ m.content }}[/INST]{% endfor %}"
    for template, first, lost in (
        (silent, "Be brief.", {"system": 3}),
        (silent, "Hi", {"system": 3}),
        (CHATML, "Hi", {}),
    ):
        mistral.chat_template = template
        row = {"messages": said(["Hi there"], ["Hello"], first=first)}
        for kind, more in (("sft", {}), ("sft", {"completion_only_loss": True}), ("prompt", {})):
            report = read(tmp_path, mistral, row, kind, 3, **more).report
            assert report.unwritten == lost and len(report.warnings) == len(lost)
    mistral.chat_template = silent
    report = read(tmp_path, mistral, {"messages": said(["Hi"], ["Ho"], first="Be.")}, "sft", 3).report
    assert "train: in 3 rows the chat template does not write what the system says" in report.lines()
    shouting = "{{ messages[0].content | upper }}{% for m in messages[1:] %}{{ m.content }}{% endfor %}"
    for template in (LLAMA, THINKS, shouting):
        mistral.chat_template = template
        turns = said([" q "], ["<think>\nso\n</think>\n\n a \n"], first=" be. ")
        assert not read(tmp_path, mistral, {"messages": turns}, "sft").report.unwritten
    mistral.chat_template = "{% for m in messages %}[INST] {{ m.content }}[/INST]{% endfor %}"
    assert read(tmp_path, mistral, {"messages": TALKS["calls"]}, "sft").report.unwritten == {"assistant": 1}


@pytest.mark.parametrize(
    ("end", "lost"),
    [
        ("{% endgeneration %}<|im_end|>\n", 2),
        ("{% endgeneration %}\n<|im_end|>", 2),
        ("<|im_end|>{% endgeneration %}\n", 0),
        ("{% endgeneration %}\n", 0),  # the stop token is appended, and is the last turn's
    ],
)
def test_marks_without_the_end_of_turn_are_a_warning(end, lost, tmp_path):
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        + end
        + "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}] * 2
    for row in ({"messages": turns}, {"prompt": turns[:-1], "completion": turns[-1:]}):
        report = read(tmp_path, tokenizer, row, "sft", 2, assistant_only_loss=True).report
        assert report.unwritten == ({"end of turn": lost} if lost else {})
        assert len(report.warnings) == bool(lost) and all("after it, or remove" in line for line in report.warnings)
        prepared = read(tmp_path, tokenizer, row, "sft", assistant_only_loss=True)
        assert trained_text(prepared, tokenizer)[-1].startswith("Hello")
        assert (tokenizer.eos_token in trained_text(prepared, tokenizer)[-1]) == (not lost)
        assert not read(tmp_path, tokenizer, row, "sft", 2).report.unwritten, "all of it is trained"


def test_a_cut_turn_of_the_real_qwen3_keeps_its_header(shared, tmp_path):
    """Its template writes an empty thinking into a last reply, and none into one that a turn follows."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "qwen3")
    many = "long words " * 30
    long, system = {"role": "user", "content": many}, {"role": "system", "content": "Be brief."}
    called = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    for turns, header in (
        ([system, long], "<|im_start|>user\n"),
        ([*said(["q"], ["a"], first="Be brief."), long], "<|im_start|>user\n"),
        ([*called, {"role": "tool", "content": many}], "<|im_start|>user\n<tool_response>\n"),
        ([{"role": "system", "content": many}, {"role": "user", "content": "q"}], "<|im_start|>system\n"),
        ([*said(["q"], [many]), {"role": "user", "content": "q"}], "<|im_start|>assistant\n"),
    ):
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": turns}) + "\n")
        data = DataConfig(source=str(tmp_path / "rows.jsonl"), max_prompt_length=30, overlong="truncate")
        prepared = prepare(data, tokenizer, "prompt", cache_dir=tmp_path / "c")
        text = tokenizer.decode(prepared.train[0].trees[0].tokens)
        whole = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        rest = text.removeprefix(header)
        assert text.startswith(header) and rest.lstrip().startswith(("long", "words")) and whole.endswith(rest), text


def test_tools_thinking_and_variables_that_the_template_loses_are_a_warning(mistral, tmp_path):
    """Counted once a row, also of a pair; earlier thinking is omitted by design; a tool's name in a call is no tool."""
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    bare = "{% for m in messages %}[{{ m.role }}] {{ m.content.split('</think>')[-1] }}{{ m.tool_calls }}{% endfor %}"
    aloud = "{% for m in messages %}[{{ m.role }}] {{ (m.thinking or '') | tojson }}{{ m.content }}{% endfor %}"
    aloud += "{{ tools }}{{ loud }}"
    thinks = said(["q", "r"], ["a", "<think>\nthen\n</think>\n\nb"])
    fields = said(["q", "r"], ["a", "b"], reasoning_content='say "it"', thinking='say "it"')
    early = said(["q", "r"], ["<think>\nso\n</think>\n\na", "<think>\n\n</think>\n\nb"])
    calls = said(["q", "r"], ["a", ""], tool_calls=[CALL])
    variables = {"chat_template_kwargs": {"lound": True, "loud": None}}
    for template, turns, more, lost in (
        (bare, thinks, {}, {"thinking": 2}),
        (bare, fields, {}, {"thinking": 2}),
        (bare, early, {}, {}),
        (bare, calls, {"tools": [tool]}, {"tools": 2}),
        (bare, thinks, {"tools": [tool], **variables}, {"thinking": 2, "tools": 2, "variable lound": 2}),
        (aloud, fields, {"tools": [tool], "chat_template_kwargs": {"loud": "x"}}, {}),
        (aloud, thinks, variables, {"variable lound": 2}),
    ):
        mistral.chat_template = template
        assert read(tmp_path, mistral, {"messages": turns, **more}, "sft", 2).report.unwritten == lost
        other = {"prompt": turns[:-1], "chosen": turns[-1:], "rejected": [{"role": "assistant", "content": "No."}]}
        assert read(tmp_path, mistral, {**other, **more}, "pair", 2).report.unwritten == lost
        prompts = read(tmp_path, mistral, {"prompt": turns[:-1], **more}, "prompt", 2).report
        assert prompts.unwritten == {what: n for what, n in lost.items() if what != "thinking"}
        assert len(prompts.warnings) == len(prompts.unwritten)
    mistral.chat_template = bare
    lines = read(tmp_path, mistral, {"messages": thinks, "tools": [tool], **variables}, "sft", 2).report.lines()
    for words in (
        "write the tools",
        "write the thinking of the last reply",
        "read the variable lound of chat_template_kwargs",
    ):
        assert f"train: in 2 rows the chat template does not {words}" in lines


def test_a_reply_that_is_not_found_is_a_malformed_row(mistral, tmp_path):
    mistral.chat_template = "{{ messages | length }}{% if add_generation_prompt %}{{ messages[-1].content }}{% endif %}"
    with pytest.raises(DataError, match=r"rows.jsonl line 1: the chat template writes the prompt differently when"):
        read(tmp_path, mistral, {"prompt": "Hi", "completion": "Ho"}, "sft")


def weighed(tmp_path, tokenizer, rows, kind="sft", template="chat", **more):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(source=str(tmp_path / "rows.jsonl"), template=template)
    return prepare(data, tokenizer, kind, cache_dir=tmp_path / "c", **more)


def weights_of(prepared, tokenizer, index=0):
    """Runs of trained tokens of one weight, as text with the weight."""
    (tree,) = prepared.train[index].trees
    weight = np.where(tree.trained, 1.0 if tree.weights is None else tree.weights, 0.0)
    edges = [0, *(np.flatnonzero(np.diff(weight)) + 1), len(weight)]
    runs = [(tokenizer.decode(tree.tokens[a:b]), float(weight[a])) for a, b in pairwise(edges)]
    return [(text, value) for text, value in runs if value]


def flagged(*flags):
    """A conversation whose assistant's turns have these keys."""
    turns = []
    for index, flag in enumerate(flags):
        turns += [{"role": "user", "content": f"q{index}"}, {"role": "assistant", "content": f"a{index}", **flag}]
    return {"messages": turns}


FLAGS = [({"weight": 0}, 0), ({"weight": 0.25}, 0.25), ({"weight": 1}, 1), ({"weight": None}, 1), ({"train": False}, 0)]
FLAGS += [({"training": True}, 1), ({"loss": False}, 0), ({"loss_scale": 0.5}, 0.5), ({"loss_mask": 0}, 0)]
FLAGS += [({"masked": True}, 0), ({"mask": False}, 1), ({"train": True, "weight": 0.5}, 0.5), ({"train_detail": []}, 1)]


@pytest.mark.parametrize(("flag", "weight"), FLAGS)
@pytest.mark.parametrize("template", [CHATML, THINKS], ids=["chatml", "qwen3"])
def test_loss_weights_of_messages(tmp_path, template, flag, weight):
    """In every way that SFT masks a conversation; the tokens are the same as without."""
    tokenizer = byte_tokenizer(template)
    rows, bare = [flagged(flag, {})], [flagged({}, {})]
    last = EMPTY if template is THINKS else ""
    masked = weighed(tmp_path, tokenizer, rows, assistant_only_loss=True)
    assert weights_of(masked, tokenizer) == [
        pair for pair in ((f"a0{END}", weight), (f"{last}a1{END}", 1.0)) if pair[1]
    ]
    plain = weighed(tmp_path, tokenizer, bare, assistant_only_loss=True)
    assert list(masked.train[0].trees[0].tokens) == list(plain.train[0].trees[0].tokens)
    assert (masked.fingerprint == plain.fingerprint) == (weight == 1)
    assert (masked.train[0].trees[0].weights is None) == (weight in (0, 1))
    whole = weighed(tmp_path, tokenizer, rows)
    lost = sum(len(text) for text, value in weights_of(whole, tokenizer) if value != 1)
    everything = weights_of(weighed(tmp_path, tokenizer, bare), tokenizer)[0][0]
    assert "".join(text for text, _ in weights_of(whole, tokenizer)) == (
        everything if weight else everything.replace(f"a0{END}", "")
    )
    assert lost == (len(f"a0{END}") if weight == 0.25 or weight == 0.5 else 0)
    last_alone = weighed(tmp_path, tokenizer, [flagged({}, flag)], completion_only_loss=True) if weight else None
    if last_alone is not None:
        assert weights_of(last_alone, tokenizer) == [(f"{last}a1{END}", weight)]
    old = weighed(tmp_path, tokenizer, rows, behavior_version=1) if template is CHATML else None
    assert old is None or old.fingerprint == weighed(tmp_path, tokenizer, bare, behavior_version=1).fingerprint


def test_loss_weights_without_turns_and_of_prompts(tmp_path):
    tokenizer = byte_tokenizer(CHATML)
    row = {"prompt": "q", "completion": [{"role": "assistant", "content": "abc", "weight": 0.5}]}
    row["prompt"] = [{"role": "user", "content": "q", "train": False}]
    assert weights_of(weighed(tmp_path, tokenizer, [row], template="none"), tokenizer) == [("abc<|im_end|>", 0.5)]
    assert weights_of(weighed(tmp_path, tokenizer, [row]), tokenizer) == [(f"abc{END}", 0.5)]
    share = {
        "conversations": [{"from": "human", "value": "q", "weight": 0}, {"from": "gpt", "value": "a", "weight": 0.5}]
    }
    found = weights_of(weighed(tmp_path, tokenizer, [share]), tokenizer)
    assert found == [("<|im_start|>user\n", 1), ("<|im_start|>assistant\n", 1), (f"a{END}", 0.5)]


def test_rows_without_anything_to_train_are_counted(tmp_path):
    tokenizer = byte_tokenizer(CHATML)
    rows = [flagged({"weight": 0}), flagged({}), flagged({"train": False}, {"train": False})]
    prepared = weighed(tmp_path, tokenizer, rows, assistant_only_loss=True)
    assert len(prepared.train) == 1 and prepared.report.untrained == 2
    assert "2 rows (67%) with the loss weight 0 for everything to train on, dropped" in prepared.report.lines()
    with pytest.raises(DataError, match="no row can be used"):
        weighed(tmp_path, tokenizer, rows[:1], assistant_only_loss=True)


def test_a_weight_that_cannot_be_honoured_is_an_error(tmp_path):
    """With file, line and key; a context that is not trained on is what a weight of 0 says."""
    tokenizer, asked = byte_tokenizer(CHATML), [{"role": "user", "content": "q"}]
    said, no = ({"role": "assistant", "content": text} for text in ("a", "b"))
    odd = {**said, "train": False}
    for kind, row in {
        "pair": {"prompt": asked, "chosen": [odd], "rejected": [no]},
        "unpaired": {"prompt": asked, "completion": [odd], "label": True},
        "prompt": {"messages": [*asked, {**said, "train": 0.5}, *asked]},
    }.items():
        with pytest.raises(DataError, match=r"rows\.jsonl line 1: .* has train .* does not support"):
            weighed(tmp_path, tokenizer, [row], kind)
    context = [*asked, odd, *asked]
    assert len(weighed(tmp_path, tokenizer, [{"prompt": context, "chosen": [said], "rejected": [no]}], "pair").train)
    prompts = weighed(tmp_path, tokenizer, [{"prompt": context}], "prompt").train
    assert prompts[0].facts["prompt"] == [*asked, said, *asked]
    for value, message in (
        ({"weight": 2}, "weight of a message must be"),
        ({"train": "no"}, "train of a message must"),
    ):
        with pytest.raises(DataError, match=message):
            weighed(tmp_path, tokenizer, [flagged(value)])
    with pytest.raises(DataError, match="line 1: train_detail weights parts of a message"):
        weighed(tmp_path, tokenizer, [flagged({"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": True}]})])


# --- completions of several turns -------------------------------------------------------------------------------------

SUM = [{"role": "user", "content": "1+2?"}]
CALLED = [
    {"role": "assistant", "content": "add 1 2"},
    {"role": "tool", "content": "three, as was asked"},
    {"role": "assistant", "content": "3"},
]


def pairs_of(tmp_path, rows, **settings):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(source=str(tmp_path / "rows.jsonl"), template="chat", **settings)
    return prepare(data, byte_tokenizer(CHATML), "pair", assistant_only_loss=True, cache_dir=tmp_path / "cache")


def trained_of(leaf):
    tokens, tokenizer = np.asarray(leaf.tokens), byte_tokenizer(CHATML)
    return tokenizer.decode(tokens[np.broadcast_to(leaf.trained, tokens.shape)])


def test_of_a_pair_only_the_assistants_turns_are_trained(tmp_path):
    rows = [{"prompt": SUM, "chosen": CALLED, "rejected": CALLED[:1]}] * 2
    [tree] = pairs_of(tmp_path, rows).train[0].trees
    chosen, rejected = tree.children
    assert "three, as was asked" in byte_tokenizer(CHATML).decode(chosen.tokens)
    assert trained_of(chosen) == "add 1 2<|im_end|>\n3<|im_end|>\n" and trained_of(rejected) == "add 1 2<|im_end|>\n"


def test_a_completion_without_a_trained_token_is_dropped_and_counted(tmp_path):
    """Truncation leaves none."""
    late = [{"role": "user", "content": "wait " * 8}, CALLED[2]]
    rows = [{"prompt": SUM, "chosen": CALLED, "rejected": CALLED[:1]}] * 9
    rows += [{"prompt": SUM, "chosen": CALLED[:1], "rejected": late}]
    report = pairs_of(tmp_path, rows, overlong="truncate", max_length=60).reports["train"]
    assert (report.read, report.used, report.overlong_dropped) == (10, 9, 1)


def test_which_turns_are_trained_is_part_of_what_the_data_is(tmp_path):
    """So reference scores that were computed for one setting are not read by the other; without it, as before."""
    rows = [{"prompt": SUM, "chosen": CALLED, "rejected": CALLED[:1]}] * 2
    with_mask = pairs_of(tmp_path, rows)
    data = DataConfig(source=str(tmp_path / "rows.jsonl"), template="chat")
    plain = prepare(data, byte_tokenizer(CHATML), "pair", cache_dir=tmp_path / "cache")
    assert with_mask.fingerprint != plain.fingerprint
