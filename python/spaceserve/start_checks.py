"""What keeps a server from starting, found as early as it can be known and said in one line."""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import socket
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from spaceserve.config import SpaceServeConfig, option
from spaceserve.shared_memory import SHM_DIR

if TYPE_CHECKING:
    import torch
    from sglang.srt.server_args import ServerArgs

# SGLang's, when the command line names none.
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 30000


class StartError(Exception):
    """The server cannot start; the message is one line that says what to do. `status`: of the process."""

    status = 1


class UsageError(StartError):
    """The command line is wrong."""

    status = 2


def first_line(error: BaseException) -> str:
    """The first line of an error's message, and the second where it only announces that; empty without a message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, with what was probably meant, and not what all options are."""

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        kind, _, words = message.partition(": ")
        unknown = words if kind == "unrecognized arguments" else ""  # in other messages the option is a known one
        names = (word.partition("=")[0] for word in unknown.split() if word.startswith("--"))
        meant = [_did_you_mean(name, self._option_string_actions) for name in names]
        raise UsageError(f"{message}{next(filter(None, meant), '')}; --help lists all options")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += _did_you_mean(str(value), map(str, action.choices or ()))
            raise


def _did_you_mean(written: str, known: Iterable[str]) -> str:
    """The known word that `written` is close to, as the end of a sentence; empty where there is none."""
    close = difflib.get_close_matches(written, known, n=1, cutoff=0.7)
    return f" (did you mean {close[0]}?)" if close else ""


def own_config(argv: list[str]) -> SpaceServeConfig:
    """SpaceServe's own arguments, before SGLang (and with it CUDA) is imported.

    Raises:
        UsageError: a value is of the wrong kind or out of range.
    """
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    SpaceServeConfig.add_cli_args(parser)
    namespace, _ = parser.parse_known_args(argv)
    try:
        return SpaceServeConfig.from_cli_args(namespace)
    except ValueError as error:
        raise UsageError(str(error)) from error


def separated(argv: list[str]) -> list[str]:
    """`argv` with `--config FILE` for `--config=FILE`, which SGLang does not know.

    Raises:
        UsageError: --config names no file.
    """
    found: list[str] = []
    for argument in argv:
        found += argument.split("=", 1) if argument.startswith("--config=") else [argument]
    if "--config" in found and not "".join(found[found.index("--config") + 1 :][:1]):
        raise UsageError("--config needs the name of a file")
    return found


def with_config_file(argv: list[str]) -> list[str]:
    """`argv` behind what the file of `--config` says of SpaceServe's options and of the model.

    SGLang merges the file when its own options are known, which is too late for what is looked at before.

    Raises:
        StartError: the file is missing, unreadable or no mapping.
    """
    if "--config" not in argv:
        return argv
    import yaml

    path = "".join(argv[argv.index("--config") + 1 :][:1])
    try:
        settings = yaml.safe_load(Path(path).read_text())
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise StartError(f"--config {path} is not YAML: {error.problem}{line}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise StartError(f"--config {path}: {str(error).splitlines()[0]}") from error
    if not isinstance(settings, dict):
        raise StartError(f"--config {path} is no mapping of options to values")
    wanted = {field.name for field in fields(SpaceServeConfig)} | {
        "host",
        "port",
        "model_path",
        "model",
        "load_format",
        "tokenizer_path",
    }
    found: list[str] = []
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        if name in wanted and value is not None:
            found += [option(name), str(value)]
        elif name in ("enable_metrics", "skip_tokenizer_init") and value is True:
            found.append(option(name))
    return [*found, *argv]


def check_memory(config: SpaceServeConfig, *, has_accelerator: bool) -> None:
    """Compare the feature store's sizes with the machine's, before anything is started.

    What the encoder worker finds when it takes the memory is exact; this is what cannot be had at any time.

    Raises:
        StartError: host memory, or the shared memory that holds the store on the CPU, is smaller.
    """
    memory_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    host_gb, cache_gb = config.encoder_feature_host_gb or 0.0, config.encoder_feature_cache_gb or 0.0
    if host_gb > memory_gb:
        raise StartError(f"--encoder-feature-host-gb {host_gb:g}: this machine has {memory_gb:.1f} GB of memory")
    if has_accelerator:
        return
    shared_gb = shutil.disk_usage(SHM_DIR).free / 1e9
    if cache_gb > shared_gb:
        raise StartError(
            f"--encoder-feature-cache-gb {cache_gb:g}: {SHM_DIR}, which holds the features on the CPU, has "
            f"{shared_gb:.2f} GB left"
        )
    if cache_gb + host_gb > memory_gb:
        raise StartError(
            f"--encoder-feature-cache-gb {cache_gb:g} and --encoder-feature-host-gb {host_gb:g}: this machine has "
            f"{memory_gb:.1f} GB of memory"
        )


def check_blocks(config: SpaceServeConfig, feature_dim: int, dtype: torch.dtype) -> None:
    """Find sizes of the feature store that hold nothing of a model, before it is loaded.

    Args:
        feature_dim: elements of one token's features.
        dtype: theirs.

    Raises:
        StartError: not even one block of features fits.
    """
    from spaceserve.encoder.process import blocks_in

    for name, size_gb in (("cache", config.encoder_feature_cache_gb), ("host", config.encoder_feature_host_gb)):
        if size_gb is not None:
            try:
                blocks_in(size_gb, feature_dim, dtype, name)
            except ValueError as error:
                raise StartError(str(error)) from error


def check_named_port(argv: list[str]) -> None:
    """`check_port` for the address on the command line, before SGLang and all its options are imported.

    Raises:
        StartError: see there.
        UsageError: the port is no whole number.
    """
    parser = OneLineParser(add_help=False)  # abbreviations are allowed, as SGLang allows them
    parser.add_argument("--host", default=DEFAULT_HOST)
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    namespace, _ = parser.parse_known_args(argv)
    check_port(namespace.host, namespace.port)


def check_port(host: str, port: int) -> None:
    """Raises StartError where nothing can listen at that address."""
    if not 0 < port < 1 << 16:
        raise StartError(f"--port {port}: ports are 1 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the server will: connections that linger from the last one are no obstacle, whoever listens is.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror as error:
            raise StartError(f"--host {host}: {error.strerror}") from error
        except OSError as error:
            raise StartError(
                f"cannot listen on {host}:{port} ({error.strerror}): "
                "stop the process that does, or choose another --port"
            ) from error


def check_architecture(server_args: ServerArgs) -> None:
    """Find out before any process is started that SGLang cannot serve the model.

    Raises:
        StartError: no architecture of the checkpoint is SGLang's, transformers' or the checkpoint's own.
    """
    import transformers
    from sglang.srt.models.registry import ModelRegistry

    config = server_args.get_model_config().hf_config
    architectures = list(config.architectures or [])
    supported = ModelRegistry.get_supported_archs()
    is_known = any(name in supported or hasattr(transformers, name) for name in architectures)
    if is_known or getattr(config, "auto_map", None):
        return
    raise StartError(
        f"the architecture {', '.join(architectures) or 'of the checkpoint'} is not one that SGLang 0.5.17 serves: "
        "give --model-path another checkpoint"
    )
