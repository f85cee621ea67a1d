"""SIS against every static split and against no mask, simulated on a changing load. No GPU: times come from curves.

    python benchmark/evaluate_sis.py --out results/ [--curves F.json ...] [--topologies 8 16 32 64 108 132]

What is simulated. One encoder works through its batches (each batch is the images waiting, up to a patch budget) and
one decoder through its steps, both at once, each at the speed that the curves give for the split in force and for
whether the other side is busy. Requests arrive by a Poisson process whose rate and image size change in segments
(light text, small images, large images, burst, decode-heavy); after its image is encoded a request decodes its
tokens. Prefill is left out (it is the same for every arm). The same arrivals serve every arm.

Arms: SIS with each objective, every static rung, and "no mask" (both sides on the whole device, where the decoder
is slowed by what the curves' profile measured, or else by `--unmasked-slowdown`, measured for a bandwidth-bound kernel
on an H200: 1.79 ms against 0.21 ms alone, and taken here for a whole decode step).

What this can show: how near the policy comes to the best static choice when the curves are right. To see what wrong
curves cost, `--error` multiplies the true times of each (side, rung) by a log-normal factor that SIS does not know;
its online correction then has to find it. It is a simulation: the figures say nothing about a real device.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from spaceserve.sis import DeviceCurves, GpuState, SpaceInferenceScheduler, estimate_curves
from spaceserve.sis.policy import MaskMode, Objective
from spaceserve.sis.roofline import KNOWN_DEVICES, DeviceSpec
from spaceserve.sis.shapes import QWEN2_VL_7B
from spaceserve.sis.standin import standin_curves


@dataclass(frozen=True)
class Segment:
    name: str
    duration_s: float
    requests_per_s: float  # on the reference device (132 SMs); scaled with a topology's size
    patches: tuple[int, ...]
    output_tokens: int


LOAD = (
    Segment("small images", 8.0, 9.0, (1024, 5329), 128),
    Segment("large images", 10.0, 1.6, (21316,), 128),
    Segment("decode-heavy", 8.0, 6.0, (1024,), 512),
    Segment("burst", 4.0, 16.0, (5329,), 64),
    Segment("mixed", 10.0, 3.5, (1024, 5329, 21316), 256),
)


@dataclass
class Request:
    arrival_ms: float
    patches: int
    tokens_left: int
    segment: int
    context: float
    encoded_ms: float = 0.0
    first_ms: float = 0.0
    finish_ms: float = 0.0
    tokens: int = 0


def arrivals(load: Sequence[Segment], scale: float, seed: int) -> list[Request]:
    rng = random.Random(seed)
    found, start = [], 0.0
    for i, segment in enumerate(load):
        t = start
        while True:
            t += rng.expovariate(segment.requests_per_s * scale) * 1e3
            if t >= start + segment.duration_s * 1e3:
                break
            patches = rng.choice(segment.patches)
            context = 100 + patches / 4
            found.append(Request(t, patches, segment.output_tokens, i, context, tokens=segment.output_tokens))
        start += segment.duration_s * 1e3
    return found


Choose = Callable[[GpuState, float], int]  # state and progress -> encoder units; progress < 0: a new batch


@dataclass
class Arm:
    name: str
    choose: Choose
    sis: SpaceInferenceScheduler | None = None
    switch_cost_ms: float = 0.05


class Device:
    """True times: the curves times a hidden error of each side and rung."""

    def __init__(self, curves: DeviceCurves, mask_mode: str, unmasked_slowdown: float, error: float, seed: int) -> None:
        self.curves, self.suffix = curves, "masked" if mask_mode == "both" else "unmasked"
        self.unmasked_slowdown = unmasked_slowdown
        rng = random.Random(seed + 1)
        units = range(1, curves.total_units + 1)
        self.error = {(side, n): math.exp(rng.gauss(0, error)) for side in ("encoder", "decode") for n in units}

    def encoder_ms(self, units: int, patches: Sequence[int], beside: bool) -> float:
        total = self.curves.total_units
        factor = self.curves.contention_factor(f"encoder_beside_decode_{self.suffix}", units) if beside else 1.0
        return self.curves.at(min(units, total)).encoder_batch_ms(patches) * factor * self.error[("encoder", units)]

    def decode_ms(self, encoder_units: int, batch: int, context: float, beside: bool) -> float:
        total = self.curves.total_units
        if not beside:
            return self.curves.at(total).decode_step_ms(batch, context) * self.error[("decode", total)]
        if encoder_units == total:
            case = "decode_beside_encoder_unmasked"
            measured = self.curves.contention_factor(case, total) if self.curves.has_contention(case, total) else None
            return self.curves.at(total).decode_step_ms(batch, context) * (measured or self.unmasked_slowdown)
        step = self.curves.at(total - encoder_units).decode_step_ms(batch, context)
        factor = self.curves.contention_factor(f"decode_beside_encoder_{self.suffix}", encoder_units)
        return step * factor * self.error[("decode", encoder_units)]


def simulate(
    arm: Arm, device: Device, requests: Sequence[Request], max_batch_patches: int, layers: int = 32
) -> tuple[list[Request], int]:
    """Runs every request to its end; returns them with their times, and the number of switches within batches.

    Events are the ends of encoder layers and of decode steps. A step or a layer keeps the speed at which it began.
    """
    pending = [replace(r) for r in sorted(requests, key=lambda r: r.arrival_ms)]
    done: list[Request] = []
    waiting: list[Request] = []
    running: list[Request] = []
    batch: list[Request] = []
    patches: tuple[int, ...] = ()
    now, next_layer, next_step = 0.0, math.inf, math.inf
    layer, units, switches, i = 0, 0, 0, 0
    layer_began = 0.0

    def state() -> GpuState:
        context = sum(r.context for r in running) / len(running) if running else 0.0
        return GpuState(
            encoder_patches=patches,
            decode_batch=len(running),
            mean_context_tokens=context,
            num_waiting=max(1, len(batch) + len(waiting)),
        )

    while i < len(pending) or waiting or running or batch:
        upcoming = pending[i].arrival_ms if i < len(pending) else math.inf
        # Idle sides start when there is work.
        if not batch and waiting:
            room = max_batch_patches
            while waiting and (not batch or waiting[0].patches <= room):
                room -= waiting[0].patches
                batch.append(waiting.pop(0))
            patches, layer = tuple(r.patches for r in batch), 0
            units = arm.choose(state(), -1.0)
            next_layer = now + device.encoder_ms(units, patches, bool(running)) / layers
            layer_began = now
        if running and next_step == math.inf:
            current = state()
            step = device.decode_ms(units, current.decode_batch, current.mean_context_tokens, bool(batch))
            next_step = now + step
            if arm.sis is not None and batch:
                split = arm.sis.last_decisions()[-1].split
                if split.raw_decode_ms and split.encoder_units == units:
                    raw = arm.sis.curves.at(device.curves.total_units - units or units)
                    raw_ms = raw.decode_step_ms(current.decode_batch, current.mean_context_tokens)
                    raw_ms *= device.curves.contention_factor(f"decode_beside_encoder_{device.suffix}", units)
                    # The state moved on since the decision: report the ratio at the state that was measured.
                    arm.sis.observe(split, measured_decode_ms=split.raw_decode_ms * step / raw_ms)
        now = min(upcoming, next_layer, next_step)
        if now == math.inf:
            break
        if now == upcoming:
            waiting.append(pending[i])
            i += 1
            continue
        if now == next_layer:
            layer += 1
            if arm.sis is not None and batch:
                split = arm.sis.last_decisions()[-1].split
                predicted = device.curves.at(units).encoder_batch_ms(patches) / layers
                beside = bool(split.raw_decode_ms)
                if beside:
                    predicted *= device.curves.contention_factor(f"encoder_beside_decode_{device.suffix}", units)
                if split.raw_encoder_ms and split.encoder_units == units and now > layer_began:
                    ratio = (now - layer_began) / predicted
                    arm.sis.observe(split, measured_encoder_ms=split.raw_encoder_ms * ratio)
            if layer == layers:
                for r in batch:
                    r.encoded_ms = now
                running += batch
                batch, patches, next_layer = [], (), math.inf
                arm.choose(state(), -1.0)
                continue
            chosen = arm.choose(state(), layer / layers)
            delay = arm.switch_cost_ms if chosen != units else 0.0
            switches += chosen != units
            units = chosen
            next_layer = now + delay + device.encoder_ms(units, patches, bool(running)) / layers
            layer_began = now + delay
            continue
        next_step = math.inf
        finished = []
        for r in running:
            # A request that joined inside the step waits for the next one.
            if r.encoded_ms > 0 and r.encoded_ms == now:
                continue
            r.tokens_left -= 1
            r.context += 1
            r.first_ms = r.first_ms or now
            if r.tokens_left == 0:
                r.finish_ms = now
                finished.append(r)
        done += finished
        running = [r for r in running if r.tokens_left > 0]
    return done, switches


def measures(done: Sequence[Request], load: Sequence[Segment], tpot_target_ms: float) -> dict[str, object]:
    """Mean TTFT and TPOT (ms), share of requests within the TPOT target, of all and of each segment."""

    def of(some: Sequence[Request]) -> dict[str, float]:
        tpot = [(r.finish_ms - r.first_ms) / max(1, r.tokens - 1) for r in some]
        ttft = [r.first_ms - r.arrival_ms for r in some]
        latency = [r.finish_ms - r.arrival_ms for r in some]
        return {
            "tpot_ms": statistics.fmean(tpot),
            "ttft_ms": statistics.fmean(ttft),
            "latency_ms": statistics.fmean(latency),
            "within_target": sum(t <= tpot_target_ms for t in tpot) / len(tpot),
            "num_requests": len(some),
        }

    by_segment = {s.name: [r for r in done if r.segment == i] for i, s in enumerate(load)}
    segments = {name: of(some) for name, some in by_segment.items() if some}
    return {"all": of(done), "segments": segments}


def arms_for(
    curves: DeviceCurves,
    rungs: Sequence[int],
    mask_mode: MaskMode,
    target_ms: float,
    switch_cost_us: float,
    weight: float,
) -> list[Arm]:
    def sis_arm(name: str, sis: SpaceInferenceScheduler, per_batch: bool = False) -> Arm:
        def choose(state: GpuState, progress: float) -> int:
            if progress >= 0 and per_batch:
                return sis.last_decisions()[-1].split.encoder_units
            split = sis.decide(state) if progress < 0 else sis.reconsider(state, progress)
            return split.encoder_units

        return Arm(name, choose, sis, switch_cost_us * 1e-3)

    def static_arm(units: int) -> Arm:
        return Arm(f"static:{units}", lambda state, progress: units)

    def make(objective: Objective, decode_weight: float = 1.0) -> SpaceInferenceScheduler:
        return SpaceInferenceScheduler(
            curves,
            rungs,
            objective,
            target_ms,
            mask_mode,
            switch_cost_us,
            decode_weight=decode_weight,
        )

    first = make("tpot")
    arms = [
        sis_arm("sis:least_delay", make("least_delay")),
        sis_arm("sis:delay, per batch", make("least_delay"), per_batch=True),
        sis_arm("sis:least_time", make("least_time")),
        sis_arm(f"sis:least_time,w={weight:g}", make("least_time", decode_weight=weight)),
        sis_arm(f"sis:w={weight:g}, per batch", make("least_time", decode_weight=weight), per_batch=True),
        sis_arm("sis:tpot", first),
        sis_arm("sis:tpot, per batch", make("tpot"), per_batch=True),
    ]
    # A static mask stays where it is, even while the decoder idles. An idle encoder leaves the decoder every SM.
    arms += [static_arm(n) for n in first.shared_rungs if n < rungs[-1]]
    arms.append(Arm("no mask", lambda state, progress: curves.total_units))
    return arms


def topology(num_sms: int) -> DeviceCurves:
    """Roofline curves of an H200 cut to `num_sms` SMs (bandwidth cut with them): simulated, no such device exists."""
    h200 = KNOWN_DEVICES["NVIDIA H200"]
    share = num_sms / h200.num_sms
    spec = DeviceSpec(
        name=f"simulated {num_sms} SMs",
        num_sms=num_sms,
        peak_flops=h200.peak_flops * share,
        peak_bandwidth=h200.peak_bandwidth * share,
    )
    curves = estimate_curves(QWEN2_VL_7B, spec, units=range(1, num_sms + 1))
    return replace(curves, min_decoder_units=min(20, max(1, num_sms // 8)), _slices={})


def evaluate(curves: DeviceCurves, options: argparse.Namespace) -> dict[str, object]:
    total = curves.total_units
    step = 8 if total >= 64 else 1 if total <= 8 else 2
    rungs = (*range(step, total, step), total)
    scale = total / 132 * options.load
    # A smaller device is a slower one: longer segments give it as many requests.
    load = tuple(replace(s, duration_s=s.duration_s * options.duration * 132 / total) for s in LOAD)
    requests = arrivals(load, scale, options.seed)
    device = Device(curves, options.mask_mode, options.unmasked_slowdown, options.error, options.seed)
    rows: dict[str, dict[str, object]] = {}
    cost, weight = options.switch_cost_us, options.decode_weight
    # A device with a fraction of the bandwidth cannot keep the target of a whole one.
    target_ms = options.tpot_target_ms * 132 / total
    for arm in arms_for(curves, rungs, options.mask_mode, target_ms, cost, weight):
        done, switches = simulate(arm, device, requests, options.max_batch_patches)
        assert len(done) == len(requests), (arm.name, len(done), len(requests))
        rows[arm.name] = measures(done, load, target_ms) | {"switches": switches}
    return {"device": curves.device_name, "total_units": total, "source": curves.source, "rungs": rungs, "arms": rows}


def table(result: dict[str, object]) -> str:
    rows: dict[str, dict] = result["arms"]  # type: ignore[assignment]
    lines = [f"{result['device']} ({result['total_units']} units, curves: {result['source']})"]
    lines.append(f"{'arm':22} {'TPOT ms':>8} {'TTFT ms':>9} {'latency ms':>10} {'in target':>9} {'switches':>8}")
    for name, row in rows.items():
        a = row["all"]
        lines.append(
            f"{name:22} {a['tpot_ms']:8.2f} {a['ttft_ms']:9.0f} {a['latency_ms']:10.0f} {a['within_target']:9.1%} "
            f"{row['switches']:8d}"
        )
    statics = {n: r for n, r in rows.items() if n.startswith("static")}
    best_name = min(statics, key=lambda n: statics[n]["all"]["latency_ms"])
    for name in (n for n in rows if n.startswith("sis")):
        ratio = rows[name]["all"]["latency_ms"] / statics[best_name]["all"]["latency_ms"]
        lines.append(f"{name}: mean latency {ratio:.3f} of the best static split ({best_name})")
        parts = []
        for segment in rows[name]["segments"]:
            best = min(statics.values(), key=lambda r: r["segments"][segment]["latency_ms"])
            own = rows[name]["segments"][segment]["latency_ms"]
            parts.append(f"{segment} {own / best['segments'][segment]['latency_ms']:.3f}")
        lines.append("  against the best static split of each segment: " + ", ".join(parts))
    return "\n".join(lines)


def plot(results: Sequence[dict], file: Path) -> None:
    """Mean TTFT over mean TPOT of every arm, a panel for each device. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(results), figsize=(5 * len(results), 4.5), squeeze=False)
    for panel, result in zip(panels[0], results, strict=True):
        for name, row in result["arms"].items():
            colour = "tab:red" if name.startswith("sis") else "black" if name == "no mask" else "tab:blue"
            panel.scatter(row["all"]["tpot_ms"], row["all"]["ttft_ms"], c=colour, s=20)
            panel.annotate(name, (row["all"]["tpot_ms"], row["all"]["ttft_ms"]), fontsize=6)
        panel.set(xscale="log", yscale="log", xlabel="mean TPOT (ms)", ylabel="mean TTFT (ms)", title=result["device"])
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for evaluate_sis.json and .png")
    parser.add_argument("--curves", type=Path, nargs="*", help="curve files; default: the shipped H200 stand-in")
    parser.add_argument(
        "--topologies", type=int, nargs="*", default=[8, 16, 32, 64, 108, 132], help="simulated SM counts"
    )
    parser.add_argument("--mask-mode", choices=["encoder", "both"], default="encoder")
    parser.add_argument("--tpot-target-ms", type=float, default=8.0, help="for 132 SMs; scaled with a topology")
    parser.add_argument("--decode-weight", type=float, default=8.0, help="w of the third SIS arm")
    parser.add_argument("--switch-cost-us", type=float, default=50.0)
    parser.add_argument("--unmasked-slowdown", type=float, default=8.5)
    parser.add_argument("--error", type=float, default=0.0, help="sigma of the hidden log-normal error of the curves")
    parser.add_argument("--load", type=float, default=1.0, help="factor on every arrival rate")
    parser.add_argument("--duration", type=float, default=1.0, help="factor on every segment's length")
    parser.add_argument("--max-batch-patches", type=int, default=21316)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    devices = [DeviceCurves.load(f) for f in options.curves] if options.curves else [standin_curves()]
    devices += [topology(n) for n in options.topologies]
    results = [evaluate(curves, options) for curves in devices]
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items() if k != "curves"}
    text = json.dumps(
        {"simulated": True, "settings": settings, "load": [asdict(s) for s in LOAD], "results": results}, indent=1
    )
    (options.out / "evaluate_sis.json").write_text(text + "\n")
    if not options.no_plot:
        try:
            plot(results, options.out / "evaluate_sis.png")
        except ImportError:
            print("matplotlib is not installed: no plot", file=sys.stderr)
    for result in results:
        print(table(result), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
