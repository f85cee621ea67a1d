"""Serving benchmark of SpaceServe against stock SGLang on one machine, in short resumable slices.

  serve_bench.py run --model DIR --results RESULTS --workloads sat:2048 --arms spaceserve stock stock-mixed
  serve_bench.py run --model DIR --results RESULTS --set targets        (the first missing entry of a set)
  serve_bench.py run --model DIR --results RESULTS --set headline --together     (all servers up at once)
  serve_bench.py plan --results RESULTS --model-name qwen2-vl-7b --set targets
  serve_bench.py report --results RESULTS --plots

A slice is one workload on two or more arms, one after the other on the same GPU with the same stored arrivals and the
same image bytes. ``run`` starts each arm once for all workloads given, leaves out what the time budget does not allow,
skips slices that are done, and prints a table last. With ``--together`` all arms' servers are up at once and each
workload runs on one arm after the other. See docs/benchmarking.md.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import timeline_record
from servebench import arms, headline, kept, matrix, plan, report, servers, tradeoff_report
from servebench.arms import Arm
from servebench.environment import gpu_query
from servebench.matrix import Entry
from servebench.memory import memory_lines
from servebench.results import Results
from servebench.servers_together import ServersTogether
from servebench.session import Session, SessionConfig, session_table
from servebench.together import TogetherSession

REPO = Path(__file__).resolve().parent.parent
TIMELINE_S = 25.0


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="model folder, given to the servers")
    parser.add_argument("--model-name", help="what results call the model (default: the folder's name)")
    parser.add_argument("--results", type=Path, required=True, help="results folder of this machine type")
    parser.add_argument("--arms", nargs="+", help="built-in names, or 'NAME=BASE FLAGS...' for more flags on one")
    parser.add_argument(
        "--workloads", nargs="+", help="see servebench/workload.py; 'sat:2048=stock,stock-mixed' for some arms only"
    )
    parser.add_argument("--set", choices=sorted(matrix.SETS), help="take the first missing entry of this set instead")
    parser.add_argument(
        "--together",
        action="store_true",
        help="all arms' servers up at once; needs --max-total-tokens in --common-flags, the same for all",
    )
    parser.add_argument(
        "--timeline", type=Path, help="with --together: at the end record encode beside decode into this folder"
    )
    parser.add_argument(
        "--timeline-later", action="store_true", help="start servers able to record; a later call on them does it"
    )
    parser.add_argument(
        "--keep-servers",
        type=Path,
        help="with --together: use the servers that this file names, and let all go on at the end (see stop)",
    )
    parser.add_argument("--max-requests", type=int, help="cut every workload to this many, to try things out")
    parser.add_argument(
        "--expect-s", nargs="*", default=[], help="SIZE=RATE to plan with where S is not measured (--together)"
    )
    parser.add_argument("--repeat", type=int, default=0, help="number of the repeat; odd ones run the arms backwards")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--api", choices=("generate", "chat"), default="generate")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--num-words", type=int, default=64)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on every image side, for small machines")
    parser.add_argument("--budget-s", type=float, default=560.0, help="bound on the whole call")
    parser.add_argument("--start-estimate-s", type=float, default=62.0, help="expected start of one server")
    parser.add_argument("--start-timeout-s", type=float, default=180.0)
    parser.add_argument("--drain-s", type=float, default=90.0, help="wait for answers after the last arrival")
    parser.add_argument("--common-flags", default="", help="flags for every server, e.g. '--load-format dummy'")
    parser.add_argument("--ours-flags", default="")
    parser.add_argument("--stock-flags", default="")
    parser.add_argument("--retry-failed", action="store_true")
    parser.add_argument("--bundle", type=Path, help="also pack what was written into this .tgz")
    parser.add_argument("--log-dir", type=Path, help="keep the servers' logs here")


def run(options: argparse.Namespace) -> int:
    servers.stop_on_sigterm()
    results = Results(options.results)
    model_name = options.model_name or Path(options.model).name
    repeat, names, workloads = options.repeat, options.arms, options.workloads
    if options.set and options.together:
        # What an earlier call left out is found by the session itself, arm by arm.
        group = matrix.SETS[options.set][0]
        names, workloads = names or list(group.arms), list(group.workloads)
    elif options.set:
        left = matrix.missing(results, model_name, matrix.SETS[options.set])
        if not left:
            print(f"set {options.set}: nothing missing")
            return 0
        group, repeat, workloads = left[0]
        names = list(group.arms)
    if not names or not workloads:
        raise ValueError("give --arms and --workloads, or --set")
    if (options.timeline or options.keep_servers) and not options.together:
        raise ValueError("--timeline and --keep-servers go with --together (timeline_record.py works on its own)")
    chosen = prepare_arms(options, names)
    entries = [cut_entry(Entry.parse(text), options.max_requests) for text in workloads]
    if options.set and options.arms:
        entries = [kept for entry in entries if (kept := within(entry, {arm.name for arm in chosen})) is not None]
    work_dir = Path(tempfile.mkdtemp(prefix="serve-bench-"))
    trace_dir = (options.keep_servers.resolve().parent if options.keep_servers else work_dir) / "trace"
    if options.timeline:
        trace_dir.mkdir(parents=True, exist_ok=True)
        chosen = [timeline_record.traced(arm, trace_dir) if arm.ours else arm for arm in chosen]
    try:
        config = SessionConfig(
            model=options.model,
            model_name=model_name,
            results=options.results,
            work_dir=work_dir,
            repo=REPO,
            device=options.device,
            api=options.api,
            repeat=repeat,
            seed=options.seed,
            output_len=options.output_len,
            num_words=options.num_words,
            scale=options.scale,
            budget_s=options.budget_s,
            start_estimate_s=options.start_estimate_s,
            start_timeout_s=options.start_timeout_s,
            drain_s=options.drain_s,
            retry_failed=options.retry_failed,
            command=stored_command(sys.argv),
        )
        session = make_session(options, config, chosen, entries, trace_dir)
        try:
            jobs = session.run()
        finally:
            if options.log_dir:
                options.log_dir.mkdir(parents=True, exist_ok=True)
                kept_logs = options.keep_servers.parent.glob("*.log") if options.keep_servers else ()
                for log in [*work_dir.glob("*.log"), *kept_logs]:
                    if log.parent.resolve() != options.log_dir.resolve():
                        shutil.copy(log, options.log_dir / log.name)
        if options.device == "cuda":
            gpus = [row[0] for row in gpu_query("name")]
            headline.store_shipped_bound(session.results, model_name, gpus, Path(options.model))
        if options.bundle and session.results.written:
            session.results.bundle(options.bundle)
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)
    print(f"\n{model_name}, repeat {repeat}\n{session_table(jobs) if jobs else 'nothing to do'}\n")
    print("\n".join(memory_lines([data for data in results.slices() if data["model"] == model_name])))
    print("\n" + "\n".join(headline.headline_lines(results, model_name)))
    for failure in session.failures:
        print(f"FAILED {failure}")
    return 1 if session.failures else 0


def prepare_arms(options: argparse.Namespace, names: list[str]) -> list[Arm]:
    """The arms with this call's flags. Raises ValueError for unknown or equal names."""
    chosen = [
        arms.prepare(
            arms.parse_arm(name),
            device=options.device,
            common_flags=options.common_flags,
            ours_flags=options.ours_flags,
            stock_flags=options.stock_flags,
        )
        for name in names
    ]
    if len({arm.name for arm in chosen}) < len(chosen):
        raise ValueError("two arms have the same name")
    # SGLang sizes its KV cache from what is free at the start: servers that start at once would get what is left.
    sized = all("--max-total-tokens" in server.template for arm in chosen for server in arm.servers)
    if options.together and options.device == "cuda" and not sized:
        raise ValueError("--together needs --max-total-tokens in --common-flags, so that all KV caches are equal")
    return chosen


def make_session(
    options: argparse.Namespace, config: SessionConfig, chosen: list[Arm], entries: list[Entry], trace_dir: Path
) -> Session:
    """The session; with ``--bundle`` every stored slice is packed at once, for a call that is cut short."""

    def pack() -> None:
        if options.bundle:
            session.results.bundle(options.bundle)

    def draw_timeline(up: ServersTogether) -> None:
        name = next((arm.name for arm in chosen if arm.ours and arm.name in up.start_s), None)
        if name is None or name in up.failed:
            return
        load = timeline_record.Load(side=max(28, int(timeline_record.Load.side * options.scale)))
        try:
            url = up.groups[name][-1].url
            print(timeline_record.record(url, trace_dir, options.timeline, load), flush=True)
        except (ValueError, OSError) as error:
            print(f"no timeline: {error}", flush=True)

    session: Session
    if options.together:
        at_end, at_end_s = (
            (draw_timeline, TIMELINE_S) if options.timeline and not options.timeline_later else (None, 0.0)
        )
        expected = plan.expected_rates(options.expect_s) if options.device == "cuda" or options.expect_s else {}
        session = TogetherSession(config, chosen, entries, pack, expected, at_end, at_end_s, options.keep_servers)
    else:
        session = Session(config, chosen, entries, pack)
    return session


def cut_entry(entry: Entry, max_requests: int | None) -> Entry:
    if max_requests is None or entry.workload.num_requests <= max_requests:
        return entry
    return replace(entry, workload=replace(entry.workload, num_requests=max_requests))


def within(entry: Entry, names: set[str]) -> Entry | None:
    """The entry on those of its arms that this call has; None where it has none of them."""
    kept = tuple(name for name in entry.arms if name in names)
    return entry if not entry.arms else replace(entry, arms=kept) if kept else None


def stored_command(argv: list[str]) -> str:
    """The command for the record: paths cut to their last part."""
    return shlex.join([Path(part).name if part.startswith(("/", "~", ".")) else part for part in argv])


def show_plan(options: argparse.Namespace) -> int:
    results = Results(options.results)
    if options.together:
        group = matrix.SETS[options.set][0]
        entries = [Entry.parse(text) for text in group.workloads]
        known = {
            plan.saturation_size(entry.workload): results.saturation(options.model_name, entry.workload)
            for entry in entries
        }
        names = tuple(options.arms or group.arms)
        entries = [kept for entry in entries if (kept := within(entry, set(names))) is not None]
        rates = plan.expected_rates(options.expect_s)
        lines, total_s = plan.plan_lines(entries, names, known, options.start_estimate_s, rates)
        print("\n".join(lines))
        print(f"{total_s:.0f} s with the stop, were nothing measured yet")
        return 0
    left = matrix.missing(results, options.model_name, matrix.SETS[options.set])
    for group, repeat, workloads in left:
        print(f"--repeat {repeat} --arms {' '.join(group.arms)} --workloads {' '.join(workloads)}")
    print(f"set {options.set}: {sum(len(workloads) for _, _, workloads in left)} slices missing", file=sys.stderr)
    return 0


def stop(options: argparse.Namespace) -> int:
    print(f"{kept.stop_all(options.keep_servers)} servers ended")
    return 0


def write_report(options: argparse.Namespace) -> int:
    results = Results(options.results)
    for model in sorted({data["model"] for data in results.slices()}):
        gpus = {gpu["name"] for data in results.slices() for gpu in data["environment"]["gpus"]}
        headline.store_shipped_bound(results, model, gpus)
    attainable = {model: tradeoff_report.rows(results, model) for model in {d["model"] for d in results.slices()}}
    sections = [tradeoff_report.section(found) for _, found in sorted(attainable.items()) if found]
    text = "\n".join([report.report(results), *sections])
    (options.results / "report.md").write_text(text)
    print(text)
    for model in sorted({data["model"] for data in results.slices()}):
        print(f"\n{model}\n" + "\n".join(headline.headline_lines(results, model)))
    if options.plots:
        from servebench import plots

        for path in plots.draw_all(results.slices(), options.results / "plots"):
            print(f"drew {path.name}", file=sys.stderr)
        for model, found in attainable.items():
            if found:
                tradeoff_report.draw(found, options.results / f"tradeoff-{model}.png")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add_run_arguments(commands.add_parser("run", help="run slices"))
    planner = commands.add_parser("plan", help="list the slices that are missing")
    planner.add_argument("--results", type=Path, required=True)
    planner.add_argument("--model-name", required=True)
    planner.add_argument("--set", choices=sorted(matrix.SETS), default="targets")
    planner.add_argument("--together", action="store_true", help="estimated seconds with all servers up at once")
    planner.add_argument("--arms", nargs="+", help="with --together: some of the set's arms only")
    planner.add_argument("--expect-s", nargs="*", default=[], help="SIZE=RATE where S is not measured yet")
    planner.add_argument("--start-estimate-s", type=float, default=90.0)
    reporter = commands.add_parser("report", help="table and plots from all slices")
    reporter.add_argument("--results", type=Path, required=True)
    reporter.add_argument("--plots", action="store_true")
    stopper = commands.add_parser("stop", help="end the servers that --keep-servers left")
    stopper.add_argument("--keep-servers", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        return {"run": run, "plan": show_plan, "report": write_report, "stop": stop}[options.command](options)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
