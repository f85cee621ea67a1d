"""Measure what a request's parts cost, encode E, prefill P and decode D, and print the bound that follows.

  bound.py measure --model DIR --results RESULTS --arm stock --sizes 224 448 672 1024 1344 2048
  bound.py measure --url http://127.0.0.1:30000 --model-name qwen2-vl-7b --arm stock --results RESULTS
  bound.py curves --curves CURVES.json --model-name qwen2-vl-7b --results RESULTS      (of spaceserve.profile)
  bound.py show --results RESULTS --model-name qwen2-vl-7b --workload fixed:2048 --rates 1.3 1.8 2.3
  bound.py tradeoff --results RESULTS --model-name qwen2-vl-7b      (TPOT at a given TTFT, for all that was measured)
  bound.py tradeoff --curves CURVES.json --workload fixed:2048 --rates 1.3 1.8 2.3

``measure`` sends single requests to an idle server: the time to the first token of an image request less that of a
text request of the same length is E (with decoding and resizing of the image, so it is an upper estimate of the
encoder's kernels); the text request's less that of a short one is P, plus one decode step, which the short one holds.
D comes from decode steps at several batch sizes. ``curves`` takes all of them from a profile of the kernels instead.
The formulas are in servebench/bound_model.py; ``tradeoff`` estimates what is attainable with the interference in the
curves (servebench/tradeoff.py) and holds the slices and the targets against it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servebench import arms, bound_model, metrics, report, servers, tradeoff_report
from servebench.bodies import APIS, build_body
from servebench.client import RequestRecord, run_job
from servebench.curve_costs import BATCHES, CONTEXT_TOKENS, SIZES, TEXT_TOKENS, from_curves
from servebench.environment import describe
from servebench.results import Results, write_atomic
from servebench.workload import ImageSpec, TraceRequest, Workload, make_trace
from spaceserve.sis.curves import DeviceCurves

REPO = Path(__file__).resolve().parent.parent
SHORT_WORDS = 4
SEED = 1 << 44


class Prober:
    """Sends closed loops of requests to one server, with fresh seeds every time, so that nothing is cached."""

    def __init__(self, url: str, *, api: str, model: str) -> None:
        self.url, self.api, self.model = url + APIS[api], api, model
        self.seed = SEED

    def send(
        self, count: int, *, side: int = 0, num_words: int = SHORT_WORDS, output_len: int = 2, concurrency: int = 1
    ) -> list[RequestRecord]:
        """Raises ValueError where a request fails."""
        bodies = []
        for index in range(count):
            self.seed += 2
            images = (ImageSpec(self.seed, side, side),) if side else ()
            request = TraceRequest(index, 0.0, images, (self.seed,), num_words, output_len)
            bodies.append(build_body(request, api=self.api, model=self.model))
        records = asyncio.run(run_job(self.url, bodies, [0.0] * count, concurrency=concurrency, timeout_s=300))
        for record in records:
            if record.error or not record.events_ms:
                raise ValueError(f"request failed: {record.error or 'no token'}")
        return records

    def ttft_ms(self, samples: int, **options: Any) -> tuple[float, int]:
        """Median TTFT over ``samples`` single requests, after one that warms up, and the prompt's tokens."""
        self.send(1, **options)
        records = self.send(samples, **options)
        return statistics.median(map(metrics.ttft_ms, records)), records[0].prompt_tokens

    def words_for_tokens(self, tokens: int) -> int:
        """Words that make a prompt of about ``tokens`` tokens; how near it came is stored beside the result."""
        few, many = (
            statistics.fmean(record.prompt_tokens for record in self.send(4, num_words=words)) for words in (16, 116)
        )
        per_word = (many - few) / 100
        return max(SHORT_WORDS, 16 + round((tokens - few) / per_word))

    def decode_step_ms(self, batch: int, num_words: int) -> float:
        """Median time of a decode step with ``batch`` requests running; the median skips the steps around prefills."""
        records = self.send(2 * batch, num_words=num_words, output_len=96, concurrency=batch)
        gaps = [gap for record in records for gap in metrics.gaps_ms(record)]
        return statistics.median(gaps)


def measure(
    prober: Prober, sizes: Sequence[int], batches: Sequence[int], samples: int, text_words: int
) -> dict[str, Any]:
    """E, P and decode steps; the costs of ``text`` are those of a text-only request of ``text_words`` words."""
    short_ms, _ = prober.ttft_ms(samples)
    steps = {batch: prober.decode_step_ms(batch, 512) for batch in batches}
    step_one = steps[min(steps)]
    text_ms, text_tokens = prober.ttft_ms(samples, num_words=text_words)
    found: dict[str, Any] = {
        "text": {
            "prompt_tokens": text_tokens,
            "ttft_text_ms": round(text_ms, 3),
            "encode_ms": 0.0,
            "prefill_ms": round(max(0.0, text_ms - short_ms + step_one), 3),
            "source": "idle server",
        }
    }
    for side in sizes:
        image_ms, image_tokens = prober.ttft_ms(samples, side=side)
        words = prober.words_for_tokens(image_tokens)
        same_ms, same_tokens = prober.ttft_ms(samples, num_words=words)
        found[str(side)] = {
            "prompt_tokens": image_tokens,
            "text_prompt_tokens": same_tokens,
            "ttft_image_ms": round(image_ms, 3),
            "ttft_text_ms": round(same_ms, 3),
            "encode_ms": round(max(0.0, image_ms - same_ms), 3),
            "prefill_ms": round(max(0.0, same_ms - short_ms + step_one), 3),
            "source": "idle server",
        }
        print(f"{side}: {found[str(side)]}", flush=True)
    return {"ttft_short_ms": round(short_ms, 3), "sizes": found, "decode_step_ms": steps}


def bound_path(results: Path, model: str, arm: str) -> Path:
    return results / "bounds" / f"{model}__{arm}.json"


def run_measure(options: argparse.Namespace) -> None:
    servers.stop_on_sigterm()
    model_name = options.model_name or Path(options.model or "model").name

    def probe(url: str) -> None:
        prober = Prober(url, api=options.api, model=options.model or model_name)
        data = {
            "model": model_name,
            "arm": options.arm.partition("=")[0],
            "measured": True,
            "environment": describe(REPO),
            **measure(prober, options.sizes, options.batches, options.samples, options.text_words),
        }
        path = bound_path(options.results, model_name, data["arm"])
        write_atomic(path, json.dumps(data, indent=1) + "\n")

    if options.url:
        probe(options.url)
    elif options.model:
        arm = arms.prepare(arms.parse_arm(options.arm), device=options.device, common_flags=options.common_flags)
        with (
            tempfile.TemporaryDirectory(prefix="bound-", ignore_cleanup_errors=True) as folder,
            servers.running_arm(
                arm, model=options.model, work_dir=Path(folder), start_timeout_s=options.start_timeout_s
            ) as group,
        ):
            probe(group[-1].url)
    else:
        raise ValueError("give --url or --model")
    print(report.bounds_table(Results(options.results)))


def run_curves(options: argparse.Namespace) -> None:
    data = from_curves(
        DeviceCurves.load(options.curves),
        options.model_name,
        options.sizes,
        options.batches,
        options.text_tokens,
        options.context,
    )
    write_atomic(bound_path(options.results, options.model_name, "curves"), json.dumps(data, indent=1) + "\n")
    print(report.bounds_table(Results(options.results)))


def run_show(options: argparse.Namespace) -> None:
    bounds = report.load_bounds(Results(options.results), options.model_name)
    if bounds is None:
        raise ValueError("nothing measured for this model: run measure or curves first")
    curves_path = bound_path(options.results, options.model_name, "curves")
    partitions = json.loads(curves_path.read_text())["partitions"] if curves_path.exists() else {}
    for rate in options.rates:
        workload = Workload.parse(f"{options.workload}@{rate:g}")
        print(f"{workload.name}: {report.describe_bound(bounds, workload, rate, options.output_len)}")
        if options.ttft_ms and workload.size in partitions:
            costs = partitions[workload.size]
            points = bound_model.partition_points(
                {int(n): value for n, value in costs["encode_ms"].items()},
                {int(n): value for n, value in costs["decode_beside_ms"].items()},
                costs["decode_alone_ms"],
                bounds["sizes"][workload.size]["prefill_ms"],
                rate,
            )
            best = bound_model.tpot_at_ttft(points, options.ttft_ms)
            print(
                f"  partitioned, prefill in turns with decode, TTFT at most {options.ttft_ms:.0f} ms: "
                + (f"{best.num_sms} SMs, TPOT {best.tpot_ms:.1f} ms, TTFT {best.ttft_ms:.0f} ms" if best else "none")
            )


def run_tradeoff(options: argparse.Namespace) -> None:
    if not options.workload:
        if not (options.results and options.model_name):
            raise ValueError("give --results and --model-name, or --curves, --workload and --rates")
        found = tradeoff_report.rows(Results(options.results), options.model_name)
        if not found:
            raise ValueError("no slices of this model on a GPU whose curves are shipped")
        for suffix, write in ((".json", tradeoff_report.store), (".png", tradeoff_report.draw)):
            write(found, options.results / f"tradeoff-{options.model_name}{suffix}")
        print(tradeoff_report.table(found))
        return
    if not options.curves or not options.rates:
        raise ValueError("--workload needs --curves and --rates")
    curves = DeviceCurves.load(options.curves)
    for rate in options.rates:
        trace = make_trace(Workload.parse(f"{options.workload}@{rate:g}x{options.requests}"), 0)
        for name, front in tradeoff_report.fronts_of(curves, [trace]).items():
            print(f"{trace.workload}, {name}: TTFT / TPOT in ms, policy")
            for point in front:
                print(f"  {point.ttft_ms:7.0f} {point.tpot_ms:7.2f}  {point.policy}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="time single requests on an idle server")
    measuring.add_argument("--url", help="a server that already runs; else one is started")
    measuring.add_argument("--model", help="model folder")
    measuring.add_argument("--model-name")
    measuring.add_argument("--arm", default="stock")
    measuring.add_argument("--results", type=Path, required=True)
    measuring.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    measuring.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    measuring.add_argument("--samples", type=int, default=7)
    measuring.add_argument("--text-words", type=int, default=64)
    measuring.add_argument("--api", choices=sorted(APIS), default="generate")
    measuring.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    measuring.add_argument("--common-flags", default="")
    measuring.add_argument("--start-timeout-s", type=float, default=240.0)
    curving = commands.add_parser("curves", help="take the costs from SIS's curve file")
    curving.add_argument("--curves", type=Path, required=True)
    curving.add_argument("--model-name", required=True)
    curving.add_argument("--results", type=Path, required=True)
    curving.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    curving.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    curving.add_argument("--text-tokens", type=int, default=TEXT_TOKENS)
    curving.add_argument("--context", type=int, default=CONTEXT_TOKENS, help="tokens of context of a decoding request")
    showing = commands.add_parser("show", help="print the bound at some rates")
    showing.add_argument("--results", type=Path, required=True)
    showing.add_argument("--model-name", required=True)
    showing.add_argument("--workload", required=True, help="a workload without its rate, e.g. fixed:2048 or mix")
    showing.add_argument("--rates", type=float, nargs="+", required=True)
    showing.add_argument("--output-len", type=int, default=128)
    showing.add_argument("--ttft-ms", type=float, help="also the best partition within this TTFT (needs curves)")
    trading = commands.add_parser("tradeoff", help="estimate the least TPOT at a given TTFT")
    trading.add_argument("--results", type=Path)
    trading.add_argument("--model-name")
    trading.add_argument("--curves", type=Path)
    trading.add_argument("--workload", help="instead of what was measured: a workload without its rate")
    trading.add_argument("--rates", type=float, nargs="+")
    trading.add_argument("--requests", type=int, default=2000)
    options = parser.parse_args(argv)
    run = {"measure": run_measure, "curves": run_curves, "show": run_show, "tradeoff": run_tradeoff}[options.command]
    try:
        run(options)
    except (ValueError, servers.ServerFailed) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
