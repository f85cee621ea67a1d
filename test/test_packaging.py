"""The wheel holds every file that the package reads, and says how SGLang finds us."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """Built from a copy: a build writes into its source tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "python", source / "python", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    )
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run([*command, "--wheel-dir", out, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = out.glob("spaceserve-*.whl")
    return zipfile.Path(file)


def test_every_file_of_the_package_is_in_the_wheel(wheel: zipfile.Path) -> None:
    packed = set(wheel.root.namelist())
    folder = ROOT / "python"
    files = [file for file in (folder / "spaceserve").rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert len(files) > 100
    assert not {str(file.relative_to(folder)) for file in files} - packed
    for needed in ("demo/model/model.safetensors", "partition/probe.cu", "py.typed"):
        assert f"spaceserve/{needed}" in packed


def test_the_platform_is_the_only_entry_point(wheel: zipfile.Path) -> None:
    (name,) = [name for name in wheel.root.namelist() if name.endswith("/entry_points.txt")]
    parser = configparser.ConfigParser()
    parser.read_string(wheel.root.read(name).decode())
    found = {section: dict(parser[section]) for section in parser.sections()}
    assert found == {"sglang.srt.platforms": {"spaceserve_cpu": "spaceserve.platform.cpu:activate"}}
