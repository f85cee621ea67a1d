"""Keep the patches to SGLang that no hook can replace: list, verify, apply, revert, refresh.

    python sgl_patches/tool.py list                 the series, and whether the installed SGLang has it
    python sgl_patches/tool.py verify               lint, clean apply to a copy of the pinned release, equal re-export
    python sgl_patches/tool.py apply --installed    change the installed package (repeating it changes nothing)
    python sgl_patches/tool.py revert --installed   undo that, back to the release's own hashes
    python sgl_patches/tool.py refresh              write every patch anew, at the line numbers of the installed release

Nothing but ``apply`` and ``revert`` touches the installed package, and they only where ``--installed`` says so. What is
"the release" is decided by the hashes in the wheel's RECORD, so a package that somebody edited is never patched.
"""

from __future__ import annotations

import argparse
import base64
import difflib
import hashlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEADER_KEYS = ("Subject", "Why", "Why-not-a-hook", "Upstream", "Remove-when", "SGLang")
HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
NO_NEWLINE = "\\ No newline at end of file"

# The files of a package by path ("sglang/srt/x.py"); None: the file does not exist.
Tree = dict[str, str | None]


class PatchError(Exception):
    """One sentence per line about what is wrong with the series, a patch or the package."""


@dataclass(frozen=True, kw_only=True)
class Hunk:
    """One hunk: ``old`` lines at line ``start`` (from 1) become ``new``. Lines keep their ends."""

    start: int
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FilePatch:
    path: str
    creates: bool
    deletes: bool
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True, kw_only=True)
class Patch:
    name: str
    header: Mapping[str, str]
    header_text: str
    files: tuple[FilePatch, ...]
    text: str


def pinned_version(pyproject: Path = HERE.parent / "pyproject.toml") -> str:
    """The version of SGLang in pyproject.toml, the one place where it is decided."""
    match = re.search(r'"sglang==([^"]+)"', pyproject.read_text())
    if match is None:
        raise PatchError(f"{pyproject} pins no version of sglang")
    return match.group(1)


# --- reading -------------------------------------------------------------------------------------------------------


def parse_header(name: str, text: str) -> dict[str, str]:
    """The header's fields; a line that starts with a space continues the field above it."""
    fields: dict[str, str] = {}
    key = None
    for line in text.splitlines():
        match = re.match(r"([A-Za-z-]+):\s*(.*)", line)
        if match:
            key = match.group(1)
            if key in fields:
                raise PatchError(f"{name}: field {key} is there twice")
            fields[key] = match.group(2)
        elif line.startswith(" ") and key is not None:
            fields[key] = f"{fields[key]} {line.strip()}".strip()
        elif line.strip():
            raise PatchError(f"{name}: header line belongs to no field: {line!r}")
    return fields


def parse_hunk(name: str, lines: list[str], position: int) -> tuple[Hunk, int]:
    """The hunk whose @@ line is ``lines[position]``, and the position after it."""
    match = HUNK.match(lines[position])
    assert match is not None
    num_old, num_new = int(match.group(2) or 1), int(match.group(4) or 1)
    old: list[str] = []
    new: list[str] = []
    at = position + 1
    while at < len(lines) and (len(old) < num_old or len(new) < num_new or lines[at].startswith("\\")):
        mark, body = lines[at][:1], lines[at][1:]
        if mark == "\\":
            for side in [old] if lines[at - 1][:1] == "-" else [new] if lines[at - 1][:1] == "+" else [old, new]:
                side[-1] = side[-1].rstrip("\n")
        elif mark in (" ", "\n"):
            old.append(body if mark == " " else "\n")
            new.append(old[-1])
        elif mark == "-":
            old.append(body)
        elif mark == "+":
            new.append(body)
        else:
            break
        at += 1
    if (len(old), len(new)) != (num_old, num_new):
        raise PatchError(f"{name}: the counts of {lines[position].strip()!r} do not match its lines")
    return Hunk(start=int(match.group(1)), old=tuple(old), new=tuple(new)), at


def parse_patch(name: str, text: str) -> Patch:
    """Raises PatchError where ``text`` is not a header and a unified diff with a/ and b/ prefixes."""
    lines = text.splitlines(keepends=True)
    begin = next((i for i, line in enumerate(lines) if line.startswith(("--- ", "diff "))), len(lines))
    header_text = "".join(lines[:begin])
    files: list[FilePatch] = []
    at = begin
    while at < len(lines):
        if lines[at].startswith(("diff ", "index ", "new file", "deleted file")) or not lines[at].strip():
            at += 1
            continue
        if not (lines[at].startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ ")):
            raise PatchError(f"{name}: line {at + 1} is no part of a unified diff: {lines[at].rstrip()!r}")
        source, target = lines[at][4:].split("\t")[0].strip(), lines[at + 1][4:].split("\t")[0].strip()
        creates, deletes = source == "/dev/null", target == "/dev/null"
        for path, prefix in ((source, "a/"), (target, "b/")):
            if path != "/dev/null" and not path.startswith(prefix):
                raise PatchError(f"{name}: paths must start with a/ and b/: {path}")
        path = source[2:] if deletes else target[2:]
        at += 2
        hunks: list[Hunk] = []
        while at < len(lines) and lines[at].startswith("@@"):
            if HUNK.match(lines[at]) is None:
                raise PatchError(f"{name}: line {at + 1} is no hunk header")
            hunk, at = parse_hunk(name, lines, at)
            hunks.append(hunk)
        files.append(FilePatch(path=path, creates=creates, deletes=deletes, hunks=tuple(hunks)))
    return Patch(
        name=name, header=parse_header(name, header_text), header_text=header_text, files=tuple(files), text=text
    )


def read_series(folder: Path) -> list[Patch]:
    """The patches of ``folder/series`` in order. Raises PatchError for a name without a file."""
    series = folder / "series"
    names = [line.partition("#")[0].strip() for line in series.read_text().splitlines()] if series.exists() else []
    patches = []
    for name in filter(None, names):
        if not (folder / name).is_file():
            raise PatchError(f"series names {name}, which does not exist")
        patches.append(parse_patch(name, (folder / name).read_text()))
    return patches


def lint(folder: Path, patches: list[Patch], pin: str) -> list[str]:
    """What is wrong with the series, one sentence each."""
    problems = []
    names = [patch.name for patch in patches]
    for path in sorted(folder.glob("*.patch")):
        if path.name not in names:
            problems.append(f"{path.name} is not in the series")
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"{name} is in the series twice")
    for number, patch in enumerate(patches, start=1):
        if not re.fullmatch(rf"{number:04d}-[a-z0-9-]+\.patch", patch.name):
            problems.append(f"{patch.name}: patch {number} must be named {number:04d}-words-of-the-subject.patch")
        for key in HEADER_KEYS:
            if not patch.header.get(key, "").strip():
                problems.append(f"{patch.name}: the header lacks {key}")
        for key in patch.header.keys() - set(HEADER_KEYS):
            problems.append(f"{patch.name}: the header has an unknown field {key}")
        if patch.header.get("SGLang", pin) != pin:
            problems.append(f"{patch.name}: made for SGLang {patch.header['SGLang']}, pinned is {pin}: refresh it")
        upstream = patch.header.get("Upstream", "")
        if upstream and not re.match(r"https://\S+|not sent: \S", upstream):
            problems.append(f"{patch.name}: Upstream must be a link or 'not sent: ' and the reason")
        if not any(file.hunks for file in patch.files):
            problems.append(f"{patch.name}: changes nothing")
        for file in patch.files:
            if not file.path.startswith("sglang/") or ".." in Path(file.path).parts:
                problems.append(f"{patch.name}: {file.path} is outside of the package sglang")
    return problems


# --- applying ------------------------------------------------------------------------------------------------------


def find_block(lines: list[str], block: tuple[str, ...], expected: int) -> int | None:
    """Index of the occurrence of ``block`` in ``lines`` that is nearest to ``expected``; None without one."""
    size = len(block)
    hits = [i for i in range(len(lines) - size + 1) if tuple(lines[i : i + size]) == block]
    return min(hits, key=lambda i: abs(i - expected), default=None)


def apply_file(patch_name: str, file: FilePatch, text: str | None, drift: list[str]) -> str | None:
    """``text`` with the hunks of ``file``; adds a sentence to ``drift`` for each that sits at another line.

    Raises:
        PatchError: the file is missing (or there although the patch creates it), or a hunk's lines are nowhere.
    """
    if file.creates:
        if text is not None:
            raise PatchError(f"{patch_name}: {file.path} exists already")
        text = ""
    if text is None:
        raise PatchError(f"{patch_name}: {file.path} does not exist")
    lines = text.splitlines(keepends=True)
    shift = 0
    for number, hunk in enumerate(file.hunks, start=1):
        # The start of an empty old side names the line before (unified diff), so nothing is taken off.
        expected = max(hunk.start - 1, 0) + shift if hunk.old else hunk.start + shift
        if not hunk.old:
            found: int | None = expected if expected <= len(lines) else None
        else:
            found = find_block(lines, hunk.old, expected)
        where = f"{patch_name}: hunk {number} of {file.path}"
        if found is None:
            raise PatchError(f"{where} (line {hunk.start}) does not fit: its lines are not in the file")
        if found != expected:
            drift.append(f"{where} drifted: expected at line {expected + 1}, found at line {found + 1}")
            shift += found - expected
        lines[found : found + len(hunk.old)] = hunk.new
        shift += len(hunk.new) - len(hunk.old)
    return None if file.deletes else "".join(lines)


def apply_patch(patch: Patch, tree: Tree) -> tuple[Tree, list[str]]:
    """A new tree with ``patch`` applied, and what drifted. ``tree`` is not changed."""
    result, drift = dict(tree), list[str]()
    for file in patch.files:
        result[file.path] = apply_file(patch.name, file, result.get(file.path), drift)
    return result, drift


def reverse_patch(patch: Patch) -> Patch:
    """The patch that undoes ``patch``."""
    files = []
    for file in patch.files:
        shift, hunks = 0, []
        for hunk in file.hunks:
            # A hunk's position on the new side; the convention for empty sides changes over with the sides.
            start = hunk.start + shift + (not hunk.old) - (not hunk.new)
            hunks.append(Hunk(start=start, old=hunk.new, new=hunk.old))
            shift += len(hunk.new) - len(hunk.old)
        # Starts are counted in the text before the patch, which for the reverse is the text after it.
        files.append(replace(file, creates=file.deletes, deletes=file.creates, hunks=tuple(hunks)))
    return replace(patch, files=tuple(files))


def export_diff(before: Tree, after: Tree) -> str:
    """The unified diff from ``before`` to ``after``, files in alphabetical order: equal trees give equal text."""
    pieces = []
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        names = ("/dev/null" if old is None else f"a/{path}", "/dev/null" if new is None else f"b/{path}")
        old_lines, new_lines = ((text or "").splitlines(keepends=True) for text in (old, new))
        for line in difflib.unified_diff(old_lines, new_lines, *names):
            pieces.append(line if line.endswith("\n") else f"{line}\n{NO_NEWLINE}\n")
    return "".join(pieces)


# --- the installed package -----------------------------------------------------------------------------------------


class Package:
    """An installed SGLang: its version, its files, and the hashes that its wheel promised."""

    def __init__(self, site: Path | None = None) -> None:
        found = list(metadata.distributions(name="sglang", path=[str(site)] if site else sys.path))
        if not found:
            raise PatchError("sglang is not installed here")
        self.version = found[0].version
        self.root = Path(str(found[0].locate_file("")))
        self.hashes = {str(file): file.hash.value for file in found[0].files or [] if file.hash is not None}

    def read(self, paths: set[str]) -> Tree:
        return {path: self._text(path) for path in paths}

    def _text(self, path: str) -> str | None:
        file = self.root / path
        # newline="": a file's own line ends are part of its hash.
        return file.read_bytes().decode() if file.exists() else None

    def write(self, before: Tree, after: Tree) -> None:
        """Replace, create or delete the files that differ; each file changes whole."""
        for path, text in after.items():
            file = self.root / path
            if text == before.get(path):
                continue
            if text is None:
                file.unlink()
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            # A new file, never the old one rewritten: package caches hard-link it into other environments.
            partial = file.with_name(f"{file.name}.partial")
            partial.write_bytes(text.encode())
            partial.replace(file)

    def changed(self, tree: Tree) -> list[str]:
        """Paths of ``tree`` that are not as the release has them."""

        def differs(path: str, text: str | None) -> bool:
            promised = self.hashes.get(path)
            if text is None or promised is None:
                return (text is None) != (promised is None)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            return digest != promised

        return sorted(path for path, text in tree.items() if differs(path, text))


@dataclass(frozen=True, kw_only=True)
class State:
    """The files that a series touches: as the release has them, as they are, and whether the series is in them."""

    release: Tree
    installed: Tree
    applied: bool


def inspect(package: Package, patches: list[Patch], pin: str) -> State:
    """Raises PatchError for another version than ``pin``, and for files that are neither the release's nor patched."""
    if package.version != pin:
        raise PatchError(f"the installed sglang is {package.version}; the patches are for {pin}")
    installed = package.read({file.path for patch in patches for file in patch.files})
    if not package.changed(installed):
        return State(release=installed, installed=installed, applied=False)
    release = installed
    try:
        for patch in reversed(patches):
            release, _ = apply_patch(reverse_patch(patch), release)
    except PatchError:
        release = installed
    if changed := package.changed(release):
        raise PatchError(
            f"files of the installed sglang are neither the release's nor this series': {', '.join(changed)}; "
            "reinstall sglang"
        )
    return State(release=release, installed=installed, applied=True)


def apply_series(patches: list[Patch], tree: Tree) -> tuple[list[Tree], list[str]]:
    """The tree after each patch (the first is ``tree`` itself), and what drifted."""
    trees, drift = [tree], list[str]()
    for patch in patches:
        after, drifted = apply_patch(patch, trees[-1])
        trees.append(after)
        drift += drifted
    return trees, drift


def export_series(patches: list[Patch], trees: list[Tree], pin: str) -> dict[str, str]:
    """Every patch written anew: its header with the pin, and the diff between the trees around it."""
    texts = {}
    for patch, before, after in zip(patches, trees[:-1], trees[1:], strict=True):
        header = re.sub(r"(?m)^SGLang:.*$", f"SGLang: {pin}", patch.header_text)
        texts[patch.name] = header + export_diff(before, after)
    return texts


# --- commands ------------------------------------------------------------------------------------------------------


def command_list(folder: Path, package: Package, patches: list[Patch], pin: str) -> None:
    state = inspect(package, patches, pin)
    print(f"{len(patches)} patches for SGLang {pin}; {'applied' if state.applied else 'not applied'} at {package.root}")
    for patch in patches:
        print(f"  {patch.name}: {patch.header.get('Subject', '')}")


def command_verify(folder: Path, package: Package, patches: list[Patch], pin: str) -> None:
    problems = lint(folder, patches, pin)
    if problems:
        raise PatchError("\n".join(problems))
    trees, drift = apply_series(patches, inspect(package, patches, pin).release)
    if drift:
        raise PatchError("\n".join(drift))
    for name, text in export_series(patches, trees, pin).items():
        if text != (folder / name).read_text():
            raise PatchError(f"{name} is not as refresh writes it: run refresh")
    print(f"{len(patches)} patches apply cleanly to SGLang {pin}.")


def command_apply(folder: Path, package: Package, patches: list[Patch], pin: str) -> None:
    command_verify(folder, package, patches, pin)
    state = inspect(package, patches, pin)
    if state.applied or not patches:
        print("Nothing to do.")
        return
    trees, _ = apply_series(patches, state.release)
    package.write(state.installed, trees[-1])
    print(f"Applied to {package.root}.")


def command_revert(folder: Path, package: Package, patches: list[Patch], pin: str) -> None:
    state = inspect(package, patches, pin)
    if not state.applied:
        print("Nothing to do.")
        return
    package.write(state.installed, state.release)
    print(f"Reverted at {package.root}.")


def command_refresh(folder: Path, package: Package, patches: list[Patch], pin: str) -> None:
    trees, drift = apply_series(patches, inspect(package, patches, pin).release)
    for line in drift:
        print(line)
    for name, text in export_series(patches, trees, pin).items():
        changed = text != (folder / name).read_text()
        if changed:
            (folder / name).write_text(text)
        print(f"{name}: {'written anew' if changed else 'equal'}")
    print(f"{len(patches)} patches refreshed against SGLang {pin}.")


COMMANDS = {
    "list": command_list,
    "verify": command_verify,
    "apply": command_apply,
    "revert": command_revert,
    "refresh": command_refresh,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--installed", action="store_true", help="let apply and revert change the installed package")
    parser.add_argument("--site", type=Path, help="a site-packages folder other than this interpreter's")
    parser.add_argument("--folder", type=Path, default=HERE, help="the folder with the series")
    args = parser.parse_args(argv)
    if args.command in ("apply", "revert") and not args.installed:
        parser.error(f"{args.command} changes the installed package: say so with --installed")
    try:
        pin = pinned_version()
        COMMANDS[args.command](args.folder, Package(args.site), read_series(args.folder), pin)
    except PatchError as error:
        for line in str(error).splitlines():
            print(f"sgl_patches: {line}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
