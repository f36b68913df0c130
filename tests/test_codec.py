"""The codec of conversations: appended to as the template would write them, and read back as they were sampled."""

import json
import re
from pathlib import Path

import pytest
import trl
from data_tokenizer import prepare, trained_text
from transformers import AutoTokenizer

from posttrain.base.errors import DataError
from posttrain.config import DataConfig
from posttrain.data.calls import PROBE_TOOLS, Call, PythonGrammar, TaggedGrammar, read_calls, tool_calls
from posttrain.data.codec import Codec, Reply

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "its name"}, "today": {"type": "boolean"}},
            "required": ["city"],
        },
    },
}
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it warm in Zürich?"}]
RESULT = {"role": "tool", "name": "weather", "content": "21 °C"}
READ = {  # the grammar of the template's calls; None: its tools or its calls are refused
    "qwen2_5": "JsonGrammar",
    "qwen3": "JsonGrammar",
    "qwen3_instruct_2507": "JsonGrammar",
    "qwen3_5_think": "TaggedGrammar",
    "qwen3_5_nothink": "TaggedGrammar",
    "qwen3_6": "TaggedGrammar",
    "qwen3_8": "TaggedGrammar",
    "nemotron_3_nano": "TaggedGrammar",
    "nemotron_3_super": "TaggedGrammar",
    "glm4moe": "TaggedGrammar",
    "llama3_1": "JsonGrammar",
    "llama3_2": "JsonGrammar",
    "gptoss": "JsonGrammar",
    "gemma3": None,  # writes no tools
    "phi3": None,
    "lfm2": None,  # writes no calls
    "lfm2_v2": None,  # strings are not escaped
    "gemma4": None,  # objects without quotes
}


@pytest.fixture
def tokenizer(shared):
    return AutoTokenizer.from_pretrained(shared / "tokenizers" / "qwen3")


@pytest.fixture
def codec(tokenizer):
    return Codec(tokenizer, [WEATHER])


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def rendered(tokenizer, messages, **more):
    return tokenizer.apply_chat_template(messages, tools=[WEATHER], tokenize=False, **more)


@pytest.mark.parametrize("name", READ)
def test_published_templates_are_learned_or_refused(tokenizer, name):
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    tokenizer.bos_token = "<|endoftext|>"  # which some of them write
    marks = {*re.findall(r"<[|｜][^<>|｜{}]+[|｜]>", tokenizer.chat_template)}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(marks)}, replace_extra_special_tokens=False)
    if READ[name] is None:
        with pytest.raises(DataError, match=r"does not write tools|cannot be read back"):
            Codec(tokenizer, PROBE_TOOLS)
        return
    codec = Codec(tokenizer, PROBE_TOOLS)  # raises unless its proofs are read back
    assert type(codec._grammar).__name__ == READ[name]
    question = {"role": "user", "content": "q"}
    calls = tool_calls([("alpha_probe", {"first_key": "a b", "second_key": 3})])
    talk = [question, {"role": "assistant", "content": "", "tool_calls": calls}]
    answer = {"role": "tool", "name": "alpha_probe", "tool_call_id": calls[0]["id"], "content": "RESULT"}
    before = tokenizer.apply_chat_template(talk, tools=PROBE_TOOLS, tokenize=False)
    whole = tokenizer.apply_chat_template(
        [*talk, answer], tools=PROBE_TOOLS, tokenize=False, add_generation_prompt=True
    )
    added = tokenizer.decode(codec.bridge(ids_of(tokenizer, before), [answer]))
    assert whole.endswith(added) and "RESULT" in added
    assert (before + added).endswith(whole[-len(added) - 20 :]), "the reply as it was, then what the template writes"


def test_a_conversation_that_grows_has_the_tokens_of_the_template(codec, tokenizer):
    """Where the sampled reply is what the template would write, the whole is the template's rendering."""
    ids = codec.first(HELLO)
    assert ids == ids_of(tokenizer, rendered(tokenizer, HELLO, add_generation_prompt=True))
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "today": true}}\n</tool_call><|im_end|>'
    ids += ids_of(tokenizer, call)
    reply = codec.parse(ids_of(tokenizer, call))
    assert reply == Reply("", calls=(Call("weather", {"city": "Zürich", "today": True}),))
    ids += codec.bridge(ids, [RESULT])
    talk = [*HELLO, reply.message, RESULT]
    assert ids == ids_of(tokenizer, rendered(tokenizer, talk, add_generation_prompt=True))
    ids += ids_of(tokenizer, "Yes.<|im_end|>")
    ids += codec.bridge(ids, [{"role": "user", "content": "Thanks. And in Rome?"}])
    talk += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Thanks. And in Rome?"}]
    assert ids == ids_of(tokenizer, rendered(tokenizer, talk, add_generation_prompt=True))


def test_two_calls_in_a_turn_and_their_results(codec, tokenizer):
    calls = "".join(
        f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>\n' for city in ("A", "B")
    )
    ids = ids_of(tokenizer, "First A, then B.\n" + calls.rstrip() + "<|im_end|>")
    reply = codec.parse(ids)
    assert reply.content == "First A, then B." and [call.arguments for call in reply.calls] == [
        {"city": "A"},
        {"city": "B"},
    ]
    ids = codec.first(HELLO) + ids
    results = [RESULT, {**RESULT, "content": "3 °C"}]
    whole = rendered(tokenizer, [*HELLO, reply.message, *results], add_generation_prompt=True)
    assert ids + codec.bridge(ids, results) == ids_of(tokenizer, whole)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name":"weather","arguments":{"city":"Z\\u00fcrich"}}', {"city": "Zürich"}),
        ('{"arguments": {"today": true, "city": "a"}, "name": "weather"}', {"today": True, "city": "a"}),
        ('{ "name" : "weather" , "arguments" : { "city" : "1.0" } }', {"city": "1.0"}),
        ('{"name": "weather", "arguments": "{\\"city\\": \\"b\\"}"}', {"city": "b"}),
        ('{"name": "weather"}', {}),
    ],
)
def test_what_a_rendering_would_change_stays_as_sampled(codec, tokenizer, text, arguments):
    sampled = ids_of(tokenizer, f"<tool_call>{text}</tool_call><|im_end|>")
    reply = codec.parse(sampled)
    assert reply.calls == (Call("weather", arguments),) and not reply.malformed
    ids = codec.first(HELLO) + sampled
    grown = ids + codec.bridge(ids, [RESULT])
    assert f"<tool_call>{text}</tool_call><|im_end|>\n<|im_start|>user\n" in tokenizer.decode(grown)
    if '"name": "weather", ' not in text:
        again = rendered(tokenizer, [*HELLO, reply.message, RESULT], add_generation_prompt=True)
        assert grown != ids_of(tokenizer, again), "a rendering has other tokens"


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "weather", "arguments": {"city": </tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": "a"}}',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>["weather"]</tool_call>',
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        "<tool_call></tool_call>",
        "<tool_call>" + "[" * 100_000,
    ],
)
def test_a_malformed_call_stays_text(codec, text, tokenizer):
    reply = codec.parse(ids_of(tokenizer, text + "<|im_end|>"))
    assert reply == Reply(text, malformed=1)
    assert "tool_calls" not in reply.message


def test_a_turn_that_the_length_limit_cut_is_closed(codec, tokenizer):
    ids = codec.first(HELLO) + ids_of(tokenizer, "It is very")
    added = tokenizer.decode(codec.bridge(ids, [{"role": "user", "content": "Go on."}]))
    assert added == "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    stopped = [*ids, tokenizer.eos_token_id]
    assert tokenizer.decode(codec.bridge(stopped, [{"role": "user", "content": "Go on."}])) == added.removeprefix(
        "<|im_end|>"
    )


def test_thinking_is_apart_and_stays_as_sampled(codec, tokenizer):
    sampled = "<think>\nRome is in the south.\n</think>\n\nYes.<|im_end|>"
    reply = codec.parse(ids_of(tokenizer, sampled))
    assert reply == Reply("Yes.", "Rome is in the south.")
    assert codec.parse(ids_of(tokenizer, "<think>\nRome is")) == Reply("", "Rome is")
    user = {"role": "user", "content": "Thanks."}
    ids = codec.first(HELLO) + ids_of(tokenizer, sampled)
    forked = codec.first([*HELLO, reply.message, user])
    assert "Rome is in the south" in tokenizer.decode(ids + codec.bridge(ids, [user]))
    assert "Rome is in the south" not in tokenizer.decode(forked)


def test_templates_that_cannot_be_split_or_have_no_tools(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}({{ messages | length }}){% endif %};{% endfor %}"
    )
    with pytest.raises(DataError, match="does not write tools"):
        Codec(tokenizer, [WEATHER])
    numbered = Codec(tokenizer)
    with pytest.raises(DataError, match=r"writes a reply otherwise once messages follow it.* becomes .*data.template"):
        numbered.bridge(numbered.first(HELLO), [RESULT])
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"the tokenizer has none: set data\.template"):
        Codec(tokenizer)


def test_arguments_survive_any_json(codec, tokenizer):
    arguments = {"city": 'a "b" \\ {c} \n<tool_call>', "more": [None, 1e-9, {"ключ": [True, False]}]}
    call = json.dumps({"name": "weather", "arguments": arguments}, ensure_ascii=False)
    reply = codec.parse(ids_of(tokenizer, f"<tool_call>\n{call}\n</tool_call><|im_end|>"))
    assert reply.calls == (Call("weather", arguments),)


def test_a_hostile_reply_is_read_in_time_that_its_length_allows():
    """Without a bound on names each opening scans the rest: 4 s for these 2,000, and 25 times as long for five times as
    many. Counted in characters that the grammar may look at, not in seconds."""
    grammar = TaggedGrammar("<function=", "", ">\n<parameter=", ">\n", "\n</parameter", ">\n</function>")
    text = "<function=" * 10_000
    calls, kept, malformed = read_calls(text, grammar, {})
    assert (calls, kept, malformed) == ([], text, 10_000)
    named = f"<function={'n' * 201}>\n</function>"
    assert read_calls(named, grammar, {}) == ([], named, 1), "names end at 200 characters"


@pytest.mark.parametrize("value", ["...", "{1, 2}", "b'x'", "1+2j", "{{1}}", "{[1]: 2}", "(1, 2)"])
def test_arguments_are_what_json_has(value):
    """What a model writes may be a Python literal that JSON lacks: it stays text, or the call is no call."""
    tagged = TaggedGrammar("<function=", "", ">\n<parameter=", ">\n", "\n</parameter", ">\n</function>")
    types = {"f": {"a": "array"}}
    [call], _, _ = read_calls(f"<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>", tagged, types)
    assert call.arguments in ({"a": value}, {"a": [1, 2]})
    calls, _, _ = read_calls(f"[f(a={value})]", PythonGrammar("[", "]"), types)
    assert [call.arguments for call in calls] == ([{"a": [1, 2]}] if value == "(1, 2)" else [])


THOUGHTLESS = "<think>\n\n</think>\n\n"  # which Qwen3's template writes before the last reply


def test_what_sft_teaches_is_what_an_episode_samples(codec, tokenizer, tmp_path):
    """A stored conversation with calls has the tokens of an episode in which the model wrote its replies, and trains
    them; and the line break that ends a turn, which nobody samples."""
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "today": True}}}
    said = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "assistant", "content": "Yes."}]
    row = {"messages": [*HELLO, said[0], RESULT, said[1]], "tools": [WEATHER]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    data = DataConfig(source=str(tmp_path / "rows.jsonl"), template="chat")
    prepared = prepare(data, tokenizer, "sft", assistant_only_loss=True, cache_dir=tmp_path / "cache")
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "today": true}}\n</tool_call><|im_end|>'
    ids = codec.first(HELLO) + ids_of(tokenizer, written)
    ids += codec.bridge(ids, [RESULT]) + ids_of(tokenizer, f"{THOUGHTLESS}Yes.<|im_end|>")
    assert [*prepared.train[0].trees[0].tokens][: len(ids)] == ids
    assert trained_text(prepared, tokenizer) == [f"{written}\n", f"{THOUGHTLESS}Yes.<|im_end|>\n"]
