"""Hooks that let SGLang's decode graphs use the skinny product where it is the quicker one.

Only what a CUDA graph of decode captures is changed; eager forwards keep SGLang's kernels. Which SMs a graph will have
is known where it is captured: `SkinnyLinears.on` measures for that group once, and holds while its graphs are captured.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from spaceserve.hooks import Hook
from spaceserve.ranks import has_several_ranks
from spaceserve.skinny_gemm.choice import Measured, choose, graph_timer
from spaceserve.skinny_gemm.kernel import Workspace, skinny_gemm
from spaceserve.skinny_gemm.tiling import MAX_BATCH, Product, Tile, product

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)
HOPPER = 9


def obstacle(model_runner: Any) -> str | None:
    """Why this scheduler's decode keeps to cuBLAS, None where it need not."""
    args = model_runner.server_args
    if model_runner.device != "cuda" or torch.cuda.get_device_capability()[0] != HOPPER:
        return "it is made for NVIDIA GPUs of the Hopper generation"
    if has_several_ranks(args):
        return "not with several ranks"
    if args.enable_lora or args.enable_torch_compile:
        return "not with LoRA or torch.compile"
    return None


class SkinnyLinears:
    """Products of the decoder that may take the skinny kernel, and which of them do on which SMs. One thread.

    Args:
        choose_products, run: what measures and what computes; tests give others.
    """

    def __init__(
        self,
        choose_products: Callable[..., list[Measured]] = choose,
        run: Callable[..., torch.Tensor] = skinny_gemm,
    ) -> None:
        self._choose, self._run = choose_products, run
        self._products: dict[int, Product] = {}  # by id of the module
        self._weights: dict[Product, list[torch.Tensor]] = {}
        self._batches: Sequence[int] = ()
        self._workspace: Workspace | None = None
        self._tiles: dict[tuple[int, Product, int], Tile] = {}
        self._measured: set[int] = set()
        self._num_sms = 0  # of the group whose graphs are being captured; 0 between captures

    def register(self, modules: Sequence[nn.Module], batches: Sequence[int], total_sms: int) -> None:
        """Take `modules` with a `weight` that fits the kernel; decode will have `batches`, the device `total_sms`."""
        weights: dict[Product, list[torch.Tensor]] = defaultdict(list)
        for module in modules:
            weight = module.weight
            assert isinstance(weight, torch.Tensor)
            found = product(*weight.shape) if weight.dim() == 2 and weight.is_contiguous() else None
            if found is not None and weight.dtype in DTYPES:
                self._products[id(module)] = found
                weights[found].append(weight.detach())
        self._weights, self._batches = dict(weights), [size for size in batches if size <= MAX_BATCH]
        if weights and self._batches:
            device = next(iter(weights.values()))[0].device
            self._workspace = Workspace(list(weights), total_sms, device)

    @contextmanager
    def on(self, num_sms: int, stream: Any) -> Iterator[None]:
        """Graphs captured meanwhile are for `num_sms` SMs, those of `stream`."""
        if self._workspace is not None and num_sms not in self._measured:
            self._measure(num_sms, stream, self._workspace)
        self._num_sms = num_sms
        try:
            yield
        finally:
            self._num_sms = 0

    def _measure(self, num_sms: int, stream: Any, workspace: Workspace) -> None:
        began_s = time.monotonic()
        with torch.inference_mode(), torch.cuda.stream(stream):
            rows = self._choose(self._weights, self._batches, num_sms, workspace, graph_timer(stream))
        self._measured.add(num_sms)
        for row in rows:
            if row.tile is not None:
                self._tiles[num_sms, row.product, row.batch] = row.tile
        for size in (min(self._batches), max(self._batches)):
            logger.info(
                "Products of decode on %d SMs, batch %d, times as fast as cuBLAS: %s",
                num_sms,
                size,
                ", ".join(row.describe() for row in rows if row.batch == size),
            )
        logger.info("Measured in %.1f s", time.monotonic() - began_s)

    def apply(self, module: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """x W^T + b with the skinny kernel, or None where SGLang's is to be used."""
        if self._num_sms == 0:
            return None
        found = self._products.get(id(module))
        if found is None or x.dim() != 2 or x.shape[1] != found.k or not x.is_contiguous():
            return None
        tile = self._tiles.get((self._num_sms, found, x.shape[0]))
        weight = module.weight
        if tile is None or x.dtype != weight.dtype or (bias is not None and bias.dtype != x.dtype):
            return None
        assert self._workspace is not None
        return self._run(x, weight, bias, found, tile, self._num_sms, self._workspace)


def linears_of(layers: Sequence[nn.Module], head: nn.Module | None) -> list[nn.Module]:
    """The unquantized linear layers among `layers`, and the output head."""
    found = [
        module
        for layer in layers
        for module in layer.modules()
        if type(getattr(module, "quant_method", None)).__name__ == "UnquantizedLinearMethod"
    ]
    return found if head is None or not hasattr(head, "weight") else [*found, head]


def skinny_linear_hooks(linears: SkinnyLinears, layers_of: Callable[[Any], Sequence[nn.Module]]) -> list[Hook]:
    """The hooks that measure before SGLang captures its decode graphs, and that put the kernel into them.

    Args:
        layers_of: the decoder's layers in a model.
    """

    def capture(original: Callable[..., None], model_runner: Any, capture_decode_cuda_graph: bool = True) -> None:
        reason = obstacle(model_runner)
        if reason is not None:
            logger.info("Products of decode are cuBLAS's: %s", reason)
            original(model_runner, capture_decode_cuda_graph)
            return
        model, decode = model_runner.model, model_runner.server_args.cuda_graph_config.decode
        num_sms = torch.cuda.get_device_properties(model_runner.gpu_id).multi_processor_count
        linears.register(linears_of(layers_of(model), getattr(model, "lm_head", None)), decode.bs or (), num_sms)
        with linears.on(num_sms, torch.cuda.Stream()):
            original(model_runner, capture_decode_cuda_graph)

    def apply(original: Callable[..., Any], method: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        result = linears.apply(layer, x, bias)
        return original(method, layer, x, bias) if result is None else result

    def head(
        original: Callable[..., Any], processor: Any, hidden_states: Any, lm_head: Any, embedding_bias: Any = None
    ) -> Any:
        plain = embedding_bias is None and not processor.use_fp32_lm_head
        result = linears.apply(lm_head, hidden_states, None) if plain else None
        return original(processor, hidden_states, lm_head, embedding_bias) if result is None else result

    return [
        Hook(
            target="sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs",
            function=capture,
            kind="around",
            why="which kernel is quicker is measured before decode graphs are captured",
            parameters=("capture_decode_cuda_graph",),
        ),
        Hook(
            target="sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
            function=apply,
            kind="around",
            why="decode graphs use the skinny product",
            parameters=("layer", "x", "bias"),
        ),
        Hook(
            target="sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
            function=head,
            kind="around",
            why="the output head is such a product too",
            parameters=("hidden_states", "lm_head", "embedding_bias"),
        ),
    ]
