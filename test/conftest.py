"""What all tests share: the GPU rule, and no network to model hubs. Servers are started by the fixtures that need them.

Tests are marked ``cpu`` (any x86-64 machine), ``gpu`` (skipped with the reason where there is no NVIDIA GPU) or
``upstream`` (also runs stock SGLang), and one without a mark is an error: it would be nobody's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The scripts under benchmark/ and their packages are tested as modules.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmark"))

# Before anything imports transformers: nothing is downloaded by a test.
for _name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ[_name] = "1"

TIERS = ("cpu", "gpu", "upstream")


def missing_gpu() -> str | None:
    """Why GPU tests cannot run here, None where they can. Asks the driver: importing torch takes seconds."""
    try:
        listing = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        return "no NVIDIA GPU: nvidia-smi is not installed"
    except subprocess.TimeoutExpired:
        return "the NVIDIA driver does not answer (nvidia-smi, 60 s)"
    if listing.returncode != 0 or "GPU" not in listing.stdout:
        return f"no NVIDIA GPU: {(listing.stdout + listing.stderr).strip() or 'nvidia-smi lists none'}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    unmarked = [item.nodeid for item in items if not any(item.get_closest_marker(tier) for tier in TIERS)]
    if unmarked:
        raise pytest.UsageError(f"tests without a mark ({', '.join(TIERS)}): {', '.join(unmarked[:5])}")
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    reason = missing_gpu() if gpu_items else None
    if reason is not None:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))


# With --fail-on-skip: what was skipped although it is not for a GPU.
_skipped: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fail-on-skip", action="store_true", help="a skipped test fails the run, unless it is marked gpu"
    )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and "gpu" not in report.keywords and not hasattr(report, "wasxfail"):
        _skipped.append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _skipped and session.config.getoption("--fail-on-skip") and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _skipped and config.getoption("--fail-on-skip"):
        terminalreporter.section("skipped, but not for want of a GPU: FAILED", red=True)
        for nodeid in _skipped:
            terminalreporter.line(nodeid)
