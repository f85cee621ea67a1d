"""One version of SGLang: what is pinned, what is installed, and what the documents say are the same."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = ("3.10", "3.11", "3.12")


def pinned() -> str:
    match = re.search(r'"sglang==([^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert match is not None
    return match.group(1)


def pins(python: str) -> dict[str, str]:
    """Name to version of constraints.txt for one version of Python."""
    result: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            name = canonicalize_name(requirement.name)
            assert name not in result, f"{name} is pinned twice for Python {python}"
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", line
            result[name] = specifier.version
    return result


def test_installed_sglang_is_the_pinned_one() -> None:
    import sglang

    assert sglang.__version__ == pinned()
    assert metadata.version("sglang") == pinned()


@pytest.mark.parametrize("python", SUPPORTED)
def test_constraints_pin_sglang_and_each_package_once(python: str) -> None:
    assert pins(python)["sglang"] == pinned()


@pytest.mark.parametrize("path", ["README.md", "sgl_patches/README.md"])
def test_documents_name_no_other_version(path: str) -> None:
    named = set(re.findall(r"SGLang:? (\d+\.\d+\.\d+(?:\.\w+)?)", (ROOT / path).read_text()))
    assert named == {pinned()}


@pytest.mark.parametrize("python", SUPPORTED)
def test_constraints_hold_all_that_sglang_and_we_ask_for(python: str) -> None:
    """The direct requirements, by name and version, on each Python; the environment is installed without a resolver."""
    have = pins(python)
    environment = {"python_version": python, "python_full_version": f"{python}.9", "extra": ""}
    ours = list(metadata.requires("spaceserve") or [])
    for line in (metadata.requires("sglang") or []) + ours:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        version = have.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not pinned"
        assert SpecifierSet(str(requirement.specifier)).contains(version, prereleases=True), f"{line}: {version}"


def test_development_tools_are_pinned() -> None:
    asked = [Requirement(line) for line in metadata.requires("spaceserve") or []]
    dev = [r.name for r in asked if r.marker is not None and r.marker.evaluate({"extra": "dev"})]
    assert "pytest" in dev
    for python in SUPPORTED:
        assert {canonicalize_name(name) for name in dev} <= pins(python).keys()


def test_entry_points_of_this_checkout_are_visible() -> None:
    """SGLang finds the CPU platform by its entry point. Hooks have none: only our launcher may install them."""
    for group, expected in (
        ("sglang.srt.platforms", {"spaceserve_cpu": "spaceserve.platform.cpu:activate"}),
        ("sglang.srt.plugins", {}),
    ):
        found = {p.name: p.value for p in metadata.entry_points(group=group) if p.value.startswith("spaceserve.")}
        assert found == expected
