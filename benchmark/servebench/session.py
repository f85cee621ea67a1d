"""Run arms one after another on one machine, each through the same workloads, and store a slice per workload."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from servebench import metrics, servers
from servebench.arms import Arm
from servebench.bodies import APIS, BodyFile, write_bodies
from servebench.client import RequestRecord
from servebench.environment import describe, scrub
from servebench.matrix import Entry, entry_key
from servebench.memory import log_figures
from servebench.results import DONE, FAILED, Results, SliceKey
from servebench.workload import ImageSpec, Trace, TraceRequest, Workload

SCHEMA = 1
WARMUP_SEED = 1 << 50
# Stands for a request without an image among the sizes to warm up.
TEXT_SIZE = (0, 0)
BUSY_GPU_MIB = 2048


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """Settings of one run. ``model`` is the path given to the servers, ``model_name`` what results call it;
    ``budget_s`` bounds the whole run; times are in seconds."""

    model: str
    model_name: str
    results: Path
    work_dir: Path
    repo: Path
    device: str = "cuda"
    api: str = "generate"
    repeat: int = 0
    seed: int = 1
    output_len: int = 128
    num_words: int = 64
    scale: float = 1.0
    budget_s: float = 560.0
    start_estimate_s: float = 62.0
    start_timeout_s: float = 180.0
    drain_s: float = 90.0
    warmup_rounds: int = 2
    retry_failed: bool = False
    command: str = ""


@dataclass
class Job:
    """One workload of the session with everything that the client needs; ``names`` are the arms that it runs on."""

    workload: Workload
    key: SliceKey
    trace: Trace
    bodies: BodyFile
    names: tuple[str, ...]
    arms: list[dict[str, Any]]

    def estimate_s(self) -> float:
        """Expected time on one arm: arrivals (beyond saturation, service), drain and warm-up; 40 s for a closed loop,
        whose time is not known."""
        overload = max(1.0, self.workload.rate) if self.workload.relative else 1.0
        return (40.0 if self.trace.concurrency else self.trace.duration_s * overload * 1.05 + 15.0) + 10.0


class Session:
    """Runs arms x workloads; what does not fit into the time budget is left out before anything starts.

    ``on_stored`` is called after each slice that was written.
    """

    def __init__(
        self,
        config: SessionConfig,
        arms: Sequence[Arm],
        workloads: Sequence[Workload | Entry],
        on_stored: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        # Alternate which arm goes first, so that drift of the machine (heat, clocks) does not favour one.
        self.arms = list(arms) if config.repeat % 2 == 0 else list(reversed(arms))
        self.entries = [item if isinstance(item, Entry) else Entry(item) for item in workloads]
        names = {arm.name for arm in arms}
        for entry in self.entries:
            if not names.issuperset(entry.arms):
                raise ValueError(f"{entry.name} names an arm that is not among {sorted(names)}")
        self.results = Results(config.results)
        self.end = time.monotonic() + config.budget_s
        self.failures: list[str] = []
        self._on_stored = on_stored
        self._warm_sizes: dict[str, set[tuple[int, int]]] = {}
        self._warm_bodies: dict[tuple[tuple[int, int], ...], BodyFile] = {}

    def missing(self) -> list[Entry]:
        """Entries whose slice is not done yet (failed ones are run again only where asked)."""
        wanted = []
        for entry in self.entries:
            status = self.results.status(self._key(entry))
            if status is None or (status == FAILED and self.config.retry_failed):
                wanted.append(entry)
        return wanted

    def _key(self, entry: Entry) -> SliceKey:
        return entry_key(self.config.model_name, entry, [arm.name for arm in self.arms], self.config.repeat)

    def _trace(self, workload: Workload) -> Trace:
        config = self.config
        return self.results.trace(
            config.model_name,
            workload,
            config.repeat,
            seed=config.seed,
            output_len=config.output_len,
            num_words=config.num_words,
            scale=config.scale,
        )

    def _bodies(self, trace: Trace) -> BodyFile:
        """The trace's request bodies, in a file that lives with this run only, named by the trace's content."""
        path = self.config.work_dir / f"{trace.digest[:16]}.bodies"
        return write_bodies(trace, path, api=self.config.api, model=self.config.model)

    def prepare(self) -> list[Job]:
        """Draw traces and build bodies for as many of the missing workloads as fit into the budget."""
        jobs: list[Job] = []
        starts_s = sum(len(arm.servers) for arm in self.arms) * self.config.start_estimate_s
        for entry in self.missing():
            trace = self._trace(entry.workload)
            names = entry.arms_of([arm.name for arm in self.arms])
            job = Job(entry.workload, self._key(entry), trace, BodyFile(Path(), ()), names, [])
            planned = starts_s + sum(len(other.names) * other.estimate_s() for other in [*jobs, job])
            if planned > self.end - time.monotonic():
                print(f"no time left for {entry.name}: {planned:.0f} s planned", flush=True)
                continue
            job.bodies = self._bodies(trace)
            jobs.append(job)
        return jobs

    def run(self) -> list[Job]:
        """Run everything; returns the jobs with their arms' results, stored as slices."""
        jobs = self.prepare()
        if not jobs:
            return []
        session_id = new_session_id()
        environment = self._describe()
        for order, arm in enumerate(self.arms):
            own = [job for job in jobs if arm.name in job.names]
            if not own:
                continue
            print(f"[{self.end - time.monotonic():.0f} s left] arm {arm.name}", flush=True)
            self._run_arm(order, arm, own)
            for job in own:
                self._store(job, session_id, environment)
        return jobs

    def _describe(self) -> dict[str, Any]:
        environment = describe(self.config.repo)
        if (environment["gpu_used_before_mib"] or 0) > BUSY_GPU_MIB:
            print(f"WARNING: the GPU holds {environment['gpu_used_before_mib']} MiB before anything starts", flush=True)
        return environment

    def run_on(self, groups: Mapping[str, Sequence[servers.Server]], environment: dict[str, Any]) -> list[Job]:
        """Run everything on servers that are up, ``groups`` by the arm's name. Raises ServerFailed."""
        jobs = self.prepare()
        for order, arm in enumerate(self.arms):
            for job in jobs:
                if arm.name in job.names:
                    measured = self._run_workload(job, arm.name, groups[arm.name])
                    job.arms.append({**arm_head(arm, order), **measured})
        for job in jobs:
            self._store(job, new_session_id(), environment)
        return jobs

    def _run_arm(self, order: int, arm: Arm, jobs: Sequence[Job]) -> None:
        config = self.config
        base = arm_head(arm, order)
        begin = time.monotonic()
        done = 0
        try:
            timeout_s = min(config.start_timeout_s, max(5.0, self.end - time.monotonic()))
            with servers.running_arm(
                arm, model=config.model, work_dir=config.work_dir, start_timeout_s=timeout_s
            ) as group:
                start_s = round(time.monotonic() - begin, 1)
                for job in jobs:
                    measured = self._run_workload(job, arm.name, group)
                    job.arms.append({**base, "start_s": start_s, **measured})
                    done += 1
                    print("  " + one_line(job.workload.name, arm.name, measured["summary"]), flush=True)
        except (servers.ServerFailed, subprocess.SubprocessError, OSError, ValueError) as error:
            message = str(error)
            self.failures.append(f"{arm.name}: {message.splitlines()[0] if message else type(error).__name__}")
            print(f"  FAILED {self.failures[-1]}", flush=True)
            for job in jobs[done:]:
                job.arms.append({**base, "error": message, "summary": {}, "requests": []})

    def _warm(self, job: Job, arm: str, group: Sequence[servers.Server]) -> None:
        """Send the sizes of the job that this server has not seen. Raises ServerFailed.

        Each alone, then eight at a time, with the caches flushed between: single and batched shapes are both compiled,
        tuned and in the allocator's cache.
        """
        config, server = self.config, group[-1]
        done = self._warm_sizes.setdefault(arm, set())
        sizes = tuple(size for size in [TEXT_SIZE, *job.trace.resolutions] if size not in done)
        if not sizes:
            return
        if sizes not in self._warm_bodies:
            trace = warmup_trace(job.trace, config.warmup_rounds, sizes)
            path = config.work_dir / f"{len(self._warm_bodies)}.warmup"
            self._warm_bodies[sizes] = write_bodies(trace, path, api=config.api, model=config.model)
        bodies = self._warm_bodies[sizes]
        for concurrency in (1, 8):
            url = server.url + APIS[config.api]
            records = run_client(config.work_dir, bodies, [0.0] * len(bodies.spans), url, (concurrency,), 120.0)
            problem = next((record.error for record in records if record.error), "")
            if problem:
                raise servers.ServerFailed(f"warm-up for {job.workload.name} failed: {problem}\n{server.tail()}")
            servers.flush(server.url)
        done.update(sizes)

    def _run_workload(
        self, job: Job, arm: str, group: Sequence[servers.Server], idle: Sequence[servers.Server] = ()
    ) -> dict[str, Any]:
        """Warm up, flush, replay the trace, flush. ``idle`` are servers of other arms that are up meanwhile."""
        config, server = self.config, group[-1]
        url = server.url + APIS[config.api]
        self._warm(job, arm, group)
        flushed = servers.flush(server.url)
        before = servers.memory(list(group))
        left_s = self.end - time.monotonic()
        duration_s = 120.0 if job.trace.concurrency else job.trace.duration_s
        timeout_s = max(5.0, min(duration_s + config.drain_s, left_s - 5.0))
        others = servers.OtherWork([*group, *idle])
        arrivals_s = [request.arrival_s for request in job.trace.requests]
        records = run_client(config.work_dir, job.bodies, arrivals_s, url, (job.trace.concurrency,), timeout_s)
        elsewhere = others.mean_cores()
        alive = all(member.process.poll() is None for member in group)
        result = {
            "flushed": flushed,
            "alive_after": alive,
            "client_timeout_s": round(timeout_s, 1),
            "cores_used_elsewhere": round(elsewhere, 2),
            "summary": metrics.summarise(records, concurrency=job.trace.concurrency),
            "server": {**servers.describe_server(server.url), "log": log_figures(group)},
            "memory_before": before,
            "memory_after": servers.memory(list(group)),
            "requests": [metrics.compact(record) for record in records],
        }
        if not alive or all(record.error for record in records):
            raise servers.ServerFailed(f"nothing was answered in {job.workload.name}\n{server.tail()}")
        servers.flush(server.url)
        return result

    def _store(self, job: Job, session_id: str, environment: dict[str, Any]) -> None:
        """Write the slice; it counts as done when every arm ran, and as failed when one could not."""
        failed = any("error" in arm for arm in job.arms)
        if len(job.arms) < len(job.names) and not failed:
            return
        config = self.config
        self.results.save_slice(
            job.key,
            {
                "schema": SCHEMA,
                "status": FAILED if failed else DONE,
                "model": config.model_name,
                "workload": job.workload.name,
                "repeat": config.repeat,
                "session": session_id,
                "command": config.command,
                "device": config.device,
                "api": config.api,
                "trace": {
                    "sha256": job.trace.digest,
                    "seed": job.trace.seed,
                    "rate": job.trace.rate,
                    "concurrency": job.trace.concurrency,
                    "scale": config.scale,
                    "num_requests": len(job.trace.requests),
                    "bodies_bytes": sum(length for _, length in job.bodies.spans),
                },
                "environment": environment,
                "servers_up_together": self._together(),
                "arms": job.arms,
            },
        )
        self._on_stored()

    def _together(self) -> list[str]:
        """Names of the arms whose servers were up at the same time; none where each arm had the GPU to itself."""
        return []


def new_session_id() -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


def arm_head(arm: Arm, order: int) -> dict[str, Any]:
    """What a slice says of an arm before any figure; ``order`` is its place in the order of running."""
    return {
        "arm": arm.name,
        "ours": arm.ours,
        "order": order,
        "commands": [server.template for server in arm.servers],
        "env": {key: scrub(value) for server in arm.servers for key, value in server.env.items()},
        "mps_by_runner": arm.needs_mps,
    }


def run_client(
    work_dir: Path,
    bodies: BodyFile,
    arrivals_s: Sequence[float],
    url: str,
    concurrencies: Sequence[int | None],
    timeout_s: float,
) -> list[RequestRecord]:
    """Run the client in a process of its own, once for each of ``concurrencies`` (None: open loop); the records of the
    last. Raises CalledProcessError or TimeoutExpired where the client itself fails."""
    job_file, out = work_dir / "client.json", work_dir / "records.json"
    out.unlink(missing_ok=True)
    job = {
        "url": url,
        "bodies": str(bodies.path),
        "spans": bodies.spans,
        "arrivals_s": list(arrivals_s),
        "concurrencies": list(concurrencies),
        "timeout_s": timeout_s,
        "out": str(out),
    }
    job_file.write_text(json.dumps(job))
    here = Path(__file__).resolve().parent.parent
    subprocess.run(
        [sys.executable, "-m", "servebench.client", str(job_file)],
        cwd=here,
        timeout=timeout_s * len(concurrencies) + 60,
        check=True,
    )
    return [RequestRecord(**row) for row in json.loads(out.read_text())]


def warmup_trace(trace: Trace, rounds: int, sizes: Sequence[tuple[int, int]] | None = None) -> Trace:
    """``rounds`` requests for each of ``sizes`` (TEXT_SIZE: one without an image) with images that ``trace`` does not
    hold; all of its resolutions and a text unless given."""
    kinds = {(image.width, image.height): image for request in trace.requests for image in request.images}
    wanted = [TEXT_SIZE, *trace.resolutions] if sizes is None else sizes
    requests: list[TraceRequest] = []
    if TEXT_SIZE in wanted:
        requests.append(TraceRequest(0, 0.0, (), (WARMUP_SEED,), 64, 16))
    for _ in range(rounds):
        for size in wanted:
            if size == TEXT_SIZE:
                continue
            seed = WARMUP_SEED + 2 * len(requests)
            image: ImageSpec = replace(kinds[size], seed=seed)
            requests.append(TraceRequest(len(requests), 0.0, (image,), (seed,), 64, 16))
    return Trace(f"warm-up of {trace.workload}", WARMUP_SEED, 0.0, tuple(requests), None)


def one_line(workload: str, arm: str, summary: dict[str, Any]) -> str:
    """A run's main figures in one line of fixed columns."""

    def show(key: str, digits: int = 1) -> str:
        value = summary.get(key)
        return "-" if value is None else f"{value:.{digits}f}"

    rate = f"{show('offered_rate', 2)}/{show('served_rate', 2)}"
    if summary.get("saturation_rate"):
        rate = f"S={show('saturation_rate', 2)}"
    return (
        f"{workload:<22} {arm:<22} rate {rate:<12} TPOT {show('tpot_mean_ms', 2):>7}/{show('tpot_p99_ms'):>6} "
        f"gap {show('longest_gap_ms', 0):>6} TTFT {show('ttft_mean_ms', 0):>6}/{show('ttft_p99_ms', 0):>6} ms "
        f"failed {summary.get('num_failed', '-')}" + (" LATE CLIENT" if summary.get("client_was_late") else "")
    )


def session_table(jobs: Sequence[Job]) -> str:
    """The short table printed at the end of a run."""
    return "\n".join(one_line(job.workload.name, arm["arm"], arm["summary"]) for job in jobs for arm in job.arms)
