"""Write constraints.txt anew: every package that the project needs, for Python 3.10, 3.11 and 3.12 on x86-64 Linux.

    python -m pip install uv
    python tools/pin.py                 # keeps the pins that still fit; adds and removes what pyproject.toml asks
    python tools/pin.py --upgrade NAME  # lets NAME (or, without a name, everything) move to its newest release

The resolver is uv, because pip resolves for one interpreter only. Lines for other systems are dropped and the
markers reduced to the Python version, so that the file reads as a list and pip installs it with ``--no-deps``.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
PYTHONS = ("3.10", "3.11", "3.12")
# The first and a late micro release: some packages ask for backports below 3.10.2 or 3.11.4.
MICROS = ("0", "20")
HEADER = """\
# Pins of everything that SpaceServe installs on x86-64 Linux with Python 3.10, 3.11 or 3.12.
# Written by tools/pin.py from pyproject.toml; the environment of tools/python is made from it.
# In an environment of your own: pip install -c constraints.txt .
"""


def environments() -> list[dict[str, str]]:
    """The marker environments in which the pins must hold."""
    return [
        {
            "implementation_name": "cpython",
            "os_name": "posix",
            "platform_machine": "x86_64",
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "python_full_version": f"{python}.{micro}",
            "python_version": python,
            "sys_platform": "linux",
            "extra": "",
        }
        for python, micro in itertools.product(PYTHONS, MICROS)
    ]


def python_marker(marker: Marker | None) -> str | None:
    """``marker`` reduced to the Python version.

    Returns:
        "" where the package is for all supported versions, None where for none of them.
    """
    wanted = [env["python_version"] for env in environments() if marker is None or marker.evaluate(env)]
    versions = sorted(set(wanted), key=PYTHONS.index)
    if len(versions) == len(PYTHONS):
        return ""
    if not versions:
        return None
    first, last = PYTHONS.index(versions[0]), PYTHONS.index(versions[-1])
    assert len(versions) == last - first + 1, f"versions with a gap: {marker}"
    if first == last:
        return f'python_version == "{versions[0]}"'
    if first == 0:
        return f'python_version < "{PYTHONS[last + 1]}"'
    return f'python_version >= "{versions[0]}"'


def reduce_lines(text: str) -> list[str]:
    """Pins of ``text`` (uv's universal output) that apply to the supported systems."""
    lines = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        requirement = Requirement(line)
        marker = python_marker(requirement.marker)
        if marker is not None:
            pin = f"{requirement.name}{requirement.specifier}"
            lines.append(f"{pin} ; {marker}" if marker else pin)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", nargs="?", const="*", action="append", default=[], metavar="NAME")
    args = parser.parse_args()
    command = ["uv", "pip", "compile", "--universal", "--python-version", PYTHONS[0], "--no-annotate", "--no-header"]
    command += ["--quiet", "--extra", "dev", "--output-file", str(CONSTRAINTS), str(ROOT / "pyproject.toml")]
    for name in args.upgrade:
        command += ["--upgrade"] if name == "*" else ["--upgrade-package", name]
    before = CONSTRAINTS.read_text() if CONSTRAINTS.exists() else None
    try:
        subprocess.run(command, check=True)
        CONSTRAINTS.write_text(HEADER + "\n".join(reduce_lines(CONSTRAINTS.read_text())) + "\n")
    except (OSError, subprocess.CalledProcessError) as error:
        if before is not None:
            CONSTRAINTS.write_text(before)
        print(f"pin.py: {error} (uv is needed: python -m pip install uv)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
