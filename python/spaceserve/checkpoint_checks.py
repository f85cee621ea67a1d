"""Looks at the files of a checkpoint before SGLang is imported, and says in one line which cannot be used."""

from __future__ import annotations

import glob
import json
import os
from pathlib import Path
from typing import Any

from spaceserve.families import FAMILIES
from spaceserve.start_checks import OneLineParser, StartError

WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt")
# One of these holds the vocabulary, or makes it; without any, transformers makes a tokenizer that knows no word.
VOCABULARY_PATTERNS = (
    "tokenizer.json",
    "vocab.*",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "*.spm",
    "tokenization_*.py",
)
# Read by SGLang and transformers in several processes, each of which would fail over it.
READ_AS_OBJECTS = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def check_named_model(argv: list[str]) -> None:
    """The checks of this module for the model on the command line, before SGLang and its options are imported.

    Raises:
        StartError: see there.
    """
    parser = OneLineParser(add_help=False)  # abbreviations are allowed, as SGLang allows them
    parser.add_argument("--model-path", "--model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--tokenizer-path")
    parser.add_argument("--skip-tokenizer-init", action="store_true")
    namespace, _ = parser.parse_known_args(argv)
    if namespace.model_path is not None:
        check_model_folder(namespace.model_path, namespace.load_format)
        if not namespace.skip_tokenizer_init:
            check_tokenizer(namespace.tokenizer_path or namespace.model_path)


def check_model_folder(path: str, load_format: str) -> None:
    """Look at a checkpoint in a local folder; a name of the Hugging Face hub, or of a remote store, passes.

    Raises:
        StartError: there is no such folder, it lacks a file that every checkpoint has, or one cannot be read.
    """
    advice = "give --model-path a Hugging Face checkpoint"
    if not os.path.isdir(path):
        if os.path.exists(path) and not path.endswith(".gguf"):
            raise StartError(f"{path} is not a folder: {advice}")
        # The hub's names are `organisation/name`, SGLang's remote ones have a scheme.
        is_local = path.startswith((os.sep, ".", "~")) or path.count(os.sep) > 1
        if is_local and "://" not in path and not os.path.exists(path):
            raise StartError(f"there is no model folder {path}: give --model-path an existing one")
        return
    try:
        names = os.listdir(path)
        if "config.json" not in names:
            raise StartError(f"the folder {path} holds no config.json: {advice}")
        weights = [name for pattern in WEIGHT_PATTERNS for name in glob.glob(pattern, root_dir=path)]
        if not weights and load_format in ("auto", "safetensors", "pt"):
            raise StartError(f"the folder {path} holds no weights ({', '.join(WEIGHT_PATTERNS)}): {advice}")
        for name in ("config.json", *weights):
            with open(os.path.join(path, name), "rb"):
                pass
    except OSError as error:
        raise StartError(f"the model folder {path} cannot be read ({error.filename}: {error.strerror})") from error
    config = _read_object(Path(path, "config.json"))
    for name in weights:
        if name.endswith(".safetensors"):
            _check_safetensors(os.path.join(path, name))
    architectures = config.get("architectures")
    if not (isinstance(architectures, list) and architectures and all(isinstance(name, str) for name in architectures)):
        raise StartError(f"{Path(path, 'config.json')} names no architectures: {advice}")
    can_split = any(name in FAMILIES for name in architectures)
    if can_split and not any(name in names for name in IMAGE_PROCESSOR_FILES):
        raise StartError(f"the folder {path} holds no {IMAGE_PROCESSOR_FILES[0]}: {advice}")


def check_tokenizer(path: str) -> None:
    """Look at the tokenizer's files in a local folder; whatever is no folder passes.

    Raises:
        StartError: there is no vocabulary, or a file that must be a JSON object is none.
    """
    if not os.path.isdir(path):
        return
    if not any(glob.glob(pattern, root_dir=path) for pattern in VOCABULARY_PATTERNS):
        raise StartError(
            f"the folder {path} holds no tokenizer (tokenizer.json or vocab.json): give --tokenizer-path a folder that "
            "does, or fetch the checkpoint again"
        )
    for name in READ_AS_OBJECTS:
        if Path(path, name).exists():
            _read_object(Path(path, name))


def _read_object(path: Path) -> dict[str, Any]:
    """Raises StartError for a file that holds no JSON object."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise StartError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also what is no UTF-8
        raise StartError(f"{path} is not JSON ({error}): fetch the checkpoint again") from error
    if not isinstance(found, dict):
        kind = {list: "a list", str: "a string", type(None): "null"}.get(type(found), "a single value")
        raise StartError(f"{path} holds {kind} where a JSON object is needed: fetch the checkpoint again")
    return found


def _check_safetensors(path: str) -> None:
    """Raises StartError for a file that was cut off, or is the pointer that Git LFS leaves. Reads its header only."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise StartError(f"the weights {path} cannot be read ({error}): fetch the checkpoint again") from error
