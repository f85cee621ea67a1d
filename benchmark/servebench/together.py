"""All arms' servers up at once on one machine; each workload then runs on one arm after the other."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from servebench import servers
from servebench.arms import Arm
from servebench.bodies import BodyFile
from servebench.matrix import EXPECTED_S, Entry
from servebench.plan import STOP_S, WARMUP_S_PER_SIZE, plan_lines, replay_s, saturation_size
from servebench.results import DONE
from servebench.servers_together import ServersTogether, running_together
from servebench.session import Job, Session, SessionConfig, arm_head, new_session_id, one_line
from servebench.workload import Workload, make_trace


class TogetherSession(Session):
    """Runs workloads x arms on servers that are all up, so that a pair's runs are adjacent in time and every server
    starts once. ``arms`` in order of importance: where the time left does not allow all of them a workload runs on the
    first ones only, one of ours and one of stock's at least, and is left out where it does not allow these.

    A server that waits launches nothing on the GPU (docs/benchmarking.md), but holds its memory: every arm needs the
    same ``--max-total-tokens``. ``at_end`` is called on the servers after the last workload; ``at_end_s`` seconds are
    kept for it. ``kept`` names servers of an earlier call to use, and these are not stopped (see ``running_together``).
    """

    def __init__(
        self,
        config: SessionConfig,
        arms: Sequence[Arm],
        workloads: Sequence[Workload | Entry],
        on_stored: Callable[[], None] = lambda: None,
        expected: Mapping[str, float] = EXPECTED_S,
        at_end: Callable[[ServersTogether], None] | None = None,
        at_end_s: float = 0.0,
        kept: Path | None = None,
    ) -> None:
        super().__init__(config, arms, workloads, on_stored)
        self._at_end, self._reserve_s, self._kept = at_end, STOP_S + at_end_s, kept
        self._importance = [arm.name for arm in arms]
        self._by_name = {arm.name: arm for arm in arms}
        self._expected = expected
        self._bodies_by_name: dict[str, BodyFile] = {}

    def _together(self) -> list[str]:
        return sorted(self._by_name)

    def missing(self) -> list[Entry]:
        """Entries with the arms that no stored slice of the same workload and repeat has."""
        done: dict[str, set[str]] = {}
        for data in self.results.slices(DONE):
            if (data["model"], data["repeat"]) == (self.config.model_name, self.config.repeat):
                done.setdefault(data["workload"], set()).update(arm["arm"] for arm in data["arms"])
        found = []
        for entry in self.entries:
            names = entry.arms_of(self._importance)
            left = tuple(name for name in names if name not in done.get(entry.workload.name, ()))
            if left:
                found.append(Entry(entry.workload, left if left != tuple(self._importance) else ()))
        return found

    def plan(self) -> tuple[list[str], float]:
        """What would run and for how long; see ``plan_lines``."""
        entries = self.missing()
        known = {saturation_size(e.workload): self._saturation(e.workload) for e in entries}
        names = tuple(self._importance)
        return plan_lines(entries, names, known, self.config.start_estimate_s, self._expected)

    def _saturation(self, workload: Workload) -> float | None:
        return self.results.saturation(self.config.model_name, workload)

    def _rate(self, workload: Workload) -> float | None:
        """S to plan with: measured, or else expected."""
        return self._saturation(workload) or self._expected.get(saturation_size(workload))

    def run(self) -> list[Job]:
        """Run everything that fits; returns the jobs that were stored."""
        entries = self.missing()
        if not entries:
            return []
        lines, total_s = self.plan()
        print("\n".join(lines), flush=True)
        print(f"planned {total_s:.0f} s, budget {self.config.budget_s:.0f} s", flush=True)
        environment, session_id = self._describe(), new_session_id()
        jobs: list[Job] = []
        config = self.config
        needed = {name for entry in entries for name in entry.arms_of(self._importance)}
        starting = [arm for arm in self.arms if arm.name in needed]
        # Logs of servers that are kept must outlive this call's folder.
        logs = config.work_dir if self._kept is None else self._kept.parent
        with running_together(starting, model=config.model, work_dir=logs, kept=self._kept) as up:
            for entry in self._likely(entries):  # while the servers start
                self._early_bodies(entry.workload)
            up.wait_ready(time.monotonic() + min(config.start_timeout_s, max(5.0, self.end - time.monotonic())))
            for name, reason in up.failed.items():
                self._fail(name, reason)
            print(f"[{self.end - time.monotonic():.0f} s left] up after {up.start_s}", flush=True)
            for entry in entries:
                if (job := self._run_entry(entry, up)) is not None:
                    self._store(job, session_id, environment)
                    jobs.append(job)
            if self._at_end is not None:
                self._at_end(up)
        return jobs

    def _fail(self, name: str, reason: str) -> None:
        self.failures.append(f"{name}: {reason.splitlines()[0] if reason else 'failed'}")
        print(f"  FAILED {self.failures[-1]}\n{reason}", flush=True)

    def _likely(self, entries: Sequence[Entry]) -> list[Entry]:
        """Those at the beginning that the budget is likely to be enough for."""
        found, total_s = [], self.config.start_estimate_s
        for entry in entries:
            if total_s > self.config.budget_s:
                break
            found.append(entry)
            total_s += len(entry.arms_of(self._importance)) * replay_s(entry.workload, self._rate(entry.workload))
        return found

    def _early_bodies(self, workload: Workload) -> BodyFile:
        """The workload's bodies. They do not depend on the rate, which may not be known yet."""
        if workload.name in self._bodies_by_name:
            return self._bodies_by_name[workload.name]
        config = self.config
        trace = make_trace(
            workload,
            config.seed + config.repeat,
            rate=1.0 if workload.relative else None,
            output_len=config.output_len,
            num_words=config.num_words,
            scale=config.scale,
        )
        self._bodies_by_name[workload.name] = bodies = self._bodies(trace)
        return bodies

    def _run_entry(self, entry: Entry, up: ServersTogether) -> Job | None:
        """Run one workload on its arms. None where no time is left for it or its S is not known."""
        names = tuple(name for name in entry.arms_of(self._importance) if name not in up.failed)
        if not names:
            return None
        try:
            trace = self._trace(entry.workload)
        except ValueError as error:
            print(f"left out: {error}", flush=True)
            return None
        left_s = self.end - time.monotonic() - self._reserve_s
        fitting = self._fitting(names, trace.resolutions, replay_s(entry.workload, self._rate(entry.workload)), left_s)
        if not fitting:
            print(f"[{left_s:.0f} s left] no time for {entry.workload.name}", flush=True)
            return None
        if dropped := [name for name in names if name not in fitting]:
            print(f"[{left_s:.0f} s left] no time for {', '.join(dropped)} in {entry.workload.name}", flush=True)
        key = self._key(Entry(entry.workload, fitting))
        job = Job(entry.workload, key, trace, self._early_bodies(entry.workload), fitting, [])
        for order, arm in enumerate(arm for arm in self.arms if arm.name in fitting):
            base = {**arm_head(arm, order), "start_s": up.start_s[arm.name]}
            idle = [server for name, group in up.groups.items() if name != arm.name for server in group]
            try:
                measured = self._run_workload(job, arm.name, up.groups[arm.name], idle)
            except (servers.ServerFailed, subprocess.SubprocessError, OSError, ValueError) as error:
                up.failed[arm.name] = str(error)
                self._fail(arm.name, str(error))
                up.stop([arm.name])
                job.arms.append({**base, "error": str(error), "summary": {}, "requests": []})
                continue
            for moment in ("memory_before", "memory_after"):
                measured[moment]["others_up"] = [name for name in up.groups if name != arm.name]
            job.arms.append({**base, **measured})
            print("  " + one_line(job.workload.name, arm.name, measured["summary"]), flush=True)
        return job

    def _fitting(
        self, names: Sequence[str], sizes: Sequence[tuple[int, int]], seconds: float, left_s: float
    ) -> tuple[str, ...]:
        """The longest beginning of ``names`` (in order of importance) for which the time left is enough. Where they
        hold arms of ours and of stock's, at least one of each; none where that does not fit."""
        cost = {
            name: seconds + WARMUP_S_PER_SIZE * len(set(sizes) - self._warm_sizes.get(name, set())) for name in names
        }
        sides = {self._by_name[name].ours for name in names}
        chosen = list(names)
        while chosen and sum(cost[name] for name in chosen) > left_s:
            # The last one without which both sides are still there.
            spare = [
                name for name in chosen if {self._by_name[other].ours for other in chosen if other != name} == sides
            ]
            if not spare:
                return ()
            chosen.remove(spare[-1])
        return tuple(chosen)
