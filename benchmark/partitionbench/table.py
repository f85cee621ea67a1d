"""Prints what the sections found."""

from __future__ import annotations

from collections.abc import Callable

from partitionbench.gpu import MLP_WIDTH, Json, failures, guarded


def print_table(report: Json) -> None:
    print(f"\ngpu_partition: {report['wall_s']} s, commit {report['commit'][:12]}")
    for section, lines_of in TABLES.items():
        if section not in report:
            continue
        result = report[section]
        print(f"\n== {section} ({result['section_s']} s)")
        for text in failures(result):
            print(f"FAILED {text.strip().splitlines()[0]}")
        if "failed" in result:
            continue
        lines = guarded(lambda lines_of=lines_of, result=result: {"lines": lines_of(result)})
        for line in lines.get("lines", [f"(table incomplete: {lines.get('failed')})"]):
            print(line)


def confine_lines(result: Json) -> list[str]:
    rungs, kernels = result["rungs"], result["kernels"]
    lines = [
        f"{result['versions']['gpu']}, torch {result['versions']['torch']}, rungs {result['versions']['rungs']}",
        f"{result['num_green_contexts']} green contexts in {result['make_all_groups_ms']:.0f} ms",
        f"granted = seen, disjoint, complete for every rung: {rungs.get('holds_for_every_rung')}; "
        f"larger groups contain smaller: {rungs.get('groups_are_nested')}",
    ]
    lines += [f"  {r}" for r in rungs.get("rows", []) if r["granted"] != r["seen"] or not r["disjoint"]]
    for row in kernels.get("rows", []):
        if "own_full_ms" in row:
            lines.append(
                f"{row['kernel']:<44} alone {row['alone_ms']:.3f} ms, others full {row['others_full_ms']:.3f}, own "
                f"full {row['own_full_ms']:.2f} (30 occupied): needs no other SM {row['needs_no_other_sm']}, "
                f"waits for its own {row['waits_for_own_sms']}, occupier complete {row['occupied_fully']}"
            )
    return lines


def switch_lines(result: Json) -> list[str]:
    lines = []
    cost, graphs = result["cost"], result["graphs"]
    if "failed" not in cost:
        lines.append(
            f"switch per layer: device {cost['switch_device_us']:.1f} us (layer {cost['layer_us']:.0f} us), submit "
            f"{cost['switch_submit_us']:.1f} us; make_current {cost['make_current_host_us']:.1f} us, activate and "
            f"leave {cost['activate_and_leave_host_us']:.1f} us of host time"
        )
    if "failed" not in graphs:
        lines.append(f"graph nodes keep the group of their capture: {graphs['nodes_keep_the_group_of_capture']}")
        lines += [
            f"  captured on {row['captured_sms']}, replayed on {row['replayed_on']}: {row['seen']} SMs seen, blocks "
            f"missing after a wait for the device {row['blocks_missing_after_device_wait']}, for the stream "
            f"{row['blocks_missing_after_stream_wait']}"
            for row in graphs["rows"]
            if not row["same_as_captured"] or row["blocks_missing_after_device_wait"]
        ]
        lines.append("  GEMM ms: " + ", ".join(f"{name} {ms:.3f}" for name, ms in graphs["gemm_ms"].items()))
    for row in result["memory"].get("rows", []):
        lines.append(f"first product on rung {row['rung']}: {row['device_bytes'] / 2**20:.0f} MiB of device memory")
    return lines


def kernels_lines(result: Json) -> list[str]:
    lines = ["GEMM K=1280, ms over SMs (efficiency against all SMs):"]
    shown = (32, 56, 60, 64, 68, 72, 76, 96, 132)
    rows = [row for row in result["gemm"].get("rows", []) if "ms" in row]
    for m, n in sorted({(row["m"], row["n"]) for row in rows}):
        cells = {row["sms"]: row for row in rows if (row["m"], row["n"]) == (m, n)}
        parts = [f"{s}: {cells[s]['ms']:.3f} ({cells[s]['efficiency']:.2f})" for s in shown if s in cells]
        lines.append(f"  {m}x{n}: " + ", ".join(parts))
    for row in result["linear_carveout"].get("rows", []):
        lines.append(
            f"  {row['call']:<12} {row['m']}x{MLP_WIDTH} in {row['sms']}: {row['plain_ms']:.3f} ms, SM target told "
            f"{row['told_ms']:.3f} ms"
        )
    for row in result["attention"].get("rows", []):
        if "ms" in row and row["sms"] in shown:
            margin = f", sm_margin {row['sm_margin_ms']:.3f}" if "sm_margin_ms" in row else ""
            lines.append(f"  {row['kernel']} {row['patches']} in {row['sms']}: {row['ms']:.3f} ms{margin}")
    return lines


def interfere_lines(result: Json) -> list[str]:
    mps = result.get("mps", {})
    lines = [f"daemon ended: {result.get('daemon_ended')}, MPS servers: {result.get('num_mps_servers')}"]
    for name, places in mps.get("decoder_alone", {}).items():
        cells = ", ".join(f"{where} {timed['median_ms']:.3f}" for where, timed in places.items())
        lines.append(f"{name} alone, ms: {cells}")
    lines.append("decoder's time over alone on all SMs (over alone on the complement); encoder's rate over alone:")
    rows = mps.get("rows", [])
    for row in rows:
        if "times_alone_on_all" not in row:
            continue
        on_complement = row.get("times_alone_on_complement")
        cell = "       " if on_complement is None else f"({on_complement:5.2f})"
        lines.append(
            f"  {row['decoder']:<12} beside {row['encoder']:<17} {row['mode']:<19} {row['times_alone_on_all']:6.2f} "
            f"{cell}  p99 {row['timed']['p99_ms']:.3f} ms, encoder {row['encoder_share_of_alone']:.2f}"
        )
    if left_out := sum("left_out" in row for row in rows):
        lines.append(f"  {left_out} arms left out: the budget was spent")
    for where, arm in result.get("time_sliced", {}).items():
        if isinstance(arm, dict) and "timed" in arm:
            lines.append(f"no MPS, encoder's large products on {where}: decode_gemm {arm['timed']['median_ms']:.3f} ms")
    return lines


TABLES: dict[str, Callable[[Json], list[str]]] = {
    "confine": confine_lines,
    "switch": switch_lines,
    "kernels": kernels_lines,
    "interfere": interfere_lines,
}
