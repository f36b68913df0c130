"""The process that renders chat templates: a template is a program that comes with a model, so it runs in isolation.

Reads one JSON object per line from stdin and answers each with one line on stdout. transformers' sandbox isolates a
template; this process also limits memory and output, and its parent limits the time.
"""

import json
import sys
from datetime import datetime

from posttrain.base.system import IS_LINUX, leave_signals_to_parent, resource

if __name__ == "__main__":  # before the import below, which takes a second
    leave_signals_to_parent()  # the parent may render again

from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

MEMORY_BYTES = 4_000_000_000  # bytes of address space; the imports take half a gigabyte
OUTPUT_BYTES = 1_000_000


def limit_memory() -> None:
    """Limit memory, if the platform supports it, against templates such as `{{ 'a' * 10 ** 12 }}`."""
    if IS_LINUX and resource is not None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def render(arguments: dict, date: str | None) -> dict:
    """One conversation as text and, if requested, the character spans that `{% generation %}` marks."""
    try:
        day = datetime.now() if date is None else datetime.fromisoformat(date)
        _compile_jinja_template(arguments["chat_template"]).environment.globals["strftime_now"] = day.strftime
        texts, spans = render_jinja_template(**arguments)
    except MemoryError:
        return {"error": "the chat template needs too much memory"}
    except Exception as error:  # an error of a template is the answer to its job and must not end the process
        return {"error": f"the chat template fails: {type(error).__name__}: {str(error)[:500]}"}
    if len(texts[0]) > OUTPUT_BYTES or len(texts[0].encode(errors="surrogatepass")) > OUTPUT_BYTES:
        return {"error": "the chat template writes more than 1 MB"}
    return {"text": texts[0], "spans": spans[0] if spans else []}


def main() -> None:
    limit_memory()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(render(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
