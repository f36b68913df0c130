"""Any chat template ends within its limits; of any conversation the assistant's text is trained and nothing else."""

import time
from collections.abc import Sequence

import pytest
from data_tokenizer import byte_tokenizer
from fuzzing import ANY_CHARACTER, JSON, TEXT, fuzzed, outcome
from hypothesis import strategies as st
from transformers import AutoTokenizer

from posttrain.base.errors import DataError
from posttrain.config.schema.data import DataConfig
from posttrain.data import render
from posttrain.data.render import RenderRequest, rendering
from posttrain.data.render_worker import OUTPUT_BYTES
from posttrain.data.rows import Row, RowError
from posttrain.data.templates import PUBLISHED, choose_template
from posttrain.data.tokenise import Tokeniser, Trained

# --- templates --------------------------------------------------------------------------------------------------------

EXPRESSIONS = st.sampled_from(
    ["messages", "messages[0]", "messages[0].content", "message.role", "loop.index0", "tools", "eos_token",
     "raise_exception('no')", "x", "1 / 0",
     "''.__class__.__mro__", "self.__init__.__globals__", "cycler.__init__", "range(10 ** 9)|list",
     "range(10 ** 7)|sum", "10 ** 10 ** 8",
     "'a' * 2000000", "'a' * 10 ** 10", "lipsum(9)", "strftime_now('%Y')", "-messages",
     "messages|tojson", "messages|string|length", "x.append(1)", "namespace(a=1)", "dict(a=1)", "[[]] * 9", "'\\ud800'",
     "'%s' % messages", "'{0.__class__}'.format(x)", "messages|map(attribute='content')|join", "none + 1"]
)  # fmt: skip
STATEMENTS = st.sampled_from(
    ["for message in messages", "endfor", "if x", "if message.role == 'assistant'", "else", "endif", "generation",
     "endgeneration", "set x = []", "set x = x + messages", "macro x()", "endmacro", "include 'x'", "extends 'x'",
     "break",
     "for a in range(99999) recursive", "raw", "endraw", "continue", "import 'os'", "do x", "block x", "endblock"]
)  # fmt: skip
PIECES = (
    EXPRESSIONS.map("{{{{ {} }}}}".format)
    | STATEMENTS.map("{{% {} %}}".format)
    | STATEMENTS.map("{{%- {} -%}}".format)
    | st.sampled_from(["{{", "}}", "{%", "%}", "{#", "#}", "{% for m in messages %}{{ m.content }}{% endfor %}"])
    | TEXT
)
WHOLE = st.tuples(
    st.sampled_from(["", "{% for message in messages %}"]), st.lists(PIECES, max_size=5).map("".join)
).map(lambda parts: "".join(parts) + ("{% endfor %}" if parts[0] else "")) | st.sampled_from(
    [published.jinja for published in PUBLISHED.values()]
)
MESSAGE = st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name"]) | TEXT, JSON, max_size=4)


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(render, "SECONDS", 0.5)


@fuzzed(25, 300, template=WHOLE, messages=st.lists(MESSAGE, max_size=3), tools=st.none() | st.lists(JSON, max_size=2),
        generate=st.booleans(), spans=st.booleans())  # fmt: skip
def test_any_template_ends_within_its_limits(hurried, template, messages, tools, generate, spans):
    tokenizer = byte_tokenizer(template)
    start = time.monotonic()

    def write() -> list[render.Rendered]:
        with rendering(tokenizer) as renderer:
            return renderer.render([RenderRequest(messages, tools, generate, spans)])

    found = outcome(write)
    assert time.monotonic() - start < 15, "the limit on time, and starting a process on a busy machine"
    if isinstance(found, DataError):
        return
    [done] = found
    assert len(done.text.encode(errors="surrogatepass")) <= OUTPUT_BYTES
    assert done.error != "" and all(0 <= begin <= end <= len(done.text) for begin, end in done.spans)


# --- conversations ----------------------------------------------------------------------------------------------------

# What the user says has capitals and digits; what the assistant says has none: letters identify each.
ASKED = st.text("ABCXYZ0189 \n.?!é字", min_size=1, max_size=12)
SAID = st.text("abcxyz \n.,;'é字😀ß\u200b\u2028\t<>|_", min_size=1, max_size=14).filter(str.strip)
KINDS = [
    ("minimind6400", "chat"), ("qwen3", "chat"), ("qwen3", "chatml"), ("gpt2", "zephyr"), ("gpt2", "r1_zero"),
    ("gpt2", "question_only"), ("gpt2", "alpaca"), ("gpt2", "tags"), ("minimind6400", "question_only"),
]  # fmt: skip


@st.composite
def conversations(draw) -> list[dict[str, str]]:
    turns = draw(st.lists(st.tuples(ASKED, SAID), min_size=1, max_size=3))
    begin = [{"role": "system", "content": draw(ASKED)}] if draw(st.booleans()) else []
    roles = [(("user", asked), ("assistant", said)) for asked, said in turns]
    return [*begin, *({"role": role, "content": text} for pair in roles for role, text in pair)]


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def trainer(request, shared):
    """A tokenizer and template, ready to tokenise."""
    name, template = request.param
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / name)
    choose_template(DataConfig(source="x", template=template), tokenizer)
    with rendering(tokenizer) as renderer:
        yield Tokeniser(tokenizer, renderer, assistant_only_loss=True)


@fuzzed(12, 800, messages=conversations())
def test_what_the_assistant_says_is_trained_and_nothing_else(trainer, messages):
    [found] = trainer.conversations([Row(None, messages)])
    assert isinstance(found, Trained), found
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    trained = [trainer.tokenizer.decode(found.tokens[begin:end]) for begin, end in found.spans]
    rest = trainer.tokenizer.decode(without(found.tokens, found.spans))
    assert len(trained) == len(said)
    for text, whole in zip(said, trained, strict=True):
        assert text.strip() in whole, "the whole turn is trained"
        assert not set(whole) & set("ABCXYZ0189"), "and nothing of another"
    asked = [message["content"] for message in messages if message["role"] != "assistant"]
    assert sum(rest.count(letter) for letter in "BCXYZ0189") >= sum(
        text.count(letter) for text in asked for letter in "BCXYZ0189"
    )


def without(tokens: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[int]:
    inside = {index for begin, end in spans for index in range(begin, end)}
    return [token for index, token in enumerate(tokens) if index not in inside]


@fuzzed(10, 500, messages=conversations(), odd=st.text(ANY_CHARACTER, max_size=8))
def test_any_text_is_tokenised_or_malformed(trainer, messages, odd):
    """Special tokens in a text, and anything else that is valid Unicode."""
    try:
        odd.encode()
    except UnicodeEncodeError:
        return
    ends = "".join(trainer.writer.endings.special[:2])
    row = Row(None, [{**message, "content": message["content"] + odd + ends} for message in messages])
    found = outcome(lambda: trainer.conversations([row]))
    if isinstance(found, list) and not isinstance(found[0], RowError):
        assert all(0 <= begin < end <= len(found[0].tokens) for begin, end in found[0].spans)
