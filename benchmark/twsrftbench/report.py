"""Tables and plots of the simulation's rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from twsrftbench.simulation import CLASSES, SIDE_SHARES, patches_of

COLOURS = {"fcfs": "tab:red", "srf": "tab:green", "twsrft": "tab:blue", "slack": "tab:orange"}


def arm_name(row: dict[str, Any]) -> str:
    return f"{row['policy']} {row['window_ms']:g} ms" if row["window_ms"] else str(row["policy"])


def table(rows: list[dict[str, Any]], columns: Sequence[str]) -> Iterator[str]:
    """Markdown: mean / p99 by class, largest wait, one row a setting."""
    names = [*CLASSES, "all"]
    yield "| " + " | ".join([*columns, *(f"{name}: mean / p99" for name in names), "longest wait"]) + " |"
    yield "|" + "---|" * (len(columns) + len(names) + 1)
    for row in rows:
        cells = [arm_name(row) if column == "policy" else str(row[column]) for column in columns]
        for name in names:
            cells.append(f"{row['classes'][name]['mean_ms']:,.0f} / {row['classes'][name]['p99_ms']:,.0f}")
        cells.append(f"{row['classes']['all']['max_ms']:,.0f}")
        yield "| " + " | ".join(cells) + " |"


def plot_sizes(rows: list[dict[str, Any]], path: Path, loads: Sequence[float], window_ms: float) -> None:
    """Completion latency by image size: mean (solid) and p99 (dashed) for each policy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sides = {patches_of(side): side for side in SIDE_SHARES}
    figure, axes = plt.subplots(2, len(loads), figsize=(4 * len(loads), 7), sharex=True, squeeze=False)
    for axes_row, kind in zip(axes, ("poisson", "bursty"), strict=True):
        for axis, load in zip(axes_row, loads, strict=True):
            for policy, colour in COLOURS.items():
                row = next(
                    r
                    for r in rows
                    if (r["kind"], r["load"], r["policy"]) == (kind, load, policy)
                    and r["window_ms"] in (0.0, window_ms)
                )
                x = [sides[int(size)] for size in row["sizes"]]
                for what, style in (("mean_ms", "-"), ("p99_ms", "--")):
                    y = [values[what] for values in row["sizes"].values()]
                    label = arm_name(row) if style == "-" else None
                    axis.plot(x, y, style, color=colour, marker=".", label=label)
            axis.set(title=f"{kind}, load {load}", yscale="log", xscale="log")
            axis.set_xticks(list(sides.values()), [str(side) for side in sides.values()], rotation=45)
            axis.minorticks_off()
            axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("image side (px)")
    for axis in axes[:, 0]:
        axis.set_ylabel("arrival to features (ms)\nsolid mean, dashed p99")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def plot_windows(rows: list[dict[str, Any]], path: Path, loads: Sequence[float]) -> None:
    """Mean of the small class and p99 of the large one over the window; FCFS and SRF are the ends of the axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    small, _, large = CLASSES
    ladder = sorted({row["window_ms"] for row in rows if row["window_ms"]})
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), sharex=True)
    for axes_row, kind in zip(axes, ("poisson", "bursty"), strict=True):
        for axis, (name, what) in zip(axes_row, ((small, "mean_ms"), (large, "p99_ms")), strict=True):
            for shade, load in enumerate(loads):
                by_arm = {arm_name(r): r for r in rows if (r["kind"], r["load"]) == (kind, load)}
                for policy, style in (("twsrft", "-"), ("slack", "--")):
                    names = ["fcfs", *(f"{policy} {window_ms:g} ms" for window_ms in ladder), "srf"]
                    x = [i for i, arm in enumerate(names) if arm in by_arm]
                    y = [by_arm[names[i]]["classes"][name][what] for i in x]
                    label = f"{policy}, load {load}"
                    axis.plot(x, y, style, color=f"C{shade}", marker=".", label=label)
            axis.set(title=f"{kind}: {name}, {what.removesuffix('_ms')}", yscale="log", ylabel="ms")
            axis.set_xticks(range(len(ladder) + 2), ["fcfs", *(f"{w:g} ms" for w in ladder), "srf"], rotation=45)
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
