"""Each format's rows in the common form, and how a format is inferred from its columns."""

import json

import pytest
from data_tokenizer import byte_tokenizer, find_layout, prepare

from posttrain.base.errors import DataError
from posttrain.base.words import last_box
from posttrain.config.schema.data import DataConfig, TagsConfig
from posttrain.data.formats import FORMATS, without_think_tags
from posttrain.data.readers import read_files
from posttrain.data.render import PREFILL
from posttrain.data.rows import MESSAGE_KEYS, RowError, messages_of, tools_of, without_think
from posttrain.data.templates import Template

TEXTS, TURNS = (Template(name, name != "none", TagsConfig()) for name in ("none", "chat"))


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def read(name, fields, template=TEXTS):
    return FORMATS[name].read(fields, template)


def test_preference_without_prompt_shares_what_begins_alike():
    row = read("preference", {"chosen": "Q: one two", "rejected": "Q: one three"})
    assert (row.prompt, row.chosen, row.rejected) == ("Q: one t", "wo", "hree")
    row = read("preference", {"chosen": "Say yes", "rejected": "Say no"})
    assert (row.prompt, row.chosen, row.rejected) == ("Say", " yes", " no")
    turns = [user("hi"), assistant("yes")]
    row = read("preference", {"prompt": "hi", "chosen": turns, "rejected": [user("hi"), assistant("no")]})
    assert (row.prompt, row.chosen, row.rejected) == (turns[:1], turns[1:], [assistant("no")])


def test_preference_mixes_of_text_and_messages():
    row = read(
        "preference", {"prompt": "hi", "chosen": [assistant("a")], "rejected": [assistant("b")], "margin": "0.5"}
    )
    assert (row.prompt, row.margin) == ([user("hi")], 0.5)
    row = read("preference", {"prompt": [user("hi")], "chosen": "a", "rejected": "b", "system": "Be."})
    assert row.prompt == [{"role": "system", "content": "Be."}, user("hi")] and row.chosen == [assistant("a")]
    with pytest.raises(RowError, match="both be strings"):
        read("preference", {"chosen": "a", "rejected": [assistant("b")]})


HH = {"chosen": "\n\nHuman: one\n\nAssistant: two\n\nHuman: three\n\nAssistant: good"}
HH["rejected"] = HH["chosen"].replace("good", "bad")


def test_hh_splits_before_the_last_reply():
    row = read("hh", HH)
    assert (row.prompt, row.chosen, row.rejected) == (HH["chosen"][: -len(" good")], " good", " bad")
    row = read("hh", HH, TURNS)
    assert row.prompt == [user("one"), assistant("two"), user("three")]
    assert (row.chosen, row.rejected, row.rejected_prompt) == ([assistant("good")], [assistant("bad")], None)


def test_hh_keeps_two_prompts_that_differ():
    other = HH["rejected"].replace("two", "zwei")
    assert read("hh", {**HH, "rejected": other}).rejected_prompt == other[: -len(" bad")]
    row = read("hh", {**HH, "rejected": other}, TURNS)
    assert row.rejected_prompt == [user("one"), assistant("zwei"), user("three")]


@pytest.mark.parametrize(
    ("transcript", "reason"),
    [("no turns", "no `"), ("\n\nAssistant: b\n\nHuman: c", "does not end"), ("\n\nAssistant: b", "no turn")],
)
def test_hh_that_is_no_transcript(transcript, reason):
    with pytest.raises(RowError, match=reason):
        read("hh", {"chosen": transcript, "rejected": transcript}, TURNS)


def test_alpaca():
    fields = {"instruction": "Add.", "input": "1 2", "output": "3"}
    assert read("alpaca", fields).prompt == "Add.\n1 2\n"
    assert read("alpaca", {**fields, "input": None}).prompt == "Add.\n"
    row = read("alpaca", fields, TURNS)
    assert row.prompt[0]["content"] == "Add.\n1 2" and row.chosen == [assistant("3")]


def test_sharegpt_and_parts():
    turns = [{"from": "system", "value": "Be."}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    assert read("sharegpt", {"conversations": turns}).chosen == [
        {"role": "system", "content": "Be."},
        user("hi"),
        assistant("yo"),
    ]
    row = read("sharegpt", {"conversations": turns[:2], "chosen": turns[2], "rejected": {"from": "gpt", "value": "no"}})
    assert (row.prompt[-1], row.chosen, row.rejected) == (user("hi"), [assistant("yo")], [assistant("no")])
    parts = [{"type": "text", "text": "a"}, {"type": "reasoning", "value": "r"}, {"type": "text", "value": "b"}]
    parts.append({"type": "tool_call", "value": '{"name": "f", "arguments": {"x": 1}}'})
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert messages_of([{"role": "assistant", "content": parts}], "m") == [
        {"role": "assistant", "content": "ab", "reasoning_content": "r", "tool_calls": [call]}
    ]


OPEN_MATHS = {"problem": "2+2?", "solution": "<think>\nTwo and two.\n</think>\n\nSo \\boxed{4}.", "answer": "4"}


@pytest.mark.parametrize("name", ["tags", "r1_zero"])
def test_a_solutions_thinking_inside_tags(name, tmp_path):
    """Its two tags have no place in the template's; with strip_think its text goes too, and the template's own stay."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(OPEN_MATHS) + "\n")
    start, end, answer = {
        "tags": ("<start_working_out>", "<end_working_out><SOLUTION>", "4</SOLUTION>"),
        "r1_zero": ("<think> ", " </think> <answer> ", "4 </answer>"),
    }[name]
    whole, bare = "\nTwo and two.\n\n\nSo \\boxed{4}.", "So \\boxed{4}."
    for strip, version, working in (
        (False, 2, whole), (True, 2, bare), (False, 1, OPEN_MATHS["solution"]), (True, 1, None),
    ):  # fmt: skip
        data = DataConfig(source=str(tmp_path / "rows.jsonl"), template=name, strip_think=strip)
        tokenizer = byte_tokenizer()
        prepared = prepare(data, tokenizer, "sft", cache_dir=tmp_path, behavior_version=version)
        text = tokenizer.decode(prepared.train[0].trees[0].tokens)
        if working is not None:
            assert text.endswith(f"{start}{working}{end}{answer}<|im_end|>")
        else:
            assert "Two and two" not in text and (start in text.rpartition("2+2?")[2]) == (name == "tags")
        prompts = prepare(data, byte_tokenizer(), "prompt", cache_dir=tmp_path, behavior_version=version)
        assert prompts.train[0].facts["answer"] == "4"


@pytest.mark.parametrize(
    ("solution", "kept", "stripped"),
    [
        ("plain 4", "plain 4", "plain 4"),
        ("so</think>4", "so4", "4"),  # the template of its model had begun the thinking
        ("<think>so", "so", ""),  # cut off
        ("a <think>b</think> c <think>d</think> e", "a b c d e", "a c e"),
        ("<think></think>4", "4", "4"),
        ("1 < 2 <thinking> x", "1 < 2 <thinking> x", "1 < 2 <thinking> x"),
    ],
)
def test_tags_of_thinking(solution, kept, stripped):
    assert (without_think_tags(solution, False), without_think_tags(solution, True)) == (kept, stripped)


def laid(value, kind="sft", format="auto"):
    return find_layout(format, {}, [value], kind, "rows")


SYSTEM_ROWS = {
    "preference": ("pair", {"prompt": "q", "chosen": "a", "rejected": "b"}),
    "hh": ("pair", HH),
    "sharegpt": ("sft", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}),
    "kto": ("unpaired", {"prompt": "q", "completion": "a", "label": True}),
    "messages": ("sft", {"messages": [user("q"), assistant("a")]}),
    "alpaca": ("sft", {"instruction": "q", "output": "a"}),
    "prompt_completion": ("sft", {"prompt": "q", "completion": "a"}),
    "problem_answer": ("sft", {"problem": "q", "answer": "1"}),
    "prompt": ("prompt", {"prompt": "q"}),
}


@pytest.mark.parametrize("name", SYSTEM_ROWS)
def test_a_system_column_is_the_first_message_in_every_format(name):
    kind, value = SYSTEM_ROWS[name]
    layout = laid({**value, "system": "Be."}, kind)
    assert layout.name == name

    def first(row):
        return (row.chosen if row.prompt is None else row.prompt)[0]

    message = {"role": "system", "content": "Be."}
    row = layout.read({**value, "system": "Be."}, TURNS)
    assert first(row) == message
    assert first(row) != first(layout.read({**value, "system": ""}, TURNS))
    with pytest.raises(RowError, match=r"system is not empty, and data\.template: none cannot"):
        layout.read({**value, "system": "Be."}, TEXTS)
    assert layout.read({**value, "system": None}, TEXTS) == layout.read(value, TEXTS)
    before = layout.read({**value, "system": "Be."}, TURNS, behavior_version=1)  # such a run goes on as it began
    read_then = name in ("preference", "sharegpt", "alpaca")
    assert before == (row if read_then else layout.read(value, TURNS, behavior_version=1))


def test_a_system_message_is_not_written_twice():
    system = {"role": "system", "content": "Be."}
    value = {"messages": [system, user("q"), assistant("a")], "system": "Be."}
    assert laid(value).read(value, TURNS).chosen == value["messages"]
    value["system"] = "Be brief."
    assert laid(value).read(value, TURNS).chosen == [{"role": "system", "content": "Be brief."}, *value["messages"]]


def test_the_history_of_alpaca():
    value = {"instruction": "Add.", "output": "3", "history": [["q", "a"], ["r", "b"]]}
    layout = laid(value)
    row = layout.read(value, TURNS)
    assert [turn["content"] for turn in row.prompt] == ["q", "a", "r", "b", "Add."]
    assert [turn["role"] for turn in row.prompt] == ["user", "assistant"] * 2 + ["user"] and row.train_history
    assert layout.read({**value, "history": '[["q", "a"], ["r", "b"]]'}, TURNS) == row
    for none in (None, [], "", " "):
        assert layout.read({**value, "history": none}, TURNS) == layout.read(value, TURNS, behavior_version=1)
    for bad in (["q", "a"], [["q"]], [{"q": "a"}], "q", [["q", 3]], 5):
        with pytest.raises(RowError, match="history"):
            layout.read({**value, "history": bad}, TURNS)
    with pytest.raises(RowError, match="history is a conversation"):
        layout.read(value, TEXTS)


def called(value, kind="sft"):
    """The arguments of all calls of a row, in order."""
    row = laid(value, kind).read(value, TURNS)
    turns = [*(row.prompt or []), *row.chosen, *(row.rejected or [])]
    return [call.get("function", call)["arguments"] for turn in turns for call in turn.get("tool_calls", ())]


CALL = {"name": "f", "arguments": '{"city": "Bern", "n": null}'}
BERN = {"city": "Bern", "n": None}  # nulls inside a JSON string stay


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": CALL}]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "tool_calls": CALL},
        {"role": "assistant", "content": "", "tool_calls": json.dumps([{"type": "function", "function": CALL}])},
        {"role": "assistant", "content": None, "function_call": CALL},
        {"role": "assistant", "content": [{"type": "tool_call", "value": json.dumps(CALL), "text": None}]},
        {"role": "assistant", "content": [{"type": "tool_call", "value": {"function": CALL}}]},
        {"from": "function_call", "value": json.dumps(CALL), "role": None},
        {"from": "function_call", "value": json.dumps([CALL])},
        {"from": "function_call", "value": CALL},
    ],
)
def test_arguments_that_are_json_become_objects(message):
    turns = [user("q"), message, {"role": "function", "name": "f", "content": "5"}]
    if "from" in message:
        turns = [{"from": "human", "value": "q"}, message]
        assert called({"conversations": turns}) == [BERN]
    else:
        assert called({"messages": turns}) == [BERN]
        assert called({"prompt": turns, "chosen": [assistant("a")], "rejected": [message]}, "pair") == [BERN, BERN]


def test_arguments_that_are_no_objects():
    def row(arguments):
        call = {"type": "function", "function": {"name": "f"} | ({} if arguments is ... else {"arguments": arguments})}
        return {"messages": [user("q"), {"role": "assistant", "content": "", "tool_calls": [call]}]}

    for none in (..., None, "", " ", "{}", {}):
        assert called(row(none)) == [{}]
    for bad, said in (("city=Bern", "JSON"), ("[1]", "not a list"), ("5", "not a number"), ('"a"', "not a string"),
                      ('{"a": "\\ud800"}', "lone surrogate"), ("[" * 9_999, "JSON")):  # fmt: skip
        with pytest.raises(RowError, match=f"arguments of the tool call 'f' .*{said}"):
            called(row(bad))
    given = row('{"a":1}')
    before = laid(given).read(given, TURNS, behavior_version=1)  # a run of version 1 goes on as it began
    assert before.chosen[1]["tool_calls"][0]["function"]["arguments"] == '{"a":1}'


def test_structured_columns_as_json_strings():
    turns, tool = [user("q"), assistant("a")], {"name": "f", "parameters": {}}
    for name, value in (("messages", turns), ("conversations", turns)):
        row = {name: json.dumps(value), "tools": json.dumps(tool)}
        read = laid(row).read(row, TURNS)
        assert (read.chosen, read.tools) == (turns, [tool])
    for tools in (tool, [tool], [json.dumps(tool)], json.dumps([tool])):
        assert tools_of(tools) == [tool]
    assert [tools_of(tools) for tools in (None, "", " ", [], {})] == [None] * 5
    for bad in ("f", "[1", 5):
        with pytest.raises(RowError, match="tools"):
            tools_of(bad)
    text = {"prompt": '[{"role": "user", "content": "q"}]', "completion": "[1]"}  # text where text is allowed
    assert (laid(text).read(text, TURNS).prompt, laid(text).read(text, TURNS).chosen) == tuple(text.values())
    with pytest.raises(RowError, match=r"messages must be JSON, not the string 'hello'"):
        laid({"messages": turns}).read({"messages": "hello"}, TURNS)
    with pytest.raises(RowError, match="messages must be a list of messages, not a string"):
        messages_of("hello", "messages")


def test_labels_and_empty_cells_of_csv():
    value = {"prompt": "q", "completion": "a", "label": "true", "messages": "", "tools": " ", "system": ""}
    layout = laid(value, "unpaired", "kto")
    words = ["true", "TRUE", " Yes ", "1", "false", "No", "0"]
    found = [layout.read({**value, "label": word}, TURNS, cells=True).label for word in words]
    assert found == [True] * 4 + [False] * 3
    for bad in ("", "maybe", "2", "y"):
        with pytest.raises(RowError, match="label"):
            layout.read({**value, "label": bad}, TURNS, cells=True)
    with pytest.raises(RowError, match="not the string 'true'"):  # JSON has a word for it
        layout.read(value, TURNS)
    pair = {"prompt": "q", "chosen": "a", "rejected": "b", "margin": "", "tie": " ", "system": "", "tools": ""}
    assert laid(pair, "pair").read(pair, TURNS, cells=True) == read("preference", {**pair, "margin": None, "tie": None})
    pair |= {"margin": "1", "tie": "no"}
    assert laid(pair, "pair").read(pair, TURNS, cells=True).margin == 1.0


def test_a_prefill_is_marked_and_a_reply_of_its_own_is_not():
    turns = [user("q"), assistant("It is")]

    def last(name, fields, template=TURNS):
        return read(name, fields, template).prompt[-1].get(PREFILL)

    assert last("prompt", {"prompt": turns}) and last("prompt_completion", {"prompt": turns, "completion": "4"})
    assert last("preference", {"prompt": turns, "chosen": "4", "rejected": "5"})
    assert last("kto", {"prompt": turns, "completion": "4", "label": True})
    transcript = HH["chosen"].replace("Human: three", "Assistant: three")
    assert not last("hh", {"chosen": transcript, "rejected": transcript.replace("good", "bad")})
    assert not last("kto", {"messages": [*turns, assistant("4")], "label": True})
    assert not last("preference", {"chosen": [*turns, assistant("4")], "rejected": [*turns, assistant("5")]})
    assert not last("prompt", {"prompt": [user("q"), {**assistant(""), "tool_calls": [CALL]}]})


def test_what_is_not_read_is_named():
    value = {"messages": [{**user("q"), "id": 1, "name": None}, {"from": "gpt", "value": "a", "id": 2, "mood": "x"}],
             "tools": None, "meta": {"a": 1}, "url": None, "label": ""}  # fmt: skip
    layout = laid({**value, "conversations": None}, format="messages")
    assert layout.unread(value) == {"meta", "messages[].id", "messages[].mood"}
    assert layout.unread({"messages": json.dumps(value["messages"])}) == {"messages[].id", "messages[].mood"}
    assert layout.unread({"messages": "not JSON"}) == layout.unread({"messages": [3, None]}) == set()
    all_read = [dict.fromkeys(MESSAGE_KEYS, "x")]
    assert layout.unread({"messages": all_read}) == set()
    parts = [{"type": "text", "text": "a", "cache": 1, "value": None}, "b"]
    assert layout.unread({"messages": [{"role": "user", "content": parts}]}) == {"messages[].content[].cache"}
    labelled = {"prompt": "p", "messages": [user("q"), assistant("a")], "label": True}
    assert laid(labelled, "unpaired").unread(labelled) == {"prompt"}
    assert laid(labelled, "unpaired").unread({**labelled, "messages": None, "completion": "c"}) == set()
    columns = find_layout("auto", {"prompt": "q"}, [{"q": "q", "prompt": "p", "completion": "c"}], "sft", "rows")
    assert columns.unread({"q": "q", "prompt": "p", "completion": [{**assistant("a"), "id": 1}]}) == {
        "prompt",
        "completion[].id",
    }


def test_images_are_refused():
    with pytest.raises(DataError, match="text models only"):
        messages_of([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "messages")
    with pytest.raises(DataError, match="text models only"):
        find_layout("auto", {}, [{"messages": [], "images": ["a.png"]}], "sft", "rows")


PROBLEMS = [
    # fields, plain reply, tagged reply
    ({"question": "Q", "answer": "1+1\n#### 2"}, "1+1\n#### 2", ("1+1", "2")),
    ({"problem": "Q", "solution": "so \\boxed{\\frac{1}{2}}."}, "so \\boxed{\\frac{1}{2}}.", None),
    ({"problem": "Q", "solution": "steps", "answer": 142.0}, "steps", ("steps", "142")),
    ({"problem": "Q", "generated_solution": "s", "expected_answer": "7"}, "s", ("s", "7")),
    ({"problem": "Q", "answer": "7"}, "7", ("", "7")),
    ({"problem": "Q", "solution": "7"}, "7", ("", "7")),
    ({"problem": "Q", "solution": "1+1\n#### 2"}, "1+1\n#### 2", ("1+1", "2")),
    ({"problem": "Q", "solution": "#### A\nso \\boxed{2}"}, "#### A\nso \\boxed{2}", ("#### A\nso \\boxed{2}", "2")),
    ({"problem": "Q", "solution": "#### A\nso 2"}, "#### A\nso 2", ("", "#### A\nso 2")),
    ({"problem": "Q", "answer": "so \\boxed{2}"}, "so \\boxed{2}", ("so \\boxed{2}", "2")),
    ({"problem": "Q", "answer": "\\boxed{2}"}, "\\boxed{2}", ("", "2")),
]


@pytest.mark.parametrize(("fields", "plain", "tagged"), PROBLEMS)
def test_problem_answer(fields, plain, tagged):
    layout = find_layout("auto", {}, [fields], "sft", "rows")
    assert layout.name == "problem_answer"
    row = layout.read(fields, TEXTS)
    assert (row.prompt, row.chosen) == ("Q\n", plain)
    working, answer = tagged or (fields["solution"], "\\frac{1}{2}")
    row = layout.read(fields, Template("tags", True, TagsConfig()))
    assert row.chosen == f"<start_working_out>{working}<end_working_out><SOLUTION>{answer}</SOLUTION>"


def test_last_box_is_balanced():
    assert last_box("\\boxed{1} or \\boxed{a{b}{c}} end") == "a{b}{c}"
    assert last_box("\\boxed{open {") is None and last_box("none") is None


def test_think_is_stripped_from_the_assistant_only():
    assert without_think("<think>a\nb</think>\n\nc <think>d</think>e") == "c e"
    turns = [user("<think>kept</think>"), {**assistant("<think>x</think>y"), "reasoning_content": "z"}]
    assert without_think(turns) == [user("<think>kept</think>"), assistant("y")]


DETECTED = {
    "hh-harmless/test.jsonl.gz": ("pair", "hh"),
    "preference-demo/dpo_en_demo.json": ("pair", "sharegpt"),
    "preference-demo/kto_en_demo.json": ("unpaired", "kto"),
    "sft-demo/alpaca_en_demo.json": ("sft", "alpaca"),
    "sft-demo/reason_tool_use_demo_50.jsonl": ("sft", "messages"),
    "gsm8k/train.jsonl": ("sft", "problem_answer"),
    "math/math500.jsonl": ("sft", "problem_answer"),
    "math/amc.json": ("sft", "problem_answer"),
    "math/minerva_math.jsonl": ("sft", "problem_answer"),
    "tinystories/sample.txt": ("sft", "text"),
}


@pytest.mark.parametrize("name", DETECTED)
def test_formats_of_real_data_are_told_and_every_row_read(shared, name):
    kind, format = DETECTED[name]
    values = [record.value for record in read_files((shared / "data" / name,))]
    layout = find_layout("auto", {}, values[:100], kind, name)
    assert layout.name == format
    for value in values:
        layout.read(value, TURNS)


@pytest.mark.parametrize(
    ("format", "columns", "kind", "message"),
    [
        ("auto", {}, "sft", "has the columns better, q, worse, which fit no format"),
        ("preference", {}, "pair", "no column chosen, rejected, which format preference needs; it has better, q"),
        ("preference", {"chosen": "best"}, "pair", "no column 'best' .for chosen.; did you mean better"),
        ("preference", {"win": "better"}, "pair", "format preference has no field 'win'; it has chosen, rejected"),
        ("problem_answer", {"problem": "q"}, "sft", "no column solution or answer"),
        ("prompt_completion", {"prompt": "q", "completion": "better"}, "pair", "need preference pairs"),
    ],
)
def test_wrong_columns_say_which_there_are(format, columns, kind, message):
    with pytest.raises(DataError, match=message):
        find_layout(format, columns, [{"better": "a", "q": "b", "worse": "c"}], kind, "rows.jsonl")


def test_columns_name_the_data_own_columns():
    value = {"q": "Q", "better": "a", "worse": "b"}
    columns = {"prompt": "q", "chosen": "better", "rejected": "worse"}
    layout = find_layout("auto", columns, [value], "pair", "rows")
    row = layout.read(value, TEXTS)
    assert (layout.name, row.prompt, row.chosen, row.rejected) == ("preference", "Q", "a", "b")


def test_ties():
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert read("preference", {**pair, "tie": True}).tie and not read("preference", {**pair, "tie": 0}).tie
    assert not read("preference", {**pair, "tie": None, "margin": 2}).tie
    with pytest.raises(RowError, match="tie must be true or false, not the string 'yes'"):
        read("preference", {**pair, "tie": "yes"})
    with pytest.raises(RowError, match="tie is true, but margin says that chosen is better by 2"):
        read("preference", {**pair, "tie": True, "margin": 2})


def test_kto_rows():
    label, turns = {"label": True}, [user("q"), assistant("a")]
    row = read("kto", {"prompt": "q", "completion": "a", "label": False})
    assert (row.prompt, row.chosen, row.label) == ("q", "a", False)
    assert read("kto", {"messages": turns, **label}).prompt == [user("q")]
    assert read("kto", {"prompt": [user("q")], "completion": "a", "label": 1}).chosen == [assistant("a")]
    for fields, said in (
        ({"prompt": "q", "completion": "a", "label": "true"}, "label must be true or false .*, not the string 'true'"),
        ({"prompt": "q", "completion": "a", "label": 2}, "not 2"),
        ({"prompt": "q", "completion": "a", "label": None}, "label is null"),
        ({"prompt": "q", **label}, "completion is missing"),
        ({"messages": turns[:1], **label}, "must end with the assistant's labelled reply"),
    ):
        with pytest.raises(RowError, match=said):
            read("kto", fields)


def test_kto_columns():
    sharegpt = [{"conversations": [], "kto_tag": True}]
    layout = find_layout("auto", {}, sharegpt, "unpaired", "rows")
    assert (layout.name, dict(layout.columns)["label"]) == ("kto", "kto_tag")
    with pytest.raises(DataError, match=r"has preference pairs .*write each pair as two rows"):
        find_layout("auto", {}, [{"prompt": "q", "chosen": "a", "rejected": "b"}], "unpaired", "rows")
    with pytest.raises(DataError, match="has no column label, which format kto needs"):
        find_layout("auto", {}, [{"prompt": "q", "completion": "a"}], "unpaired", "rows")


def test_kto_rows_are_not_imitated_unasked():
    with pytest.raises(DataError, match="KTO"):
        find_layout("auto", {}, [{"messages": [], "label": False}], "sft", "rows")


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("problem_answer", {"problem": "Q", "answer": float("nan")}, "answer must be a finite number, not nan"),
        ("problem_answer", {"problem": "Q", "answer": float("-inf")}, "answer must be a finite number, not -inf"),
        ("preference", {"chosen": "a", "rejected": "b", "margin": 10**400}, "margin must be a number, not 1000"),
    ],
)
def test_numbers_that_are_none_are_malformed_rows(name, fields, reason):
    with pytest.raises(RowError, match=reason):
        read(name, fields)


def test_columns_given_the_wrong_way_round_are_told():
    with pytest.raises(DataError, match=r"data\.columns: write \{prompt: question\}: first the field, then"):
        find_layout("auto", {"question": "prompt"}, [{"question": "Q", "completion": "c"}], "sft", "rows")
