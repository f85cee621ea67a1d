"""`python -m spaceserve.launch_server`: SGLang's server with a dedicated encoder worker.

Takes every argument of `sglang.launch_server` and SpaceServe's own (`--help`, group SpaceServe). Without
`--model-path` it serves the bundled demo model.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from contextlib import ExitStack
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from spaceserve.channels import Channels
from spaceserve.checkpoint_checks import check_model_folder, check_named_model, check_tokenizer
from spaceserve.config import SpaceServeConfig, option
from spaceserve.processes import WithEnvironment, may_fork, start_forkserver, start_method_hook, stop_forkserver
from spaceserve.reaper import Reaper
from spaceserve.start_checks import (
    OneLineParser,
    StartError,
    UsageError,
    check_architecture,
    check_blocks,
    check_memory,
    check_named_port,
    check_port,
    first_line,
    own_config,
    separated,
    with_config_file,
)
from spaceserve.starting import SCHEDULER_FAILED, ProcessFailed, Starting

# What shells give a command that Ctrl-C has ended.
INTERRUPTED = 128 + signal.SIGINT

if TYPE_CHECKING:
    from sglang.srt.server_args import PortArgs, ServerArgs

    from spaceserve.families import Family
    from spaceserve.hooks import Hook
    from spaceserve.partition.mps import MpsDaemon
    from spaceserve.partition.mps_supervisor import MpsSupervisor


class _Parser(OneLineParser):
    """SGLang's arguments may be abbreviated, as in `--tp 2`; SpaceServe's own never make such a name ambiguous."""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        own = {field.name for field in fields(SpaceServeConfig)}
        matches: list[Any] = super()._get_option_tuples(option_string)
        return [match for match in matches if match[0].dest not in own]


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse SGLang's and SpaceServe's arguments, as SGLang does; the bundled model where none is named.

    Raises:
        UsageError: an argument is unknown, or one's value is none that it can have.
    """
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.common import suppress_noisy_warnings

    suppress_noisy_warnings()
    parser = _Parser(prog="python -m spaceserve.launch_server")
    ServerArgs.add_cli_args(parser)
    SpaceServeConfig.add_cli_args(parser)
    if "--config" in argv:
        from sglang.srt.server_args_config_parser import ConfigArgumentMerger

        try:
            argv = ConfigArgumentMerger(parser).merge_config_with_args(argv)
        except ValueError as error:
            raise UsageError(f"--config: {error}") from error
    if not any(argument.split("=")[0] in ("--model-path", "--model") for argument in argv):
        from spaceserve.demo import model_path

        argv = [*argv, "--model-path", str(model_path())]
    return parser.parse_args(argv)


def resolve_server_args(namespace: argparse.Namespace) -> ServerArgs:
    """SGLang's own resolution of its arguments.

    Raises:
        StartError: the checkpoint's configuration, or an argument of SGLang's, cannot be used.
    """
    import logging

    from sglang.srt.server_args import ServerArgs

    logging.basicConfig(
        level=getattr(logging, namespace.log_level.upper()),
        format="[%(asctime)s] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )
    try:
        server_args = ServerArgs.from_cli_args(namespace)
    except AssertionError as error:
        # How SGLang refuses most combinations of arguments; where it has no words for one, the condition says it.
        condition = traceback.extract_tb(error.__traceback__)[-1].line
        reason = first_line(error) or f"it asks for `{condition}`"
        raise UsageError(f"SGLang refuses these options: {reason}; --help lists all") from error
    except Exception as error:  # whatever a checkpoint's configuration makes SGLang and transformers raise
        reason = first_line(error) or "no reason given"
        if not isinstance(error, ValueError | OSError):
            reason = f"{type(error).__name__}: {reason}"
        raise StartError(f"the model in {namespace.model_path} cannot be served: {reason}") from error
    for name in ("tp_size", "pp_size", "dp_size", "nnodes"):
        if getattr(server_args, name) < 1:  # SGLang would start no scheduler, and fail over that
            raise UsageError(f"{option(name)} must be at least 1, got {getattr(server_args, name)}")
    return server_args


def split_obstacle(server_args: ServerArgs, family: Family | None) -> str | None:
    """Why this server cannot have an encoder worker, in words for the user; None if it can."""
    from sglang.srt.environ import envs

    if family is None:
        architectures = ", ".join(server_args.get_model_config().hf_config.architectures or ["unknown"])
        return f"its architecture ({architectures}) cannot be split"
    obstacles = [
        (server_args.disaggregation_mode != "null", "--disaggregation-mode is set"),
        (server_args.encoder_only or server_args.language_only, "SGLang's own encoder disaggregation is on"),
        (server_args.pp_size > 1, "--pp-size is above 1"),
        (server_args.dp_size > 1, "--dp-size is above 1"),
        (server_args.nnodes > 1, "--nnodes is above 1"),
        (server_args.tokenizer_worker_num > 1, "--tokenizer-worker-num is above 1"),
        (server_args.skip_tokenizer_init, "--skip-tokenizer-init is set"),
        (server_args.smg_grpc_mode or server_args.use_ray, "the server is not an HTTP server of one host"),
        (bool(envs.SGLANG_RUST_SERVER.get()), "SGLANG_RUST_SERVER is set"),
        (server_args.enable_memory_saver, "--enable-memory-saver is set"),
    ]
    return next((reason for is_met, reason in obstacles if is_met), None)


def serve(
    server_args: ServerArgs, config: SpaceServeConfig, channels: Channels, reaper: Reaper, mps: MpsDaemon | None
) -> None:
    """Run the server until it ends. `mps`: the started daemon, where there is a GPU.

    Raises:
        StartError: `--encoder-worker on` for a model or setting that cannot be split; a process that did not start.
    """
    import logging

    from sglang.launch_server import run_server
    from sglang.srt.configs.model_config import ModelConfig

    from spaceserve.families import feature_dim, find_family

    family = find_family(server_args.get_model_config().hf_config.architectures)
    obstacle = split_obstacle(server_args, family)
    if config.encoder_worker == "off":
        stop_forkserver()
        run_server(server_args)
        return
    if obstacle is not None:
        if config.encoder_worker == "on":
            raise StartError(f"--encoder-worker on is not possible: {obstacle}")
        if family is None:
            check_architecture(server_args)
        logging.getLogger(__name__).warning("Serving without an encoder worker, as stock SGLang does: %s", obstacle)
        stop_forkserver()
        run_server(server_args)
        return
    assert family is not None
    # As the encoder worker makes it: what the arguments keep may have been made before SGLang settled the dtype.
    model_config = ModelConfig.from_server_args(server_args)
    check_blocks(config, feature_dim(model_config.hf_config), model_config.dtype)
    _serve_split(server_args, config, family, channels, reaper, mps)


def _load_file_hook(reaper: Reaper) -> Hook:
    """SGLang's schedulers publish their load in a file of /dev/shm, which stays when they are killed."""
    from spaceserve.hooks import Hook

    def remember(result: PortArgs, *args: Any, **kwargs: Any) -> None:
        from sglang.srt.managers.load_snapshot import shm_path_for

        reaper.remove_too(shm_path_for(result.instance_id))

    return Hook(
        target="sglang.srt.server_args.PortArgs.init_new",
        function=remember,
        kind="after",
        why="nothing is left in /dev/shm after a crash",
        parameters=("server_args",),
    )


def _serve_split(
    server_args: ServerArgs,
    config: SpaceServeConfig,
    family: Family,
    channels: Channels,
    reaper: Reaper,
    mps: MpsDaemon | None,
) -> None:
    from functools import partial

    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    from spaceserve.encoder.supervisor import EncoderSupervisor
    from spaceserve.frontend import cancelled_log
    from spaceserve.frontend.admission import Admission, admission_hooks
    from spaceserve.hooks import install
    from spaceserve.partition.mps_supervisor import MpsMetrics, MpsSupervisor
    from spaceserve.scheduler.process import run_scheduler_process
    from spaceserve.status import add_status_routes

    # Pixels are made in the encoder worker: SGLang's transport of pixels would only take device memory.
    server_args.override("spaceserve", mm_feature_transport="cpu")
    if server_args.tp_size > 1:
        # The encoder and its features lie on the first GPU; SGLang would refuse to start over the difference.
        os.environ.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0")
    forked = may_fork()
    starting = Starting()
    supervisor = EncoderSupervisor(server_args, config, family, channels, starting.fail, forked=forked)
    mps_supervisor = None if mps is None else MpsSupervisor(mps, _gpu_contexts_lost)
    if mps_supervisor is not None and server_args.enable_metrics:
        mps_supervisor.metrics = MpsMetrics({"model_name": str(server_args.served_model_name)})
    try:
        if mps_supervisor is not None:
            mps_supervisor.start()
        supervisor.start()
        hooks = admission_hooks(Admission(config, channels), family)
        hooks.append(_load_file_hook(reaper))
        hooks.append(starting.hook())
        if forked:
            hooks.append(start_method_hook())
        if mps_supervisor is not None:
            hooks.append(_failed_process_hook(mps_supervisor))
        install(hooks)
        cancelled_log.install()
        add_status_routes(channels, dict if mps_supervisor is None else mps_supervisor.snapshot)
        launch_server(
            server_args,
            run_scheduler_process_func=WithEnvironment(partial(run_scheduler_process, config, channels, family)),
            run_detokenizer_process_func=WithEnvironment(run_detokenizer_process),
        )
    except ProcessFailed as failed:
        starting.over()
        raise StartError(str(failed)) from None
    except RuntimeError as error:
        # SGLang's own words for a scheduler that ended are about the memory of the machine, whatever the cause.
        if "scheduler died during initialization" not in str(error):
            raise
        raise StartError(SCHEDULER_FAILED) from None
    finally:
        _call_off_watchdog()
        if mps_supervisor is not None:
            mps_supervisor.stop()
        supervisor.stop()


def _failed_process_hook(mps_supervisor: MpsSupervisor) -> Hook:
    """SGLang kills the whole server when a process of it fails; where MPS is the cause, that is said before."""
    from spaceserve.hooks import Hook

    def look(*args: Any, **kwargs: Any) -> None:
        mps_supervisor.look_now()

    return Hook(
        target="sglang.srt.managers.tokenizer_manager.SignalHandler.running_phase_sigquit_handler",
        function=look,
        kind="before",
        why="a lost MPS server ends the server with its reason and status 1",
        parameters=("signum", "frame"),
    )


def _gpu_contexts_lost(reason: str) -> None:
    """End the server at once: its processes may hang in the driver, and nobody would be answered any more.

    The reaper removes what is left.
    """
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils import kill_process_tree

    state = http_server._global_state
    if state is not None and state.tokenizer_manager.gracefully_exit:
        return  # the server is ending, and the MPS server with it
    print(f"spaceserve: {reason}", file=sys.stderr, flush=True)
    kill_process_tree(os.getpid(), include_parent=False)
    os._exit(1)


def _call_off_watchdog() -> None:
    """The server ends, so its processes may: SGLang's watchdog would take that for a crash and end this one too soon.

    What comes after, the MPS daemon's end among it, must still run.
    """
    from sglang.srt.entrypoints import http_server

    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    state = http_server._global_state
    watchdog = None if state is None else state.tokenizer_manager._subprocess_watchdog
    if watchdog is not None:
        watchdog.stop()


def _start_mps(config: SpaceServeConfig, reaper: Reaper, stack: ExitStack) -> MpsDaemon | None:
    """Start MPS where encoder and decoder are to share a GPU; before anything makes a CUDA context."""
    from spaceserve.partition.mps import MpsDaemon, gpu_is_present

    if config.encoder_worker == "off" or not gpu_is_present():
        return None
    daemon = stack.enter_context(MpsDaemon())
    os.environ.update(daemon.client_environ)
    if daemon.is_owned and daemon.pipe_directory is not None:
        # SGLang ends itself with SIGKILL after SIGTERM: then only the reaper is left to do this.
        reaper.end_mps(str(daemon.pipe_directory))
        reaper.remove_too(str(daemon.pipe_directory.parent))
    return daemon


def run(argv: list[str]) -> None:
    """Parse, check, serve.

    Raises:
        StartError: the server cannot start.
    """
    argv = separated(argv)
    if {"-h", "--help"} & set(argv):
        parse_args(argv)  # prints it and exits
    with_file = with_config_file(argv)
    config = own_config(with_file)
    check_memory(config, has_accelerator=not may_fork())
    check_named_port(with_file)
    check_named_model(with_file)
    with ExitStack() as stack:
        channels = Channels.create(dp_size=1)
        reaper = Reaper(channels.shm_prefix, channels.run_dir)
        stack.callback(reaper.close)
        if "--enable-metrics" in with_file and "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            # prometheus_client looks at this when it is imported, in every process.
            metrics_dir = os.path.join(channels.run_dir, "metrics")
            os.mkdir(metrics_dir)
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = metrics_dir
        mps = None
        if may_fork():
            start_forkserver(os.path.join(channels.run_dir, "forkserver"))
        else:
            mps = _start_mps(config, reaper, stack)

        # Called first at the end: a second Ctrl-C must not interrupt the clean-up after the first.
        stack.callback(signal.signal, signal.SIGINT, signal.SIG_IGN)
        namespace = parse_args(argv)
        check_model_folder(namespace.model_path, namespace.load_format)
        if not namespace.skip_tokenizer_init:
            check_tokenizer(namespace.tokenizer_path or namespace.model_path)
        check_port(namespace.host, namespace.port)
        try:
            serve(resolve_server_args(namespace), config, channels, reaper, mps)
        finally:
            from sglang.srt.utils import kill_process_tree

            kill_process_tree(os.getpid(), include_parent=False)


def main(argv: list[str]) -> int:
    """`run`, with errors as one line. Returns the exit code."""
    try:
        run(argv)
    except StartError as error:
        print(f"spaceserve: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print("spaceserve: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
