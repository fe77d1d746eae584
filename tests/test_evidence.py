"""The evidence's instrument: test data is read once, runs repeat and resume, and the columns are what they say."""

import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
from evidence import __main__ as runner  # noqa: E402
from evidence import files, grid, page, runs, scores, shifts, tables, tasks  # noqa: E402
from evidence.rows import ROWS  # noqa: E402


@pytest.fixture
def short(monkeypatch, tmp_path):
    """Let runs be short, and leave the repository alone."""
    monkeypatch.setattr(tasks, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(files, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(page, "PAGE", tmp_path / "evidence.md")
    monkeypatch.setattr(grid, "SETTINGS", tmp_path / "settings.json")
    grids = {"plain": [{}, {"lr": 3.0}, {"sgd": True}]}  # the last one is for tasks with another optimizer
    seeds = {"plain": [100, 101], "every method": [100]}
    settings = {"grids": grids, "seeds": seeds, "validation_nll": {}, "chosen": {}, "budget": {}}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    monkeypatch.setattr(tasks.Digits, "epochs", 1)
    monkeypatch.setattr(scores, "RESAMPLED", 20)
    monkeypatch.setattr(runner, "apart", lambda work, *args: work(*args))  # which would not know of these changes
    return tmp_path


def run(*arguments):
    threads = torch.get_num_threads()
    try:
        runner.main(["--tasks", "digits", *arguments])
    finally:
        torch.set_num_threads(threads)


def stable(path):
    """Return a result without what a clock measured."""
    result = json.loads(path.read_text())
    result.pop("train_seconds")
    for name in ("calibrate_seconds", "fit_over_training"):
        result["notes"].pop(name, None)
    for scored in result["predictions"].values():
        scored.pop("cost")
    return result


def test_from_data_to_page(short, capsys):
    run("--seeds", "0", "1")
    found = files.read_all()
    rows = {row for row in ROWS if grid.is_known(row, "digits")}
    assert set(found["digits"]) == rows and all(set(seeds) == {0, 1} for seeds in found["digits"].values())
    text = (short / "evidence.md").read_text()
    assert text == page.page(found)
    assert all(f"| {page.words(row)} |" in text for row in rows)
    assert "\n### digits\n" in text and (short / "results" / "digits.svg").read_text().startswith("<?xml")
    capsys.readouterr()
    run("--seeds", "0", "1", "--list")
    assert "0 runs are left" in capsys.readouterr().out


def test_test_data_is_scored_once(short):
    rows = ["la_last_kron", "plain", "vi"]
    run("--seeds", "0", "--rows", *rows)
    before = {row: stable(files.path_of("digits", row, 0)) for row in rows}
    task = tasks.Digits(0)
    with pytest.raises(files.WrittenError, match="--rerun"):
        files.score_once(task, "plain", ROWS["plain"](task))
    run("--seeds", "0", "--rows", *rows, "--rerun")
    for row in rows:  # the same scores once more
        assert stable(files.path_of("digits", row, 0)) == {**before[row], "reruns": 1}


def test_a_run_has_a_process_of_its_own(tmp_path):
    runs.apart(write_process, tmp_path / "here")
    process, threads = (tmp_path / "here").read_text().split()
    assert int(process) != os.getpid() and threads == "1"


def write_process(path):
    path.write_text(f"{os.getpid()} {torch.get_num_threads()}")


def test_a_run_that_fails_ends_no_other(short, monkeypatch, capsys):
    broken = {**ROWS, "plain": lambda task: 1 / 0}
    monkeypatch.setattr(runs, "ROWS", broken)
    monkeypatch.setattr(runner, "apart", failing)
    with pytest.raises(SystemExit, match="1 runs failed: digits/plain/0 raised the error above; run again"):
        run("--seeds", "0", "--rows", "plain", "la_last_kron")
    assert set(files.read_all()["digits"]) == {"la_last_kron"}
    with pytest.raises(runs.RunError, match="was killed by signal 9"):
        runs.apart(kill_oneself)


def kill_oneself():
    os.kill(os.getpid(), 9)


def failing(work, *args):
    """Do as `apart` does, in this process."""
    try:
        runs.alone(work, args)
    except SystemExit as error:
        raise runs.RunError("raised the error above") from error


def test_one_function_reads_test_data():
    callers = [p.name for p in sorted((EXAMPLES / "evidence").glob("*.py")) if ".test()" in p.read_text()]
    assert callers == ["files.py"]
    assert (EXAMPLES / "evidence" / "files.py").read_text().count(".test()") == 1


def test_a_dry_run_scores_validation_data_and_writes_nothing(short, monkeypatch, capsys):
    monkeypatch.setattr(tasks.Digits, "test", None)
    run("--dry", "--seeds", "100", "--rows", "plain", "vi")
    assert "digits/vi/100" in capsys.readouterr().out
    assert not (short / "results").exists() and not (short / "evidence.md").exists()


def test_a_setting_is_chosen_on_validation_data(short, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(tasks.Digits, "test", None)
        run("--tune", "--rows", "plain")
    kept = grid.read()
    tried = kept["validation_nll"]["digits"]["plain"]
    assert set(tried) == {"{}", '{"lr": 3.0}'}
    assert all(len(nlls) == 2 for nlls in tried.values())
    assert kept["chosen"]["digits"]["plain"] == json.loads(min(tried, key=lambda key: sum(tried[key])))
    assert kept["budget"]["digits"]["plain"]["steps"] == 4 * 30  # one epoch of 960 digits in batches of 32
    run("--seeds", "0", "--rows", "plain", "plain_tuned", "vi_tuned")  # which has no setting, and is left out
    assert set(files.read_all()["digits"]) == {"plain", "plain_tuned"}
    assert files.read_all()["digits"]["plain_tuned"][0]["setting"] == kept["chosen"]["digits"]["plain"]


def test_no_part_overlaps_another():
    task = tasks.Digits(0)
    whole = torch.cat([task.train.x, task.held_out.x, task.test().known.x])
    assert sorted(map(tuple, whole.tolist())) == sorted(map(tuple, task.all.x.tolist()))
    assert len(task.held_out.y) == 240


def test_differences_are_paired_by_seed():
    def result(nll):
        return {"predictions": {"mean": {"nll": nll, "ood_mi": None}}}

    table = tables.Table({"a": {0: result(1.0), 1: result(2.0), 2: result(9.0)}, "b": {0: result(1.5), 1: result(2.2)}})
    apart = table.paired(("a", "mean"), ("b", "mean"), "nll")
    assert apart == pytest.approx((-0.35, 0.15, 2, 2))
    assert apart.sign_test == 0.5 and tables.Apart(0, 0, 5, 5).sign_test == 2 / 32
    assert tables.Apart(0, 0, 2, 5).sign_test == 1
    same = tables.Table({"a": {0: result(1.0), 1: result(2.0)}, "b": {0: result(1.0), 1: result(2.5)}})
    assert same.paired(("a", "mean"), ("b", "mean"), "nll").count == 1  # a tie says nothing of signs
    overlapping = tables.Table(table.rows, overlap=0.5)  # two seeds: s^2 (1/2 + 1/2) and not s^2/2
    assert overlapping.paired(("a", "mean"), ("b", "mean"), "nll").error == pytest.approx(0.15 * 2**0.5)
    assert math.isnan(table.mean("a", "mean", "ood_mi"))


def test_what_steps_by_sgd_is_compared_with_plain_training_that_does():
    def result(nll):
        return {"predictions": {"temperature": {"nll": nll}, "mean": {"nll": nll}}}

    rows = {"plain": {0: result(1.0)}, "vi": {0: result(0.8)}, "sgld": {0: result(0.4)}}
    assert tables.Table(rows).against(("sgld", "mean")).mean == pytest.approx(-0.6)
    chosen = {"plain_tuned": {0: result(0.6)}, "sgld_tuned": {0: result(0.3)}, "ensemble5": {0: result(0.2)}}
    table = tables.Table({**rows, **chosen, "plain_sgd": {0: result(0.5)}})
    assert table.against(("sgld", "mean")).mean == pytest.approx(-0.1)
    assert table.against(("sgld_tuned", "mean")).mean == pytest.approx(-0.3)
    assert table.against(("vi", "mean")).mean == pytest.approx(-0.2)
    assert math.isnan(table.against(("sgld", "mean"), ("ensemble5", "temperature")).mean)  # which is not of its kind
    assert not grid.is_known("plain_sgd", "digits") and grid.is_known("plain_sgd", "sentences")


def test_shifts_have_five_levels():
    assert shifts.levels(7).tolist() == [1, 2, 3, 4, 5, 1, 2]
    images = torch.rand(20, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    away = (shifts.rotated_or_noisy(images, 0) - images).square().mean((1, 2, 3))
    assert away[5:10].diff().min() > 0  # the noisy ones: more at every level
    texts = ["an honest film about wonderful people"] * 500
    damaged = [
        sum(a != b for a, b in zip(t.split(), o.split(), strict=True))
        for t, o in zip(shifts.with_typos(texts, 0), texts, strict=True)
    ]
    by_level = [sum(damaged[k::5]) / len(damaged[k::5]) / 6 for k in range(5)]
    assert by_level == sorted(by_level) and by_level[4] == pytest.approx(0.4 * 5 / 6, abs=0.08)  # "an" is too short
