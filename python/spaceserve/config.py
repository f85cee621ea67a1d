"""SpaceServe's own settings, beside SGLang's `ServerArgs`."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from dataclasses import dataclass, field
from typing import Any

from spaceserve.encoder_schedule import DEFAULT_BATCH_CAPACITY_PATCHES, DEFAULT_WINDOW_S, POLICIES, SchedulePolicy
from spaceserve.sis.policy import MaskMode

ENCODER_WORKER_MODES = ("auto", "on", "off")
BOTH_PREFIX = "both+"
# Of what float() takes, without spaces, underscores and other alphabets' digits.
DECIMAL = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?", re.ASCII | re.IGNORECASE)
# The smallest image: one token, of 2 x 2 patches in all families.
MIN_BATCH_CAPACITY_PATCHES = 4
MAX_PREPROCESS_THREADS = 256
# A worker that serves gives a sign of life once a second.
MIN_HEARTBEAT_TIMEOUT_S = 2.0
MAX_IMAGE_MB = 1e6


def option(name: str) -> str:
    """The command-line option of a setting."""
    return "--" + name.replace("_", "-")


def _setting(default: Any, help_text: str, **argparse_kwargs: Any) -> Any:
    return field(default=default, metadata={"help": help_text, **argparse_kwargs})


def _auto_or_int(text: str) -> int | None:
    """None for "auto"."""
    try:
        return None if text == "auto" else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected auto or a whole number, got {text!r}") from error


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


@dataclass(frozen=True, kw_only=True)
class SmPartition:
    """`--sm-partition` in parts. `kind` is auto, sis, static or off.

    Attributes:
        num_sms: N of `static:N`.
        decode_weight: W of `sis:W`.
        reconsider_layers: K of `sis:W:K`; overrides `--sm-reconsider-layers`.
        mask_mode: which sides keep to SMs of their own: "encoder", or "both" after the prefix `both+`.
        is_default: plain `auto`: both sides where that can be, the encoder alone elsewhere.
    """

    kind: str
    num_sms: int | None = None
    decode_weight: float | None = None
    reconsider_layers: int | None = None
    mask_mode: MaskMode = "encoder"
    is_default: bool = False

    @staticmethod
    def parse(text: str) -> SmPartition:
        """Raises ValueError for what is none of auto, off, static:N, sis, sis:W and sis:W:K (N, W above 0; K whole),
        all but off also after `both+`."""
        mask_mode: MaskMode = "both" if text.startswith(BOTH_PREFIX) else "encoder"
        kind, *numbers = text.removeprefix(BOTH_PREFIX).split(":")
        if text == "auto":
            return SmPartition(kind=kind, mask_mode="both", is_default=True)
        if not numbers and (kind in ("auto", "sis") or (kind == "off" and mask_mode == "encoder")):
            return SmPartition(kind=kind, mask_mode=mask_mode)
        if kind == "static" and len(numbers) == 1 and _is_whole(numbers[0]) and int(numbers[0]) > 0:
            return SmPartition(kind=kind, num_sms=int(numbers[0]), mask_mode=mask_mode)
        if kind == "sis" and len(numbers) <= 2 and all(map(_is_whole, numbers[1:])):
            weight = float(numbers[0]) if DECIMAL.fullmatch(numbers[0]) else 0.0
            if 0 < weight < 1e9:
                layers = int(numbers[1]) if len(numbers) == 2 else None
                return SmPartition(kind=kind, decode_weight=weight, reconsider_layers=layers, mask_mode=mask_mode)
        raise ValueError(
            "--sm-partition must be auto, sis, sis:W, sis:W:K, static:N (W and N above 0, K below 10^9; each also "
            f"after both+) or off, got {text[:80]!r}"
        )


@dataclass(frozen=True, kw_only=True)
class SpaceServeConfig:
    """Settings of the encoder worker, the feature store and the partition; picklable into every process.

    Each field is a command-line option of the same name (`encoder_worker` is `--encoder-worker`).
    """

    encoder_worker: str = _setting(
        "auto",
        "Run the vision encoder in its own process: 'on', 'off' (stock SGLang), or 'auto' (on where the "
        "architecture can be split, else off with one line that says why).",
        choices=ENCODER_WORKER_MODES,
    )
    encoder_feature_cache_gb: float | None = _setting(
        None,
        "Size of the encoder feature store in GB. Default: 2 %% of the device's memory, 0.25 on the CPU.",
        type=float,
    )
    encoder_feature_host_gb: float | None = _setting(
        None,
        "Host memory in GB for features that the store evicts: they are copied back when they are wanted again, which "
        "is far quicker than to encode them. Default: none.",
        type=float,
    )
    encoder_schedule_policy: SchedulePolicy = _setting(  # noqa: RUF009  # it returns a dataclass field
        "twsrft",
        "Order of encoder work: 'twsrft' (time-windowed shortest-remaining-first), 'slack' (twsrft with windows that "
        "grow with the request), 'fcfs' or 'srf'.",
        choices=POLICIES,
    )
    encoder_window_ms: float = _setting(
        DEFAULT_WINDOW_S * 1000,
        "TWSRFT: requests that arrive within one window are ordered by remaining patches; older windows go first.",
        type=float,
    )
    encoder_batch_capacity_patches: int | None = _setting(
        None,
        "Most patches in one encoder forward, or 'auto': from the device's profile where a measured one ships, else "
        f"{DEFAULT_BATCH_CAPACITY_PATCHES} (1024 on the CPU). Default: auto.",
        type=_auto_or_int,
    )
    encoder_preprocess_threads: int | None = _setting(
        None, "Threads of the encoder worker that decode and resize images. Default: from the cores.", type=int
    )
    encoder_attention: str = _setting(
        "auto",
        "Attention of the encoder on Hopper GPUs: 'auto' (for long images FA4's kernel, from the length on from which "
        "it is quicker than FA3, measured at the start) or 'fa3' (SGLang's for all).",
        choices=("auto", "fa3"),
    )
    encoder_timeout_s: float = _setting(
        1800.0, "Longest wait of a request for its features before it fails with HTTP 503.", type=float
    )
    encoder_heartbeat_timeout_s: float = _setting(
        20.0, "An encoder worker that has been silent for this long is killed and started again.", type=float
    )
    encoder_max_image_mb: float = _setting(
        64.0, "Largest image or video file accepted, in MB; larger ones get HTTP 400.", type=float
    )
    encoder_max_image_pixels: int = _setting(
        178_956_970,
        "Most pixels (width x height) of an image, or of two frames of a video, accepted; more get HTTP 400.",
        type=int,
    )
    sm_partition: str = _setting(
        "auto",
        "SMs of the encoder worker: 'sis' (chosen for every batch; 'sis:W' weighs a decode step W times), 'static:N' "
        "(N SMs), 'off' (no mask), or 'auto' ('both+sis' on a GPU, 'sis' where decode cannot be masked, 'off' on the "
        "CPU). After 'both+', as in 'both+sis', decode keeps to the other SMs meanwhile, with CUDA graphs that are "
        "captured at the start.",
    )
    sm_reconsider_layers: int = _setting(
        0,
        "With 'sis': choose the SMs again before every so many layers of a running encoder batch; 0: per batch only.",
        type=int,
    )
    prefill_beside_decode: str = _setting(
        "auto",
        "Run prefill on a stream and SMs of its own while decode goes on: 'on', 'off' (SGLang's turns), or 'auto' (on "
        "where model and attention backend allow it).",
        choices=ENCODER_WORKER_MODES,
    )
    skinny_gemm: str = _setting(
        "auto",
        "Kernels of decode's matrix products in CUDA graphs, batches of up to 32: 'auto' (SpaceServe's or cuBLAS's, "
        "whichever is quicker on the SMs in question, measured at the start; Hopper GPUs) or 'off' (cuBLAS's).",
        choices=("auto", "off"),
    )
    sis_objective: str = _setting(
        "delay",
        "What 'sis' minimises: 'delay' (of all requests, those that wait for the encoder and those that decode), or "
        "'time' (of an encoder batch and a decode step, as in the SpaceServe paper).",
        choices=("delay", "time"),
    )
    tpot_target_ms: float | None = _setting(
        None,
        "Give the encoder the most SMs that keep the time per output token under this, instead of --sis-objective.",
        type=float,
    )

    def __post_init__(self) -> None:
        if self.encoder_worker not in ENCODER_WORKER_MODES:
            raise ValueError(f"--encoder-worker must be one of {', '.join(ENCODER_WORKER_MODES)}")
        if self.encoder_schedule_policy not in POLICIES:
            raise ValueError(f"--encoder-schedule-policy must be one of {', '.join(POLICIES)}")
        positive = (
            "encoder_feature_cache_gb",
            "encoder_feature_host_gb",
            "encoder_window_ms",
            "encoder_batch_capacity_patches",
            "encoder_preprocess_threads",
            "encoder_timeout_s",
            "encoder_heartbeat_timeout_s",
            "encoder_max_image_mb",
            "encoder_max_image_pixels",
            "tpot_target_ms",
        )
        for name in positive:
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{option(name)} must be greater than 0 and finite, got {value}")
        bounds: tuple[tuple[str, float, float, str], ...] = (
            (
                "encoder_batch_capacity_patches",
                MIN_BATCH_CAPACITY_PATCHES,
                math.inf,
                f"at least {MIN_BATCH_CAPACITY_PATCHES}, the patches of one token",
            ),
            ("encoder_preprocess_threads", 1, MAX_PREPROCESS_THREADS, f"at most {MAX_PREPROCESS_THREADS}"),
            (
                "encoder_heartbeat_timeout_s",
                MIN_HEARTBEAT_TIMEOUT_S,
                math.inf,
                f"at least {MIN_HEARTBEAT_TIMEOUT_S:g}: the worker gives a sign of life once a second",
            ),
            ("encoder_max_image_mb", 0, MAX_IMAGE_MB, f"at most {MAX_IMAGE_MB:g}"),
        )
        for name, least, most, wanted in bounds:
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ValueError(f"{option(name)} must be {wanted}, got {value}")
        if self.sm_reconsider_layers < 0:
            raise ValueError(f"--sm-reconsider-layers must not be negative, got {self.sm_reconsider_layers}")
        SmPartition.parse(self.sm_partition)

    @classmethod
    def is_at_fault(cls, reason: str) -> bool:
        """Whether the reason of an error names one of the settings: then it is the user's to mend."""
        named = set(re.findall(r"--[a-z][a-z-]*", reason))
        return any(option(setting.name) in named for setting in dataclasses.fields(cls))

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add every setting to `parser`, in one group named SpaceServe."""
        group = parser.add_argument_group("SpaceServe", "The encoder worker, its feature store and its SMs.")
        for setting in dataclasses.fields(cls):
            kwargs = dict(setting.metadata)
            default = "" if setting.default is None else f" (default: {setting.default})"
            kwargs["help"] = kwargs["help"] + default
            group.add_argument(option(setting.name), default=setting.default, **kwargs)

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> SpaceServeConfig:
        """Take SpaceServe's settings out of a parsed command line.

        Raises:
            ValueError: a value is out of its range; the message names the option.
        """
        return cls(**{setting.name: getattr(namespace, setting.name) for setting in dataclasses.fields(cls)})
