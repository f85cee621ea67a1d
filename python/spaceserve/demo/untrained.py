"""Writes an untrained checkpoint of the demo model's architecture, for tests: `python -m spaceserve.demo.untrained`.

Weights of the usual small scale make every greedy answer the same token. Here they are scaled up until the answer
depends on the picture and on the text, so that equality between two servers proves something.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from spaceserve.demo.architecture import save_configs
from spaceserve.demo.model import DemoModel, checkpoint_tensors, initialise


def write_untrained(folder: Path, seed: int = 0, gain: float = 2.0) -> None:
    """Write a checkpoint with random weights into `folder` (made where it does not exist)."""
    model = DemoModel()
    initialise(model, seed=seed, gain=gain)
    with torch.no_grad():
        # Residual branches and picture features as strong as the embeddings, or the text alone decides.
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(24.0)
            elif name.endswith("merger.mlp.2.weight"):
                parameter.mul_(8.0)
    save_configs(folder)
    save_file(checkpoint_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_untrained(args.out, seed=args.seed)
    print(f"untrained checkpoint in {args.out}")


if __name__ == "__main__":
    main()
