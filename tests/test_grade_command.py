"""`posttrain grade`: rows out as they came in, with a verdict each; what cannot be graded is said."""

import gzip
import json
import os
import re
import subprocess
import sys

import pytest

from posttrain.cli import main

ROWS = [
    {"completion": r"So \boxed{\frac{1}{2}}", "answer": "0.5", "id": 7},
    {"completion": r"So \boxed{2}", "answer": 3, "id": 8, "score": "mine"},
    {"completion": r"So \boxed{3}", "answer": "", "id": 9},
    {"completion": "nothing 🤷 \ud800", "answer": "1", "id": 10},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_come_out_in_order_with_their_verdicts(tmp_path, capsys):
    file = write(tmp_path / "rows.jsonl", ROWS)
    assert main(["grade", str(file), "--reward", "math", "--workers", "1", "--deadline", "20"]) == 0
    said = capsys.readouterr()
    print(said.out, said.err)
    out = read(tmp_path / "rows.jsonl.graded.jsonl")
    assert [row["id"] for row in out] == [7, 8, 9, 10]
    assert [row["verdict"] for row in out] == ["correct", "wrong", "bad_gold", "wrong"]
    assert [row["score"] for row in out] == [1.0, 0.0, None, 0.0]
    assert [row["extracted"] for row in out] == [r"\frac{1}{2}", "2", None, None]
    assert all(0 <= row["seconds"] < 20 for row in out) and out[2]["reason"] == "there is no answer to compare with"
    assert out[0]["completion"] == ROWS[0]["completion"] and out[1]["answer"] == 3
    assert "mean score 0.3333 over 3 with a verdict" in said.out
    assert "at most 1 GB" in said.err or sys.platform != "linux"


def test_other_columns_other_files_and_classes(tmp_path, capsys):
    file, output = tmp_path / "rows.csv.gz", tmp_path / "out.jsonl"
    with gzip.open(file, "wt") as stream:
        stream.write("text,gold\nso </think> <answer> 18 </answer>,18\nso 18,18\nso </think> <answer> 1 </answer>,18\n")
    names = ["--completion-column", "text", "--answer-column", "gold", "--output", str(output), "--workers", "1"]
    assert main(["grade", str(file), "--reward", "r1_zero", *names]) == 0
    assert "format and answer, 00: 0, 01: 1, 10: 1, 11: 1" in capsys.readouterr().out
    assert [row["format_and_answer"] for row in read(output)] == ["11", "01", "10"]
    assert [row["parts"] for row in read(output)] == [
        {"format": 1.0, "answer": 1.0},
        {"format": 0.0, "answer": 1.0},
        {"format": 1.0, "answer": 0.0},
    ]


def test_a_function_as_the_command_finds_it(tmp_path):
    """In the current folder, by the installed command's rules: Python would not look there of itself."""
    (tmp_path / "my_rewards.py").write_text(
        "def half(completions, answer, level):\n"
        "    return [None if a == '' else (a == c) / 2 for c, a in zip(completions, answer, strict=True)]\n"
    )
    rows = [{"completion": c, "answer": a, "level": 1} for c, a in (("1", "1"), ("2", 1), ("3", ""))]
    write(tmp_path / "rows.jsonl", rows)
    code = "import sys; sys.path.remove(''); from posttrain.cli import main; sys.exit(main(sys.argv[1:]))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", code, "grade", "rows.jsonl", "--reward", "my_rewards:half"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    out = read(tmp_path / "rows.jsonl.graded.jsonl")
    verdicts = [("correct", 0.5), ("wrong", 0.0), ("not_applicable", None)]
    assert [(row["verdict"], row["score"]) for row in out] == verdicts
    for verdict, _ in verdicts:
        assert re.search(rf"{verdict}\W+1\W+33", done.stdout), done.stdout


def test_a_few_unreadable_rows_keep_their_place_and_many_are_refused(tmp_path, capsys):
    rows = [json.dumps({"completion": "#### 1", "answer": "1"})] * 200
    rows[5], rows[6] = '{"completion": ', '{"completion": 3.50, "answer": 3.5}'
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(rows))
    assert main(["grade", str(file), "--reward", "gsm8k", "--workers", "1"]) == 0
    out = read(tmp_path / "rows.jsonl.graded.jsonl")
    assert len(out) == 200 and out[5].keys() == {"error"} and out[5]["error"].startswith("line 6: not JSON")
    assert out[6]["verdict"] == "correct" and "1 row could not be read" in capsys.readouterr().out
    rows[7:10] = ['{"completion": null, "answer": "1"}'] * 3
    file.write_text("\n".join(rows))
    assert main(["grade", str(file), "--reward", "gsm8k", "--workers", "1", "--overwrite"]) == 1
    said = capsys.readouterr().err
    assert "4 of 200 rows" in said and "rows.jsonl line 8: completion must be a string, not null" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reward", "maths"], "there is no reward maths; did you mean math?"),
        (["--reward", "xyz"], "choose one of match_format_exactly, "),
        (["--reward", "math", "--completion-column", "text"], "has no column text with the completions: it has compl"),
        (["--reward", "math", "--answer-column", "gold"], "has no column gold with the right answers"),
        (["--reward", "math", "--deadline", "0"], "must be above 0 seconds"),
        (["--reward", "no_such:thing"], "there is no module no_such"),
        (["--reward", "math", "--workers", "0"], "workers"),
    ],
)
def test_mistakes_are_named(tmp_path, capsys, arguments, message):
    file = write(tmp_path / "rows.jsonl", ROWS)
    assert main(["grade", str(file), *arguments]) != 0
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "rows.jsonl.graded.jsonl").exists()
    assert main(["grade", str(tmp_path / "absent.jsonl"), "--reward", "math"]) == 1
