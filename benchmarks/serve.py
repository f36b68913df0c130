"""How much `posttrain serve` gains from concurrent requests: `python -m benchmarks.serve`.

    throughput   tokens per second over HTTP for 32 clients divided by those for one client; each client is a separate
                 process with requests of 128 tokens to the random model of 31.7M parameters
    first token  seconds until a streamed chat reply of stories260K begins, with one client

Prints the table and writes results/serve.json. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import SHARED, add_results, make_models, processors, put_table

RESULTS, PAGE = Path(__file__).parent / "results/serve.json", Path(__file__).parent / "README.md"
CLIENTS, TOKENS, REQUESTS = 32, 128, 3  # REQUESTS: per client, one after another
GOALS = {"throughput": 6.0, "first": 0.3}

# A client without packages, so that it uses as little as possible of the two cores.
CLIENT = """
import http.client, json, sys, time
port, seed, requests, tokens = map(int, sys.argv[1:])
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
print("ready", flush=True)
sys.stdin.readline()
for number in range(requests):
    body = {"prompt": [5 + seed, 6, 7, 8] * 8, "max_tokens": tokens, "seed": seed * 1000 + number}
    body["ignore_eos"] = True
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    print(answer["usage"]["completion_tokens"], flush=True)
"""


@contextmanager
def server(model: Path, *options: str) -> Iterator[int]:
    """Run a server in a separate process. Yields its port."""
    command = [sys.executable, "-m", "posttrain", "serve", str(model), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "serving" in line)
        try:
            yield int(line.partition("127.0.0.1:")[2].partition("/")[0])
        finally:
            process.terminate()


def tokens_per_second(port: int, clients: int, requests: int) -> float:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(port), str(seed), str(requests), str(TOKENS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(clients)
    ]
    for client in started:
        assert client.stdout is not None and client.stdout.readline() == "ready\n"
    began = time.perf_counter()
    for client in started:
        assert client.stdin is not None
        client.stdin.write("go\n")
        client.stdin.flush()
    tokens = sum(int(line) for client in started for line in client.communicate()[0].split())
    assert tokens == clients * requests * TOKENS
    return tokens / (time.perf_counter() - began)


def first_token(port: int) -> float:
    from openai import OpenAI

    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    messages = [{"role": "user", "content": "Tell a story about a cat."}]
    began = time.perf_counter()
    stream = client.chat.completions.create(model="m", messages=messages, max_tokens=32, stream=True)  # pyright: ignore
    next(chunk for chunk in stream if chunk.choices and chunk.choices[0].delta.content)
    spent = time.perf_counter() - began
    stream.close()
    return spent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    found: dict[str, list[float]] = {"one": [], "many": [], "throughput": [], "first": []}
    with TemporaryDirectory() as place, server(make_models(Path(place))["policy"]) as port:
        for _ in range(rounds):
            found["one"].append(tokens_per_second(port, 1, REQUESTS))
            found["many"].append(tokens_per_second(port, CLIENTS, REQUESTS))
            found["throughput"].append(found["many"][-1] / found["one"][-1])
            print(json.dumps({name: values[-1:] for name, values in found.items()}), flush=True)
    with server(SHARED / "models/stories260K", "--template", "alpaca") as port:
        found["first"] = [first_token(port) for _ in range(rounds + 1)][1:]  # without the client's first connection
    results = add_results(
        RESULTS, {name: {"goal": GOALS.get(name), "rounds": values} for name, values in found.items()}
    )
    median = {name: statistics.median(values) for name, values in found.items()}
    lines = [
        "| | median | goal |",
        "|---|---|---|",
        f"| one client, {TOKENS} tokens a request | {median['one']:,.0f} tokens/s | |",
        f"| {CLIENTS} clients | {median['many']:,.0f} tokens/s | |",
        f"| ratio | {median['throughput']:.1f} | ≥ {GOALS['throughput']:g} |",
        f"| first token of a chat reply, stories260K | {median['first']:.3f} s | < {GOALS['first']:g} s |",
    ]
    table = "\n".join(lines)
    put_table(PAGE, f"{table}\n\n{processors(results)}", "serve")
    print(table)
    met = median["throughput"] >= GOALS["throughput"] and median["first"] < GOALS["first"]
    print("every goal is met" if met else "a goal is missed")
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
