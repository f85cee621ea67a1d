"""What a server on one GPU does when a part of the Multi-Process Service, or a client of it, is killed.

  mps_faults.py OUT_DIR --tokenizer DIR [--budget-s 180]

Three servers start at once, each with a daemon and a folder of its own. On the first (Qwen2-VL-2B's shapes, dummy
weights) four text answers stream and an image is asked for again and again, while in turn

  worker    the encoder worker gets SIGKILL with encodes on the device: it is started again, its requests are answered
  control   the control daemon gets SIGKILL: it is started again, contexts and answers go on
  worker2   the encoder worker gets SIGKILL once more, so that the new one comes up under the new daemon

On the second the MPS server itself gets SIGKILL (lost): every context is gone, so the server must end with status 1
and say why, and leave no process, file or folder. The third (the bundled demo model) finds no control program on its
PATH (no_mps): one warning, the processes take turns, answers are right.

A fault that a server does not survive is a result, not an error of this script. Writes OUT_DIR/mps-faults.json after
each part and the servers' logs; prints a table last. Exit status 0: everything went as said above.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

import dummy_model
from mpsfaults.load import BURST, Burst, Json, Load, ask_image, image_body
from mpsfaults.watched import CONTROL, MPS_SERVER, Watched
from servebench import servers
from servebench.arms import OURS, ServerSpec
from servebench.environment import describe, scrub
from servebench.results import write_atomic

REPO = Path(__file__).resolve().parent.parent
# Where the server looks for the control program besides the PATH.
OTHER_CONTROL = Path("/usr/local/nvidia/bin") / CONTROL
SHAPE = "qwen2-vl-2b"
FLAGS = (
    "--random-seed 1 --mem-fraction-static 0.5 --max-total-tokens 150000 --max-running-requests 24 "
    "--cuda-graph-max-bs-decode 8 --encoder-feature-cache-gb 1 --enable-metrics"
)
LOST_LINE = "every GPU context on it is lost"
NO_MPS_LINE = "MPS does not run"
RESTART_TIMEOUT_S = 45.0
AFTER_TIMEOUT_S = 30.0  # for answers once a worker is up again
LOST_RESERVE_S = 25.0  # of the budget is kept for the part lost
DEATH_TIMEOUT_S = 30.0
CLEAN_UP_TIMEOUT_S = 20.0
LEFTOVER_PATTERNS = (("/dev/shm", "*"), (tempfile.gettempdir(), "spaceserve-*"), ("/tmp", "spaceserve-*"))


class Faults:
    """Runs the parts until the budget is spent; `report` goes to the file after each."""

    def __init__(self, options: argparse.Namespace, work_dir: Path) -> None:
        self.options = options
        self.work_dir = work_dir
        self.deadline = time.monotonic() + options.budget_s
        self.started = time.monotonic()
        self.report: Json = {
            "environment": describe(REPO),
            "command": scrub(" ".join(["mps_faults.py", *sys.argv[1:]])),
            "flags": f"{FLAGS} {options.ours_flags}".strip(),
            "parts": {},
        }
        self.files_before = leftover_files()
        self.all: dict[str, Watched] = {}

    def left_s(self, at_most: float) -> float:
        """Seconds to wait for something, within the budget."""
        return max(0.1, min(at_most, self.deadline - time.monotonic()))

    def save(self) -> None:
        self.report["wall_s"] = round(time.monotonic() - self.started, 1)
        write_atomic(self.options.out / "mps-faults.json", json.dumps(self.report, indent=1) + "\n")

    def note(self, name: str, part: Json) -> None:
        self.report["parts"][name] = part
        self.save()
        print(f"[{self.report['wall_s']:6.1f} s] {name}: {'ok' if part.get('ok') else 'NOT as expected'}", flush=True)

    def wait(self, condition: Callable[[], bool], timeout_s: float, poll_s: float = 0.1) -> bool:
        end = time.monotonic() + self.left_s(timeout_s)
        while time.monotonic() < end:
            if condition():
                return True
            time.sleep(poll_s)
        return condition()

    # ---- servers

    def start(self, name: str, model: str, flags: str, env: dict[str, str]) -> None:
        """Start a server with a folder of its own for MPS; returns at once."""
        folder = self.work_dir / name
        folder.mkdir()
        spec = ServerSpec("server", f"{OURS} {FLAGS} {flags} {self.options.ours_flags}".strip())
        (port,) = servers.free_ports(1)
        log = self.work_dir / f"{name}.log"
        values = {"model": model, "port": str(port)}
        server = servers.start_server(spec, log, port, {"TMPDIR": str(folder), **env}, values)
        self.all[name] = Watched(server, folder)

    def ready(self, name: str) -> Watched | None:
        """The server once it answers; None, with a part that says why, where it does not."""
        watched = self.all[name]
        begin = time.monotonic()
        try:
            watched.server.wait_ready(time.monotonic() + self.left_s(120))
        except servers.ServerFailed as error:
            self.note(f"{name}: start", {"ok": False, "error": scrub(str(error))[-3000:]})
            return None
        watched.note_processes()
        self.report.setdefault("start_s", {})[name] = round(begin - self.started + time.monotonic() - begin, 1)
        return watched

    def stop(self, name: str) -> None:
        """Stop a server; what it leaves is a part of the result."""
        watched = self.all[name]
        if watched.is_up():
            watched.note_processes()
            watched.server.stop()
        self.wait(lambda: not watched.left_processes(), CLEAN_UP_TIMEOUT_S)
        self.report.setdefault("left_processes", {})[name] = watched.left_processes()

    # ---- parts

    def new_image(self, watched: Watched, seed: int) -> Json:
        """The answer to an image that was never sent before."""
        if not watched.is_up():
            return {"status": 0, "error": "the server had ended"}
        return ask_image(watched.url, image_body(seed, 448), self.left_s(AFTER_TIMEOUT_S))

    def kill_worker(self, watched: Watched, load: Load, first_seed: int) -> Json:
        """SIGKILL for the encoder worker while it encodes."""
        side = self.options.burst_side
        before = watched.status()
        victim = watched.encoder()
        if victim is None:
            return {"ok": False, "error": "there is no encoder worker", **watched.trouble()}
        burst = Burst(watched.url, first_seed, side)
        begin = time.monotonic()

        def is_busy() -> bool:
            # Written twice a second; more than the load's own image, so batches of the burst have been launched.
            return int(watched.status().get("num_requests", 0)) > 1

        self.wait(lambda: is_busy() or len(burst.rows) == BURST, 10, poll_s=0.02)
        unanswered = BURST - len(burst.rows)
        victim.kill()
        killed = time.monotonic()
        epoch = before.get("epoch", 0)
        restarted = self.wait(
            lambda: not watched.is_up() or watched.status().get("epoch", 0) > epoch, RESTART_TIMEOUT_S
        )
        up_s = time.monotonic() - killed
        rows = burst.join(self.left_s(AFTER_TIMEOUT_S))
        new = self.new_image(watched, first_seed + 100)
        end = time.monotonic()
        part: Json = {
            "requests_in_flight": unanswered,
            "restarted": restarted and watched.is_up(),
            "restart_s": round(up_s, 2),
            "in_flight_answered": sum(row["status"] == 200 for row in rows),
            "in_flight_errors": [row["error"] for row in rows if row["status"] != 200],
            "in_flight_longest_s": max((row["seconds"] for row in rows), default=None),
            "new_image": {key: new.get(key) for key in ("status", "seconds", "error")},
            "load_before": load.between(begin - 2.0, begin),
            "load": load.between(killed, end),
            "mps": watched.status().get("mps"),
        }
        mended = unanswered and part["restarted"] and part["in_flight_answered"] == BURST and new.get("status") == 200
        return survived(watched, part, mended)

    def kill_control(self, watched: Watched, load: Load) -> Json:
        """SIGKILL for the control daemon."""
        controls = watched.mps_processes(CONTROL)
        if not controls:
            return {"ok": False, "error": "no control daemon was found", **watched.trouble()}
        restarts = watched.status().get("mps", {}).get("num_restarts", 0)
        servers_before = [process.pid for process in watched.mps_processes(MPS_SERVER)]
        begin = time.monotonic()
        for control in controls:
            control.kill()

        def is_back() -> bool:
            mps = watched.status().get("mps", {})
            return not watched.is_up() or (mps.get("num_restarts", 0) > restarts and mps.get("state") == "running")

        restarted = self.wait(is_back, 20)
        restart_s = time.monotonic() - begin
        image = self.new_image(watched, 2_000_000)
        time.sleep(self.left_s(2.0))
        end = time.monotonic()
        part: Json = {
            "restarted": restarted and watched.is_up(),
            "restart_s": round(restart_s, 2),
            "restarts_metric": watched.metric("spaceserve:mps_restarts_total"),
            "mps": watched.status().get("mps"),
            "mps_servers_survived": all(psutil.pid_exists(pid) for pid in servers_before) and bool(servers_before),
            "image": {key: image.get(key) for key in ("status", "seconds", "error")},
            "load": load.between(begin, end),
            "lines": watched.lines_with("control daemon"),
        }
        mended = (
            part["restarted"]
            and image.get("status") == 200
            and part["restarts_metric"] == restarts + 1
            and part["mps_servers_survived"]
        )
        return survived(watched, part, mended)

    def kill_mps_server(self, watched: Watched) -> Json:
        """SIGKILL for the MPS server, which holds every context: the server has to end."""
        with Load(watched.url, 448) as load:
            time.sleep(self.left_s(2.0))
            watched.note_processes()
            victims = watched.mps_processes(MPS_SERVER)
            begin = time.monotonic()
            for victim in victims:
                victim.kill()
            ended = self.wait(lambda: not watched.is_up(), DEATH_TIMEOUT_S, poll_s=0.02)
            end_s = time.monotonic() - begin
            load.stop()
        self.wait(lambda: not watched.left_processes(), CLEAN_UP_TIMEOUT_S)
        lines = watched.lines_with(LOST_LINE)
        part: Json = {
            "mps_servers": len(victims),
            "ended": ended,
            "end_s": round(end_s, 2),
            "exit_status": watched.server.process.poll(),
            "error_lines": lines,
            "num_lines_after": sum(1 for _ in watched.server.log.open(errors="replace")),
            "left_processes": watched.left_processes(),
            "tokens_before": load.between(begin - 2.0, begin)["stream_tokens"],
        }
        part["ok"] = bool(victims and ended and part["exit_status"] == 1 and lines and not part["left_processes"])
        part["trouble"] = watched.trouble()
        return part

    def without_mps(self, watched: Watched) -> Json:
        """A server that can have no MPS: turns, one warning, right answers."""
        from spaceserve.demo import RIGHT_ANSWER
        from spaceserve.demo.ask import ask

        with Load(watched.url, 224, num_streams=1) as load:
            begin = time.monotonic()
            found, failure = [], ""
            try:
                found = [ask(watched.url) for _ in range(3)]
            except (OSError, ValueError, KeyError) as error:
                failure = f"{type(error).__name__}: {error}"
            time.sleep(self.left_s(2.0))
            end = time.monotonic()
            status = watched.status()
        warnings = watched.lines_with(NO_MPS_LINE)
        part: Json = {
            "right_answers": sum(answer.strip() == RIGHT_ANSWER for answer in found),
            "asked": 3,
            "error": failure,
            "warnings": warnings,
            "mps": status.get("mps"),
            "partition": status.get("split", {}).get("mode"),
            "mps_processes": len(watched.mps_processes(CONTROL)),
            "load": load.between(begin, end),
        }
        part["ok"] = (
            part["right_answers"] == 3
            and len(warnings) == 1
            and not part["mps_processes"]
            and not part["load"]["stream_errors"]
            and part["load"]["images_answered"] > 0
        )
        if not part["ok"]:
            part["trouble"] = watched.trouble()
        return part

    def faults_of_clients(self, watched: Watched) -> None:
        """The faults that the server must survive, in turn, until one ends it."""
        status = watched.status()
        self.report["split"] = status.get("split")
        with Load(watched.url, 448) as load:
            time.sleep(self.left_s(3.0))
            parts: list[tuple[str, Callable[[], Json]]] = [
                ("worker", lambda: self.kill_worker(watched, load, 3_000_000)),
                ("control", lambda: self.kill_control(watched, load)),
                ("worker2", lambda: self.kill_worker(watched, load, 4_000_000)),
            ]
            for name, part in parts:
                if not watched.is_up():
                    self.note(name, {"ok": False, "error": "the server had ended", **watched.trouble()})
                elif time.monotonic() > self.deadline - 5:
                    self.note(name, {"ok": False, "error": "not run: the budget was spent"})
                else:
                    self.note(name, guarded(part))
            load.stop()

    def run(self) -> None:
        options = self.options
        model = options.model
        if model is None:
            model = str(self.work_dir / SHAPE)
            dummy_model.write(SHAPE, Path(model), options.tokenizer)
        flags = options.model_flags
        self.start("survivor", model, flags, {})
        if not options.only_survivor:
            self.start("lost", model, flags, {})
            from spaceserve.demo import model_path

            env, self.report["no_mps_how"] = environment_without_mps(self.work_dir / "bin")
            self.start("no_mps", str(model_path()), "", env)
            if (watched := self.ready("no_mps")) is not None:
                self.note("no_mps", guarded(lambda: self.without_mps(watched)))
            stopping = threading.Thread(target=self.stop, args=("no_mps",))
            stopping.start()
            self.deadline -= LOST_RESERVE_S
        if (survivor := self.ready("survivor")) is not None:
            self.faults_of_clients(survivor)
        if options.only_survivor:
            return
        stopping.join()
        self.deadline += LOST_RESERVE_S
        if (lost := self.ready("lost")) is not None:
            survives = self.all["survivor"].is_up()
            self.note("lost", guarded(lambda: self.kill_mps_server(lost)))
            # It has a daemon of its own on the same GPU.
            self.report["survivor_up_before_and_after_lost"] = [survives, self.all["survivor"].is_up()]

    def finish(self) -> None:
        """Stop what runs, and look for what is left."""
        self.deadline = max(self.deadline, time.monotonic() + CLEAN_UP_TIMEOUT_S)
        stopping = [threading.Thread(target=self.stop, args=(name,)) for name in self.all]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()
        names = self.report.setdefault("left_processes", {})
        for name, watched in self.all.items():
            names[name] = watched.left_processes()
            with contextlib.suppress(OSError):
                shutil.copy(watched.server.log, self.options.out / watched.server.log.name)
        end = time.monotonic() + 10
        while leftover_files() - self.files_before and time.monotonic() < end:
            time.sleep(0.2)
        left = {*(leftover_files() - self.files_before)}
        left |= {str(path.relative_to(self.work_dir)) for path in self.work_dir.glob("*/spaceserve-*")}
        self.report["left_files"] = sorted(left)
        self.save()


def survived(watched: Watched, part: Json, mended: object) -> Json:
    """The part of a fault that the server must survive: well if what broke is `mended` and no stream was disturbed."""
    part["ok"] = bool(mended and not part["load"]["stream_errors"] and part["load"]["stream_tokens"] > 0)
    if not part["ok"]:
        part["trouble"] = watched.trouble()
    watched.note_processes()
    return part


def guarded(part: Callable[[], Json]) -> Json:
    """A part's result, or its failure in words: the parts after it still run."""
    try:
        return part()
    except Exception as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def leftover_files() -> set[str]:
    """What servers could have left in shared memory and the folders for temporary files."""
    return {str(path) for folder, pattern in LEFTOVER_PATTERNS for path in Path(folder).glob(pattern)}


def environment_without_mps(bin_dir: Path) -> tuple[dict[str, str], str]:
    """An environment in which MPS cannot run, and how it was made: a PATH that lacks the control program.

    Where the server would find the program anyway, the environment names a daemon that is not there.
    """
    if OTHER_CONTROL.exists():
        return {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent-mps"}, "the environment names a daemon that is not there"
    folders = []
    bin_dir.mkdir()
    for number, folder in enumerate(os.environ.get("PATH", os.defpath).split(os.pathsep)):
        if not (Path(folder) / CONTROL).exists():
            folders.append(folder)
            continue
        # The folder's other programs are needed: compilers, ldconfig.
        twin = bin_dir / str(number)
        twin.mkdir()
        for program in Path(folder).iterdir():
            if program.name != CONTROL:
                (twin / program.name).symlink_to(program)
        folders.append(str(twin))
    return {"PATH": os.pathsep.join(folders)}, "the control program is not on the PATH"


def table(report: Json) -> list[str]:
    """One line for each part."""
    lines = [f"mps_faults: {report['wall_s']} s, commit {report['environment']['commit'][:12]}"]
    for name, part in report["parts"].items():
        words = [f"{name:<10}", "ok " if part.get("ok") else "NOT"]
        load = part.get("load", {})
        if "restart_s" in part:
            words.append(f"restarted {part['restarted']} after {part['restart_s']} s;")
        if "in_flight_answered" in part:
            words.append(f"{part['in_flight_answered']} of {BURST} in flight answered;")
        if "new_image" in part:
            words.append(f"new image {part['new_image']['status']} in {part['new_image'].get('seconds')} s;")
        if "image" in part:
            words.append(f"image {part['image']['status']} in {part['image'].get('seconds')} s;")
        if "end_s" in part:
            words.append(f"ended {part['ended']} after {part['end_s']} s with {part['exit_status']};")
            words.append(f"{len(part['error_lines'])} lines say why; left processes {len(part['left_processes'])}")
        if "right_answers" in part:
            words.append(f"{part['right_answers']} of 3 right, {len(part['warnings'])} warning;")
        if load:
            words.append(
                f"streams: {load['stream_tokens']} tokens, pause {load['longest_pause_s']} s, "
                f"{len(load['stream_errors'])} errors; images {load['images_answered']} ok, "
                f"{len(load['image_errors'])} failed"
            )
        if part.get("error"):
            words.append(part["error"][-400:])
        lines.append(" ".join(words))
    lines.append(f"left processes {report.get('left_processes')}, left files {report.get('left_files')}")
    lines.append("OK" if is_ok(report) else "NOT OK")
    return lines


def is_ok(report: Json) -> bool:
    return (
        bool(report["parts"])
        and all(part.get("ok") for part in report["parts"].values())
        and not report.get("left_files")
        and not any(report.get("left_processes", {}).values())
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the result and the servers' logs")
    parser.add_argument("--tokenizer", type=Path, help="folder with the Qwen2 tokenizer")
    parser.add_argument("--model", help="serve this checkpoint instead of dummy weights")
    parser.add_argument("--model-flags", default="--load-format dummy", help="flags of the server of this model")
    parser.add_argument("--ours-flags", default="", help="more flags of every server")
    parser.add_argument("--burst-side", type=int, default=2048, help="side in pixels of the images under a kill")
    parser.add_argument("--only-survivor", action="store_true", help="leave out the parts lost and no_mps")
    parser.add_argument("--budget-s", type=float, default=180.0)
    options = parser.parse_args()
    if options.model is None and options.tokenizer is None:
        parser.error("give --tokenizer for dummy weights, or --model")
    servers.stop_on_sigterm()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    options.out.mkdir(parents=True, exist_ok=True)
    # A short path: sockets of the daemons lie below it, and their paths have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="mpsf-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        faults = Faults(options, Path(folder))
        try:
            faults.run()
        finally:
            faults.finish()
    print("\n".join(table(faults.report)))
    return 0 if is_ok(faults.report) else 1


if __name__ == "__main__":
    sys.exit(main())
