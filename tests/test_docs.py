"""The documentation is true: its commands are run, its code too, its links and the files and tests it names are there.

How a command of a fenced block is run:
- In an empty folder, in the order of the page; what an earlier command has made is there for a later one.
- A block after a line that names a file of its kind (YAML `hh.yaml`, JSON `rows.jsonl`, Python `my_rewards.py`) is that
  file, for all commands of the page. Every page also has the files of README.md, and four rows of real preference
  pairs as `pairs.jsonl`.
- Names on the hub become local: data by DATA, models by `local_model`; MODEL in a command is a local model.
- The Python blocks of a page are one program.
- What trains is made small by SMALL: `checkpoint-500` is then `checkpoint-1`, and hundreds of steps are as many single
  ones. All else stays as it is written.
- A run that no later command of its page reads is checked with `--dry-run`. On the pages in LONG every run is, other
  commands are checked by their flags, and Python is compiled. `make slow` runs all of every page; README.md always is.
- `posttrain serve` starts a server of a small model, whose address takes the place of SERVED.
- A preset without further settings is trained by tests/test_presets.py; here it has to be among those.
A line that none of this covers fails the test.
"""

import gzip
import importlib.util
import itertools
import json
import re
import shlex
import shutil
import tomllib
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Literal, get_args, get_origin

import httpx
import pytest
import yaml
from conftest import int8_is_wrong
from test_compare import answered, evaluation
from test_presets import LABELLED, LOCAL, PAIRS
from test_serve import serving
from test_suites import LOCAL as SUITES

from posttrain.cli import main
from posttrain.config.schema.methods import METHODS
from posttrain.evaluation.comparing.sources import split_name
from posttrain.training.state import Saved, State

HELP: dict[tuple[str, ...], str] = {}  # the help of commands, shown once
ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = {"yaml": "yaml", "json": "jsonl", "python": "py"}
SHELL = ("bash", "sh", "console", "shell")
HH = "data/hh-harmless/train.jsonl.gz"
SOLUTIONS = "data/gsm8k/example_model_solutions.jsonl"
DATA = {
    "Anthropic/hh-rlhf": (HH, "hh"),
    "trl-lib/ultrafeedback_binarized": (PAIRS, "sharegpt"),
    "trl-lib/kto-mix-14k": (LABELLED, "kto"),
    "openai/gsm8k/main": ("data/gsm8k/train.jsonl", "problem_answer"),
    "gsm8k": ("data/gsm8k/train.jsonl", "problem_answer"),
}
SMALL = {"max-steps": 2, "batch-size": 2, "max-rows": 12, "save-steps": 1, "logging-steps": 1}
SERVED = "http://127.0.0.1:8000"  # in a page, where `posttrain serve` listens: here a stand-in's address
TRAINING = ("train", "verify-resume", "sweep")
LONG = """comparison distill engines eval export grading grpo kto losses memory runs scaling serve stages""".split()  # noqa: SIM905
TRAINING_ONLY = {"--resume", "--overwrite", "--dry-run", "--probe", "--no-quality", "--json"}


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """(language, content, the line before it) of every fenced block."""
    text = page.read_text(encoding="utf-8")
    return [(m["language"], m["body"], text[: m.start()].rstrip().rpartition("\n")[2]) for m in BLOCK.finditer(text)]


def files(page: Path) -> dict[str, str]:
    """The files that a page shows, each in a block after a line that names it."""
    named = [
        (re.search(rf"`([\w-]+\.{FILES[kind]})`", before), body) for kind, body, before in blocks(page) if kind in FILES
    ]
    return {found[1]: body for found, body in named if found}


def lines(body: str) -> list[list[str]]:
    """The commands of a block, split as a shell splits them; comments and prompts are gone."""
    joined = body.replace("\\\n", " ").splitlines()
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in joined]
    return [line for line in words if line]


def posttrain_arguments(words: list[str]) -> list[str] | None:
    """The arguments for posttrain if that is what the command runs, however it is started."""
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    for start in (["posttrain"], [".venv/bin/posttrain"], ["uv", "run", "posttrain"], ["python", "-m", "posttrain"]):
        if words[: len(start)] == start:
            return words[len(start) :]
    return None


def commands(page: Path) -> list[list[str]]:
    return [words for language, body, _ in blocks(page) if language in SHELL for words in lines(body)]


# --- posttrain's own commands ---------------------------------------------------------------------------------------


class Reader:
    """Runs what a page says, in the order it says it, in the current folder."""

    def __init__(self, page: Path, shared: Path, scratch_model: Path, capsys, trains_all: bool = False):
        self.shared, self.scratch_model, self.capsys = shared, scratch_model, capsys
        self.trains_all = trains_all or page.name == "README.md"
        self.flags_only = page.stem in LONG and not self.trains_all
        reading = [
            " ".join(words) for words in commands(page) if (posttrain_arguments(words) or ["train"])[0] not in TRAINING
        ]
        reading += [body for language, body, _ in blocks(page) if language == "python"]
        self.read_runs = {word for text in reading for word in re.findall(r"[\w-]+", text)}
        self.resources, self.url = ExitStack(), SERVED
        with gzip.open(shared / HH, "rt", encoding="utf-8") as rows:
            Path("pairs.jsonl").write_text("".join(itertools.islice(rows, 4)), encoding="utf-8")
        for name, text in (files(ROOT / "README.md") | files(page)).items():
            Path(name).write_text(text, encoding="utf-8")

    def run(self, arguments: list[str], statuses: tuple[int, ...] = (0,)) -> str:
        status = main(arguments)
        out, error = self.capsys.readouterr()
        assert status in statuses, f"posttrain {shlex.join(arguments)}\n{error}"
        return out

    def command(self, arguments: list[str]) -> None:
        verb, *rest = arguments
        if self.flags_only and verb not in TRAINING:
            flags_exist(arguments, self.run)
        elif verb in (*TRAINING, "plan", "explore") and verb != "sweep":
            if verb == "train" and len(rest) == 1 and not Path(rest[0]).exists():
                assert rest[0] in LOCAL, f"{rest[0]} is no preset that tests/test_presets.py trains"
                return
            rest = [re.sub(r"checkpoint-\d+$", "checkpoint-1", word) for word in rest]
            rest = [
                re.sub(r"00$", "", word) if flag == "--max-steps" else word
                for flag, word in itertools.pairwise(["", *rest])
            ]
            if verb in ("plan", "explore") or self.trains(rest):
                self.run([verb, *self.local(rest)])
            elif verb == "train" and not {"--resume", "--overwrite"} & set(rest):
                self.run([verb, *self.local(rest), "--dry-run"])
            else:
                flags_exist(arguments, self.run)
        elif verb == "sweep":  # the swept values are not those of one run
            flags = self.local([rest[0], "--dry-run"])[2:]
            self.run([verb, *rest, *flags, *([] if self.trains(rest) or "--dry-run" in rest else ["--dry-run"])])
        elif verb in ("score", "generate", "sample"):
            model = rest[0] if Path(rest[0]).exists() else str(self.shared / "models/stories260K")
            self.run([verb, model, *rest[1:]])
        elif verb == "serve":
            flags_exist(arguments, self.run)
            if self.url == SERVED:
                self.url = self.resources.enter_context(serving(self.shared / "models/stories260K"))
        elif verb == "report":
            for name in itertools.takewhile(lambda word: not word.startswith("-"), rest):
                self.stored([name])
            self.run(arguments)
        elif verb == "losses":
            self.run([verb, *self.stored(rest)])
        elif verb == "rollouts":
            any_reward = [word for flag, word in itertools.pairwise(["", *rest]) if "--above" not in (flag, word)]
            self.run([verb, *self.stored(any_reward)])
        elif verb == "quantize" and "--suite" in rest:
            flags_exist(arguments, self.run)  # tests/test_quantize.py has a suite
        elif verb == "quantize":
            model = rest[0] if Path(rest[0]).exists() else str(self.shared / "models/stories260K")
            self.run([verb, model, *rest[1:], "--max-completion-length", "4"], statuses=(0, 3))  # 3: few rows
        elif verb == "grade":
            self.run([*arguments, "--workers", "1"])
        elif arguments[:2] == ["data", "save"]:
            self.run(["data", "save", str(self.shared / DATA[rest[1]][0]), *rest[2:], "--max-rows", "4"])
        elif verb == "eval":
            self.run([*self.evaluated(rest), "--workers", "1"] if "--suite" in rest else arguments)
        elif verb == "compare" and "--judge" in rest:
            flags_exist(arguments, self.run)  # tests/test_compare.py has a judge
        elif verb == "compare":
            self.evaluations(rest)
            self.run(arguments)
        elif (
            verb in ("quickstart", "ui", "chat", "launch")  # tests/test_launched_ranks.py launches
            or "--push-to-hub" in rest
            or (verb == "doctor" and (not rest or rest[0].startswith("-")))
        ):
            flags_exist(arguments, self.run)
        else:
            assert verb in ("config", "data", "runs", "export", "doctor") or "--help" in arguments, (
                f"nothing here knows how to run posttrain {verb}"
            )
            self.run(arguments)

    def trains(self, rest: list[str]) -> bool:
        """Whether the run is trained here: a later command of the page reads it, or all are."""
        if self.trains_all or self.flags_only:
            return self.trains_all
        named = [word for flag, word in itertools.pairwise(rest) if flag == "--name"]
        shown = [rest[0], *(word for word in rest if word.startswith("name=")), *(f"name={word}" for word in named)]
        return (
            not shown[0].startswith("-")
            and yaml.safe_load(self.run(["config", "show", *shown]))["name"] in self.read_runs
        )

    def python(self, body: str, page: Path, names: dict) -> None:
        code = compile(body.replace(SERVED, self.url), page.name, "exec")
        if not self.flags_only:
            exec(code, names)

    def curl(self, words: list[str]) -> None:
        """What curl would send to the page's server."""
        if self.flags_only:
            return
        options = dict(itertools.pairwise(words))
        name, _, value = options["-H"].partition(": ")
        address = words[1].replace(SERVED, self.url)
        assert httpx.post(address, content=options["-d"], headers={name: value}).status_code == 200

    def evaluated(self, rest: list[str]) -> list[str]:
        """A few items of real rows, asked of a local model."""
        models = list(itertools.takewhile(lambda word: not word.startswith("-"), rest))
        local = [name if Path(name).exists() else str(self.shared / "models/stories260K") for name in models]
        names = rest[rest.index("--suite") + 1].split(",")
        known = [name for name in names if name in SUITES and "--data" not in rest]
        data = [word for name in known for word in ("--data", f"{name}={self.shared / 'data' / SUITES[name][0]}")]
        few = ["--max-rows", "3", "--max-completion-length", "4"]
        return ["eval", *local, *rest[len(models) :], *data, *few]

    def evaluations(self, rest: list[str]) -> None:
        """Evaluation folders with a few recorded solutions of GSM8K, under the names that `compare` is given."""
        rows = [json.loads(line) for line in (self.shared / SOLUTIONS).read_text().splitlines()[:20]]
        for index, name in enumerate(word for word in rest if not word.startswith("-")):
            folder, model = Path(split_name(name)[1]), ("6b_verification", "175b_finetuning")[index % 2]
            if not folder.exists():
                answers = answered([float(row[model]["is_correct"]) for row in rows])
                evaluation(folder, [replace(one, suite="gsm8k") for one in answers])

    def stored(self, rest: list[str]) -> list[str]:
        """The arguments of a command about a run: its first step, and the run of tests/saved_run for one not made."""
        if not Path(rest[0]).exists():
            saved = ROOT / "tests/saved_run"
            shutil.copytree(saved / "model", "model", dirs_exist_ok=True)
            shutil.copytree(saved / "run", rest[0])
        return [rest[0], *(re.sub(r"^\d+$", "1", word) for word in rest[1:])]

    def local(self, rest: list[str]) -> list[str]:
        """The arguments with the names of the hub, and MODEL, replaced by what is here, and made small."""
        rest = [
            word.replace("=MODEL", f"={self.scratch_model}") for word in rest if not word.startswith("devices.ids=")
        ]
        one = list(rest)
        if "--method" in rest and ("," in rest[rest.index("--method") + 1] or "all" in rest):  # several: as the file is
            del one[rest.index("--method") : rest.index("--method") + 2]
        shown = settings_only(one) or [str(next(Path(word) for word in rest if Path(word).is_dir()) / "config.yaml")]
        whole = yaml.safe_load(self.run(["config", "show", *shown]))
        changes = {f"--{flag}": value for flag, value in SMALL.items()}
        for name, stage in whole.pop("stages", {"": {}}).items():
            settings = {**whole, **stage}
            source = settings["data"]["source"]
            if source in DATA:
                file, format = DATA[source]
                changes |= {"--source": self.shared / file, "--format": format}
            if settings.get("rewards"):
                changes[f"stages.{name}.".removeprefix("stages..") + "rollout.max_completion_length"] = 16
            if settings["data"]["validation"] is not None:
                changes["--validation"] = "{rows: 5}"
            if settings["method"].get("teacher"):
                changes["method.teacher"] = self.local_model(settings)
            for index, model in enumerate(settings["models"]):
                if not Path(model["path"]).exists():
                    changes[f"models.{index}.path"] = self.local_model(settings)
                    changes[f"models.{index}.name"] = model["name"] or Path(model["path"]).name
        return [*rest, *(f"{flag}={value}" for flag, value in changes.items() if flag not in rest)]

    def local_model(self, settings: dict) -> Path:
        """The small one that was really trained; where a chat template is needed, the one that has one."""
        return self.shared / "models/stories260K" if settings["data"]["template"] == "none" else self.scratch_model


def settings_only(rest: list[str]) -> list[str]:
    """The arguments without those that are no settings: `config show` then says what the settings come to."""
    kept, words = [], iter(rest)
    for word in words:
        if word in (
            "--rows",
            "--first",
            "--row",
            "--sort",
            "--set",
            "--against",
            "--ngram",
            "--report",
            "--good-rows",
            "--skip",
            "--kills",
            "--model-index",
            "--memory-limit",
            "--nproc",
            "--device",
        ):
            next(words)
        elif word not in TRAINING_ONLY and not Path(word).is_dir():  # the folder is that of --resume
            kept.append(word)
    return kept


def flags_exist(arguments: list[str], run) -> None:
    """Every flag of a command is in the help of its verb, or of its group."""
    verbs = [word for word in arguments if re.fullmatch(r"[a-z]+", word)]
    group = arguments[0] in ("config", "data", "runs") and len(verbs) > 1
    command = tuple(verbs[:2] if group else arguments[:1])
    if command not in HELP:
        HELP[command] = run([*command, "--help"])
    shown = HELP[command]
    for flag in (word.partition("=")[0] for word in arguments if word.startswith("--")):
        name = re.sub(r"^--([\w-]+\.)*", "--", flag).replace("_", "-")
        assert re.search(rf"{re.escape(name)}(?![\w-])", shown) or name in TRAINING_ONLY, (
            f"{arguments[0]} has no {flag}"
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_code_run(page, shared, scratch_model, tmp_path, monkeypatch, capsys):
    if page.stem == "quantize" and int8_is_wrong():
        pytest.skip("PyTorch multiplies 8-bit integers wrongly here")
    in_a_folder(tmp_path, monkeypatch)
    follow(page, Reader(page, shared, scratch_model, capsys))


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if p.stem in LONG or any(words[1:2] in (["train"], ["sweep"]) for words in commands(p))],
    ids=lambda p: p.name,
)
def test_all_of_a_page_runs(page, shared, scratch_model, tmp_path, monkeypatch, capsys):
    if page.stem == "quantize" and int8_is_wrong():
        pytest.skip("PyTorch multiplies 8-bit integers wrongly here")
    in_a_folder(tmp_path, monkeypatch)
    follow(page, Reader(page, shared, scratch_model, capsys, trains_all=True))


def in_a_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def follow(page: Path, reader: Reader) -> None:
    with reader.resources:
        run_page(page, reader)
    runs_are_as_described(Path.cwd())


def run_page(page: Path, reader: Reader) -> None:
    names = {"__name__": "docs"}
    for language, body, _ in blocks(page):
        if language == "python":
            reader.python(body, page, names)
        elif language in SHELL:
            for words in lines(body):
                arguments = posttrain_arguments(words)
                if arguments is not None:
                    reader.command(arguments or ["--help"])
                elif words[0] == "curl":
                    reader.curl(words)
                else:
                    other_command_is_real(words)
        else:
            mentioned = [line for line in body.splitlines() if re.match(r"(\$ )?posttrain ", line)]
            assert not mentioned, f"a command in a block that is not marked as bash: {mentioned}"


def runs_are_as_described(folder: Path) -> None:
    """Every file of the runs below is in the tables of runs.md, and every file of their checkpoints in resume.md's."""
    for run in (path.parent for path in folder.rglob("run.json")):
        stages = [path for path in run.iterdir() if (path / "run.json").exists()]
        unnamed(run, "runs.md", {".gitignore", *(path.name for path in stages)})
        for checkpoint in (path.parent for path in run.glob("checkpoint-*/state.json")):
            unnamed(
                checkpoint, "resume.md", {"special_tokens_map.json", "vocab.json", "merges.txt"}
            )  # of the tokenizer


def unnamed(folder: Path, page: str, others: set[str]) -> None:
    rows = re.findall(r"^\| (.*?) \| ", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)
    names = [name.rstrip("/") for row in rows for name in re.findall(r"`([^`]+)`", row)]
    known = "|".join(re.escape(name).replace(r"\{step\}", r"\d+") for name in names)
    missing = [path.name for path in folder.iterdir() if path.name not in others and not re.fullmatch(known, path.name)]
    assert missing == [], f"docs/{page} lists every file of {folder}, but not these"


def test_resume_lists_the_whole_state():
    page = (ROOT / "docs/resume.md").read_text(encoding="utf-8")
    named = [*(field.name for cls in (State, Saved) for field in fields(cls))]
    assert [name for name in named if f"`{name}`" not in page] == []


def test_the_rules_find_what_is_wrong(shared, scratch_model, tmp_path, monkeypatch, capsys):
    """A command that no test runs, or that fails, is seen."""
    monkeypatch.chdir(tmp_path)
    reader = Reader(ROOT / "README.md", shared, scratch_model, capsys)
    for wrong in (
        ["trian", "x"],
        ["train", "no-such-preset"],
        ["train", "dpo-hh", "training.max_step=3"],
        ["config", "sohw", "dpo-hh"],
    ):
        with pytest.raises(AssertionError):
            reader.command(wrong)
    for wrong in ("make breakfast", "pip install -e .[nothing]", "rm -rf /", "python -m no_such_module"):
        with pytest.raises(AssertionError):
            other_command_is_real(wrong.split())


# --- other tools ----------------------------------------------------------------------------------------------------


def other_command_is_real(words: list[str]) -> None:
    """A command of another tool is not run: what it refers to in this project has to exist."""
    tool, *rest = words
    if tool == "make":
        targets = re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert rest and set(rest) <= set(targets), f"the Makefile has no {rest}"
    elif (tool, *rest[:1]) in (("pip", "install"), ("uv", "pip")) or words[:2] in (["uv", "sync"], ["uv", "venv"]):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = [extra for word in rest for extra in re.findall(r"^\.\[(.*)\]$", word)]
        extras = [name for found in extras for name in found.split(",")]
        extras += [name for flag, name in itertools.pairwise(rest) if flag == "--extra"]
        assert set(extras) <= set(project["optional-dependencies"]), f"there is no extra among {extras}"
        files = [name for flag, name in itertools.pairwise(rest) if flag in ("-c", "-r")]
        assert all((ROOT / name).is_file() for name in files), files
    elif tool in ("tensorboard", "wandb", "trackio"):
        assert importlib.util.find_spec(tool), f"{tool} is not installed"
    elif words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(rest[1]), f"there is no module {rest[1]}"
    else:
        assert words[:2] == ["git", "clone"], f"nothing here knows how to check: {shlex.join(words)}"


# --- what pages say in passing --------------------------------------------------------------------------------------


def slug(heading: str) -> str:
    """The anchor GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_conflict_of_a_merge_is_left(page):
    assert not re.search(r"^(<{7} |={7}$|>{7} )", page.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page):
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [slug(heading) for heading in headings], f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_tests_that_are_named_exist(page):
    for name, test in re.findall(r"`((?:posttrain|tests|docs|benchmarks)/[\w./-]+)(?:::(\w+))?`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
        if test:
            assert f"def {test}(" in (ROOT / name).read_text(encoding="utf-8"), f"{page.name} names {name}::{test}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_passing_exist(page, monkeypatch, capsys):
    """`posttrain verb --flag` within a sentence: there is such a verb with such flags."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(arguments: list[str]) -> str:
        status = main(arguments)
        out, error = capsys.readouterr()
        assert status == 0, f"{page.name}: posttrain {shlex.join(arguments)}\n{error}"
        return out

    for code in re.findall(r"`posttrain ([^`]+)`", BLOCK.sub("", page.read_text(encoding="utf-8"))):
        words = shlex.split(code)
        if not words[0].startswith("--"):
            flags_exist([word for word in words if word != "--help"], run)


def words_of(annotation: object) -> set[str]:
    """The values of all Literals in a type."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return set().union(*(words_of(part) for part in get_args(annotation)))


def test_the_page_of_methods_names_every_method_and_loss():
    page = set(re.findall(r"\w+", (ROOT / "docs/methods.md").read_text(encoding="utf-8")))
    for name, method in METHODS.items():
        fields = [method.model_fields[each] for each in ("loss_type", "divergence") if each in method.model_fields]
        known = {name}.union(*(words_of(field.annotation) for field in fields))
        assert known <= page, f"docs/methods.md lacks {', '.join(sorted(known - page))}"


def test_something_was_found():
    found = [words for page in PAGES for words in commands(page)]
    assert len([words for words in found if posttrain_arguments(words) is not None]) > 25
    assert ["make", "quickstart"] in found and ["make", "test"] in found
