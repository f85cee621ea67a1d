"""tools/environment.py and tools/python: which pins, which interpreter, and never a half-built environment."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module with its cache in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return load("environment")


class FakeBuild:
    """Stands in for the download and installation of 9 GB: an environment without packages."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.num_builds, self.fail_before_marker = module, 0, False

    def __call__(self, root: Path, environment: Path, pins: list[str], stamp: str) -> None:
        self.num_builds += 1
        self.module.remove(environment)
        self.module.venv.create(environment, with_pip=False, symlinks=True)
        if self.fail_before_marker:
            raise self.module.SetupError("cut off")
        self.module.mark_complete(environment, stamp)


@pytest.fixture
def fake_build(environment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> FakeBuild:
    fake = FakeBuild(environment)
    monkeypatch.setattr(environment, "build_shared", fake)
    return fake


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "sgl_patches").mkdir(parents=True)
    (root / "constraints.txt").write_text('# pins\none==1.0\ntwo==2.0 ; python_version >= "3.10"\n')
    return root


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a==1", {"3.10", "3.11", "3.12"}),
        ('a==1 ; python_version == "3.10"', {"3.10"}),
        ('a==1 ; python_version >= "3.11"', {"3.11", "3.12"}),
        ('a==1 ; python_version < "3.12"', {"3.10", "3.11"}),
        ("# a==1", set()),
        ("", set()),
    ],
)
def test_pins_are_chosen_by_python_version(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, line: str, expected: set[str]
) -> None:
    chosen = set()
    for minor in (10, 11, 12):
        monkeypatch.setattr(environment.sys, "version_info", (3, minor, 4))
        if environment.applies(line):
            chosen.add(f"3.{minor}")
    assert chosen == expected


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
def test_choice_agrees_with_the_markers_of_the_constraints(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    from packaging.requirements import Requirement

    monkeypatch.setattr(environment.sys, "version_info", (3, int(python[2:]), 4))
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    requirements = [(line, Requirement(line)) for line in lines]
    wanted = [line for line, r in requirements if r.marker is None or r.marker.evaluate({"python_version": python})]
    assert [line for line in lines if environment.applies(line)] == wanted


def test_environment_is_built_once_and_again_for_new_pins(
    environment: ModuleType, fake_build: FakeBuild, checkout: Path
) -> None:
    first = environment.shared_environment(checkout)
    assert environment.shared_environment(checkout) == first
    assert fake_build.num_builds == 1
    pins = (checkout / "constraints.txt").read_text()
    (checkout / "constraints.txt").write_text(pins + '# a comment\nthree==3.0 ; python_version < "3.10"\n')
    assert environment.shared_environment(checkout) == first, "what does not apply here must not matter"
    (checkout / "constraints.txt").write_text(pins.replace("one==1.0", "one==1.1"))
    second = environment.shared_environment(checkout)
    assert second != first
    assert fake_build.num_builds == 2
    (checkout / "sgl_patches" / "0001-x.patch").write_text("text")
    assert environment.shared_environment(checkout) not in (first, second), "patches are part of the key"


def test_half_built_environment_is_built_again(environment: ModuleType, fake_build: FakeBuild, checkout: Path) -> None:
    fake_build.fail_before_marker = True
    with pytest.raises(environment.SetupError):
        environment.shared_environment(checkout)
    fake_build.fail_before_marker = False
    path = environment.shared_environment(checkout)
    assert fake_build.num_builds == 2
    (path / "bin" / "python").unlink()
    (path / "bin" / "python").symlink_to("/nonexistent/python3")
    assert environment.shared_environment(checkout) == path, "its interpreter was uninstalled"
    assert fake_build.num_builds == 3


def test_two_at_once_build_once(
    environment: ModuleType,
    fake_build: FakeBuild,
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    building, waiting, go_on = threading.Event(), threading.Event(), threading.Event()

    def slow_build(root: Path, path: Path, pins: list[str], stamp: str) -> None:
        building.set()
        assert go_on.wait(60)
        fake_build(root, path, pins, stamp)

    def say(text: str) -> None:
        # Reading captured output while another thread prints can lose what it prints; an event cannot be lost.
        if "waiting for it" in text:
            waiting.set()

    monkeypatch.setattr(environment, "build_shared", slow_build)
    monkeypatch.setattr(environment, "say", say)
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(environment.shared_environment(checkout))) for _ in range(2)
    ]
    threads[0].start()
    assert building.wait(60)
    threads[1].start()
    # The second says that it waits before it does; only then may the first go on.
    assert waiting.wait(60)
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert len(paths) == 2
    assert paths[0] == paths[1]
    assert fake_build.num_builds == 1


def test_full_disk_is_said_before_anything_is_downloaded(
    environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=10**9))
    with pytest.raises(environment.SetupError, match=r"1\.0 GB free and the packages need 14 GB"):
        environment.build_shared(tmp_path, tmp_path / "venv-x", ["one==1.0"], "x")
    assert not (tmp_path / "venv-x").exists()


def test_failed_pip_shows_its_last_lines(environment: ModuleType, tmp_path: Path) -> None:
    arguments = ["download", "--no-index", "--dest", str(tmp_path), "no-such-package==1.0"]
    fake = tmp_path / "venv"
    (fake / "bin").mkdir(parents=True)
    (fake / "bin" / "python").symlink_to(sys.executable)
    with pytest.raises(environment.SetupError) as error:
        environment.run_pip(arguments, fake, tmp_path / "pip.log", "Try again.")
    assert "pip download failed" in str(error.value)
    assert str(tmp_path / "pip.log") in str(error.value)
    assert str(error.value).endswith("Try again.")


def test_finished_batches_are_not_downloaded_again(
    environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = [f"package{n}==1.0" for n in range(40)]
    asked: list[str] = []
    broken = True

    def fake_pip(arguments: list[str], path: Path, log: Path, hint: str) -> None:
        requirements = Path(arguments[arguments.index("--requirement") + 1]).read_text().split()
        if broken and "package1==1.0" in requirements:
            raise environment.SetupError("no network")
        asked.extend(requirements)

    monkeypatch.setattr(environment, "run_pip", fake_pip)
    monkeypatch.setattr(environment, "NUM_DOWNLOADS", 1)
    with pytest.raises(environment.SetupError):
        environment.download(pins, tmp_path, tmp_path / "wheels", 0.0)
    broken = False
    environment.download(pins, tmp_path, tmp_path / "wheels", 0.0)
    assert sorted(asked) == sorted(pins), "each once"


def test_virtual_environment_of_somebody_else_is_left_alone(
    environment: ModuleType, fake_build: FakeBuild, checkout: Path
) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "precious").touch()
    (checkout / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(environment.SetupError, match="was not made by tools/python"):
        environment.checkout_environment(checkout, environment.shared_environment(checkout))
    assert (checkout / ".venv" / "precious").exists()


def run_tools_python(path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """tools/python with only ``path`` and the system's basic commands to find interpreters in."""
    for command in ("bash", "dirname", "cat"):
        real = shutil.which(command)
        assert real is not None
        (path / command).symlink_to(real)
    variables = {"PATH": str(path), "HOME": str(path), **env}
    return subprocess.run(
        [str(path / "bash"), str(TOOLS / "python"), "-c", "print('ran')"],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )


def script(path: Path, text: str) -> None:
    path.write_text(f"#!{shutil.which('bash')}\n{text}\n")
    path.chmod(0o755)


def test_no_python_at_all_is_explained(tmp_path: Path) -> None:
    result = run_tools_python(tmp_path)
    assert result.returncode == 1
    assert "SpaceServe needs Python 3.10, 3.11 or 3.12" in result.stderr
    assert "python3: not found" in result.stderr
    assert "SPACESERVE_PYTHON=" in result.stderr


def test_python_that_is_too_new_is_passed_over(tmp_path: Path) -> None:
    script(tmp_path / "python3", 'echo "is Python 3.14" >&2; exit 1')
    script(tmp_path / "python3.12", 'case "$1" in -c) exit 0;; *) echo "environment from $0" >&2; exit 7;; esac')
    result = run_tools_python(tmp_path)
    assert result.returncode == 7
    assert f"environment from {tmp_path}/python3.12" in result.stderr


def test_every_reason_is_listed(tmp_path: Path) -> None:
    script(tmp_path / "python3", 'echo "is Python 3.14" >&2; exit 1')
    result = run_tools_python(tmp_path)
    assert result.returncode == 1
    assert "python3: is Python 3.14" in result.stderr
    assert "python3.10: not found" in result.stderr


def test_named_python_is_used_alone(tmp_path: Path) -> None:
    script(tmp_path / "python3", "exit 0")
    result = run_tools_python(tmp_path, SPACESERVE_PYTHON="/nowhere/python3.12")
    assert result.returncode == 1
    assert "/nowhere/python3.12: not found" in result.stderr


@pytest.mark.skipif(
    not (ROOT / ".venv" / "complete").exists(), reason="the tests run without tools/python's environment"
)
def test_tools_python_runs_the_environment_and_passes_arguments_and_exit_codes() -> None:
    code = "import sys, spaceserve; print(sys.argv[1:], spaceserve.__file__); sys.exit(3)"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(
        [TOOLS / "python", "-c", code, "a b", "*"], env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 3, result.stderr
    assert result.stdout.strip() == f"['a b', '*'] {ROOT / 'python' / 'spaceserve' / '__init__.py'}"
