"""Arms: how each server under test is started. Commands are templates; ``{python}``, ``{model}``, ``{host}``,
``{port}`` and ``{port2}`` are filled in when a server starts, so stored results name no path of a machine."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace

STOCK = "{python} -m sglang.launch_server --model-path {model} --host {host} --port {port}"
OURS = "{python} -m spaceserve.launch_server --model-path {model} --host {host} --port {port}"
# What stock SGLang needs on a machine without an accelerator; SpaceServe's launcher chooses these itself.
STOCK_CPU_FLAGS = (
    "--device cpu --disable-overlap-schedule --disable-fast-image-processor --max-total-tokens 20000 "
    "--attention-backend torch_native"
)


@dataclass(frozen=True)
class ServerSpec:
    """One server process of an arm; ``role`` names its log file."""

    role: str
    template: str
    env: dict[str, str] = field(default_factory=dict)

    def command(self, **values: str) -> list[str]:
        """The argument vector. Raises ValueError where the template names an unknown placeholder."""
        try:
            return [part.format(**values) for part in shlex.split(self.template)]
        except KeyError as error:
            raise ValueError(f"server template uses unknown placeholder {error}") from error


@dataclass(frozen=True)
class Arm:
    """An arm of the comparison. The last server is the one that clients talk to; they start in order, each when the
    one before answers. ``needs_mps`` makes the runner start a private MPS daemon around them (SpaceServe starts its
    own)."""

    name: str
    servers: tuple[ServerSpec, ...]
    ours: bool
    needs_mps: bool = False
    note: str = ""

    def with_flags(self, flags: str) -> Arm:
        """The same arm with ``flags`` appended to every server's command."""
        servers = tuple(replace(server, template=f"{server.template} {flags}") for server in self.servers)
        return replace(self, servers=servers) if flags else self


def _stock(name: str, flags: str = "", *, needs_mps: bool = False, note: str = "") -> Arm:
    return Arm(name, (ServerSpec("server", f"{STOCK} {flags}".strip()),), ours=False, needs_mps=needs_mps, note=note)


def _ours(name: str, flags: str = "", note: str = "") -> Arm:
    return Arm(name, (ServerSpec("server", f"{OURS} {flags}".strip()),), ours=True, note=note)


MIXED_CHUNK = "--enable-mixed-chunk --chunked-prefill-size 2048"
EPD = (
    ServerSpec("encoder", STOCK.replace("{port}", "{port2}") + " --encoder-only"),
    ServerSpec("server", STOCK + " --language-only --encoder-urls http://{host}:{port2}"),
)
BUILT_IN = {
    arm.name: arm
    for arm in (
        _stock("stock", note="SGLang's defaults"),
        _stock("stock-mixed", MIXED_CHUNK, note="the stronger stock setting"),
        _stock("stock-mps", needs_mps=True, note="what MPS alone brings"),
        Arm("stock-epd-mps", EPD, ours=False, needs_mps=True, note="SGLang's encoder disaggregation on one GPU"),
        _ours("spaceserve", note="SpaceServe's defaults"),
        _ours("spaceserve-nopart", "--sm-partition off", "encoder process under MPS, no SM partition"),
        _ours("spaceserve-static64", "--sm-partition static:64", "the encoder always on 64 SMs"),
        _ours("spaceserve-static96", "--sm-partition static:96", "the encoder always on 96 SMs"),
        _ours("spaceserve-sis", "--sm-partition sis", "SIS chooses the encoder's SMs, decode has all"),
        _ours("spaceserve-cublas", "--skinny-gemm off", "no kernels of our own for decode's products"),
        _ours("spaceserve-fa3", "--encoder-attention fa3", "no FA4 for long images"),
        _ours("spaceserve-fcfs", "--encoder-schedule-policy fcfs"),
        _ours("spaceserve-srf", "--encoder-schedule-policy srf"),
        _ours("spaceserve-twsrft", "--encoder-schedule-policy twsrft"),
        _ours("spaceserve-nostore", "--encoder-feature-cache-gb 0.1", "a store that holds little more than one image"),
    )
}


def parse_arm(text: str) -> Arm:
    """``NAME`` of a built-in arm, or ``NAME=BASE FLAGS...`` for a base arm with more flags.

    Raises ValueError for an unknown arm.
    """
    name, _, definition = text.partition("=")
    base, _, flags = (definition or name).strip().partition(" ")
    if base not in BUILT_IN:
        raise ValueError(f"unknown arm {base!r}, expected one of {sorted(BUILT_IN)} or NAME=BASE FLAGS...")
    return replace(BUILT_IN[base].with_flags(flags.strip()), name=name.strip())


def prepare(arm: Arm, *, device: str, common_flags: str = "", ours_flags: str = "", stock_flags: str = "") -> Arm:
    """Add the flags of this run: those for every server, those for our or for stock arms, and the CPU's."""
    flags = [common_flags, ours_flags if arm.ours else stock_flags]
    if device == "cpu":
        if arm.needs_mps:
            raise ValueError(f"arm {arm.name} needs a GPU")
        flags.append("--device cpu" if arm.ours else STOCK_CPU_FLAGS)
    return arm.with_flags(" ".join(flag for flag in flags if flag))
