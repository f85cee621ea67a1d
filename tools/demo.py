"""Start a server, ask it a question about a picture, print the answer and leave the server running.

Called by tools/demo. Arguments that are not listed by ``--help`` go to ``python -m spaceserve.launch_server``, which
serves the bundled demo model unless they name another.
"""

from __future__ import annotations

import argparse
import base64
import json
import mimetypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from spaceserve.demo import PICTURE, QUESTION, RIGHT_ANSWER

# Far more than it takes on two cores (the README says how long that is); a slower machine is no failure.
START_LIMIT_S = 900
STOP_LIMIT_S = 30

# A proxy in the environment must not see requests to this machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def state_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    path = Path(base) / "spaceserve" / "demo"
    path.mkdir(parents=True, exist_ok=True)
    return path


def start_ticks(pid: int) -> str | None:
    """When process ``pid`` started, in the kernel's words; None where there is none (or only its zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


class Server:
    """The server of one port: its process, its log, and the file by which a later call finds it again."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = state_dir() / f"{port}.log"
        self.state = state_dir() / f"{port}.json"

    def pid(self) -> int | None:
        """The process that an earlier call left running; numbers are used again, so its start must match."""
        try:
            saved = json.loads(self.state.read_text())
        except (OSError, ValueError):
            return None
        return saved["pid"] if start_ticks(saved["pid"]) == saved["start_ticks"] else None

    def port_is_free(self) -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError:
                return False
        return True

    def start(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        env = dict(os.environ)
        if not any(argument.split("=")[0] in ("--model", "--model-path") for argument in arguments):
            env.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
        command = [sys.executable, "-m", "spaceserve.launch_server", "--host", "127.0.0.1", "--port", str(self.port)]
        with open(self.log, "w") as log:
            # A session of its own: it outlives this terminal, and one signal reaches all of its processes.
            process = subprocess.Popen(
                command + arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )
        self.state.write_text(json.dumps({"pid": process.pid, "start_ticks": start_ticks(process.pid)}))
        return process

    def get(self, path: str, body: dict[str, Any] | None = None, timeout_s: float = 5.0) -> Any:
        """GET ``path``, or POST ``body`` as JSON; the decoded reply, None where it is empty."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with _opener.open(request, timeout=timeout_s) as reply:
            text = reply.read()
        return json.loads(text) if text else None

    def is_healthy(self) -> bool:
        try:
            self.get("/health")
        except (OSError, ValueError):
            return False
        return True

    def stop(self, pid: int) -> None:
        """SIGTERM, as Ctrl-C in a terminal would end it; SIGKILL to the whole session where that is not heard."""
        os.kill(pid, signal.SIGTERM)
        limit_s = time.monotonic() + STOP_LIMIT_S
        while start_ticks(pid) is not None and time.monotonic() < limit_s:
            time.sleep(0.1)
        if start_ticks(pid) is not None:
            print(f"The server did not end within {STOP_LIMIT_S} s: killed.", file=sys.stderr)
            os.killpg(pid, signal.SIGKILL)
        # What cleans up after the server is a process of its own and takes a moment more.
        while is_being_cleaned_up(pid) and time.monotonic() < limit_s + STOP_LIMIT_S:
            time.sleep(0.1)
        self.state.unlink(missing_ok=True)


def is_being_cleaned_up(launcher_pid: int) -> bool:
    """Whether the reaper of the server with this launcher is still at work."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(argument.endswith(b"spaceserve/reaper.py") for argument in arguments) and (
                str(launcher_pid).encode() in arguments
            ):
                return True
    return False


def wait_until_healthy(server: Server, process: subprocess.Popen[bytes]) -> str | None:
    """None once the server answers; otherwise why it does not."""
    started_s = time.monotonic()
    while not server.is_healthy():
        elapsed_s = time.monotonic() - started_s
        code = process.poll()
        if code is not None:
            server.state.unlink(missing_ok=True)
            return f"The server ended with exit code {code}."
        if elapsed_s > START_LIMIT_S:
            server.stop(process.pid)
            return f"The server did not come up within {START_LIMIT_S} s."
        if sys.stderr.isatty():
            print(f"\r\033[K  starting ... {elapsed_s:.0f} s", end="", file=sys.stderr, flush=True)
        time.sleep(0.25)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return None


def ask(server: Server, image: Path, question: str) -> str:
    """The server's answer to ``question`` about the picture, through its OpenAI-compatible API."""
    kind = mimetypes.guess_type(image.name)[0] or "image/png"
    url = f"data:{kind};base64,{base64.b64encode(image.read_bytes()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 64,
        "temperature": 0,
    }
    reply = server.get("/v1/chat/completions", body, timeout_s=300)
    return str(reply["choices"][0]["message"]["content"]).strip()


def log_tail(log: Path, num_lines: int = 15) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"    {line[:200]}" for line in lines[-num_lines:])


def fail(text: str, server: Server | None = None) -> int:
    print(text, file=sys.stderr)
    if server is not None:
        print(f"  The last lines of {server.log}:\n{log_tail(server.log)}", file=sys.stderr)
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/demo", description=__doc__, allow_abbrev=False)
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--image", type=Path, default=PICTURE, help="the picture to ask about")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--stop", action="store_true", help="end the server that an earlier call left running")
    args, server_arguments = parser.parse_known_args()
    server = Server(args.port)
    pid = server.pid()
    if args.stop:
        if pid is None:
            return fail(f"No server of tools/demo runs on port {args.port}.")
        server.stop(pid)
        print(f"Stopped the server on port {args.port}.")
        return 0
    if not args.image.is_file():
        return fail(f"No such picture: {args.image}")
    if pid is None and not server.port_is_free():
        return fail(f"Port {args.port} is in use by another program. Choose another: tools/demo --port {args.port + 1}")

    started_s = time.monotonic()
    process = None
    if pid is None:
        print(f"Starting the server (under a minute on two cores); log: {server.log}", file=sys.stderr)
        process = server.start(server_arguments)
        pid = process.pid
    else:
        print(f"Asking the server that already runs on port {args.port}.", file=sys.stderr)
    try:
        if process is not None and (failure := wait_until_healthy(server, process)) is not None:
            return fail(failure, server)
        answer = ask(server, args.image, args.question)
    except KeyboardInterrupt:
        server.stop(pid)
        return fail("\nInterrupted; the server was stopped.") + 129
    except (OSError, ValueError, KeyError, IndexError) as error:
        detail = error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
        return fail(f"The server did not answer: {error} {detail}".rstrip(), server)

    print(f"Picture:  {args.image}")
    print(f"Question: {args.question}")
    asked_bundled = (args.image.resolve(), args.question) == (PICTURE, QUESTION)
    verdict = "" if not asked_bundled else " (right)" if answer == RIGHT_ANSWER else f" (it shows {RIGHT_ANSWER})"
    print(f"Answer:   {answer}{verdict}")
    print(f"\nAnswered after {time.monotonic() - started_s:.0f} s. The server goes on running (process {pid}):")
    print(f"  OpenAI-compatible API: {server.url}/v1")
    print(f"  stop it:               tools/demo --stop --port {args.port}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
