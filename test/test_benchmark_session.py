"""The benchmark's runner, results folder, report and plan, on scripted servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import psutil
import pytest

import serve_bench
import soak
from scripted_sessions import BENCHMARK, FAKE, config, fake_arm, fake_server_is_importable  # noqa: F401 - a fixture
from servebench import arms, matrix, report, servers
from servebench.arms import Arm, ServerSpec
from servebench.environment import scrub
from servebench.matrix import Entry
from servebench.results import DONE, FAILED, Results, SliceKey
from servebench.session import Session
from servebench.workload import Workload

pytestmark = pytest.mark.cpu


OURS, STOCK = fake_arm("spaceserve", "--tpot-ms 1", ours=True), fake_arm("stock", "--tpot-ms 2")
WORKLOADS = ["sat:224x200", "fixed:224@60x12"]


def test_a_session_stores_one_slice_per_workload_and_is_not_run_twice(tmp_path: Path) -> None:
    workloads = [Workload.parse(text) for text in WORKLOADS]
    session = Session(config(tmp_path), [OURS, STOCK], workloads)
    jobs = session.run()
    assert not session.failures
    assert [job.workload.name for job in jobs] == WORKLOADS
    slices = {data["workload"]: data for data in Results(tmp_path / "results").slices()}
    assert sorted(slices) == sorted(WORKLOADS)
    data = slices["fixed:224@60x12"]
    assert [arm["arm"] for arm in data["arms"]] == ["spaceserve", "stock"]
    for arm in data["arms"]:
        assert arm["summary"]["num_failed"] == 0
        assert arm["summary"]["output_tokens"] == 12 * 6
        assert len(arm["requests"]) == 12
        assert arm["flushed"] is True
        assert arm["cores_used_elsewhere"] >= 0
        # Prompts differ between requests and are the same in both arms.
        assert [row["prompt"] for row in arm["requests"]] == [row["prompt"] for row in data["arms"][0]["requests"]]
        assert arm["memory_after"]["host_processes"][0]["rss_mib"] > 0
        assert arm["server"]["metrics"][0].startswith("spaceserve:fake_requests")
    assert slices["sat:224x200"]["arms"][1]["summary"]["saturation_rate"] > 0
    assert data["environment"]["commit"]
    assert str(tmp_path) not in json.dumps(slices)
    session.results.bundle(tmp_path / "bundle.tgz")
    with tarfile.open(tmp_path / "bundle.tgz") as archive:
        names = archive.getnames()
    assert sorted(name.partition("/")[0] for name in names) == ["slices", "slices", "traces", "traces"]
    again = Session(config(tmp_path), [STOCK, OURS], workloads)
    assert again.missing() == []
    assert again.run() == []
    # The relative workload now finds S, and keeps its trace when S changes.
    relative = Workload.parse("fixed:224@0.5Sx4")
    results = Results(tmp_path / "results")
    saturation = results.saturation("tiny", relative)
    assert saturation is not None
    assert saturation == slices["sat:224x200"]["arms"][1]["summary"]["saturation_rate"]
    trace = results.trace("tiny", relative, 0, seed=1, output_len=6)
    assert trace.rate == pytest.approx(0.5 * saturation, rel=1e-3)
    results.slice_path(SliceKey("tiny", "sat:224x200", ("spaceserve", "stock"), 0)).unlink()
    assert results.saturation("tiny", relative) is None
    assert results.trace("tiny", relative, 0, seed=1, output_len=6) == trace
    with pytest.raises(ValueError, match="other options"):
        results.trace("tiny", relative, 0, seed=1, output_len=7)
    text = report.report(Results(tmp_path / "results"))
    assert "### tiny, fixed:224@60x12" in text


def test_a_server_that_dies_marks_the_slice_failed_and_leaves_no_process(tmp_path: Path) -> None:
    broken = Arm("stock", (ServerSpec("server", "{python} -c 'raise SystemExit(7)'"),), ours=False)
    workload = Workload.parse("text@100x3")
    session = Session(config(tmp_path), [OURS, broken], [workload])
    session.run()
    assert session.failures == ["stock: server exited with 7"]
    failed = Results(tmp_path / "results").slices(FAILED)
    assert [arm.get("error", "")[:20] for arm in failed[0]["arms"]] == ["", "server exited with 7"]
    assert failed[0]["arms"][0]["summary"]["num_failed"] == 0
    assert Session(config(tmp_path), [OURS, broken], [workload]).missing() == []
    assert Session(config(tmp_path, retry_failed=True), [OURS, broken], [workload]).missing() == [Entry(workload)]
    ours = [p for p in psutil.Process().children(recursive=True) if "fake_server" in " ".join(p.cmdline())]
    assert ours == []
    assert "## Failed slices" in report.report(Results(tmp_path / "results"))


def test_what_does_not_fit_the_budget_is_left_out_before_anything_starts(tmp_path: Path) -> None:
    session = Session(config(tmp_path, budget_s=10.0), [OURS, STOCK], [Workload.parse("text@1x100")])
    assert session.run() == []
    assert Results(tmp_path / "results").slices(None) == []


def test_a_hung_server_is_ended_as_a_group(tmp_path: Path) -> None:
    script = "import subprocess, sys, time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    script += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"
    spec = ServerSpec("server", f'{{python}} -c "{script}"')
    original, servers.STOP_GRACE_S = servers.STOP_GRACE_S, 1.0
    try:
        with (
            pytest.raises(servers.ServerFailed, match="not ready"),
            servers.running_arm(Arm("hung", (spec,), ours=False), model="m", work_dir=tmp_path, start_timeout_s=2.0),
        ):
            pass
    finally:
        servers.STOP_GRACE_S = original
    assert [p for p in psutil.Process().children(recursive=True) if "time.sleep(600)" in " ".join(p.cmdline())] == []


def test_a_terminated_run_takes_its_servers_with_it(tmp_path: Path) -> None:
    code = f"""
import sys, time
sys.path.insert(0, {str(BENCHMARK)!r})
from pathlib import Path
from servebench import servers
from servebench.arms import Arm, ServerSpec
servers.stop_on_sigterm()
arm = Arm("fake", (ServerSpec("server", {FAKE!r}),), ours=False)
with servers.running_arm(arm, model="m", work_dir=Path({str(tmp_path)!r}), start_timeout_s=60) as group:
    print(group[0].process.pid, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdout is not None
        pid = int(runner.stdout.readline())
        assert psutil.pid_exists(pid)
        runner.terminate()
        assert runner.wait(60) == 143
    assert not psutil.pid_exists(pid)


def test_an_arm_that_needs_mps_says_so_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spaceserve.partition.mps.shutil.which", lambda *_, **__: None)
    arm = Arm("stock-mps", OURS.servers, ours=False, needs_mps=True)
    with (
        pytest.raises(servers.ServerFailed, match="needs MPS"),
        servers.running_arm(arm, model="m", work_dir=tmp_path, start_timeout_s=5),
    ):
        pass


def test_repeats_alternate_the_order_of_arms(tmp_path: Path) -> None:
    names = [
        [arm.name for arm in Session(config(tmp_path, repeat=repeat), [OURS, STOCK], []).arms] for repeat in (0, 1, 2)
    ]
    assert names == [["spaceserve", "stock"], ["stock", "spaceserve"], ["spaceserve", "stock"]]


def test_arms_of_the_command_line() -> None:
    arm = arms.parse_arm("mixed1k=stock --enable-mixed-chunk --chunked-prefill-size 1024")
    assert arm.name == "mixed1k"
    assert not arm.ours
    command = arm.servers[0].command(python="py", model="m", host="h", port="1", port2="2")
    assert command[:3] == ["py", "-m", "sglang.launch_server"]
    assert command[-3:] == ["--enable-mixed-chunk", "--chunked-prefill-size", "1024"]
    with pytest.raises(ValueError, match="unknown arm"):
        arms.parse_arm("nothing")
    with pytest.raises(ValueError, match="needs a GPU"):
        arms.prepare(arms.parse_arm("stock-mps"), device="cpu")
    prepared = arms.prepare(arms.parse_arm("spaceserve"), device="cpu", common_flags="--a", ours_flags="--b")
    assert prepared.servers[0].template.endswith("--a --b --device cpu")
    epd = arms.parse_arm("stock-epd-mps")
    encoder, server = (spec.command(python="p", model="m", host="h", port="1", port2="2") for spec in epd.servers)
    assert encoder[encoder.index("--port") + 1] == "2"
    assert "http://h:2" in server
    assert server[server.index("--port") + 1] == "1"
    with pytest.raises(ValueError, match="placeholder"):
        ServerSpec("server", "{nothing}").command(port="1")


def test_every_set_names_known_arms_and_workloads_and_plans_what_is_missing(tmp_path: Path) -> None:
    for groups in matrix.SETS.values():
        for group in groups:
            assert all(Entry.parse(text).name == text for text in group.workloads)
            assert all(set(Entry.parse(text).arms) <= set(group.arms) for text in group.workloads)
            assert all(arms.parse_arm(name).name == name for name in group.arms)
    for target in matrix.TARGETS:
        assert any(
            target.workload == Entry.parse(text).workload.name
            for groups in matrix.SETS.values()
            for group in groups
            for text in group.workloads
        )
    results = Results(tmp_path)
    groups = (matrix.Group(("text@10", "mix@1"), ("spaceserve", "stock"), 2),)
    assert [(r, w) for _, r, w in matrix.missing(results, "m", groups)] == [
        (0, ["text@10", "mix@1"]),
        (1, ["text@10", "mix@1"]),
    ]
    key = SliceKey("m", "text@10", ("stock", "spaceserve"), 0)
    results.save_slice(key, {"status": DONE, "arms": []})
    assert [w for _, _, w in matrix.missing(results, "m", groups)] == [["mix@1"], ["text@10", "mix@1"]]


def summary(**figures: float) -> dict[str, Any]:
    base = {"num_requests": 200, "num_failed": 0, "output_tokens": 25600, "client_was_late": False}
    return {**base, "served_rate": 2.0, "offered_rate": 2.0, **figures}


def stored(workload: str, repeat: int, **arms_figures: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": 1,
        "status": DONE,
        "model": "qwen2-vl-7b",
        "workload": workload,
        "repeat": repeat,
        "trace": {"rate": 2.0},
        "environment": {
            "commit": "0123456789abcdef",
            "uncommitted_changes": False,
            "cpu": "a cpu",
            "gpus": [{"name": "a gpu", "driver": "1"}],
            "versions": {"sglang": "0.5.17", "torch": "2"},
        },
        "arms": [
            {"arm": name.replace("_", "-"), "ours": name.startswith("space"), "summary": figures, "requests": []}
            for name, figures in arms_figures.items()
        ],
    }


def save(results: Results, data: dict[str, Any]) -> None:
    names = tuple(arm["arm"] for arm in data["arms"])
    results.save_slice(SliceKey(data["model"], data["workload"], names, data["repeat"]), data)


def test_targets_are_checked_against_the_better_stock_setting(tmp_path: Path) -> None:
    results = Results(tmp_path)
    save(results, stored("text@10", 0, spaceserve=summary(tpot_mean_ms=7.0), stock=summary(tpot_mean_ms=7.2)))
    good = summary(tpot_mean_ms=9.0, longest_gap_ms=150.0, ttft_mean_ms=900.0)
    stock = summary(tpot_mean_ms=60.0, longest_gap_ms=9000.0, ttft_mean_ms=1000.0)
    mixed = summary(tpot_mean_ms=30.0, longest_gap_ms=400.0, ttft_mean_ms=800.0)
    save(results, stored("fixed:2048@0.7S", 0, spaceserve=good, stock=stock, stock_mixed=mixed))
    rows = {row[0]: row for target in matrix.TARGETS if (row := report.check_target(target, results.slices(), 7.2))}
    tpot, gap, ttft = rows["fixed:2048@0.7S"][2:5]
    assert tpot == "9.00, at most 9.00: met"
    assert gap == "150, at most 200: met"
    assert ttft == "900, at most 800: **missed**"
    assert rows["text@10"][2] == "7.00, at most 7.20: met"
    assert "sat:2048" not in rows
    text = report.report(results)
    assert "Text-only TPOT of stock: 7.20 ms" in text
    assert "E, P and D of these sizes were not measured" in text


def test_the_bound_stands_beside_the_results(tmp_path: Path) -> None:
    results = Results(tmp_path)
    figures = summary(tpot_mean_ms=9.0, longest_gap_ms=150.0, ttft_mean_ms=900.0)
    save(results, stored("fixed:2048@2", 0, spaceserve=figures, stock=figures))
    save(results, stored("fixed:2048@3", 0, spaceserve=figures, stock=figures))
    cost = {"encode_ms": 251.0, "prefill_ms": 130.0, "prompt_tokens": 5400, "source": "test"}
    bounds = {"model": "qwen2-vl-7b", "arm": "stock", "measured": True, "sizes": {"2048": cost}}
    (tmp_path / "bounds").mkdir()
    (tmp_path / "bounds" / "qwen2-vl-7b__stock.json").write_text(
        json.dumps({**bounds, "decode_step_ms": {"1": 5.0, "16": 5.4}})
    )
    text = report.report(results)
    assert "at most 2.62 req/s" in text
    assert "TPOT at least 5.0 ms" in text


def test_the_command_line_reports_errors_and_runs_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve_bench.main(["run", "--model", "m", "--results", str(tmp_path), "--workloads", "x@1", "--arms", "stock"])
    assert "not a workload" in capsys.readouterr().err
    assert serve_bench.main(["plan", "--results", str(tmp_path), "--model-name", "m", "--set", "cpu"]) == 0
    out = capsys.readouterr()
    assert "--arms spaceserve stock --workloads sat:224x12" in out.out
    assert "4 slices missing" in out.err


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from servebench import plots

    results = Results(tmp_path)
    row = {"id": 0, "at": 0.0, "sent": 0.0, "d": [1000, 50, 60, 900], "prompt": 9, "cached": 0}
    for repeat, rate in enumerate((2.0, 3.0)):
        figures = summary(tpot_mean_ms=9.0, longest_gap_ms=150.0, ttft_mean_ms=900.0)
        data = stored(f"fixed:448@{rate:g}", repeat, spaceserve=figures, stock=figures)
        data["trace"]["rate"] = rate
        for arm in data["arms"]:
            arm["requests"] = [row]
        save(results, data)
    names = [path.name for path in plots.draw_all(results.slices(), tmp_path / "plots")]
    assert len(names) == 5
    assert "qwen2-vl-7b__448__by_rate.png" in names
    assert all((tmp_path / "plots" / name).stat().st_size > 5000 for name in names)


def test_stored_text_names_no_path_of_this_machine() -> None:
    text = scrub(
        f"{sys.executable} -m x --model {os.path.expanduser('~')}/m /opt/a/lib/site-packages/b.py http://h:1/v1/c"
    )
    assert os.path.expanduser("~") not in text
    assert "/opt" not in text
    assert "http://h:1/v1/c" in text
    assert "site-packages/b.py" in text


def test_soak_compares_answers_and_watches_memory(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [
        "--server",
        FAKE,
        "--stock",
        FAKE,
        "--model",
        "m",
        "--out",
        str(out),
        "--requests",
        "60",
        "--images",
        "6",
    ]
    status = soak.main([*command, "--sample", "20", "--interval-s", "0.2", "--side", "56"])
    result = json.loads(out.read_text())
    assert status == 0
    assert result["num_failed"] == 0
    assert result["against_stock"]["equal"] == result["against_stock"]["sampled"] == 20
    # The fake server's answers depend on the request, so equality says something.
    assert result["against_stock"]["distinct_answers"] >= 15
    assert result["memory"][0]["last_mib"] > 0
    assert result["store_metrics"] == ["spaceserve:fake_requests 60"]


def test_soak_finds_unequal_answers_and_growth() -> None:
    from servebench.client import RequestRecord

    ours = [RequestRecord(i, 0.0, text=f"a{i}") for i in range(4)]
    stock = [RequestRecord(0, 0.0, text="a1"), RequestRecord(1, 0.0, text="other")]
    found = soak.compare(ours, stock, [1, 3])
    assert (found["equal"], found["unequal"][0]["request"]) == (1, 3)
    mib = 2**20
    samples = [(float(n), n, {1: (100 + n) * mib, 2: 50 * mib}) for n in range(0, 101, 10)]
    rows = {row["pid"]: row for row in soak.memory_growth(samples, {1: "grows", 2: "flat"}, 100, 20)}
    assert rows[1]["growth_mib"] == pytest.approx(75, abs=1)
    assert rows[1]["late_growth_mib"] == pytest.approx(20, abs=1)
    assert rows[1]["by_window_mib"] == [105, 125, 145, 165, 185]
    assert rows[2]["growth_mib"] == rows[2]["late_growth_mib"] == 0


def test_scripts_show_their_help() -> None:
    for script in (
        "serve_bench.py",
        "bound.py",
        "soak.py",
        "timeline.py",
        "timeline_record.py",
        "dummy_model.py",
        "correctness.py",
        "tp_smoke.py",
        "host_tier.py",
    ):
        done = subprocess.run(
            [sys.executable, str(BENCHMARK / script), "--help"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "usage" in done.stdout
