"""The promises of docs/reliability.md: the tests that prove each, and the figures that these measure.

`pytest --prove` (`make prove`) runs the tests of every promise, the slow ones too, prints the figures beside their
goals, and writes them to docs/reliability.md. A test measures a figure with the fixture `figure`.
"""

import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs/reliability.md"
BEGIN, END = "<!-- written by make prove -->", "<!-- end -->"


@dataclass(frozen=True)
class Promise:
    """`tests` are ids without the folder: a file, a function, or one of its parameters.

    `at_most` limits each value of a figure, and `at_least` the sum of a figure's values, by the figure's name.
    """

    name: str
    text: str
    tests: tuple[str, ...]
    at_most: Mapping[str, float] = field(default_factory=dict)
    at_least: Mapping[str, float] = field(default_factory=dict)


POOL, ANSWERS, FAULTS = "test_grading_pool.py::test_", "test_grading_answers.py::test_", "test_faults.py::test_"
STORE, VERIFY, SOURCES = "test_store_checkpoint.py::test_", "test_verify.py::test_", "test_data_sources.py::test_"
PROOF = "test_prove.py::test_"
PROMISES = (
    Promise(
        "hostile completions",
        "Every hostile completion has a verdict within its deadline (2 s) and half a second, whether the caller is the "
        "main thread, another thread or asyncio. None runs code, and no grader takes more than 1 GB.",
        (
            f"{POOL}all_hostile_completions_at_the_default_deadline",
            f"{POOL}what_goes_wrong_is_a_verdict_without_a_score",
            f"{POOL}a_worker_has_no_secrets_and_nowhere_to_go",
            f"{POOL}no_worker_outlives_its_program",
        ),
        {"slowest verdict, s": 2.5, "growth of the training process, MB": 50},
        {"hostile completions": 300},
    ),
    Promise(
        "waiting",
        "The training process never stands still for a grader.",
        (f"{POOL}all_hostile_completions_at_the_default_deadline", f"{POOL}from_a_thread_and_from_asyncio"),
        {"longest standstill, s": 0.25},
    ),
    Promise(
        "verdicts",
        "A timeout, a crash and a bad gold answer are no rewards: they are excluded from the update and counted, with "
        "an alarm above 0.5 %. Time in the queue is not counted against a deadline.",
        (
            f"{POOL}what_goes_wrong_is_a_verdict_without_a_score",
            f"{POOL}counts_and_the_alarm",
            f"{POOL}a_queue_costs_nobody_their_time_and_order_is_kept",
            f"{ANSWERS}a_gold_that_cannot_be_read_is_a_bad_gold",
            "test_online.py::test_what_has_no_reward_is_left_out_and_counted",
            "test_online.py::test_a_reward_that_takes_too_long_is_counted_and_no_zero",
        ),
    ),
    Promise(
        "known pairs",
        "A run grades 20 known pairs first and refuses to start when one has the wrong verdict.",
        (
            f"{POOL}every_rule_has_twenty_known_pairs_and_gets_them_right",
            f"{POOL}a_grader_that_gives_zero_to_all_is_refused",
        ),
    ),
    Promise(
        "equivalent answers",
        "Equal answers are equal however they are written, and different ones are different.",
        ("test_grading_answers.py", "test_fuzz_answers.py"),
        {"different answers taken as equal": 2, "equal answers missed": 8},
        {"pairs of answers": 304},
    ),
    Promise(
        "kill and resume",
        "A run killed at random moments, many of them inside a save, ends bit for bit like the uninterrupted run: "
        "weights, optimizer, schedule, random states, order of samples (SFT, DPO, GRPO). A run that fails by itself "
        "saves its last finished step.",
        (
            f"{VERIFY}thirty_five_kills[sft]",
            f"{VERIFY}thirty_five_kills[dpo]",
            f"{VERIFY}thirty_kills_while_completions_are_sampled[grpo]",
            "test_failures.py",
        ),
        {"differences after the last resume": 0},
        {"kills of a run": 100, "of these inside a save": 30},
    ),
    Promise(
        "kills inside a save",
        "After a kill inside a save the newest complete checkpoint loads, and what was half-written is removed.",
        (f"{STORE}two_hundred_random_kills", f"{STORE}a_kill_at_every_system_call_of_a_save"),
        {"checkpoints lost": 0},
        {"kills of a save": 200},
    ),
    Promise(
        "damaged files",
        "A flipped bit, a truncated file and a missing one are found by their hash and named, and the run falls back "
        "to the checkpoint before.",
        (
            f"{FAULTS}damage_to_a_real_checkpoint_is_always_seen",
            f"{FAULTS}what_does_not_belong_together_is_fallen_back_from",
            "test_fuzz_store.py::test_any_damage_to_a_checkpoint_is_named",
        ),
        {"damage not found": 0},
        {"flipped bits": 300, "truncations": 100, "files deleted": 5},
    ),
    Promise(
        "full disk",
        "On a full disk the error says so, the previous checkpoint is intact, and the run resumes once there is space.",
        (
            f"{STORE}a_full_disk_at_ten_points",
            f"{STORE}no_room_for_a_file_at_ten_points",
            f"{FAULTS}a_full_disk_at_ten_points_of_a_run",
            "test_online.py::test_a_full_disk_under_the_rollouts",
        ),
        {},
        {"points of a run at which the disk is full": 10},
    ),
    Promise(
        "NaN and infinity",
        "A step whose loss, gradient, reward or advantage is not finite is skipped and counted; five in a row end the "
        "run; such weights are never saved.",
        (
            f"{FAULTS}a_step_that_is_not_finite_is_skipped_and_counted",
            f"{FAULTS}five_in_a_row_end_the_run_and_a_resume_goes_on",
            f"{FAULTS}weights_that_are_not_finite_are_never_saved",
            f"{FAULTS}a_metric_that_is_not_finite_does_no_harm",
        ),
    ),
    Promise(
        "malformed rows",
        "Malformed rows are reported with their line numbers; above 1 % of them the run does not start.",
        (
            f"{SOURCES}fifty_malformed_rows_are_counted_with_their_lines",
            f"{SOURCES}more_than_one_in_a_hundred_is_refused",
            f"{SOURCES}lone_surrogates_anywhere_are_one_malformed_row",
            "test_fuzz_data.py",
            "test_bad_input.py::test_a_malformed_row_is_named_by_its_line",
            "test_data_prepare.py::test_overlong_rows_are_counted",
        ),
        {},
        {"malformed rows named": 50},
    ),
    Promise(
        "hostile files",
        "Chat templates run in a sandbox, for at most 2 s and 1 MB. Pickled weights, YAML tags and repositories that "
        "bring code are refused by default.",
        (
            "test_data_templates.py::test_hostile_templates_end_in_an_error",
            "test_fuzz_templates.py",
            "test_fuzz_config.py",
            "test_config_errors.py",
            "test_bad_input.py::test_pickled_weights_need_leave",
            "test_bad_input.py::test_code_that_comes_with_a_model_is_not_run",
            "test_untrusted.py",
        ),
    ),
    Promise(
        "stored rollouts",
        "However the writer is killed, the database is sound, and a step is stored with all its completions or not at "
        "all. A full disk or a lock ends the run with a message and loses nothing.",
        (
            "test_rollouts.py::test_a_killed_writer_leaves_whole_steps[200]",
            "test_rollouts.py::test_a_file_that_stays_locked_stops_the_run_with_a_word",
            "test_rollouts.py::test_whatever_stops_the_writer_stops_the_run_with_a_word",
            "test_online.py::test_a_full_disk_under_the_rollouts",
        ),
        {"steps stored in part": 0},
        {"kills of the writer": 200},
    ),
    Promise(
        "web pages",
        "Pages are served on 127.0.0.1 by default, and on another address only with a token. No path leads out of "
        "the listed folders, and what a model says is shown as inert text.",
        (
            "test_ui.py::test_nothing_outside_the_list_is_read",
            "test_ui.py::test_foreign_pages_are_refused",
            "test_ui.py::test_what_cannot_be_served_is_said",
            "test_fuzz_http.py",
            "test_viewing.py::test_names_are_looked_up_and_never_joined_to_a_path",
            "test_viewing.py::test_strings_are_inert_and_markup_is_kept",
            "test_serve.py::test_the_command_refuses_before_it_loads",
            "test_chat.py::test_what_a_model_says_is_inert",
        ),
    ),
    Promise(
        "signals",
        "After SIGINT or SIGTERM at any moment the run saves, exits within 10 s and leaves no process behind.",
        (
            f"{FAULTS}signals_in_any_phase",
            f"{FAULTS}a_second_ctrl_c_leaves_at_once",
            f"{FAULTS}a_long_step_is_given_up_for_a_signal",
            "test_resume.py::test_a_signal_saves_and_the_run_goes_on",
        ),
        {"longest exit after a signal, s": 10, "processes left behind": 0},
        {"signals": 12},
    ),
    Promise(
        "what has changed",
        "A changed data set, a missing named checkpoint and settings other than the checkpoint's are refused.",
        (
            "test_resume.py::test_resume_refuses_other_settings_and_other_data",
            "test_resume.py::test_a_refused_resume_leaves_the_run_as_it_is",
            "test_resume.py::test_a_damaged_checkpoint_falls_back_one_and_a_missing_one_is_named",
            f"{STORE}named_checkpoint",
            "test_data_prepare.py::test_the_fingerprint_is_of_the_data_alone",
        ),
    ),
    Promise(
        "ranks",
        "Two ranks have the gradients, metrics and completions of one process, for every objective, also with sharded "
        "weights.",
        (
            "test_ranks.py::test_two_ranks_have_the_gradients_of_one_process_for_every_objective",
            "test_ranks.py::test_the_sum_over_ranks_is_that_of_one_process_to_rounding",
            "test_ranks.py::test_two_ranks_sample_the_completions_of_one_process_with_every_method",
        ),
    ),
    Promise(
        "kills of ranks",
        "When one of several processes is killed, the run ends within its deadline, names it, and resumes to the same "
        "weights.",
        (f"{PROOF}killed_ranks_end_and_resume_to_the_same_run",),
        {"longest end after a rank's death, s": 30, "tensors that differ after the last resume": 0},
        {"kills of random ranks": 10},
    ),
    Promise(
        "memory",
        "The memory of a GRPO run stays flat over 2,000 steps.",
        (f"{PROOF}memory_is_flat_over_two_thousand_steps_of_grpo",),
        {"growth over the second half of the run, MB per 1,000 steps": 2},
        {"steps of GRPO": 2000},
    ),
    Promise(
        "overhead",
        "Vital checks, the rollout store and grading together take at most 3 % of a step.",
        (f"{PROOF}checks_store_and_grading_take_little_of_a_step",),
        {"checks, store and grading, % of a step": 3},
    ),
)
GOALS = {name: goal for promise in PROMISES for name, goal in promise.at_most.items()}
KNOWN = GOALS.keys() | {name for promise in PROMISES for name in promise.at_least}


@pytest.fixture
def figure(request) -> Callable[[str, float], None]:
    """`figure(name, value)`: record a measured figure of a promise, and fail where it is above its goal."""

    def record(name: str, value: float) -> None:
        assert name in KNOWN, f"{name} is a figure of no promise"
        print(f"{name}: {value:.4g}")
        request.node.user_properties.append(("figure", [name, float(value)]))
        assert value <= GOALS.get(name, float("inf")), f"{name}: {value:.4g}, the goal is at most {GOALS[name]}"

    return record


def proves(test: str, nodeid: str) -> bool:
    """Whether `test` of a promise names the test with this id of pytest's."""
    found = _tail(nodeid)
    return found == test or found.startswith((f"{test}::", f"{test}["))


def _tail(nodeid: str) -> str:
    """The id without its folders; a parameter may have slashes of its own."""
    name, bracket, parameters = nodeid.partition("[")
    return name.rpartition("/")[2] + bracket + parameters


# --- what the tests say ---------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    promise: Promise
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)

    def rows(self) -> Iterable[tuple[str, str, str, bool]]:
        """(figure, measured, goal, met) of each figure; one that was not measured is not met."""
        for name, goal in self.promise.at_most.items():
            found = self.values.get(name, [])
            yield name, f"{max(found):.4g}" if found else "none", f"≤ {goal:g}", bool(found) and max(found) <= goal
        for name, goal in self.promise.at_least.items():
            found = sum(self.values.get(name, []))
            yield name, f"{found:g}", f"≥ {goal:g}", found >= goal

    @property
    def met(self) -> bool:
        return self.passed > 0 and not self.failed and all(met for *_, met in self.rows())


def outcomes(reports: Iterable) -> list[Outcome]:
    """What the reports of all tests say of each promise."""
    found = [Outcome(promise) for promise in PROMISES]
    for report in reports:
        for outcome in found:
            if not any(proves(test, report.nodeid) for test in outcome.promise.tests):
                continue
            if report.failed:
                outcome.failed.append(report.nodeid)
            elif report.skipped:
                reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
                outcome.skipped.append(f"{_tail(report.nodeid)}: {reason.removeprefix('Skipped: ')}")
            elif report.when == "call":
                outcome.passed += 1
            if report.when == "call":
                for kind, value in report.user_properties:
                    if kind == "figure":
                        outcome.values.setdefault(value[0], []).append(value[1])
    return found


def as_markdown(found: Iterable[Outcome], seconds: float) -> str:
    import torch

    lines = [
        f"Measured on {date.today()} in {seconds / 60:.0f} minutes: {os.cpu_count()} cores, {platform.system()} "
        f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}.",
        "",
        "| promise | tests passed | figure | measured | goal |",
        "|---|---|---|---|---|",
    ]
    for outcome in found:
        state = "" if outcome.met else "**not met** "
        first = f"**{outcome.promise.name}**: {outcome.promise.text}", f"{state}{outcome.passed}"
        rows = [(name, measured, goal) for name, measured, goal, _ in outcome.rows()] or [("", "", "")]
        for index, row in enumerate(rows):
            lines.append("| " + " | ".join((*(first if index == 0 else ("", "")), *row)) + " |")
    skipped = sorted({reason for outcome in found for reason in outcome.skipped})
    lines += ["", "Skipped on this machine:" if skipped else "No test was skipped.", ""]
    return "\n".join(lines + [f"- `{reason}`" for reason in skipped])


# --- the run of pytest ----------------------------------------------------------------------------------------------


def pytest_addoption(parser) -> None:
    parser.addoption("--prove", action="store_true", help="run what proves docs/reliability.md, and write that page")
    parser.addoption("--rank-kills", type=int, default=10, help="kills of random ranks in --prove (10)")


def pytest_configure(config) -> None:
    if config.getoption("--prove"):
        config.pluginmanager.register(Prover())


class Prover:
    """Runs the tests of the promises alone, and shows what they say of each."""

    def __init__(self) -> None:
        self.began, self.reports = time.monotonic(), []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items) -> None:
        tests = {test for promise in PROMISES for test in promise.tests}
        chosen = [item for item in items if any(proves(test, item.nodeid) for test in tests)]
        # The slow ones first, so that no worker is left with one of them at the end.
        items[:] = sorted(chosen, key=lambda item: item.get_closest_marker("slow") is None)

    def pytest_runtest_logreport(self, report) -> None:
        self.reports.append(report)

    def pytest_terminal_summary(self, terminalreporter) -> None:
        every = outcomes(self.reports)
        found = [outcome for outcome in every if outcome.passed or outcome.failed]
        terminalreporter.section("promises")
        for outcome in found:
            state = "met" if outcome.met else "NOT MET"
            terminalreporter.line(f"{state:8}{outcome.promise.name} ({outcome.passed} tests)")
            for name, measured, goal, met in outcome.rows():
                terminalreporter.line(f"{'':8}{name}: {measured} ({goal}){'' if met else ' NOT MET'}")
        missed = [outcome.promise.name for outcome in found if not outcome.met]
        terminalreporter.line(f"not met: {', '.join(missed)}" if missed else f"all {len(found)} promises are met")
        if found == every:  # not of a part of them
            begin, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
            made = as_markdown(found, time.monotonic() - self.began)
            PAGE.write_text(f"{begin}{BEGIN}\n{made}\n{END}{rest.split(END)[1]}", encoding="utf-8")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session) -> None:
        """A figure that was missed makes the status 1, as a failed test does."""
        found = [outcome for outcome in outcomes(self.reports) if outcome.passed or outcome.failed]
        if not hasattr(session.config, "workerinput") and not all(outcome.met for outcome in found):
            session.exitstatus = session.exitstatus or 1
