"""The Chat page: one model, or two that answer the same questions; rewards, votes, and the tokens of a reply."""

import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI

from posttrain.base.errors import PosttrainError, message_of
from posttrain.base.files import table_beside
from posttrain.base.words import counted
from posttrain.reports import design
from posttrain.reports.markup import el, message, text
from posttrain.serving.client import Client, ModelServers, Talk, together
from posttrain.ui.guard import CHAT
from posttrain.ui.parts import HEAD, STYLE, bar
from posttrain.ui.viewer import Viewer, is_reward_model, models_below, where
from posttrain.ui.votes import COLOURS, cells, token_map, undo_vote, write_vote

VOTES = "votes.jsonl"  # in the folder of runs
# Button of a vote -> columns of its row; only reward models learn from ties.
VOTED = {"A is better": {}, "B is better": {}, "Tie": {"tie": True}, "Both bad": {"tie": True, "bad": True}}
UNDO = "Undo vote"
ASK = "Choose model A: the model of a run, a folder, or a hub id."
IN_MEMORY = 3  # models in memory: two that reply, and one that scores
ALTERNATIVES = 5
TEMPLATES = ("auto", "none", "alpaca", "tags", "r1_zero", "question_only")
JOINER = "\u2060"
OPENING, OPENED = re.compile(r"(<)(?=[a-zA-Z/!?])|(&)(?=[a-zA-Z#])"), re.compile(f"([<&]){JOINER}")
# Colour of the palette -> Gradio's variables, separated by spaces.
THEME = table_beside(__file__, "theme.yaml")
QUIET: Any = {"show_progress": "hidden", "api_visibility": "private"}  # options of all events
History = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Models:
    """The models to talk to: the models of the runs, and the servers that host them."""

    viewer: Viewer
    servers: ModelServers

    def client(self, model: str, template: str) -> Client:
        path = models_below(self.viewer).get(model, model)
        options = ["--template", template] if template in TEMPLATES[1:] else []
        return self.servers.client(path, options)

    def choices(self) -> list[list[str]]:
        """The current models of the runs that can be A, B and the reward model."""
        models = models_below(self.viewer)
        rewards = [name for name, folder in models.items() if is_reward_model(folder)]
        replying = [name for name in models if name not in rewards]
        return [replying, replying, rewards]


@dataclass(frozen=True)
class Controls:
    """The values of the page's controls."""

    model_a: str
    model_b: str
    reward: str
    system: str
    template: str
    temperature: float
    top_p: float
    max_tokens: float
    seed: float | None

    @property
    def models(self) -> list[str]:
        """Model A, and model B if chosen; empty without model A."""
        return [model for model in (self.model_a, self.model_b) if model] if self.model_a else []

    @property
    def system_turns(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def talks(self, models: Models, histories: Sequence[History], settings: Mapping[str, Any]) -> list[Talk]:
        """The conversation of each model, with settings for its next reply."""
        clients = [models.client(model, self.template) for model in self.models]
        return [
            Talk(client, dict(settings), self.system or None, turns_of(history))
            for client, history in zip(clients, histories, strict=False)
        ]


def _read(values: Sequence[Any]) -> tuple[Controls, list[History]]:
    """The values of the controls and of the two chatbots, which follow them."""
    *controls, a, b = values
    return Controls(*controls), [list(a or []), list(b or [])]


def mount(app: FastAPI, viewer: Viewer) -> None:
    """Add the chat page to an application. Gradio's other services are switched off."""
    with gr.Blocks(title="posttrain", analytics_enabled=False) as blocks:
        gr.HTML(bar(CHAT), apply_default_css=False, padding=False)
        gr.HTML(partial(where, viewer), apply_default_css=False, padding=False, elem_classes=["view"])
        page(Models(viewer, ModelServers(IN_MEMORY)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Gradio warns if no Node server renders its pages
        gr.mount_gradio_app(
            app, blocks, path=CHAT, footer_links=[], run_history=False, show_error=False, ssr_mode=False, pwa=False,
            mcp_server=False, enable_monitoring=False, theme=theme(), head=f"{HEAD}<style>{STYLE}</style>",
            max_file_size="16mb", app_kwargs={"openapi_url": None, "docs_url": None, "redoc_url": None},
        )  # fmt: skip


def theme() -> gr.themes.Base:
    """The project's design as a Gradio theme. It uses system fonts, so that nothing is loaded from another host."""
    sans, mono = ([name.strip().strip('"') for name in font.split(",")] for font in (design.FONT, design.MONO))
    base = gr.themes.Base(font=sans, font_mono=mono, radius_size="sm", spacing_size="md", text_size="md")
    values = {name: f"var(--{colour})" for colour, names in THEME.items() for name in names.split()}
    dark = {f"{name}_dark": value for name, value in values.items() if f"{name}_dark" in vars(base)}
    return base.set(**values, **dark, block_shadow="none", button_primary_shadow="none", button_secondary_shadow="none")


def page(models: Models) -> None:
    """The page's components and their events."""
    controls = _controls(models)
    with gr.Row():
        sides = [_chatbot("Model A", placeholder=ASK), _chatbot("Model B", visible=False)]
    status = _view()
    with gr.Row():
        question = gr.Textbox(
            label="Question", show_label=False, placeholder="Ask something", lines=1, max_lines=8, scale=12,
            autofocus=True,
        )  # fmt: skip
        send = gr.Button("Send", variant="primary", scale=1, min_width=90)
        stop = gr.Button("Stop", scale=1, min_width=90)
    with gr.Row():
        again, back, clear = (gr.Button(name, size="sm", min_width=90) for name in ("Again", "Undo", "Clear"))
        votes = [gr.Button(name, size="sm", min_width=90, visible=False) for name in (*VOTED, UNDO)]
    _panels(models, controls, sides)
    answered = gr.State(None)  # the controls at the last replies, for a vote; they may have changed since
    given, changed = [*controls, *sides, question], [*sides, question, status, answered]
    asking = gr.on([send.click, question.submit], partial(_answered, models, False), given, changed, **QUIET)
    repeating = again.click(partial(_answered, models, True), given, changed, **QUIET)
    stop.click(lambda: message("Stopped."), None, status, cancels=[asking, repeating], **QUIET)
    back.click(lambda a, b: (taken_back(a), taken_back(b)), sides, sides, **QUIET)
    clear.click(lambda: ([], [], "", None), None, [*sides, status, answered], **QUIET)
    for button in votes:
        vote = partial(_voted, models.viewer.root / VOTES, button.value)
        button.click(vote, [answered, *sides], status, **QUIET)
    controls[0].change(
        lambda name: gr.update(label=name or "Model A", placeholder="" if name else ASK), controls[0], sides[0], **QUIET
    )
    controls[1].change(
        lambda name: [gr.update(label=name, visible=bool(name)), *[gr.update(visible=bool(name))] * len(votes)],
        controls[1], [sides[1], *votes], **QUIET,
    )  # fmt: skip


def _controls(models: Models) -> list[Any]:
    """The input components for the values of `Controls`, in the order of its fields."""
    with gr.Row(equal_height=True):
        chosen = [
            gr.Dropdown([""], value="", label=label, info=info, allow_custom_value=True)
            for label, info in (
                ("Model A", "a run's model, a folder, or a hub id"),
                ("Model B", "for comparison (optional)"),
                ("Reward model", "scores each reply (optional)"),
            )
        ]
    with gr.Accordion("Settings", open=False), gr.Row():
        settings = [
            gr.Textbox(label="System prompt", lines=1),
            gr.Dropdown(TEMPLATES, value="auto", label="Template"),
            gr.Slider(0, 2, 0.7, step=0.05, label="Temperature"),
            gr.Slider(0.05, 1, 1, step=0.05, label="top_p"),
            gr.Number(256, label="Longest reply (tokens)", precision=0, minimum=1),
            gr.Number(None, label="Seed", precision=0, minimum=0, placeholder="new each time"),
        ]

    def listed(request: gr.Request) -> list[Any]:
        """The lists, including the selected values: Gradio shows a value that is not in the list, but sends another."""
        lists = zip(selected(request), models.choices(), strict=True)
        return [gr.update(choices=list(dict.fromkeys(["", value, *choices]))) for value, choices in lists]

    def selected(request: gr.Request) -> list[str]:
        """The values of A, B and the reward model in the address (/chat?a=MODEL)."""
        return [str(request.query_params.get(name, "")) for name in "abr"]

    gr.on(None, listed, None, chosen, **QUIET).then(selected, None, chosen, **QUIET)
    return [*chosen, *settings]


def _panels(models: Models, controls: list[Any], sides: list[Any]) -> None:
    """The panels with the tokens of the last reply and with the prompt that the model reads."""
    with gr.Accordion("Tokens of the last reply", open=False):
        with gr.Row():
            whose = gr.Radio(["A", "B"], value="A", label="Reply of")
            colour = gr.Radio(list(COLOURS), value="difference", label="Colour")
            show = gr.Button("Show tokens", size="sm")
        tokens = _view()
    with gr.Accordion("What the model reads", open=False):
        read = gr.Button("Show the prompt", size="sm")
        prompt = _view()

    show.click(partial(_explained, models), [whose, colour, *controls, *sides], tokens, **QUIET)
    read.click(partial(_prompts, models), [*controls, *sides], prompt, **QUIET)


def _view() -> gr.HTML:
    return gr.HTML(apply_default_css=False, elem_classes=["view"])


def _chatbot(label: str, visible: bool = True, placeholder: str = "") -> gr.Chatbot:
    return gr.Chatbot(
        label=label, height=460, min_width=320, visible=visible, editable="all", buttons=["copy"],
        placeholder=placeholder, render_markdown=False, sanitize_html=True, latex_delimiters=[], allow_tags=False,
        feedback_options=None,
    )  # fmt: skip


def _answered(models: Models, again: bool, *values: Any) -> Iterator[Any]:
    """Yield values for the chatbots, the question, the status and the models while replies arrive. `again`: the last
    question is answered again, not the one in the last of the values."""
    controls, histories = _read(values[:-1])
    question = None if again else str(values[-1] or "").strip()
    histories = [without_reply(history) if again else history for history in histories]
    if not controls.models:
        yield *histories, question, message("Choose model A first.", "warning"), gr.skip()
        return
    if question == "" or (question is None and not any(histories)):
        yield *histories, "", message("Type a question first.", "warning"), gr.skip()
        return
    seed = int(controls.seed) if controls.seed is not None else random.getrandbits(31)
    settings = {"temperature": controls.temperature, "top_p": controls.top_p, "max_tokens": int(controls.max_tokens)}
    yield *histories, gr.skip(), message(f"Loading {' and '.join(controls.models)} …"), gr.skip()
    try:
        talks = controls.talks(models, histories, settings | {"seed": seed})
        replies = [talk.again() if question is None else talk.ask(question) for talk in talks]
        turns = [] if question is None else [{"role": "user", "content": shown(question)}]
        now: list[History] = [[*history, *turns, {"role": "assistant", "content": ""}] for history in histories]
        texts = [""] * len(talks)
        yield *_sides(now, len(talks)), "", "", controls
        for side, piece in together(replies):
            texts[side] += piece
            now[side][-1]["content"] = shown(texts[side])
            yield *_sides(now, len(talks)), gr.skip(), gr.skip(), gr.skip()
        yield *_sides(now, len(talks)), gr.skip(), _facts(models, controls, talks, seed), gr.skip()
    except PosttrainError as error:
        yield *histories, question or "", message(message_of(error), "error"), gr.skip()


def _sides(now: Sequence[History], count: int) -> list[Any]:
    return [now[side] if side < count else gr.skip() for side in range(2)]


def _facts(models: Models, controls: Controls, talks: Sequence[Talk], seed: int) -> str:
    """The seed and the rewards of the last replies."""
    facts = [f"seed {seed}"]
    if controls.reward:
        rewards = models.client(controls.reward, "auto").rewards([talk.messages for talk in talks])
        facts += [f"reward of {name} {value:.3f}" for name, value in zip("AB", rewards, strict=False)]
    return el("p", " · ".join(facts), class_="quiet")


def _guarded(work: Callable[..., str]) -> Callable[..., str]:
    """`work`, with the message of an error as its result."""

    @wraps(work)
    def guarded(*values: Any) -> str:
        try:
            return work(*values)
        except PosttrainError as error:
            return message(message_of(error), "error")

    return guarded


@_guarded
def _voted(file: Path, vote: str, answered: Controls | None, *histories: History | None) -> str:
    a, b = ([*map(dict, turns_of(history or []))] for history in histories)
    replied = all(turns and turns[-1]["role"] == "assistant" for turns in (a, b))
    if answered is None or len(answered.models) < 2 or not replied:
        return message("Ask two models first: a vote compares their last replies.", "warning")
    if a[:-1] != b[:-1]:
        return message("The conversations differ before the last replies, so they cannot be compared.", "warning")
    prompt, replies, models = [*answered.system_turns, *a[:-1]], (a[-1]["content"], b[-1]["content"]), answered.models
    if vote == UNDO:
        return message(f"Removed from {file}: {counted(undo_vote(file, prompt, replies), 'preference')} left.")
    if replies[0] == replies[1]:
        return message("Both replies are the same: there is nothing to prefer.", "warning")
    better = int(vote == "B is better")
    facts = {"chosen_model": models[better], "rejected_model": models[1 - better]} | VOTED[vote]
    count = write_vote(file, prompt, replies[better], replies[1 - better], facts)
    return message(
        f"Written to {file}: {counted(count, 'preference')}, training data for `posttrain train --method dpo`."
    )


@_guarded
def _explained(models: Models, whose: str, colour: str, *values: Any) -> str:
    controls, histories = _read(values)
    turns = turns_of(histories[1 if whose == "B" else 0])
    if not turns or turns[-1]["role"] != "assistant":
        return message("There is no reply yet.", "warning")
    clients = [models.client(model, controls.template) for model in controls.models]
    scored = [client.score([*controls.system_turns, *turns], ALTERNATIVES) for client in clients]
    reply = cells(scored[0], scored[1] if len(scored) > 1 else None)
    return token_map(reply, colour if colour in COLOURS else "difference", controls.models)


@_guarded
def _prompts(models: Models, *values: Any) -> str:
    controls, histories = _read(values)
    parts = [
        el("div", el("p", model, class_="quiet"), el("pre", text(talk.prompt())), class_="side")
        for model, talk in zip(controls.models, controls.talks(models, histories, {}), strict=True)
    ]
    return el("div", *parts, class_="sides") if parts else message("Choose model A first.", "warning")


def turns_of(history: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The turns of a chatbot's messages, without what `shown` adds. Their contents are strings or lists of parts."""
    turns = []
    for entry in history:
        content = entry.get("content")
        parts = content if isinstance(content, list) else [content]
        text = "".join(str(part.get("text", "")) if isinstance(part, Mapping) else str(part or "") for part in parts)
        if entry.get("role") in ("user", "assistant"):
            turns.append({"role": str(entry["role"]), "content": OPENED.sub(r"\1", text)})
    return turns


def shown(text: str) -> str:
    """The text for the chatbot, which reads HTML: an invisible character prevents the start of tags and entities."""
    return OPENING.sub(rf"\g<0>{JOINER}", text)


def without_reply(history: History | None) -> History:
    turns: History = [{**turn, "content": shown(turn["content"])} for turn in turns_of(history or [])]
    return turns[:-1] if turns and turns[-1]["role"] == "assistant" else turns


def taken_back(history: History | None) -> History:
    return without_reply(history)[:-1]
