"""Make the Python environment of this checkout, or find it made. Standard library only; called by tools/python.

Two layers, so that several checkouts share the 9 GB of packages but not their own code:

``${XDG_CACHE_HOME:-~/.cache}/spaceserve/venv-HASH``
    Everything that constraints.txt pins, with the patches of sgl_patches/ (there are none so far). HASH is of the pins,
    the patches and the Python version: new pins make a new environment and never change one that is in use. Built
    under a lock; usable once the file ``complete`` is in it, built again otherwise.
``CHECKOUT/.venv``
    A virtual environment without packages of its own but this checkout, installed editable, so that
    SGLang sees our entry points. A .pth file adds the shared layer.

Prints the path of the second layer on stdout; everything for the reader goes to stderr.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from pathlib import Path

# Measured on Python 3.11: 9.3 GB installed; the downloaded wheels lie beside them until the install is done.
INSTALLED_GB = 9.5
DOWNLOADED_GB = 4.0
# pip fetches one file at a time; a few of them side by side fill the line.
NUM_DOWNLOADS = 3
PINS_PER_BATCH = 16
RESUME_HINT = "Run the same command again: what has been downloaded is kept."
PYTHON_TAG = f"{sys.version_info[0]}.{sys.version_info[1]}"


class SetupError(Exception):
    """What went wrong, and what to do about it, in words for the user."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "spaceserve"


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


@contextlib.contextmanager
def locked(path: Path, waiting: str) -> Iterator[None]:
    """Hold the lock file ``path``; says ``waiting`` where another process has it. Released by the kernel on exit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(waiting)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def site_packages(environment: Path) -> Path:
    return environment / "lib" / f"python{PYTHON_TAG}" / "site-packages"


def runs(environment: Path) -> bool:
    """Whether the environment's interpreter starts (its base may have been uninstalled)."""
    python = environment / "bin" / "python"
    return python.exists() and subprocess.run([python, "-I", "-c", ""], check=False).returncode == 0


def is_complete(environment: Path, stamp: str) -> bool:
    marker = environment / "complete"
    return marker.is_file() and marker.read_text() == stamp and runs(environment)


def mark_complete(environment: Path, stamp: str) -> None:
    """The marker appears whole or not at all, after everything else is on disk."""
    partial = environment / "complete.partial"
    partial.write_text(stamp)
    os.replace(partial, environment / "complete")


def remove(path: Path) -> None:
    """Delete a tree such that one that is half deleted is never taken for whole."""
    (path / "complete").unlink(missing_ok=True)
    if path.exists():
        shutil.rmtree(path)


def applies(line: str) -> bool:
    """Whether a line of constraints.txt is a pin for this Python version (markers are those of tools/pin.py)."""
    pin, _, marker = line.partition(" ; ")
    if not pin.strip() or pin.startswith("#"):
        return False
    if not marker:
        return True
    name, operator, version = marker.split()
    assert name == "python_version", line
    have = sys.version_info[:2]
    want = tuple(int(part) for part in version.strip('"').split("."))
    return {"==": have == want, "<": have < want, ">=": have >= want}[operator]


def check_disk(path: Path, needed_gb: float) -> None:
    """Raises SetupError where the file system of ``path`` lacks ``needed_gb``."""
    free_gb = shutil.disk_usage(path).free / 1e9
    if free_gb < needed_gb:
        raise SetupError(
            f"{path} has {free_gb:.1f} GB free and the packages need {needed_gb:.0f} GB while they are installed "
            f"({INSTALLED_GB:.0f} GB afterwards). Free some, or set XDG_CACHE_HOME to a larger disk."
        )


class Progress:
    """One line that is rewritten on a terminal, and a line every ``period_s`` elsewhere."""

    def __init__(self, period_s: float = 20.0) -> None:
        self.terminal = sys.stderr.isatty()
        self.period_s = 0.2 if self.terminal else period_s
        self.last_s = time.monotonic()

    def show(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self.last_s < self.period_s:
            return
        self.last_s = now_s
        if self.terminal:
            print(f"\r\033[K  {text}", end="", file=sys.stderr, flush=True)
        else:
            say(f"  {text}")

    def done(self) -> None:
        if self.terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def run_pip(arguments: list[str], environment: Path, log: Path, hint: str) -> None:
    """Run the environment's pip with its output in ``log``; raises SetupError that ends in its last lines."""
    env = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    # Settings that would make pip install somewhere else than here, or refuse to.
    for name in ("PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIRE_VIRTUALENV", "PIP_REQUIRE_HASHES"):
        env.pop(name, None)
    # pip unpacks and builds in TMPDIR: /tmp is often a small memory disk.
    scratch = log.with_suffix(".tmp")
    scratch.mkdir(parents=True, exist_ok=True)
    env["TMPDIR"] = str(scratch)
    command = [str(environment / "bin" / "python"), "-I", "-m", "pip", "--no-cache-dir", *arguments]
    try:
        with open(log, "w") as file:
            code = subprocess.run(command, env=env, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if code != 0:
        lines = log.read_text(errors="replace").splitlines()
        tail = "\n".join(f"    {line}" for line in lines[-12:])
        raise SetupError(f"pip {arguments[0]} failed; its last lines:\n{tail}\n  The whole log: {log}\n  {hint}")


def download(pins: list[str], environment: Path, wheels: Path, started_s: float) -> None:
    """Fill the folder ``wheels``, some packages per pip: a batch that is done is not fetched again after a failure."""
    wheels.mkdir(exist_ok=True)
    progress = Progress()
    # Dealt out like cards, since the large packages are neighbours in the alphabet.
    num_batches = max(1, len(pins) // PINS_PER_BATCH)
    batches = [pins[start::num_batches] for start in range(num_batches)]
    num_done = 0

    def fetch(number: int) -> None:
        batch_done = wheels / f"{digest(*batches[number])}.done"
        if batch_done.exists():
            return
        requirements = wheels / f"batch-{number}.txt"
        requirements.write_text("".join(f"{pin}\n" for pin in batches[number]))
        arguments = ["download", "--no-deps", "--progress-bar", "off"]
        arguments += ["--requirement", str(requirements), "--dest", str(wheels)]
        run_pip(arguments, environment, wheels / f"batch-{number}.log", RESUME_HINT)
        batch_done.touch()

    with concurrent.futures.ThreadPoolExecutor(NUM_DOWNLOADS) as pool:
        futures = {pool.submit(fetch, number): number for number in range(num_batches)}
        try:
            while not_done := [future for future in futures if not future.done()]:
                concurrent.futures.wait(not_done, timeout=0.5, return_when=concurrent.futures.FIRST_EXCEPTION)
                for future in futures:
                    if future.done():
                        future.result()
                num_done = sum(len(batches[number]) for future, number in futures.items() if future.done())
                elapsed_s = time.monotonic() - started_s
                progress.show(f"downloaded {num_done} of {len(pins)} packages, {elapsed_s:.0f} s")
        finally:
            progress.done()
            for future in futures:
                future.cancel()
    for future in futures:
        future.result()


def build_shared(root: Path, environment: Path, pins: list[str], stamp: str) -> None:
    """Download and install ``pins`` into a new virtual environment at ``environment``, and patch SGLang there."""
    wheels = environment.with_suffix(".wheels")
    have_gb = sum(file.stat().st_size for file in wheels.glob("*")) / 1e9 if wheels.exists() else 0.0
    remove(environment)
    check_disk(environment.parent, INSTALLED_GB + DOWNLOADED_GB - have_gb)
    say(f"Making the Python environment in {environment} (once for these pins):")
    say(
        f"  {len(pins)} packages for Python {PYTHON_TAG}; {DOWNLOADED_GB - have_gb:.1f} GB to download, "
        f"{INSTALLED_GB:.0f} GB installed; about 5 minutes with a fast connection."
    )
    started_s = time.monotonic()
    venv.create(environment, with_pip=True, symlinks=True)
    download(pins, environment, wheels, started_s)
    say(f"  downloaded after {time.monotonic() - started_s:.0f} s; installing (2 to 3 minutes) ...")
    requirements = environment.with_suffix(".txt")
    requirements.write_text("".join(f"{pin}\n" for pin in pins))
    arguments = ["install", "--no-deps", "--no-index", "--find-links", str(wheels), "--no-build-isolation"]
    arguments += ["--progress-bar", "off", "--requirement", str(requirements)]
    run_pip(arguments, environment, environment.with_suffix(".log"), RESUME_HINT)
    patch = [str(environment / "bin" / "python"), "-I", str(root / "sgl_patches" / "tool.py"), "apply", "--installed"]
    if subprocess.run(patch, stdout=sys.stderr, check=False).returncode != 0:
        raise SetupError("the patches in sgl_patches/ do not apply to the pinned SGLang (see above)")
    shutil.rmtree(wheels)
    requirements.unlink()
    mark_complete(environment, stamp)
    say(f"  done after {time.monotonic() - started_s:.0f} s.")


def shared_environment(root: Path) -> Path:
    """The layer of pinned packages, made where it is missing."""
    text = (root / "constraints.txt").read_text()
    pins = [line.partition(" ; ")[0].strip() for line in text.splitlines() if applies(line)]
    # Patched and unpatched checkouts must not share a package, so the patches are part of the key.
    patches = [file.read_text() for file in sorted((root / "sgl_patches").glob("*.patch"))]
    # The pins, not the file's text: comments and pins for other versions of Python do not matter.
    stamp = digest(*pins, *patches, PYTHON_TAG, str(sysconfig.get_config_var("SOABI")))
    environment = cache_dir() / f"venv-{stamp}"
    if is_complete(environment, stamp):
        return environment
    lock = cache_dir() / f"venv-{stamp}.lock"
    with locked(lock, f"Another process is making {environment}; waiting for it ..."):
        if not is_complete(environment, stamp):
            build_shared(root, environment, pins, stamp)
    return environment


def checkout_environment(root: Path, shared: Path) -> Path:
    """The layer of this checkout, made anew when its metadata, its place or the shared layer has changed."""
    environment = root / ".venv"
    stamp = digest(
        str(root), str(shared), (root / "pyproject.toml").read_text(), Path(__file__).read_text(), sys.base_prefix
    )
    if is_complete(environment, stamp):
        return environment
    lock = cache_dir() / f"checkout-{digest(str(root))}.lock"
    with locked(lock, f"Another process is making {environment}; waiting for it ..."):
        if is_complete(environment, stamp):
            return environment
        if environment.exists() and not (environment / "shared-path").exists():
            raise SetupError(f"{environment} was not made by tools/python: move it away, or use it without tools/.")
        remove(environment)
        venv.create(environment, with_pip=False, symlinks=True)
        (environment / "shared-path").write_text(str(shared))
        # addsitedir, not a plain path: packages of the shared layer have .pth files of their own.
        code = f"import site; site.addsitedir({str(site_packages(shared))!r})\n"
        (site_packages(environment) / "spaceserve_shared.pth").write_text(code)
        arguments = ["install", "--no-deps", "--no-index", "--no-build-isolation", "--editable", str(root)]
        log = cache_dir() / f"checkout-{digest(str(root))}.log"
        run_pip(arguments, environment, log, "Is pyproject.toml sound?")
        mark_complete(environment, stamp)
    return environment


def main() -> int:
    root = Path(sys.argv[1]).resolve()
    try:
        print(checkout_environment(root, shared_environment(root)))
    except SetupError as error:
        say(f"tools/python: {error}")
        return 1
    except OSError as error:
        say(f"tools/python: {error.strerror or error}: {error.filename or ''}")
        return 1
    except KeyboardInterrupt:
        say("\ntools/python: interrupted; the same command goes on from here.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
