"""Prometheus metrics of the encoder's SMs and of SIS, named the way SGLang names its own."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from spaceserve.sis.policy import RULES, Split

_SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_RATIO_BUCKETS = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)


class SplitMetrics:
    """What `EncoderSplit` chose, what it expected and what came of it.

    Make it once per process, after PROMETHEUS_MULTIPROC_DIR is set. Threads may call it at the same time.

    labels: label names and values, the same as of SGLang's own metrics (model_name, ...).
    """

    def __init__(self, labels: Mapping[str, str], registry: CollectorRegistry = REGISTRY) -> None:
        self._labels = dict(labels)
        names = list(labels)

        def counter(name: str, documentation: str, more: tuple[str, ...] = ()) -> Counter:
            return Counter(f"spaceserve:{name}", documentation, [*names, *more], registry=registry)

        def histogram(name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"spaceserve:{name}", documentation, names, registry=registry, buckets=buckets)

        self._sms = Gauge(
            "spaceserve:encoder_sms",
            "SMs (cores on the CPU) of the last encoder batch.",
            names,
            registry=registry,
            multiprocess_mode="mostrecent",
        )
        self._batches = counter("encoder_batches_total", "Encoder batches, by the SMs that they began on.", ("sms",))
        self._decisions = counter(
            "sis_decisions_total", "Choices of SMs by SIS, by the rule that made them.", ("rule",)
        )
        self._switches = counter("sm_partition_switches_total", "Changes of the encoder's SMs while it was busy.")
        self._encode = histogram("encode_seconds", "Measured time of an encoder batch.", _SECONDS_BUCKETS)
        self._predicted_encode = histogram(
            "predicted_encode_seconds", "Time of an encoder batch that SIS expected.", _SECONDS_BUCKETS
        )
        self._predicted_decode = histogram(
            "predicted_decode_step_seconds",
            "Time of a decode step beside the batch that SIS expected.",
            _SECONDS_BUCKETS,
        )
        self._ratio = histogram("encode_prediction_ratio", "Measured over expected time of a batch.", _RATIO_BUCKETS)
        for rule in RULES:
            self._decisions.labels(**self._labels, rule=rule)  # a rule that has not been used yet reads 0

    def add_decision(self, split: Split) -> None:
        """SIS has chosen `split`, for a batch or for the rest of one."""
        self._decisions.labels(**self._labels, rule=split.rule).inc()
        self._switches.labels(**self._labels).inc(split.switched)

    def begin_batch(self, units: int, split: Split | None) -> None:
        """A batch starts on `units`, which `split` chose (None: nobody chose)."""
        self._sms.labels(**self._labels).set(units)
        self._batches.labels(**self._labels, sms=str(units)).inc()
        if split is not None:
            self._predicted_encode.labels(**self._labels).observe(split.predicted_encoder_ms / 1e3)
            if split.predicted_decode_ms > 0:
                self._predicted_decode.labels(**self._labels).observe(split.predicted_decode_ms / 1e3)

    def end_batch(self, elapsed_ms: float, split: Split | None) -> None:
        """The batch took `elapsed_ms` on the device."""
        self._encode.labels(**self._labels).observe(elapsed_ms / 1e3)
        if split is not None and split.predicted_encoder_ms > 0:
            self._ratio.labels(**self._labels).observe(elapsed_ms / split.predicted_encoder_ms)
