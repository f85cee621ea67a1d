"""What scripts that compare SpaceServe with stock SGLang on one checkpoint share: their options and the checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

import random_checkpoint


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that has the shared options; `parse` checks them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the result and the servers' logs")
    parser.add_argument("--tokenizer", type=Path, help="folder with the Qwen2 tokenizer, for --shape")
    parser.add_argument("--shape", default="qwen2-vl-2b", help="a Qwen2-VL shape of dummy_model.py")
    parser.add_argument("--model", help="serve this checkpoint instead of random weights")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on every image side")
    parser.add_argument("--common-flags", default="")
    parser.add_argument("--ours-flags", default="")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line's options. Exits with a message where they name no checkpoint."""
    options = parser.parse_args()
    if options.model is None and options.tokenizer is None:
        parser.error("give --tokenizer for random weights, or --model")
    return options


def make_model(options: argparse.Namespace, work_dir: Path) -> Path:
    """The checkpoint to serve: the one given, or a random one of the named shape below `work_dir`.

    Raises ValueError for a shape or tokenizer that cannot be used, CalledProcessError where the weights fail.
    """
    if options.model is not None:
        return Path(options.model)
    folder = work_dir / str(options.shape)
    random_checkpoint.write_model_apart(options.shape, folder, tokenizer=options.tokenizer, device=options.device)
    return folder
