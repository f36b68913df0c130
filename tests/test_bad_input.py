"""Bad input as a user meets it, on the command line: one clear message, a non-zero status, and nothing lost."""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save_file
from transformers import Gemma3Config

from posttrain.cli import main

PAIR = {"prompt": "Once", "chosen": " upon a time", "rejected": " a cat"}
PAIRS = [{**PAIR, "prompt": f"Once {n}"} for n in range(20)]


def contents(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def write(path: Path, rows: list | bytes) -> None:
    """Rows as JSON, one a line; bytes, and rows that are texts, as they are."""
    if isinstance(rows, bytes):
        path.write_bytes(rows)
    else:
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys, shared):
    """Run a command that must fail; returns the one message. Input files must stay as they are."""
    monkeypatch.chdir(tmp_path)
    model = f"model.path={shared / 'models/stories260K'}"

    def run(*arguments, verb="train", status=1) -> str:
        settings = [model, "method=dpo", "data.source=rows.jsonl", "data.template=none", "name=run"]
        before = {name: digest for name, digest in contents(tmp_path).items() if not name.startswith("runs/run/")}
        assert main([verb, *settings, "training.max_steps=1", *map(str, arguments)]) == status
        error = capsys.readouterr().err
        print(error)
        assert error.count("error: ") == 1 and "Traceback" not in error and "unexpected" not in error
        error = error[error.index("error: ") :]
        assert len(error.splitlines()) < 15
        after = contents(tmp_path)
        assert {name: after.get(name) for name in before} == before
        assert not list((tmp_path / "runs").rglob("*.safetensors")), "a failed run saved a model"
        return error

    return run


# --- data -----------------------------------------------------------------------------------------------------------

MALFORMED = {
    "bad JSON": ('{"prompt": "a",', ["not JSON", "column"]),
    "a list": ("[1, 2]", ["must be an object with named columns, not a list"]),
    "a column missing in one row": ({"prompt": "a", "chosen": "b"}, ["rejected is missing"]),
    "a number for a text": ({**PAIR, "chosen": 5}, ["chosen must be a string or a list of messages, not a number"]),
    "null": ({**PAIR, "rejected": None}, ["rejected is null"]),
    "NUL": ({**PAIR, "chosen": "a\0b"}, ["chosen contains NUL at character 2"]),
    "a lone surrogate": ({**PAIR, "chosen": "\ud800"}, ["chosen is not valid Unicode"]),
    "10 MB": ({**PAIR, "chosen": "a" * 10_000_000}, ["chosen has 10,000,000 characters", "limit of 1,000,000"]),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_row_is_named_by_its_line(refused, name):
    row, words = MALFORMED[name]
    write(Path("rows.jsonl"), [*PAIRS[:6], row, *PAIRS[6:]])
    error = refused()
    for word in ("rows.jsonl line 7: ", "1 of 21 rows are malformed, more than 1%", *words):
        assert word in error, word


def test_a_malformed_row_among_many_is_counted_and_left_out(tmp_path, monkeypatch, shared, capsys):
    monkeypatch.chdir(tmp_path)
    write(Path("rows.jsonl"), ["{broken", *PAIRS * 6])
    arguments = ["method=dpo", "data.source=rows.jsonl", "data.template=none", "--rows", "0"]
    assert main(["explore", f"model.path={shared / 'models/stories260K'}", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "121 rows read" in shown and "120 examples used" in shown
    assert "1 row malformed, dropped" in shown and "rows.jsonl line 1: not JSON" in " ".join(shown.split())


def test_explore_shows_what_a_run_refuses_and_writes_the_good_rows(tmp_path, monkeypatch, shared, capsys):
    monkeypatch.chdir(tmp_path)
    renamed = [{"prompt": row["prompt"], "good": row["chosen"], "bad": row["rejected"]} for row in PAIRS]
    broken = {**renamed[0], "bad": [{"role": "user", "content": "no reply"}] * 2}
    write(Path("rows.jsonl"), ["{skipped", renamed[0], "{broken", *renamed[1:4], broken, {"prompt": 5}, *renamed[4:]])
    model = f"model.path={shared / 'models/stories260K'}"
    columns = "data.columns={chosen: good, rejected: bad}"
    arguments = ["method=dpo", "data.source=rows.jsonl", "data.template=none", columns, "data.skip_rows=1", model]
    assert main(["plan", *arguments]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert f"3 of {len(PAIRS) + 3} rows are malformed, more than 1%. Correct them, or" in error
    assert "posttrain explore SETTINGS data.source=rows.jsonl --good-rows FILE.jsonl" in error
    assert main(["explore", *arguments, "--rows", "1", "--no-quality", "--good-rows", "good.jsonl"]) == 0
    out, err = capsys.readouterr()
    shown = " ".join(out.split())
    assert "more than 1%, so plan and train refuse it" in shown and "row 1 " in shown
    for line in (3, 7, 8):
        assert f"rows.jsonl line {line}" in shown
    assert [json.loads(line) for line in Path("good.jsonl").read_text().splitlines()] == renamed
    assert "wrote good.jsonl without 3 malformed rows" in err
    settings = shlex.split(err.partition("; use it with ")[2].splitlines()[0])
    assert main(["explore", *arguments, *settings, "--rows", "0"]) == 0  # the settings read what was written
    assert f"{len(PAIRS)} examples used" in capsys.readouterr().out
    assert main(["explore", *arguments, "--good-rows", "good.jsonl"]) == 1  # which exists
    assert main(["explore", *arguments, "--good-rows", "rows.jsonl", "--overwrite"]) == 1  # the source
    mixed = "data.source=[{source: rows.jsonl}, {source: good.jsonl}]"
    assert main(["explore", *arguments[2:], mixed, "method=dpo", "data.skip_rows=0", "--good-rows", "new.jsonl"]) == 2
    assert "add data.source=SOURCE" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("form", ["auto", "sharegpt"])
def test_one_conversation_is_no_file_of_rows(refused, form):
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    for text in ({"id": "a", "conversations": turns}, turns):
        Path("one.json").write_text(json.dumps(text))
        error = refused("method=sft", "data.source=one.json", f"data.format={form}")
        assert "Each row is one message" in error and "put a single conversation in a list, [{...}]" in error


UNREADABLE = {
    "empty": (b"", ["rows.jsonl has no rows: the file is empty"]),
    "Latin-1": ('{"prompt": "caf\xe9", "chosen": "a", "rejected": "b"}\n'.encode("latin-1"), ["line 1", "not UTF-8"]),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), ["rows.jsonl is UTF-16, not UTF-8", "iconv"]),
    "binary": (bytes(range(128, 256)) * 50, ["rows.jsonl line 1", "not UTF-8"]),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unreadable_file(refused, name):
    content, words = UNREADABLE[name]
    write(Path("rows.jsonl"), content)
    error = refused()
    assert all(word in error for word in words)


COLUMNS = {
    "unknown ones": ([], ["rows.jsonl has the columns prompt, better, worse, which fit no format", "data.columns"]),
    "the format's": (["data.format=preference"], ["has no column chosen, rejected", "it has prompt, better, worse"]),
    "a typing error": (
        ["data.columns={chosen: bettr, rejected: worse}"],
        ["data.columns: ", "has no column 'bettr' (for chosen); did you mean better? it has prompt, better, worse"],
    ),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_missing_columns_say_which_there_are(refused, name):
    arguments, words = COLUMNS[name]
    write(Path("rows.jsonl"), [{"prompt": "a", "better": "b", "worse": "c"}] * 3)
    error = refused(*arguments)
    assert all(word in error for word in words)


LABELLED = [{"prompt": f"Once {n}", "completion": " upon a time", "label": n % 2 == 0} for n in range(20)]
KTO = {
    "one class": (
        [row | {"label": True} for row in LABELLED],
        ["all 20 training examples are labelled true", "needs both", "method.type: sft"],
    ),
    "the other class": ([row | {"label": False} for row in LABELLED], ["all 20 training examples are labelled false"]),
    "labels as strings": (
        [row | {"label": str(row["label"])} for row in LABELLED],
        ["20 of 20 rows are malformed", "line 1: label must be true or false", "not the string 'True'"],
    ),
    "pairs": (PAIRS, ["has preference pairs", "write each pair as two rows", "method.type: dpo"]),
    "no labels": (
        [{"prompt": "a", "completion": "b"}] * 3,
        ["has no column label, which format kto needs; it has prompt, completion"],
    ),
}


@pytest.mark.parametrize("name", KTO)
def test_what_kto_cannot_learn_from(refused, name):
    rows, words = KTO[name]
    write(Path("rows.jsonl"), rows)
    error = refused("method=kto", "training.batch_size=4")
    assert all(word in error for word in words)


def test_pairs_without_a_difference_leave_nothing(refused):
    write(Path("rows.jsonl"), [{**PAIR, "rejected": PAIR["chosen"]}] * 3)
    error = refused()
    assert "no row can be used" in error and "3 rows (100%) whose chosen and rejected are the same, dropped" in error
    assert "malformed" not in error


@pytest.mark.parametrize("method", ["dpo", "orpo"])
def test_ties_are_for_reward_models(refused, method):
    write(Path("rows.jsonl"), [*PAIRS, {**PAIR, "tie": True}])
    write(Path("rows.jsonl"), [{**PAIR, "tie": True}] * 21)
    error = refused(f"method={method}")
    assert f"train: 21 ties among 21 pairs dropped: only reward models learn from ties; {method} needs" in error


def test_what_pairs_are_needed_for(refused):
    write(Path("rows.jsonl"), LABELLED)
    error = refused()
    assert "which has no chosen and rejected" in error and "need preference pairs" in error


def test_a_missing_file_names_its_neighbour(refused):
    write(Path("row.jsonl"), PAIRS)
    assert "rows.jsonl does not exist: did you mean row.jsonl?" in refused()


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("method=dpoo", "method.type is 'dpoo'; did you mean dpo?"),
        ("method.loss_type=sigmod", "method.loss_type.0 is 'sigmod'; did you mean sigmoid?"),
        ("data.format=prefrence", "data.format is 'prefrence'; did you mean preference?"),
        ("training.max_steps=many", "training.max_steps is 'many'; it must be a whole number"),
        ("data.max_length=20000", "training.tokens_per_pack is 8192, but a pair may have 40000 tokens"),
    ],
)
@pytest.mark.parametrize("verb", ["train", "plan", "explore"])
def test_wrong_settings(refused, verb, argument, message):
    write(Path("rows.jsonl"), PAIRS)
    assert message in refused(argument, verb=verb)
    assert not Path("runs").exists()


# --- models ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path, shared):
    """A copy of a model to break, and rows to train it on; its config.json with some keys changed."""
    folder = tmp_path / "model"
    shutil.copytree(shared / "models/stories260K", folder)
    write(tmp_path / "rows.jsonl", PAIRS)

    def change(**keys) -> Path:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | keys))
        return folder

    return change


def test_lora_targets_that_match_nothing(refused, copied):
    error = refused(f"model.path={copied()}", "model.lora={target_modules: [query, v_proj]}")
    assert "lora.target_modules: query match no module of llama" in error
    assert "its linear layers are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in error


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_missing_models(refused, copied, tmp_path, verb):
    (tmp_path / "empty").mkdir()
    assert "model no/such/folder: no such folder" in refused("model.path=no/such/folder", verb=verb)
    arguments = ("--overwrite",) if verb == "train" else ()
    error = refused("model.path=./empty", *arguments, verb=verb)
    assert "model ./empty: contains no model (config.json), and is not a run; it has nothing" in error
    error = refused("model.path=Qwen/Qwen3-0.6B", *arguments, verb=verb)
    assert "model Qwen/Qwen3-0.6B: is neither a folder nor in the local hub cache" in error
    for run, saved in (("both/sft", "final"), ("both/dpo", "checkpoint-2")):
        (tmp_path / "runs" / run / saved).mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / run / "run.json").write_text("{}")
    error = refused("model.path=runs/both", *arguments, verb=verb)
    assert "model runs/both: contains no model, but 1 run: name one, such as runs/both/sft" in error
    error = refused("model.path=runs/both/dpo", *arguments, verb=verb)
    assert "model runs/both/dpo: is a run without a final model: finish it with --resume, or name the folder" in error
    (tmp_path / "runs/alpaca-lora").mkdir(parents=True, exist_ok=True)
    assert "did you mean the run runs/alpaca-lora?" in refused("model.path=alpaca-lora", *arguments, verb=verb)
    assert "did you mean ./empty?" in refused("model.path=./empt", *arguments, verb=verb).replace(
        "mean empty", "mean ./empty"
    )


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_a_vision_model(refused, copied, verb):
    Gemma3Config().save_pretrained(copied())
    error = refused("model.path=./model", verb=verb)
    assert "(gemma3) has a vision part: posttrain trains text models only" in error


def test_pickled_weights_need_leave(refused, copied, capsys):
    folder = copied()
    torch.save(load((folder / "model.safetensors").read_bytes()), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    error = refused("model.path=./model")
    assert "has no safetensors weights; pickled ones can run code" in error and "model.allow_pickle: true" in error
    arguments = ["method=dpo", "data.source=rows.jsonl", "data.template=none", "training.max_steps=1", "name=allowed"]
    assert main(["train", "model.path=./model", "model.allow_pickle=true", *arguments]) == 0, capsys.readouterr().err
    assert Path("runs/allowed/final/model.safetensors").is_file()


def test_code_that_comes_with_a_model_is_not_run(refused, copied, tmp_path):
    trap = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    auto_map = {"AutoConfig": "trap.Config", "AutoModelForCausalLM": "trap.Model"}
    folder = copied(model_type="mine", auto_map=auto_map)
    (folder / "trap.py").write_text(trap)
    error = refused("model.path=./model")
    assert "comes with its own Python code; if you trust it, set model.trust_remote_code: true" in error
    assert not (tmp_path / "ran").exists()


def test_damaged_models(refused, copied):
    folder = copied()
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "model ./model: the weights are damaged or incomplete" in refused("model.path=./model")

    tensors = load(whole)  # of bytes: a file that is mapped must not be written to
    del tensors["model.norm.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    error = refused("model.path=./model", "--overwrite")
    assert "the weights lack model.norm.weight, which LlamaForCausalLM needs" in error

    (folder / "tokenizer.json").unlink()
    assert "model ./model: has no tokenizer: it needs tokenizer.json" in refused("model.path=./model", "--overwrite")


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does: gated models are forbidden, all others unknown."""

    def do_HEAD(self):
        gated = "gated" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("X-Error-Message", "Access is restricted." if gated else "Repository not found")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *arguments):
        pass


SEVERAL = """
import contextlib, io, json, sys
from posttrain.cli import main
for arguments in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
        status = main(arguments)
    print(json.dumps([status, errors.getvalue()]))
"""


def test_gated_and_unknown_names_on_the_hub(shared, tmp_path):
    write(tmp_path / "rows.jsonl", PAIRS)
    settings = ["train", "method=dpo", "training.max_steps=1", "data.template=none", "data.source=rows.jsonl"]
    local = f"model.path={shared / 'models/stories260K'}"
    runs = {
        "model some/gated: is gated: ask for access on its hub page, then set HF_TOKEN": ["model.path=some/gated"],
        "model some/unknown: not found on the hub (or private: set HF_TOKEN)": ["model.path=some/unknown"],
        "some/gated is gated: accept its terms at https://huggingface.co/datasets/some/gated and set HF_TOKEN": [
            local, "data.source=some/gated",
        ],
        "some/unknown is not a data set on the hub, or it is private (set HF_TOKEN)": [
            local, "data.source=some/unknown",
        ],
    }  # fmt: skip
    commands = [[*settings, *changes, f"name=run{n}"] for n, changes in enumerate(runs.values())]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    environment = os.environ | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home")}
    try:  # a process of its own: the address of the hub is read when huggingface_hub is imported
        done = subprocess.run(
            [sys.executable, "-c", SEVERAL],
            input=json.dumps(commands),
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
        )
    finally:
        server.shutdown()
        server.server_close()
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(runs), done.stderr
    for message, (status, error) in zip(runs, results, strict=True):
        print(error)
        assert status == 1 and error.startswith(f"error: {message}") and error.count("\n") == 1


# --- the run folder and the machine ---------------------------------------------------------------------------------


def test_an_existing_run_folder_stays_as_it_is(refused, copied, capsys):
    copied()
    arguments = ["model.path=./model", "method=dpo", "data.source=rows.jsonl", "data.template=none", "name=first"]
    assert main(["train", *arguments, "training.max_steps=1"]) == 0, capsys.readouterr().err
    before = contents(Path("runs/first"))
    assert "final/model.safetensors" in before
    capsys.readouterr()
    assert main(["train", *arguments, "training.max_steps=2"]) == 1
    error = capsys.readouterr().err
    assert "runs/first has a run already: resume it (--resume), replace it (--overwrite)" in error
    assert "Traceback" not in error and contents(Path("runs/first")) == before
    Path("papers").mkdir()
    write(Path("papers/thesis.txt"), b"years of work")
    assert main(["train", *arguments, "training.max_steps=1", "output_dir=.", "name=papers", "--overwrite"]) == 1
    print(capsys.readouterr().err)
    assert Path("papers/thesis.txt").read_bytes() == b"years of work" and len(list(Path("papers").iterdir())) == 1


OUT_OF_MEMORY = """
import resource, sys
from posttrain import runner
from posttrain.cli import main

def limit_memory(config, **rest):  # so that threads and libraries get what they want, and a large tensor does not
    pages = int(open("/proc/self/statm").read().split()[0])
    room = pages * resource.getpagesize() + 700 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (room, resource.getrlimit(resource.RLIMIT_AS)[1]))
    return train(config, **rest)

train, runner.train = runner.train, limit_memory
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limit on a process's memory")
def test_out_of_memory_names_the_knobs(shared, tmp_path):
    rows = [{"prompt": f"Once {n}", "chosen": " upon a time" * 300, "rejected": " a cat" * 300} for n in range(96)]
    write(tmp_path / "rows.jsonl", rows)
    settings = [f"model.path={shared / 'models/stories260K'}", "method=dpo", "data.source=rows.jsonl", "name=run"]
    settings += [
        "data.template=none",
        "data.max_length=8000",
        "training.tokens_per_pack=150000",
        "training.batch_size=96",
    ]
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY, "train", *settings], capture_output=True, text=True, cwd=tmp_path
    )
    print(done.stderr)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: out of memory\nLower training.tokens_per_pack (150,000), then data.max_length (8,000)" in done.stderr
    assert "gradient_checkpointing=true" in done.stderr and "(model.lora=true)" in done.stderr
    assert "max_completion_length" not in done.stderr, "of online methods"
    run = json.loads((tmp_path / "runs/run/run.json").read_text())
    assert run["state"] == "failed" and "allocate" in run["reason"]


def test_debug_shows_the_stack_trace(tmp_path, monkeypatch, shared, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = [f"model.path={shared / 'models/stories260K'}", "method=dpo", "data.source=rows.jsonl", "--debug"]
    assert main(["train", *arguments]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error and error.splitlines()[-1].startswith("error: rows.jsonl does not exist")
