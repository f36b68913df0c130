"""`posttrain runs`: order, filters, what needs what, pruning, snapshots, renaming, archives, differences."""

import io
import json
import os
import re
import shutil
import tarfile
from pathlib import Path

import pytest
import yaml
from test_cli_runs import CONFIG, make

from posttrain.base.errors import RunError
from posttrain.cli import main
from posttrain.config import RunConfig, dump, preset_names
from posttrain.config.reading.load import find, load
from posttrain.data.sources import keep
from posttrain.runs import folder as folders
from posttrain.runs import summary
from posttrain.runs.checkpoint import verify
from posttrain.runs.finding import checked_name, find_runs, size_of
from posttrain.runs.folder import Notes, read_notes, write_notes
from posttrain.runs.managing.listing import Column, bound, cell_width, filtered, ordered, table_lines
from posttrain.runs.metrics import first_latest, headlines, latest_metrics
from posttrain.runs.run import Run
from posttrain.runs.summary import RunSummary, summaries_below


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.fixture
def runs(here, capsys):
    """The command; returns what it printed, after checking its exit status."""

    def command(*words: str, status: int = 0, answer: str = "") -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdin", io.StringIO(answer))
            found = main(["runs", *words])
        out, error = capsys.readouterr()
        assert found == status, out + error
        return out + error

    return command


def settings(path: str = "some/qwen3-0.6b", **others: object) -> str:
    values = {"models": [{"path": path}], "method": {"type": "dpo"}, "data": {"source": "rows.jsonl"}} | others
    return dump(RunConfig.model_validate({"name": "toy"} | values))


def with_checkpoints(folder: Path, *steps: int, config: str = CONFIG) -> Path:
    make(folder, 2, config)
    with Run.open(folder) as run:
        for step in steps:
            run.save_checkpoint(step, lambda at: (at / "model.bin").write_bytes(b"x" * 1000), limit=None)
    return folder


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


# Reading fast is reading right


def test_the_quick_head_is_that_of_yaml(tmp_path, monkeypatch):
    """Of every preset, and of values that YAML writes in quotes, folds, or takes for something else."""
    texts = [dump(load(find(name)).stages) for name in preset_names()]
    texts.append(settings("models/a word").replace("models/a word", "models/" + "long " * 60))
    for value in (
        "true",
        "null",
        "y",
        "a: b",
        "x" * 300,
        "long " * 60,
        "'q'",
        "1e5",
        ".5",
        "~",
        "ü/ö",
        "a\x1bb",
        "../x",
    ):
        texts.append(
            yaml.dump({"models": [{"path": value, "name": value}], "method": {"type": "x"}, "data": {"source": value}})
        )
        texts.append(settings("models/q").replace("models/q", value))
    texts += [
        "method: {type: dpo}\n",
        "models:\n- path: a\n  name: b\n# c\nmethod:\n  type: x  # y\ndata:\n  source: [a,\n   b]\n",
    ]
    texts += [
        "",
        "[unclosed",
        "method: dpo\nmodels: 5\ndata: [1]\n",
        "models:\n- x: 'a\n\n    path: no'\n  path: b\n  name: null\n",
    ]
    quick = 0
    for text in texts:
        (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
        found = RunSummary(tmp_path).head
        with monkeypatch.context() as patch:
            patch.setattr(summary, "_quick_head", lambda text: None)
            assert found == RunSummary(tmp_path).head, text
        quick += summary._quick_head(text) is not None
    print(f"{quick} of {len(texts)} read without a parser")
    assert quick >= len(texts) / 3


def test_the_headline_is_that_of_all_metrics(tmp_path):
    make(tmp_path / "x", 5)
    with open(tmp_path / "x/metrics.jsonl", "a") as file:
        file.write('{"step": 6, "eval_rewards/accuracies": null, "loss": 0.1}\n{"step": 7, "cut')
    names = ["eval_rewards/accuracies", "rewards/accuracies", "eval_loss", "loss"]
    assert first_latest(tmp_path / "x", names) == (6, "eval_loss", 0.5)
    assert latest_metrics(tmp_path / "x")["eval_loss"] == 0.5
    run = summaries_below(tmp_path)[0]
    name, value = next(iter(headlines(run.method, run.metrics).items()))
    assert (run.step, run.headline) == (run.metrics["step"], f"{name} {value:.3g}")
    assert run.size == RunSummary(tmp_path / "x").size
    assert first_latest(tmp_path, names) == (0, "", None)


def test_damaged_foreign_and_hostile_folders_stop_no_list(runs, here):
    make(Path("runs/fine"))
    for name, text in {
        "half": '{"format": 1, "state": "runn',
        "other": '{"format": 7}',
        "list": "[1, 2]",
        "when": json.dumps(json.loads(Path("runs/fine/run.json").read_text()) | {"started": "yesterday"}),
        "types": json.dumps(json.loads(Path("runs/fine/run.json").read_text()) | {"provenance": 5}),
    }.items():
        Path("runs", name).mkdir()
        Path("runs", name, "run.json").write_text(text)
    make(Path("runs/metrics"))
    Path("runs/metrics/metrics.jsonl").write_text("5\n")
    make(Path("runs/notes"))
    Path("runs/notes/notes.json").write_text('{"tags": 5}')
    make(Path("runs/evil\x1b[31m<b>\u202e"))
    Path("runs/foreign/deep").mkdir(parents=True)
    Path("runs/pipe").mkdir()
    os.mkfifo("runs/pipe/run.json")
    os.mkfifo("runs/fine/config.yaml.pipe")
    shown = runs("list")
    print(shown)
    assert shown.count("damaged") >= 5 and "9 runs" in shown and "\x1b" not in shown and "\u202e" not in shown
    assert r"evil\x1b[31m<b>\u20" in shown and "metrics.jsonl: a line near the end is damaged" in shown
    assert all(len(line) <= 80 for line in shown.splitlines()[:12])
    for name in ("half", "metrics", "notes"):
        assert "damaged" in runs("show", name)


# Order and filters


def test_order_and_filters(here):
    for index, (name, steps) in enumerate({"b-10": 3, "b-9": 2, "a": 0}.items()):
        make(Path("runs", name), steps)
        os.utime(Path("runs", name, "run.json"), (index, index))
    write_notes(Path("runs/b-9"), Notes(("keep", "paper"), "the <b>good</b> one"))
    rows = summaries_below(Path("runs"))

    def names(order="time", reverse=False, *terms):
        return [row.name for row in ordered(filtered(rows, terms), order, reverse)]

    assert names() == ["b-10", "b-9", "a"] and names("name") == ["a", "b-9", "b-10"]
    assert names("step", True) == ["b-10", "b-9", "a"]
    assert names("result") == ["b-10", "b-9", "a"] and names("result", True) == [
        "b-10",
        "b-9",
        "a",
    ]  # without one: last
    assert (
        names("time", False, "tag=keep") == ["b-9"] == names("time", False, "GOOD") == names("name", False, "name=*9")
    )
    assert names("name", False, "tag!=keep", "step>=0") == ["a", "b-10"]
    assert names("name", False, "step>2") == ["b-10"] and names("name", False, "size>1MB") == []
    assert names("name", False, "age<1h") == ["a", "b-9", "b-10"] and names("name", False, "age>1d") == []
    for term, message in (("colour=red", "cannot filter by colour"), ("state>x", "is a text"), ("size>big", "a size")):
        with pytest.raises(RunError, match=message):
            names("name", False, term)
    with pytest.raises(RunError, match="cannot sort by colour"):
        names("colour")
    assert (bound("size", "1.5GB"), bound("size", "3kb"), bound("age", "2w")) == (1.5e9, 3000, 14 * 86_400)


def test_a_table_fits_and_loses_nothing():
    columns = [Column("name", folds=True), Column("n", right=True)]
    rows = [["a name of several words and one" + "x" * 60, "5"], ["日本語" * 10, "12"]]
    lines = table_lines(columns, rows, 40)
    assert max(map(cell_width, lines)) <= 40
    text = "".join("".join(lines).split())
    assert text.count("x") == 60 and sum(text.count(sign) for sign in "日本語") == 30


def test_the_list_for_programs_and_people(runs):
    make(Path("runs/one"))
    make(Path("runs/two"), 9)
    assert [json.loads(line)["name"] for line in runs("list", "--json", "--sort", "step", "-r").splitlines()] == [
        "two",
        "one",
    ]
    assert "1 run of 2" in runs("list", "step>5") and "0 runs of 2" in runs("list", "no-such-word")
    assert "2 runs" in runs()  # alone, without a terminal
    assert "cannot sort" in runs("list", "--sort", "beauty", status=1)


# Tags and notes


def test_tags_and_notes_never_reach_the_run(runs):
    make(Path("runs/toy"), 1)
    before = {path: path.read_bytes() for path in Path("runs/toy").rglob("*") if path.is_file()}
    assert runs("tag", "toy", "keep", "paper") == "runs/toy: #keep #paper\n"
    assert runs("tag", "toy", "-keep", "lr/2") == "runs/toy: #paper #lr/2\n"
    assert "no tag ghost; it has paper, lr/2" in runs("tag", "toy", "-ghost", status=1)
    assert "is not a tag" in runs("tag", "toy", "two words", status=1) and "is not a tag" in runs(
        "tag", "toy", "\x1b", status=1
    )
    assert runs("note", "toy", "better\nthan \x1b[1m") == "runs/toy/notes.json: note written\n"
    assert runs("note", "toy") == "better\nthan \\x1b[1m\n"
    assert read_notes(Path("runs/toy")) == Notes(("paper", "lr/2"), "better\nthan \x1b[1m")
    shown = runs("show", "toy")
    assert "#paper #lr/2" in shown and "better" in shown and "\x1b" not in shown
    assert {path: path.read_bytes() for path in before} == before
    runs("note", "toy", "")
    assert "has no note" in runs("note", "toy")


def test_a_note_survives_a_run_that_starts_anew(here):
    folder = Path("runs/x")
    with pytest.raises(RunError), Run.create(folder, CONFIG, {}):
        write_notes(folder, Notes(("mine",)))
        raise RunError("no such model")
    Run.create(folder, CONFIG, {}).close()
    assert read_notes(folder).tags == ("mine",)
    Run.create(folder, CONFIG, {}, overwrite=True).close()
    assert read_notes(folder) == Notes()


# What needs what


@pytest.fixture
def family(here):
    """A reward model, a policy trained with it, an adapter on the policy's checkpoint, and stages of a whole run."""
    with_checkpoints(Path("runs/judge"), 5)
    rewards = {"method": {"type": "grpo"}, "rewards": [{"type": "model", "path": "runs/judge/final"}]}
    with_checkpoints(Path("runs/policy"), 5, 9, config=settings(**rewards))
    with_checkpoints(Path("runs/adapted"), 5, config=settings("runs/policy/checkpoint-5"))
    Path("runs/adapted/final/adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(here / "runs/policy/checkpoint-5")})
    )
    Path("runs/whole").mkdir()
    Path("runs/whole/config.yaml").write_text("name: whole\n")
    make(Path("runs/whole/sft"))
    make(Path("runs/whole/dpo"), config=settings("runs/whole/sft/final"))
    Path("runs/whole/dpo/base").symlink_to("../sft/final")
    return here


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rm", "-y", "judge"), "needed by 1 other run: runs/policy (rewards.0.path)"),
        (("rm", "-y", "policy"), "runs/adapted (models.0.path, final/adapter_config.json)"),
        (("prune", "-y", "policy"), "runs/policy is not pruned: needed by 1 other run: runs/adapted"),
        (("rm", "-y", "runs/whole/sft"), "runs/whole/dpo (models.0.path, base)"),
        (("rename", "policy", "new"), "would lose it"),
    ],
)
def test_what_others_need_is_refused(family, runs, words, message):
    before = size_of(Path("runs"))
    shown = " ".join(runs(*words, status=1).split())
    assert message in shown.replace(str(family) + "/", "") and "--force" in shown
    assert size_of(Path("runs")) <= before + 200  # lock files
    runs(*words, "--force")


def test_runs_that_go_together_need_no_force(family, runs):
    assert "not deleted" in runs("rm", "-y", "judge", "policy", status=1)
    runs("rm", "-y", "judge", "policy", "adapted")
    runs("rm", "-y", "whole")
    make(Path("runs/swept/1-a"))
    assert "contains 1 run" in runs("rm", "-y", "swept", status=1)
    Path("runs/swept/sweep.json").write_text("{}")
    runs("rm", "-y", "swept")
    assert find_runs(Path("runs")) == [] and not Path("runs/whole").exists()


def test_a_recorded_model_counts_from_where_the_run_was_started(here, runs):
    make(Path("runs/judge"))
    make(Path("runs/user"))
    facts = json.loads(Path("runs/user/run.json").read_text())
    facts["provenance"] |= {"folder": str(here / "runs"), "models": {"rewards.0.path": {"path": "judge/final"}}}
    Path("runs/user/run.json").write_text(json.dumps(facts))
    assert "runs/user (rewards.0.path)" in runs("rm", "-y", "judge", status=1).replace(str(here) + "/", "")


# Pruning


def test_pruning_keeps_what_a_resume_needs(runs):
    folder = with_checkpoints(Path("runs/toy"), 1, 3, 5, 7)
    (folder / "checkpoint-7/model.bin").write_bytes(b"y" * 1000)  # a flipped bit: the newest that is intact is 5
    (folder / "checkpoint-9.set-aside").mkdir()
    (folder / "best.tmp-77").mkdir()
    assert "nothing is deleted" in runs("prune", "toy", answer="n\n") and len(checkpoints(folder)) == 6
    assert "not confirmed" in runs("prune", "toy", status=1)
    shown = runs("prune", "toy", answer="y\n")
    assert "damaged" in shown and "set aside" in shown and "left by a crash" in shown and "freed" in shown
    assert (
        checkpoints(folder) == ["checkpoint-5"]
        and verify(folder / "checkpoint-5") == []
        and (folder / "final").is_dir()
    )
    assert "nothing to delete" in runs("prune", "toy")
    (folder / "checkpoint-5/model.bin").unlink()
    with_steps = with_checkpoints(Path("runs/bad"), 4)
    for path in with_steps.glob("checkpoint-*/model.bin"):
        path.unlink()
    assert "no intact checkpoint" in runs("prune", "-y", "bad", status=1) and len(checkpoints(with_steps)) == 2
    runs("prune", "-y", "bad", "--keep-last", "0")
    assert checkpoints(with_steps) == []


def test_freeing_by_rule(runs, here, monkeypatch):
    old, new, busy = (with_checkpoints(Path("runs", name), 4, 6) for name in ("old", "new", "busy"))
    with Run.open(old) as run:
        run.save_model(run.best, 4, lambda at: (at / "model.bin").write_bytes(b"x"))
    facts = json.loads((old / "run.json").read_text()) | {"ended": "2020-01-01T00:00:00+00:00"}
    (old / "run.json").write_text(json.dumps(facts))
    shown = runs("free", "--keep-last", "1", "--keep-best", "--older-than", "30d", answer="y\n")
    assert "checkpoint-2" in shown and "runs/new" not in shown and "1 folder or file of 1 run" in shown
    assert checkpoints(old) == ["checkpoint-4", "checkpoint-6"] and len(checkpoints(new)) == 3
    monkeypatch.setattr(folders, "PATIENCE_S", 0.05)
    with Run.open(busy):
        shown = runs("free", "name!=old", "--yes")
        assert f"in progress: {busy}" in shown and len(checkpoints(busy)) == 3 and checkpoints(new) == ["checkpoint-6"]
        for words in (
            ("prune", "busy"),
            ("rm", "busy"),
            ("rename", "busy", "x"),
            ("snapshot", "busy"),
            ("export", "busy"),
        ):
            yes = ["--yes"] if words[0] in ("prune", "rm") else []
            assert f"in use by process {os.getpid()}" in runs(*words, *yes, status=1), words
    assert "30days" in runs("free", "--older-than", "30days", status=1)
    assert not list(here.glob("*.tar.gz*"))


# Links


def test_a_run_that_is_named_by_a_link_is_opened(family, runs, capsys):
    """A link to a run, and one to the output folder: both show and archive what the run's own name does."""
    Path("stage").symlink_to("runs/whole/dpo")
    Path("linked").symlink_to("runs")
    archived, shown = [], []
    for name in ("runs/whole/dpo", "stage", "linked/whole/dpo"):
        shown.append(runs("show", name).partition("state")[2])
        assert main(["report", name, "--output", "report.html", "--overwrite"]) == 0
        assert "<html" in Path("report.html").read_text()
        runs("export", name, "-o", f"{len(archived)}.tar")
        with tarfile.open(f"{len(archived)}.tar") as archive:
            archived.append({(member.name, member.type, member.size) for member in archive})
    assert "finished" in shown[0] and shown[0] == shown[1] == shown[2]
    assert archived[0] == archived[1] == archived[2]
    assert ("dpo/base", tarfile.DIRTYPE, 0) in archived[0] and not any(
        kind == tarfile.SYMTYPE for _, kind, _ in archived[0]
    )
    assert runs("list") == runs("list", "--output-dir", "linked")


def test_links_in_the_output_folder_are_not_followed(family, runs):
    """To everything, to the folder itself, to a run elsewhere: no list and no deleting goes through them."""
    make(family / "elsewhere")
    before, freed = runs("list"), runs("free", status=1)
    for name, target in (
        ("all", "/"),
        ("self", "."),
        ("away", "../elsewhere"),
        ("file", "/etc/passwd"),
        ("none", "no"),
    ):
        Path("runs", name).symlink_to(target)
    said = runs("list")
    assert said.startswith(before) and "\nall -> /: a link, which is not followed\naway -> ../elsewhere: " in said
    assert runs("free", status=1) == freed and "3 folders" in freed
    runs("prune", "-y", "judge")
    Path("runs/judge/link").symlink_to("/etc/passwd")
    assert "link -> /etc/passwd" in runs("show", "judge") and "root:" not in runs("show", "judge")
    runs("export", "judge", "-o", "judge.tar")
    with tarfile.open("judge.tar") as archive:
        assert archive.getmember("judge/link").issym()
    assert (family / "elsewhere/run.json").is_file()


# Snapshots


def test_a_snapshot_survives_pruning_and_deleting(runs):
    folder = with_checkpoints(Path("runs/toy"), 1, 3)
    write_notes(folder, Notes(("keep",)))
    (folder / "link").symlink_to("final")
    before = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    name = runs("snapshot", "toy", "--name", "good", "--note", "the best").split()[-1]
    assert name == "good" and "the best" in runs("snapshots") and "1 run," in runs("list")
    runs("prune", "-y", "toy")
    runs("rm", "-y", "toy")
    assert "verified and restored" in runs("restore", "good")
    assert {
        str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"
    } == before
    assert (folder / "link").is_symlink()
    assert "--replace" in runs("restore", "good", status=1)
    runs("restore", "good", "--replace", answer="n\n")
    (folder / "training.log").write_text("later")
    runs("restore", "good", "--replace", "--yes")
    assert (folder / "training.log").read_bytes() == before["runs/toy/training.log"]
    runs("restore", "good", "--to", "twin")
    assert "2 runs" in runs("list")
    for bad in ("../x", "a/b", ".x", "checkpoint-5", "x.tmp-4"):
        assert "cannot name a run" in runs("restore", "good", "--to", bad, status=1)
    assert "no snapshot nothing" in runs("restore", "nothing", status=1)
    runs("rm", "-y", ".snapshots/good")
    assert "no snapshots" in runs("snapshots")


def test_a_damaged_snapshot_is_not_restored(runs):
    with_checkpoints(Path("runs/toy"), 3)
    runs("snapshot", "toy", "--name", "s")
    copy = Path("runs/.snapshots/s/run")
    sound = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    for path, message in (
        ("checkpoint-3/model.bin", "checkpoint-3: model.bin: SHA-256"),
        ("metrics.jsonl", "metrics.jsonl: SHA-256 differs"),
    ):
        data = sound[copy / path]
        (copy / path).write_bytes(bytes([data[0] ^ 1]) + data[1:])
        assert message in runs("restore", "s", "--to", "again", status=1) and not Path("runs/again").exists()
        (copy / path).write_bytes(data)
    (copy / "results.txt").write_text("new")
    assert "results.txt: not in snapshot.json" in runs("restore", "s", "--to", "again", status=1)
    (copy / "results.txt").unlink()
    facts = json.loads((copy.parent / "snapshot.json").read_text())
    (copy.parent / "snapshot.json").write_text(json.dumps(facts | {"run": "../../elsewhere"}))
    assert "damaged" in runs("restore", "s", status=1) and "damaged" in runs("snapshots")


def test_a_snapshot_needs_what_its_run_needed(family, runs):
    runs("snapshot", "whole", "--name", "all")
    runs("snapshot", "policy", "--name", "p")
    runs("rm", "-y", "--force", "policy")
    assert "p/run (rewards.0.path)" in "".join(runs("rm", "-y", "judge", status=1).split("\n"))
    runs("rm", "-y", "whole")
    runs("restore", "all")
    assert Path("runs/whole/dpo/base/model.bin").is_file()


# Names


def test_renaming_updates_other_runs(family, runs):
    runs("rm", "-y", "adapted")
    with_checkpoints(Path("runs/next"), config=settings("runs/policy/final"))
    facts = json.loads(Path("runs/next/run.json").read_text())
    absolute = {"path": str(family / "runs/policy/final"), "content": "sha256 0"}
    facts["provenance"]["models"] = {"models.0.path": absolute}
    Path("runs/next/run.json").write_text(json.dumps(facts))
    shown = runs("rename", "policy", "Politik ü")
    assert "runs/policy is now runs/Politik ü" in shown and shown.count("updated") == 3
    assert (
        not Path("runs/policy").exists()
        and yaml.safe_load(Path("runs/Politik ü/config.yaml").read_text())["name"] == "Politik ü"
    )
    changed = yaml.safe_load(Path("runs/next/config.yaml").read_text())
    assert (
        changed["models"][0]["path"] == "runs/Politik ü/final"
        and changed["method"] == {"type": "dpo"} | changed["method"]
    )
    now = json.loads(Path("runs/next/run.json").read_text())["provenance"]["models"]["models.0.path"]
    assert now == {"path": str(family / "runs/Politik ü/final"), "content": "sha256 0"}
    assert load(Path("runs/next/config.yaml")).config.models[0].path == "runs/Politik ü/final"
    runs("rename", "whole", "all")
    assert yaml.safe_load(Path("runs/all/dpo/config.yaml").read_text())["models"][0]["path"] == "runs/all/sft/final"
    assert Path("runs/all/dpo/base/model.bin").is_file()


@pytest.mark.parametrize(
    "name", ["..", "../x", "/tmp/x", "a/b", "", ".x", "-x", " x", "x\n", "x\x1b[1m", "final", "x" * 300, "ok.tmp-3"]
)
def test_names_that_are_refused(name):
    with pytest.raises(RunError, match="cannot name a run"):
        checked_name(name)


def test_renaming_refuses_taken_names_and_stages(family, runs):
    make(Path("runs/free"))
    assert "exists: choose another name" in runs("rename", "free", "policy", status=1)
    assert "named after a model or stage of whole" in runs("rename", "whole/sft", "x", status=1)
    assert "cannot name a run" in runs("rename", "free", "../free", status=1)
    make(Path("runs/swept/1-a"))
    Path("runs/swept/sweep.json").write_text("{}")
    assert "is a trial of the sweep swept" in runs("rename", "swept/1-a", "x", status=1)
    Path("runs/link").symlink_to(family / "runs/free")
    assert "is a link to" in runs("rename", "link", "x", status=1)


# Archives and differences


def test_an_archive_is_the_run(runs, here):
    with_checkpoints(Path("runs/toy"), 3)
    shown = runs("export", "toy")
    assert shown.startswith("toy.tar.gz: 10 files") and "packed" in shown
    with tarfile.open("toy.tar.gz") as archive:
        assert {(member.uid, member.uname) for member in archive} == {(0, "")}
        archive.extractall(here / "other", filter="data")
    for path in Path("runs/toy").rglob("*"):
        if path.is_file() and path.name != ".lock":
            assert (here / "other" / path.relative_to("runs")).read_bytes() == path.read_bytes()
    assert verify(here / "other/toy/checkpoint-3") == [] and "1 run," in runs("list", "--output-dir", "other")
    assert "exists" in runs("export", "toy", status=1)
    runs("export", "toy", "--no-checkpoints", "-o", "small.tar")
    with tarfile.open("small.tar") as archive:
        assert (
            not [name for name in archive.getnames() if "checkpoint" in name]
            and "toy/final/model.bin" in archive.getnames()
        )
    assert "ends in .tar.gz" in runs("export", "toy", "-o", "x.zip", status=1)
    assert "is inside the run" in runs("export", "toy", "-o", "runs/toy/x.tar", status=1)


def test_an_archive_has_the_base_of_its_adapters(family, runs):
    runs("export", "runs/whole/dpo", "-o", "dpo.tar")
    with tarfile.open("dpo.tar") as archive:
        assert archive.getmember("dpo/base/model.bin").isfile()
    runs("export", "whole", "-o", "whole.tar")
    with tarfile.open("whole.tar") as archive:
        assert archive.getmember("whole/dpo/base").issym() and archive.getmember("whole/sft/final/model.bin").isfile()


def test_differences(runs):
    make(Path("runs/a"), 3, settings())
    make(Path("runs/b"), 4, settings("other/model", training={"learning_rate": 1e-3}))
    facts = json.loads(Path("runs/b/run.json").read_text())
    facts["provenance"]["versions"]["torch"] = "9.9"
    Path("runs/b/run.json").write_text(json.dumps(facts))
    shown = runs("diff", "a", "b")
    print(shown)
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.strip()}
    assert rows["models.0.path"] == ["some/qwen3-0.6b", "other/model"] and rows["training.learning_rate"][1] == "0.001"
    assert rows["versions.torch"][-1] == "9.9" and rows["loss"] == ["0.333333", "0.25", "-0.08333"]
    assert "eval_loss" not in rows and "2 differ" in shown and all(len(line) <= 80 for line in shown.splitlines())
    assert "0 differ" in runs("diff", "a", "a") and "there is no run c" in runs("diff", "a", "c", status=1)


def test_what_is_needed_elsewhere_counts_when_a_run_is_named_by_path(family, runs, monkeypatch):
    """--output-dir is another folder then: the runs beside the pruned one are looked at."""
    monkeypatch.chdir(family / "runs/whole")
    assert "is not pruned: needed by" in runs("prune", "-y", "../policy", status=1)
    monkeypatch.chdir(family)
    shown = runs("free", "-y")
    assert "kept: runs/policy/checkpoint-5, needed by runs/adapted" in shown and "freed" in shown
    assert checkpoints(Path("runs/policy")) == ["checkpoint-5", "checkpoint-9"]


@pytest.mark.slow
def test_a_renamed_restored_and_unpacked_run_is_resumed(runs, shared, here):
    """Real runs: DPO from another run's model, and an adapter on that."""

    def train(*words: object) -> None:
        assert main(["train", *map(str, words)]) == 0

    data = {"source": shared / "data/hh-harmless/train.jsonl.gz", "format": "hh", "template": "none", "max_rows": 20}
    few = [*(f"data.{name}={value}" for name, value in data.items()), "data.max_length=400", "training.batch_size=2"]
    few += ["training.max_steps=1", "checkpoint.save_steps=1", "devices.type=cpu", "method=dpo"]
    train("name=first", f"model={shared / 'models/stories260K'}", *few)
    train("name=second", "model=runs/first/final", *few)
    train("name=adapted", "model.path=runs/first/final", "model.lora={r: 4}", *few)
    assert "would lose it" in runs("rename", "first", "start", status=1)
    runs("rename", "first", "start", "--force")
    for name in ("second", "adapted"):
        train("--resume", f"runs/{name}", "--max-steps", 2)
    runs("snapshot", "second", "--name", "s")
    runs("export", "second")
    runs("rm", "-y", "second")
    runs("restore", "s")
    train("--resume", "runs/second", "--max-steps", 3)
    with tarfile.open("second.tar.gz") as archive:
        archive.extractall("elsewhere", filter="data")
    train("--resume", "elsewhere/second", "--max-steps", 3)
    lines = [Path(folder, "second/metrics.jsonl").read_text().splitlines()[-1] for folder in ("runs", "elsewhere")]
    losses = [json.loads(line)["loss"] for line in lines]
    print(losses)
    assert losses[0] == losses[1]


# Commands that are killed


def killed(step: int, *words: str) -> bool:
    """Run a command in a fork that ends at its call number `step` of those that change folders; whether it did."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 99
    left = step
    for module, name in (
        (os, "rename"),
        (os, "replace"),
        (os, "mkdir"),
        (os, "unlink"),
        (os, "rmdir"),
        (Path, "write_bytes"),
    ):
        original = getattr(module, name)

        def dying(*given, _original=original, **options):
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(99)
            return _original(*given, **options)

        setattr(module, name, dying)
    try:
        main(["runs", *words])
    finally:
        os._exit(0)


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder with its bytes, without locks."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if path.name != folders.LOCK
    }


@pytest.mark.parametrize(
    "words",
    [
        ("restore", "kept", "--replace", "-y"),
        ("restore", "kept", "--to", "other"),
        ("rename", "toy", "other"),
        ("rm", "-y", "--force", "toy"),
        ("snapshot", "toy", "--name", "second"),
        ("export", "toy", "-o", "toy.tar"),
    ],
    ids=" ".join,
)
def test_what_a_killed_command_leaves_is_finished_or_undone_by_the_next(here, runs, words):
    """Wherever it is killed: then the runs are those of before or of after, with nothing beside them."""

    def prepared() -> Path:
        shutil.rmtree("runs", ignore_errors=True)
        for path in Path().glob("toy.tar*"):
            path.unlink()
        make(Path("runs/toy"))
        make(Path("runs/user"), config=settings("runs/toy/final"))
        runs("snapshot", "toy", "--name", "kept", "--note", "n")
        (Path("runs/toy/extra.txt")).write_text("since then")
        return Path("runs")

    before = tree(prepared())
    step = 0
    while killed(step, *words):
        runs("list")
        found = tree(Path("runs"))
        names = {path.name for path in Path("runs").iterdir()} | {
            path.name for path in Path("runs/.snapshots").iterdir()
        }
        assert not any(re.search(r"\.(?:tmp|old)-", name) for name in names), (step, names)
        assert not list(Path("runs").rglob("renaming.json"))
        if words[0] == "rename":
            new, old = Path("runs/other"), Path("runs/toy")
            assert new.exists() != old.exists()
            config = yaml.safe_load(Path("runs/user/config.yaml").read_text())
            assert config["models"][0]["path"] == f"runs/{'other' if new.exists() else 'toy'}/final", step
        elif words[0] in ("snapshot", "export"):
            assert found.items() >= before.items()
        elif words[0] == "rm":
            assert (
                not Path("runs/toy").exists()
                or tree(Path("runs/toy")).items()
                >= {name.removeprefix("toy/"): data for name, data in before.items() if name.startswith("toy/")}.items()
            )
        else:
            place = Path("runs") / (words[3] if "--to" in words else "toy")
            assert "--to" in words or place.is_dir()
            assert not place.exists() or (place / "run.json").is_file()
        runs("export", "user", "-o", "toy.tar", "--overwrite")
        assert [path.name for path in Path().glob("toy.tar*")] == ["toy.tar"]
        step += 1
        before = tree(prepared())
    print(f"{' '.join(words)}: killed at {step} places")
    assert step > 2


def test_free_lists_what_interrupted_commands_left_and_spares_what_is_being_written(here, runs):
    make(Path("runs/toy"))
    for name in ("toy.tmp-4194304123456", "toy.old-4194304123456", ".snapshots/s.tmp-4194304123456"):
        Path("runs", name).mkdir(parents=True)
    alive = Path(f"runs/new.tmp-{os.getpid()}123456")
    alive.mkdir()
    Path("toy.tar.gz.tmp-4194304123456").write_bytes(b"x" * 2000)
    Path("mine.tmp-4194304123456").mkdir()
    own = ("toy.tmp-1", "toy.old-2", "toy.old-20261126", "toy.tmp-19991231")  # no name that posttrain gives
    for name in own:
        Path("runs", name).mkdir()
    shown = runs("free", "--keep-last", "9", answer="n\n")
    assert shown.count("left by an interrupted command") == 4 and "new.tmp" not in shown and "mine" not in shown
    assert "freed" in runs("free", "--keep-last", "9", "-y")
    assert sorted(path.name for path in Path("runs").iterdir()) == sorted([".snapshots", alive.name, "toy", *own])
    assert [path.name for path in Path().glob("*.tmp-*")] == ["mine.tmp-4194304123456"]
    shutil.rmtree("runs/toy")
    Path("runs/toy.old-4194304123456").mkdir()
    Path("runs/toy.old-4194304123456/run.json").write_text("{}")
    with pytest.raises(RunError, match="run"), Run.create(Path("runs/toy"), CONFIG, {}):
        pass  # the run that was moved aside is put back, not written over
    assert Path("runs/toy/run.json").read_text() == "{}"


def test_what_a_killed_data_save_left_goes_with_the_next_to_the_same_folder(here):
    for name in ("set.tmp-4194304123456", f"set.tmp-{os.getpid()}123456", "other.tmp-4194304123456"):
        Path(name).mkdir()
    Path("rows.jsonl").write_text('{"text": "a"}')
    keep("rows.jsonl", Path("set"))
    assert not Path("set.tmp-4194304123456").exists()
    assert len(list(Path().glob("*.tmp-*"))) == 2 and Path("set").is_dir()
