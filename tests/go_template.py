"""The part of Go's text/template that posttrain writes for ollama, so that tests can render it without Go.

tests/test_export.py::test_the_renderer_is_gos compares it with Go itself.
"""

import ast
import json
import re

ACTION = re.compile(r"\{\{(-\s)?\s*((?:\"(?:\\.|[^\"\\])*\"|[^\"}])*?)\s*(\s-)?\}\}")
TOKEN = re.compile(r"\"(?:\\.|[^\"\\])*\"|:=|[()=]|[\w.$]+")


class GoError(Exception):
    """What ends the execution of a template."""


def collated(messages: list[dict]) -> list[dict]:
    """What ollama makes of a conversation first: neighbouring messages of one role are joined by an empty line."""
    found: list[dict] = []
    for message in messages:
        if found and found[-1]["role"] == message["role"]:
            found[-1]["content"] += "\n\n" + message["content"]
        else:
            found.append(dict(message))
    return found


def render(template: str, messages: list[dict]) -> str:
    """The text for a conversation. Raises GoError where Go does."""
    body, rest = _block(_parts(template), 0)
    assert rest is None, f"unexpected {rest}"
    data = {"Messages": [{"Role": m["role"], "Content": m["content"]} for m in collated(messages)]}
    return "".join(_run(body, data, data, {}))


def _parts(template: str) -> list[tuple[str, str]]:
    """Texts and actions in turn; `{{- ` and ` -}}` strip the spaces and line breaks beside them."""
    parts, at, strip = [], 0, False
    for found in ACTION.finditer(template):
        text = template[at : found.start()]
        text = text.lstrip(" \t\r\n") if strip else text
        parts += [("text", text.rstrip(" \t\r\n") if found[1] else text), ("action", found[2].strip())]
        at, strip = found.end(), bool(found[3])
    text = template[at:]
    return [*parts, ("text", text.lstrip(" \t\r\n") if strip else text)]


def _block(parts: list, start: int) -> tuple[list, str | None]:
    """A tree up to `else` or `end`, which is returned; `parts` is consumed."""
    body = []
    while parts:
        kind, value = parts.pop(0)
        if kind == "text":
            body.append(("text", value))
        elif value.startswith(("if ", "range ")):
            body.append(_branch(value, parts))
        elif value == "end" or value.startswith("else"):
            return body, value
        else:
            body.append(("do", value))
    return body, None


def _branch(head: str, parts: list) -> tuple:
    body, ended = _block(parts, 0)
    other: list = []
    if ended is not None and ended.startswith("else if "):
        other = [_branch(ended.removeprefix("else "), parts)]
    elif ended == "else":
        other, ended = _block(parts, 0)
        assert ended == "end"
    return (head, body, other)


def _run(body: list, root, dot, variables: dict):
    for part in body:
        if part[0] == "text":
            yield part[1]
        elif part[0] == "do":
            yield from _do(part[1], root, dot, variables)
        elif part[0].startswith("range "):
            names, _, what = part[0].removeprefix("range ").partition(" := ")
            index, item = names.split(", ")
            for number, value in enumerate(_value(TOKEN.findall(what), root, dot, variables)):
                variables |= {index: number, item: value}
                yield from _run(part[1], root, value, variables)
        else:
            condition = _value(TOKEN.findall(part[0].removeprefix("if ")), root, dot, variables)
            yield from _run(part[1] if condition else part[2], root, dot, variables)


def _do(action: str, root, dot, variables: dict):
    name, is_set, what = re.fullmatch(r"(\$\w+) :?(=) (.*)|(?:.*)", action, re.DOTALL).groups()
    if is_set:
        variables[name] = _value(TOKEN.findall(what), root, dot, variables)
    elif action.startswith("template "):
        raise GoError(f"template {action.split(' ', 1)[1].rpartition(' ')[0]} not defined")
    else:
        yield _value(TOKEN.findall(action), root, dot, variables)


def _value(tokens: list[str], root, dot, variables: dict):
    """The value of a pipeline of one command: an operand, or a function with operands."""
    operands = []
    while tokens:
        token = tokens.pop(0)
        if token == "(":
            depth, inner = 1, []
            while depth:
                inner.append(tokens.pop(0))
                depth += {"(": 1, ")": -1}.get(inner[-1], 0)
            operands.append(_value(inner[:-1], root, dot, variables))
        elif token.startswith('"'):
            operands.append(_string(token))
        elif token.isdecimal():
            operands.append(int(token))
        elif token == "$.Messages":
            operands.append(root["Messages"])
        elif token.startswith("$"):
            operands.append(variables[token])
        elif token.startswith("."):
            operands.append(dot[token[1:]])
        else:
            operands.append(FUNCTIONS[token])
    first, *rest = operands
    return first(*rest) if callable(first) else first


def _string(literal: str) -> str:
    return ast.literal_eval(literal)  # posttrain writes only escapes that Go and Python share


FUNCTIONS = {
    "and": lambda *values: next((value for value in values if not value), values[-1]),
    "eq": lambda a, b: a == b,
    "len": len,
    "slice": lambda items, start: items[start:],
}

GO = """package main

import (
	"bytes"
	"encoding/json"
	"os"
	"text/template"
)

type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

func main() {
	var asked struct {
		Template      string
		Conversations [][]*message
	}
	if err := json.NewDecoder(os.Stdin).Decode(&asked); err != nil {
		panic(err)
	}
	parsed := template.Must(template.New("").Option("missingkey=zero").Parse(asked.Template))
	texts := []map[string]string{}
	for _, messages := range asked.Conversations {
		var b bytes.Buffer
		if err := parsed.Execute(&b, map[string]any{"Messages": messages, "Response": ""}); err != nil {
			texts = append(texts, map[string]string{"error": err.Error()})
		} else {
			texts = append(texts, map[string]string{"text": b.String()})
		}
	}
	json.NewEncoder(os.Stdout).Encode(texts)
}
"""


def asked_of_go(template: str, conversations: list[list[dict]]) -> str:
    """The input of the program GO, which renders the conversations with Go's own text/template."""
    return json.dumps({"Template": template, "Conversations": [collated(one) for one in conversations]})
