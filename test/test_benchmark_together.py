"""Servers of several arms up at once, on scripted servers; the plan, the short tables and the memory items."""

from __future__ import annotations

import contextlib
import json
import tarfile
from pathlib import Path
from typing import Any

import psutil
import pytest

import serve_bench
from scripted_sessions import config, fake_arm, fake_server_is_importable  # noqa: F401 - a fixture
from servebench import headline, kept, memory, plan
from servebench.arms import Arm, ServerSpec
from servebench.matrix import SETS, Entry
from servebench.results import DONE, FAILED, Results, SliceKey
from servebench.together import TogetherSession
from servebench.workload import Workload

pytestmark = pytest.mark.cpu


OURS = fake_arm("spaceserve", "--tpot-ms 1", ours=True)
STOCK = fake_arm("stock", "--tpot-ms 2")
MIXED = fake_arm("stock-mixed", "--tpot-ms 3")


def requests_seen(arm: dict[str, Any]) -> int:
    return int(arm["server"]["metrics"][0].split()[-1])


def leftover() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is none
            if "fake_server" in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_one_start_serves_all_and_relative_rates_follow_in_the_same_call(tmp_path: Path) -> None:
    texts = ["sat:224x30=stock,stock-mixed", "fixed:224@0.5Sx6", "text@50x5", "mix@0.5Sx5"]
    packed: list[int] = []
    session = TogetherSession(
        config(tmp_path), [OURS, MIXED, STOCK], [Entry.parse(text) for text in texts], lambda: packed.append(1), {}
    )
    jobs = session.run()
    assert not session.failures
    assert leftover() == []
    # The mix's S was not measured: left out, the rest runs.
    assert [job.workload.name for job in jobs] == ["sat:224x30", "fixed:224@0.5Sx6", "text@50x5"]
    assert len(packed) == 3
    slices = {data["workload"]: data for data in Results(tmp_path / "results").slices()}
    saturation, fixed, text = (slices[name] for name in ("sat:224x30", "fixed:224@0.5Sx6", "text@50x5"))
    assert [arm["arm"] for arm in saturation["arms"]] == ["stock-mixed", "stock"]
    best = max(arm["summary"]["saturation_rate"] for arm in saturation["arms"])
    assert fixed["trace"]["rate"] == pytest.approx(0.5 * best, rel=1e-3)
    assert [arm["arm"] for arm in fixed["arms"]] == ["spaceserve", "stock-mixed", "stock"]
    for data in slices.values():
        assert data["status"] == DONE
        assert data["servers_up_together"] == ["spaceserve", "stock", "stock-mixed"]
        for arm in data["arms"]:
            assert arm["summary"]["num_failed"] == 0
            assert arm["start_s"] > 0
            assert len(arm["memory_after"]["others_up"]) == 2
            assert arm["memory_after"]["host_processes"]
    # One text and two images, each alone and in a group, once for each server, however many workloads have them.
    ours, stock = (next(arm for arm in text["arms"] if arm["arm"] == name) for name in ("spaceserve", "stock"))
    assert requests_seen(ours) == 6 + 6 + 5
    assert requests_seen(stock) == 6 + 30 + 6 + 5
    again = TogetherSession(config(tmp_path), [OURS, MIXED, STOCK], [Entry.parse(text) for text in texts], expected={})
    assert [entry.workload.name for entry in again.missing()] == ["mix@0.5Sx5"]


def test_an_arm_that_does_not_start_leaves_the_others_to_run(tmp_path: Path) -> None:
    broken = Arm("stock", (ServerSpec("server", "{python} -c 'raise SystemExit(7)'"),), ours=False)
    session = TogetherSession(config(tmp_path), [OURS, MIXED, broken], [Workload.parse("text@50x3")])
    session.run()
    assert session.failures == ["stock: server exited with 7"]
    (data,) = Results(tmp_path / "results").slices()
    assert [arm["arm"] for arm in data["arms"]] == ["spaceserve", "stock-mixed"]
    # The arm that is missing is what a later call runs, on the same trace.
    later = TogetherSession(config(tmp_path), [OURS, MIXED, STOCK], [Workload.parse("text@50x3")])
    assert later.missing() == [Entry(Workload.parse("text@50x3"), ("stock",))]
    later.run()
    digests = {data["trace"]["sha256"] for data in Results(tmp_path / "results").slices()}
    assert len(digests) == 1
    assert later.missing() == []


def test_an_arm_that_dies_fails_its_slice_and_is_left_out_of_the_rest(tmp_path: Path) -> None:
    dying = fake_arm("stock", "--die-at 3")
    texts = ["text@40x3", "text@60x3"]
    session = TogetherSession(config(tmp_path), [OURS, MIXED, dying], [Entry.parse(text) for text in texts])
    session.run()
    results = Results(tmp_path / "results")
    assert [data["workload"] for data in results.slices(FAILED)] == ["text@40x3"]
    assert [[arm["arm"] for arm in data["arms"]] for data in results.slices()] == [["spaceserve", "stock-mixed"]]
    assert len(session.failures) == 1
    assert leftover() == []


def test_servers_that_are_kept_serve_the_next_call(tmp_path: Path) -> None:
    names = tmp_path / "up" / "servers.json"
    names.parent.mkdir()

    def session(arms: list[Arm], text: str) -> TogetherSession:
        made = TogetherSession(config(tmp_path), arms, [Workload.parse(text)], kept=names)
        made.run()
        assert not made.failures
        return made

    try:
        session([OURS, STOCK], "text@50x3")
        first = {p.pid for p in leftover()}
        assert len(first) == 2
        # Of the two that run one is asked for with other flags, and takes the place of the old one.
        session([OURS, fake_arm("stock", "--tpot-ms 1")], "text@60x3")
        second = {p.pid for p in leftover()}
        assert (len(second), len(second - first)) == (2, 1)
        # What a call does not need is not forgotten.
        session([MIXED], "text@80x3")
        assert set(json.loads(names.read_text())) == {"spaceserve", "stock", "stock-mixed"}
        (text,) = [data for data in Results(tmp_path / "results").slices() if data["workload"] == "text@60x3"]
        assert requests_seen(text["arms"][0]) == 2 + 3 + 2 + 3
        assert requests_seen(text["arms"][1]) == 2 + 3
        mps = Arm("stock-mps", STOCK.servers, ours=False, needs_mps=True)
        refused = TogetherSession(config(tmp_path), [mps], [Workload.parse("text@70x3")], kept=names)
        with pytest.raises(ValueError, match="MPS"):
            refused.run()
    finally:
        assert kept.stop_all(names) == 3
        for process in leftover():
            process.kill()
            process.wait()
    assert not names.exists()
    assert kept.stop_all(names) == 0


def test_less_time_means_fewer_arms_before_none(tmp_path: Path) -> None:
    session = TogetherSession(config(tmp_path), [OURS, MIXED, STOCK], [])
    names, sizes = ("spaceserve", "stock-mixed", "stock"), [(224, 224)]
    assert session._fitting(names, sizes, 10.0, 40.0) == names
    assert session._fitting(names, sizes, 10.0, 30.0) == ("spaceserve", "stock-mixed")
    assert session._fitting(names, sizes, 10.0, 20.0) == ()
    assert session._fitting(("stock-mixed", "stock"), sizes, 10.0, 20.0) == ("stock-mixed",)
    for name in names:
        session._warm_sizes[name] = set(sizes)
    assert session._fitting(names, sizes, 10.0, 30.0) == names


def test_the_plan_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rate = Workload.parse("fixed:2048@0.5S")
    assert plan.replay_s(rate, 2.0) == pytest.approx(200 + plan.TAIL_S + plan.OVERHEAD_S)
    # Beyond saturation the answers take longer than the arrivals.
    assert plan.replay_s(Workload.parse("fixed:2048@2S"), 2.0) == pytest.approx(100 + plan.TAIL_S + plan.OVERHEAD_S)
    assert plan.replay_s(Workload.parse("sat:2048"), 2.0) == pytest.approx(40 + plan.OVERHEAD_S)
    lines, total = plan.plan_lines([Entry(rate)], ("a", "b"), {"2048": 2.0}, 60.0)
    assert total == pytest.approx(60 + 2 * (208 + plan.WARMUP_S_PER_SIZE) + plan.STOP_S)
    assert len(lines) == 2
    assert plan.expected_rates(["2048=3"])["2048"] == 3.0
    with pytest.raises(ValueError, match="SIZE=RATE"):
        plan.expected_rates(["2048"])
    arguments = ["--results", str(tmp_path), "--model-name", "m", "--set", "headline", "--together"]
    assert serve_bench.main(["plan", *arguments]) == 0
    out = capsys.readouterr().out
    assert all(Entry.parse(text).workload.name in out for text in SETS["headline"][0].workloads)
    assert "s with the stop" in out


def test_the_command_line_wants_equal_kv_caches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", "--model", "m", "--results", str(tmp_path), "--set", "headline", "--together"]
    with pytest.raises(SystemExit):
        serve_bench.main(command)
    assert "--max-total-tokens" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no arm"):
        Entry.parse("text@1=")
    cut = serve_bench.cut_entry(Entry.parse("sat:2048=stock"), 6)
    assert cut.name == "sat:2048x6=stock"
    assert serve_bench.within(Entry.parse("text@1=stock,b"), {"b"}) == Entry.parse("text@1=b")
    assert serve_bench.within(Entry.parse("text@1=stock"), {"b"}) is None


def test_the_bundle_is_whole_after_every_slice(tmp_path: Path) -> None:
    results = Results(tmp_path / "results")
    for number in range(2):
        results.save_slice(SliceKey("m", f"text@{number + 1}", ("stock",), 0), {"status": DONE, "arms": []})
        results.bundle(tmp_path / "bundle.tgz")
        with tarfile.open(tmp_path / "bundle.tgz") as archive:
            assert len(archive.getnames()) == number + 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


LOG = """
[2026-01-01 00:00:00] Load weight end. elapsed=9.10 s, type=Qwen2VL, avail mem=123.01 GB, mem usage=15.57 GB.
[2026-01-01 00:00:01] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 200000, K size: 5.34 GB, V size: 5.34 GB
[2026-01-01 00:00:02] Capture decode CUDA graph end. elapsed=3.00 s, mem usage=0.90 GB, avail mem=90.00 GB.
[2026-01-01 00:00:02] Capture prefill CUDA graph end. elapsed=3.00 s, mem usage=0.10 GB, avail mem=89.90 GB.
[2026-01-01 00:00:03 encoder] Encoder worker ready: 675.8 M parameters, features of 3584 x torch.bfloat16, \
store of 299584 tokens (2.15 GB), 0.00 GB in host memory, batches of 65536 patches, 8 preprocessing threads
"""


def arm_with_memory(name: str, *, others: list[str], own: bool = True) -> dict[str, Any]:
    processes = [
        {"pid": 1, "name": "sglang::scheduler", "mib": 30720, "own": True},
        {"pid": 2, "name": "spaceserve::encoder", "mib": 6144, "own": own},
        {"pid": 3, "name": "other", "mib": 51200, "own": False},
    ]
    after = {"gpu_used_mib": 90000, "gpu_processes": processes if own else processes[2:], "others_up": others}
    log = memory.parse_log(LOG.replace("\\\n", ""))
    return {"arm": name, "ours": True, "summary": {}, "memory_after": after, "server": {"log": log}}


def test_memory_is_itemised_and_says_where_servers_were_together() -> None:
    figures = memory.parse_log(LOG.replace("\\\n", ""))
    assert figures == {
        "weights": 15.57,
        "kv_tokens": 200000,
        "kv": pytest.approx(10.68),
        "graphs": 1.0,
        "encoder_weights": 1.26,
        "slab": 2.0,
    }
    alone = memory.items(arm_with_memory("spaceserve", others=[]), together=False)
    assert alone["total"] == 36.0
    assert alone["rest"] == pytest.approx(36 - 15.57 - 10.68 - 1 - 1.26 - 2, abs=0.011)
    shared = memory.items(arm_with_memory("spaceserve", others=["stock"]), together=True)
    assert "weights" not in shared
    assert shared["rest"] == pytest.approx(36 - 10.68 - 1.26 - 2, abs=0.011)
    # Where the driver hides processes, a total that holds other servers is no figure of this arm.
    assert memory.gpu_mib(arm_with_memory("a", others=["b"], own=False)) is None
    assert memory.gpu_mib(arm_with_memory("a", others=[], own=False)) == 90000
    arms = [arm_with_memory("spaceserve", others=["stock"])]
    later = {"model": "m", "workload": "text@10", "session": "2", "servers_up_together": ["spaceserve"], "arms": arms}
    first = {**later, "session": "1", "servers_up_together": [], "arms": [arm_with_memory("spaceserve", others=[])]}
    assert "up together" in "\n".join(memory.memory_lines([later]))
    # A slice that had the GPU to itself says more than a later one that had not.
    assert "alone on the GPU" in "\n".join(memory.memory_lines([first, later]))
    assert "weights 15.57" in "\n".join(memory.memory_lines([first, later]))


def test_memory_beyond_stock_is_named() -> None:
    ours, stock = arm_with_memory("spaceserve", others=["stock"]), arm_with_memory("stock", others=["spaceserve"])
    ours["server"]["encoder_gpu_memory"] = {"reserved_bytes": int(5.5 * 2**30), "allocated_bytes": 4 << 30}
    stock["ours"] = False
    stock["memory_after"] = {"gpu_processes": [{"pid": 4, "name": "sglang::scheduler", "mib": 33 * 1024, "own": True}]}
    data = {"model": "m", "workload": "text@10", "session": "1", "servers_up_together": [], "arms": [ours, stock]}
    figures = memory.items(ours, together=True)
    assert figures["encoder_workspace"] == pytest.approx(5.5 - 1.26 - 2.0)
    assert figures["encoder_context"] == 0.5
    (line,) = memory.beyond_stock([data])
    assert line == (
        "spaceserve beyond stock: 3.00 GiB: slab 2.00, encoder workspace 2.24, encoder context 0.50, rest -1.74 "
        "(after text@10)"
    )
    assert line in memory.memory_lines([data])
    stock["server"]["log"]["kv_tokens"] = 100.0
    assert not [*memory.beyond_stock([data])], "another size of the KV cache"


def save(results: Results, workload: str, rate: float, **arms: dict[str, Any]) -> None:
    rows: list[dict[str, Any]] = [
        {"arm": name.replace("_", "-"), "ours": name.startswith("space"), "summary": figures, "requests": []}
        for name, figures in arms.items()
    ]
    data = {
        "status": DONE,
        "model": "qwen2-vl-7b",
        "workload": workload,
        "repeat": 0,
        "trace": {"rate": rate},
        "arms": rows,
    }
    results.save_slice(SliceKey("qwen2-vl-7b", workload, tuple(row["arm"] for row in rows), 0), data)


def test_the_short_table_has_every_arm_with_its_ratios_and_the_bound(tmp_path: Path) -> None:
    results = Results(tmp_path)

    def figures(tpot: float, gap: float, ttft: float, good: float) -> dict[str, float]:
        base = {"offered_rate": 2.0, "served_rate": 1.9, "goodput_ttft5000_tpot15": good}
        return {**base, "tpot_mean_ms": tpot, "longest_gap_ms": gap, "ttft_mean_ms": ttft}

    save(results, "text@10", 10.0, spaceserve=figures(6, 40, 40, 9), stock_mixed=figures(5, 35, 38, 9))
    ours, mixed = figures(7, 180, 900, 1.9), figures(20, 400, 800, 0.5)
    save(results, "fixed:2048@1.2S", 3.0, spaceserve=ours, stock_mixed=mixed)
    save(results, "fixed:2048@0.7S", 2.0, spaceserve=figures(6, 180, 900, 1.9), stock_mixed=mixed)
    save(results, "fixed:2048@0.7S", 2.0, stock=figures(40, 900, 700, 0.2))
    save(results, "sat:2048", 0.0, stock={"saturation_rate": 2.6}, spaceserve={"saturation_rate": 3.1})
    (tmp_path / "bounds").mkdir()
    cost = {"encode_ms": 251.0, "prefill_ms": 130.0}
    bounds = {"arm": "curves", "measured": True, "sizes": {"2048": cost}, "decode_step_ms": {"1": 5.0, "16": 5.4}}
    (tmp_path / "bounds" / "qwen2-vl-7b__curves.json").write_text(json.dumps(bounds))
    lines = headline.headline_lines(results, "qwen2-vl-7b")
    assert max(map(len, lines)) <= headline.WIDTH
    by_arm = {(line.split()[0], line.split()[1]): line for line in lines}
    line = by_arm["fixed:2048@0.7S", "spaceserve"]
    # TPOT 6 over the better stock's text-only 5; TTFT 900 over the 700 that the other slice of this trace has.
    assert line.split()[3:] == ["2.00/1.90", "6.00", "1.20", "0.180", "0.900", "1.29", "1.90", "3.80", "MISSED", "ttft"]
    assert by_arm["fixed:2048@1.2S", "spaceserve"].split()[-1] == "met"
    assert by_arm["sat:2048", "spaceserve"].split()[3:5] == ["S", "3.10"]
    assert by_arm["sat:2048", "spaceserve"].split()[-1] == "met"
    assert "MISSED" in by_arm["text@10", "spaceserve"]
    assert not by_arm["fixed:2048@0.7S", "stock-mixed"].rstrip().endswith(("met", "ttft"))
    assert "1/(E+P) 2.62/s: at 2.00/s TPOT >= 5." in "\n".join(lines)
    assert "3.00/s is beyond it" in "\n".join(lines)


def test_shipped_curves_give_a_bound_for_their_gpu_and_model(tmp_path: Path) -> None:
    import dummy_model
    from spaceserve.sis.curves import DeviceCurves, shipped_files

    curves = DeviceCurves.load(shipped_files()[0])
    model = tmp_path / "qwen2-vl-7b"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(dummy_model.model_config(dummy_model.SHAPES["qwen2-vl-7b"])))
    results = Results(tmp_path / "results")
    assert not headline.store_shipped_bound(results, "qwen2-vl-7b", ["another GPU"], model)
    assert not headline.store_shipped_bound(results, "qwen2-vl", [curves.device_name])
    assert headline.store_shipped_bound(results, "qwen2-vl-7b", [curves.device_name], model)
    stored = json.loads((tmp_path / "results/bounds/qwen2-vl-7b__curves.json").read_text())
    assert 1e3 / (stored["sizes"]["2048"]["encode_ms"] + stored["sizes"]["2048"]["prefill_ms"]) < 10
    assert results.written
