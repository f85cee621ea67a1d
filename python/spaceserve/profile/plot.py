"""Curves as a PNG: latency of encoder batch, decode step and prefill chunk over units."""

from __future__ import annotations

from pathlib import Path

from spaceserve.sis.curves import DeviceCurves


def plot_curves(curves: DeviceCurves, file: str | Path) -> None:
    """Writes a PNG with three panels. Raises ValueError where matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from error

    figure, panels = pyplot.subplots(1, 3, figsize=(15, 4.5), constrained_layout=True)
    linear = {name: curves.curves[f"{name}_linear"] for name in ("encoder", "decode", "prefill")}
    contexts = curves.curves["decode_attention"].y
    context = contexts[len(contexts) // 2]
    for panel, phase, title in zip(
        panels,
        ("encoder", "decode", "prefill"),
        ("encoder, one image", f"decode step, {context:g} tokens of context", "prefill chunk, no prefix"),
        strict=True,
    ):
        units = linear[phase].units
        for size in linear[phase].x:
            n = int(size)
            ms = [
                curves.at(u).encoder_batch_ms([n])
                if phase == "encoder"
                else curves.at(u).decode_step_ms(n, context)
                if phase == "decode"
                else curves.at(u).prefill_chunk_ms(n, 0)
                for u in units
            ]
            label = {"encoder": f"{n} patches", "decode": f"batch {n}", "prefill": f"{n} tokens"}[phase]
            panel.plot(units, ms, marker="o", markersize=3, label=label)
        panel.set_xlabel({"sm": "SMs", "core": "cores"}.get(curves.unit_kind, curves.unit_kind))
        panel.set_ylabel("ms")
        panel.set_yscale("log")
        panel.set_title(title)
        panel.grid(True, which="both", alpha=0.3)
        panel.legend(fontsize=7)
    figure.suptitle(f"{curves.device_name}, {curves.total_units} units, {curves.source}")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
