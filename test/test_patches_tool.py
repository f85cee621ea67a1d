"""sgl_patches/tool.py on a made-up package and series, and the real series on the real package."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "sgl_patches" / "tool.py"


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sgl_patches_tool", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tool = load_tool()
PIN = tool.pinned_version()

SCHEDULER = "".join(f"line {n}\n" for n in range(1, 31))
OTHER = "alpha\nbeta\nno newline at the end"
RELEASE = {"sglang/srt/scheduler.py": SCHEDULER, "sglang/other.py": OTHER}
HEADER = f"""\
Subject: say what changes
Why: the made-up package needs it
  on two lines
Why-not-a-hook: nothing calls it
Upstream: not sent: made up
Remove-when: never
SGLang: {PIN}

"""


class Sandbox:
    """A site-packages folder with a package named sglang, and a series of two patches for it."""

    def __init__(self, folder: Path) -> None:
        self.site, self.series = folder / "site", folder / "series"
        self.series.mkdir()
        first = dict(RELEASE)
        first["sglang/srt/scheduler.py"] = SCHEDULER.replace("line 7\n", "line seven\nand a half\n")
        second = dict(first)
        second["sglang/srt/scheduler.py"] = second["sglang/srt/scheduler.py"].replace("line 20\n", "")
        second["sglang/other.py"] = OTHER + " any more\n"
        second["sglang/added.py"] = "new = True\n"
        self.patched = second
        self.names = ["0001-seven.patch", "0002-the-rest.patch"]
        self.write_patch(0, tool.export_diff(RELEASE, first))
        self.write_patch(1, tool.export_diff(first, second))
        (self.series / "series").write_text("# comment\n" + "\n".join(self.names) + "\n")
        self.install(RELEASE)

    def write_patch(self, index: int, diff: str, header: str = HEADER) -> None:
        (self.series / self.names[index]).write_text(header + diff)

    def install(self, files: dict[str, str], version: str = PIN) -> None:
        if self.site.exists():
            shutil.rmtree(self.site)
        info = self.site / f"sglang-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
        record = ""
        for path, text in files.items():
            file = self.site / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record += f"{path},sha256={digest},{len(text)}\n"
        (info / "RECORD").write_text(record)

    def files(self) -> dict[str, str]:
        return {str(p.relative_to(self.site)): p.read_text() for p in sorted(self.site.rglob("*.py"))}

    def run(self, *arguments: str) -> int:
        return int(tool.main([*arguments, "--site", str(self.site), "--folder", str(self.series)]))


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


def test_series_in_the_repository_verifies_against_the_installed_release() -> None:
    result = subprocess.run([sys.executable, TOOL, "verify"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_apply_and_revert_round_trip_and_are_idempotent(sandbox: Sandbox, capsys: pytest.CaptureFixture[str]) -> None:
    assert sandbox.run("verify") == 0
    assert sandbox.files() == RELEASE, "verify must not touch the package"
    assert sandbox.run("apply", "--installed") == 0
    assert sandbox.files() == sandbox.patched
    assert sandbox.run("verify") == 0, "a package that is patched verifies too"
    capsys.readouterr()
    assert sandbox.run("apply", "--installed") == 0
    assert "Nothing to do" in capsys.readouterr().out
    assert sandbox.files() == sandbox.patched
    assert sandbox.run("list") == 0
    listing = capsys.readouterr().out
    assert "; applied" in listing
    assert "0002-the-rest.patch: say what changes" in listing
    assert sandbox.run("revert", "--installed") == 0
    assert sandbox.files() == RELEASE
    assert sandbox.run("revert", "--installed") == 0
    assert sandbox.files() == RELEASE


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_installed_package_is_changed_only_when_asked(sandbox: Sandbox, command: str) -> None:
    with pytest.raises(SystemExit) as error:
        sandbox.run(command)
    assert error.value.code != 0
    assert sandbox.files() == RELEASE


def test_another_version_is_refused(sandbox: Sandbox, capsys: pytest.CaptureFixture[str]) -> None:
    sandbox.install(RELEASE, version="9.9.9")
    for command in (["verify"], ["apply", "--installed"], ["refresh"], ["list"]):
        assert sandbox.run(*command) == 1
        assert f"is 9.9.9; the patches are for {PIN}" in capsys.readouterr().err
    assert sandbox.files() == RELEASE


def test_edited_package_is_refused(sandbox: Sandbox, capsys: pytest.CaptureFixture[str]) -> None:
    (sandbox.site / "sglang/other.py").write_text("edited by hand\n")
    assert sandbox.run("apply", "--installed") == 1
    assert "sglang/other.py" in capsys.readouterr().err
    assert sandbox.files()["sglang/srt/scheduler.py"] == SCHEDULER


def test_refresh_of_a_clean_series_changes_nothing(sandbox: Sandbox, capsys: pytest.CaptureFixture[str]) -> None:
    before = [(sandbox.series / name).read_bytes() for name in sandbox.names]
    assert sandbox.run("refresh") == 0
    assert capsys.readouterr().out.count(": equal") == 2
    assert [(sandbox.series / name).read_bytes() for name in sandbox.names] == before


def test_drift_is_reported_and_refresh_mends_it(sandbox: Sandbox, capsys: pytest.CaptureFixture[str]) -> None:
    moved = {**RELEASE, "sglang/srt/scheduler.py": "added\nabove\n" + SCHEDULER}
    sandbox.install(moved)
    assert sandbox.run("verify") == 1
    report = capsys.readouterr().err
    assert "0001-seven.patch: hunk 1 of sglang/srt/scheduler.py drifted: expected at line 4, found at line 6" in report
    assert sandbox.run("apply", "--installed") == 1
    assert sandbox.files() == moved
    assert sandbox.run("refresh") == 0
    assert sandbox.run("verify") == 0
    assert sandbox.run("apply", "--installed") == 0
    assert sandbox.files()["sglang/srt/scheduler.py"] == "added\nabove\n" + sandbox.patched["sglang/srt/scheduler.py"]


def test_hunk_that_fits_nowhere_is_named(sandbox: Sandbox, capsys: pytest.CaptureFixture[str]) -> None:
    sandbox.install({**RELEASE, "sglang/srt/scheduler.py": SCHEDULER.replace("line 20\n", "line twenty\n")})
    for command in (["verify"], ["refresh"], ["apply", "--installed"]):
        assert sandbox.run(*command) == 1
        assert (
            "0002-the-rest.patch: hunk 1 of sglang/srt/scheduler.py (line 18) does not fit" in capsys.readouterr().err
        )


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (HEADER.replace("Why: the made-up package needs it\n  on two lines\n", ""), "the header lacks Why"),
        (HEADER.replace("Remove-when: never", "Remove-when:"), "the header lacks Remove-when"),
        (HEADER.replace("not sent: made up", "somewhere"), "Upstream must be a link"),
        (HEADER.replace(PIN, "0.0.1"), "made for SGLang 0.0.1"),
        (HEADER.replace("Subject:", "Author: me\nSubject:"), "unknown field Author"),
        (HEADER.replace("Subject:", "Subject: twice\nSubject:"), "field Subject is there twice"),
        ("just text\n\n" + HEADER, "belongs to no field"),
    ],
)
def test_lint_catches_a_bad_header(
    sandbox: Sandbox, capsys: pytest.CaptureFixture[str], header: str, problem: str
) -> None:
    body = (sandbox.series / sandbox.names[0]).read_text().removeprefix(HEADER)
    sandbox.write_patch(0, body, header)
    assert sandbox.run("verify") == 1
    error = capsys.readouterr().err
    assert problem in error
    assert sandbox.names[0] in error


def test_lint_catches_a_bad_series(sandbox: Sandbox, capsys: pytest.CaptureFixture[str]) -> None:
    (sandbox.series / "series").write_text(f"{sandbox.names[1]}\n")
    assert sandbox.run("verify") == 1
    error = capsys.readouterr().err
    assert "0001-seven.patch is not in the series" in error
    assert "0002-the-rest.patch: patch 1 must be named 0001-" in error
    (sandbox.series / "series").write_text("0001-gone.patch\n")
    assert sandbox.run("verify") == 1
    assert "0001-gone.patch, which does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("b/sglang/srt", "b/elsewhere/srt", "outside of the package sglang"),
        ("b/sglang/srt", "b/sglang/../srt", "outside of the package sglang"),
        ("+line seven\n", "", "counts of"),
        ("--- a/", "--- ", "paths must start with a/ and b/"),
    ],
)
def test_broken_diff_is_refused(
    sandbox: Sandbox, capsys: pytest.CaptureFixture[str], old: str, new: str, problem: str
) -> None:
    text = (sandbox.series / sandbox.names[0]).read_text()
    assert old in text
    (sandbox.series / sandbox.names[0]).write_text(text.replace(old, new))
    assert sandbox.run("verify") == 1
    assert problem in capsys.readouterr().err
    assert sandbox.files() == RELEASE


texts = st.none() | st.lists(st.sampled_from(["a", "b", "c", "", "  x"]), max_size=12).flatmap(
    lambda lines: st.sampled_from(["\n".join(lines), "".join(f"{line}\n" for line in lines)])
)


@settings(max_examples=300, deadline=None)
@given(before=texts, after=texts)
def test_exported_diff_applies_and_reverses_for_any_texts(before: str | None, after: str | None) -> None:
    if before == after or ("" in (before, after) and None in (before, after)):
        return  # nothing to write down: an empty file and no file have the same diff
    path = "sglang/x.py"
    patch = tool.parse_patch("p", HEADER + tool.export_diff({path: before}, {path: after}))
    forward, drift = tool.apply_patch(patch, {path: before})
    assert (forward, drift) == ({path: after}, [])
    backward, drift = tool.apply_patch(tool.reverse_patch(patch), {path: after})
    assert (backward, drift) == ({path: before}, [])
