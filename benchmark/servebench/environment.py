"""What a result was measured on: commit, GPU, driver, versions; and how paths are kept out of stored results."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("spaceserve", "sglang", "torch", "transformers", "sglang-kernel", "flashinfer-python", "triton", "numpy")


def run_text(command: list[str], timeout_s: float = 20.0) -> str:
    """Standard output of ``command``, or an empty string where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def gpu_query(fields: str) -> list[list[str]]:
    """``nvidia-smi --query-gpu`` as rows of strings; no rows without a GPU."""
    text = run_text(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]


def gpu_memory_used_mib() -> int | None:
    """Memory in use on the first GPU; None without one."""
    rows = gpu_query("memory.used")
    return int(rows[0][0]) if rows and rows[0][0].isdigit() else None


def gpu_processes() -> list[dict[str, Any]]:
    """Memory per process as the driver sees it: pid, name, MiB. Empty without a GPU; a container may hide pids."""
    text = run_text(
        ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"]
    )
    rows = []
    for line in text.splitlines():
        pid, name, memory = (cell.strip() for cell in line.rsplit(",", 2)) if line.count(",") >= 2 else ("", "", "")
        if pid.isdigit():
            rows.append({"pid": int(pid), "name": Path(name).name, "mib": int(memory) if memory.isdigit() else None})
    return rows


def commit_of(repo: Path) -> str:
    """The tree's commit; ``SPACESERVE_COMMIT`` names it where there is no .git, and "unknown" stands for neither."""
    named = os.environ.get("SPACESERVE_COMMIT", "").strip() or _git_head(repo)
    return named if re.fullmatch("[0-9a-f]{7,64}", named) else "unknown"


def _git_head(repo: Path) -> str:
    return run_text(["git", "-C", str(repo), "rev-parse", "HEAD"])


def describe(repo: Path) -> dict[str, Any]:
    """Machine, versions and commit (see commit_of). Without .git uncommitted changes are not known (None)."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    status = ["git", "-C", str(repo), "status", "--porcelain", "--", "python", "benchmark", "csrc", "sgl_patches"]
    changed = run_text(status)
    edits = [line for line in changed.splitlines() if "benchmark/results" not in line]
    gpus = gpu_query("name,driver_version,memory.total,compute_mode")
    cuda = re.search(r"CUDA Version: ([\d.]+)", run_text(["nvidia-smi"]))
    return {
        "commit": commit_of(repo),
        "uncommitted_changes": bool(edits) if _git_head(repo) else None,
        "gpus": [
            {"name": row[0], "driver": row[1], "memory_mib": row[2], "compute_mode": row[3]}
            for row in gpus
            if len(row) == 4
        ],
        "gpu_used_before_mib": gpu_memory_used_mib(),
        "cuda_driver_api": cuda[1] if cuda else None,
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _cpu_name() -> str:
    try:
        match = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match[1] if match else platform.machine()


def scrub(text: str) -> str:
    """``text`` without paths of this machine."""
    text = re.sub(r"(/[^\s'\",:]+)?/(site|dist)-packages/", "site-packages/", text)
    for path, short in ((os.getcwd(), "."), (sys.prefix, "PREFIX"), (os.path.expanduser("~"), "~")):
        if len(path) > 1:
            text = text.replace(path, short)
    return re.sub(r"(?<![\w.~:/])/(?:[\w.+-]+/)+(?=[\w.+-]+)", "", text)
