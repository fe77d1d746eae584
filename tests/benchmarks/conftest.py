"""Collect the ratios of a run, as JSON, and have the pages written anew."""

import json
import platform
import re
from datetime import date
from pathlib import Path

import pytest
import torch

from tests.benchmarks.pages import PAGE, README, RESULTS, page, with_table
from tests.benchmarks.workloads import LONG, SHORT


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also measure ViT-L/32 and ResNet-101")


def pytest_generate_tests(metafunc):
    if "work" in metafunc.fixturenames:
        works = SHORT + (LONG if metafunc.config.getoption("--full") else ())
        metafunc.parametrize("work", works, ids=lambda w: w.name, scope="session")


def pytest_collection_modifyitems(items):
    """Measure peak memory first: it takes processes of their own, which need room beside this one."""
    items.sort(key=lambda item: "peak_memory" not in item.name)


class Table:
    """Rows of (group, workload, what) with numbers, written as they come.

    Args:
        rows: What was measured before, and stays unless it is measured again.
    """

    def __init__(self, rows):
        self.rows = rows

    def add(self, group, work, what, **numbers):
        self.rows[f"{group} | {work} | {what}"] = {k: round(v, 3) for k, v in numbers.items()}
        write(self.rows)


@pytest.fixture(scope="session")
def table(request):
    anew = request.config.getoption("--full") or not RESULTS.exists()
    return Table({} if anew else json.loads(RESULTS.read_text())["rows"])


def write(rows):
    """Write the results, the page and the README's table."""
    results = {
        "date": date.today().isoformat(),
        "machine": f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "rows": rows,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(results))
    README.write_text(with_table(README.read_text(), results))


def processor():
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor()
