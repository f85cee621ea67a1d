"""Loading the encoder alone, through SGLang's own model loader, and running it."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spaceserve.families import Family
from spaceserve.hooks import Hook

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# One of a batch's whole sequences, one of its windows where the encoder has them.
MAX_CACHED_MASKS = 2


class LanguageModelStub(nn.Module):
    """Stands where the language model or its head would be; it has no parameters and cannot run."""

    embed_tokens: nn.Module | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("the encoder worker holds no language model")


def weights_hook(family: Family, *, vision: bool) -> Hook:
    """The hook that makes SGLang's loader load the encoder's weights only (`vision`), or all others."""

    def load_part_of_weights(
        original: Callable[..., Any], model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Any:
        return original(
            model, ((name, weight) for name, weight in weights if (family.vision_weights in name) == vision)
        )

    return Hook(
        target=f"{family.target(family.model_class)}.load_weights",
        function=load_part_of_weights,
        kind="around",
        why="load the encoder's weights only" if vision else "load the language model's weights only",
        parameters=("weights",),
    )


def mask_cache_hook() -> Hook:
    """The hook that bounds SGLang's cache of attention masks, used where no kernel takes several images (on the CPU).

    A mask of n patches takes n² bytes of host memory, and SGLang keeps 128 by the sizes of a batch's images: they fill
    for hours, to 2.1 GB with batches of 4,096 patches. All layers ask for the same ones before the next batch comes.
    """
    from sglang.srt.layers.attention.vision import VisionSdpaAttention

    make_mask = inspect.unwrap(VisionSdpaAttention._generate_mask_cache)
    return Hook(
        target="sglang.srt.layers.attention.vision.VisionSdpaAttention._generate_mask_cache",
        function=functools.lru_cache(maxsize=MAX_CACHED_MASKS)(make_mask),
        kind="replace",
        why="attention masks of the last batch only",
        parameters=("s", "flatten_batch", "cu_seqlens"),
    )


def encoder_only_hooks(family: Family) -> list[Hook]:
    """The hooks that make SGLang's loader build and load the encoder's part of a model, and keep its memory bounded."""
    return [
        Hook(
            target=family.target(family.language_class),
            function=LanguageModelStub,
            kind="replace",
            why="no language model in the encoder worker",
        ),
        Hook(
            target=family.target(family.head_class),
            function=LanguageModelStub,
            kind="replace",
            why="no output head in the encoder worker",
        ),
        weights_hook(family, vision=True),
        mask_cache_hook(),
    ]


def load_part(server_args: ServerArgs, init_file: str) -> tuple[nn.Module, Any]:
    """Load a model through SGLang in this process, without a scheduler: with hooks installed, one part of it.

    Initialises torch.distributed with one rank, which SGLang's layers need, so a process can do this once.

    Args:
        server_args: names the checkpoint, its format and the device.
        init_file: path that torch.distributed may create for its rendezvous.

    Returns:
        The model and its Hugging Face configuration.
    """
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import (
        get_default_distributed_backend,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.model_loader import get_model
    from sglang.srt.runtime_context import publish

    publish(server_args, role="encoder")
    gpu_id = server_args.base_gpu_id
    on_gpu = server_args.device == "cuda"
    torch.get_device_module(server_args.device).set_device(gpu_id if on_gpu else "cpu")
    model_config = ModelConfig.from_server_args(server_args)
    init_distributed_environment(
        backend=get_default_distributed_backend(server_args.device),
        world_size=1,
        rank=0,
        distributed_init_method=f"file://{init_file}",
        local_rank=gpu_id,
    )
    initialize_model_parallel(tensor_model_parallel_size=1)
    initialize_dp_attention(server_args, model_config)
    model = get_model(
        model_config=model_config,
        load_config=LoadConfig(
            load_format=server_args.load_format,
            download_dir=server_args.download_dir,
            model_loader_extra_config=server_args.model_loader_extra_config,
        ),
        device_config=DeviceConfig(device=server_args.device, gpu_id=gpu_id),
    )
    return model.eval(), model_config.hf_config


class VisionEncoder:
    """The encoder of one model on one device. The caller installs `encoder_only_hooks` first."""

    def __init__(self, server_args: ServerArgs, init_file: str) -> None:
        self.model, self.hf_config = load_part(server_args, init_file)
        self.vision: nn.Module = self.model.get_submodule("visual")
        parameter = next(self.vision.parameters())
        self.device: torch.device = parameter.device
        self.dtype: torch.dtype = parameter.dtype

    def num_parameters(self) -> int:
        """Parameters in this process, all of them the encoder's."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def blocks(self) -> list[nn.Module]:
        """The encoder's layers in their order; empty for an encoder that does not name them `blocks`."""
        return list(getattr(self.vision, "blocks", ()))

    @torch.inference_mode()
    def encode(self, pixel_values: Sequence[torch.Tensor], grids: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Run the encoder over several images at once, on the current stream.

        Args:
            pixel_values: for each image its flattened patches `[num_patches, patch_dim]`.
            grids: for each image its patches in time, height and width.

        Returns:
            Features of all images, one after another: `[sum of tokens, feature_dim]` in `self.dtype`.
        """
        pixels = torch.cat([pixel.to(self.device, self.dtype, non_blocking=True) for pixel in pixel_values])
        grid_thw = torch.tensor(list(grids), dtype=torch.long)
        return self.vision(pixels, grid_thw=grid_thw)
