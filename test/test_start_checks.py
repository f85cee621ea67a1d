"""What keeps a server from starting: found early, said in one line that names the option or the file."""

from __future__ import annotations

import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spaceserve.channels import Channels
from spaceserve.checkpoint_checks import check_model_folder, check_named_model, check_tokenizer
from spaceserve.config import SpaceServeConfig
from spaceserve.demo import model_path
from spaceserve.encoder.process import reason_of
from spaceserve.encoder.supervisor import EncoderSupervisor
from spaceserve.families import FAMILIES
from spaceserve.start_checks import (
    OneLineParser,
    StartError,
    UsageError,
    check_blocks,
    check_memory,
    check_named_port,
    check_port,
    first_line,
    own_config,
    separated,
    with_config_file,
)
from spaceserve.starting import ProcessFailed, Starting

pytestmark = pytest.mark.cpu


@pytest.fixture
def signal_handlers() -> Iterator[None]:
    """The handlers that a start sets are gone after the test."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGQUIT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_an_option_that_cannot_be_read_is_one_line() -> None:
    with pytest.raises(UsageError, match="--encoder-preprocess-threads: invalid int value: '1e5'"):
        own_config(["--encoder-preprocess-threads", "1e5"])
    with pytest.raises(StartError, match="--encoder-window-ms must be greater than 0"):
        own_config(["--encoder-window-ms", "-1"])
    assert own_config(["--encoder-window-ms", "5", "--of-sglang", "1"]).encoder_window_ms == 5


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ["--mem-fraction-statik", "0.5"],
            r"unrecognized .*-statik 0.5 \(did you mean --mem-fraction-static\?\); --help",
        ),
        (["--mem-fraction-statik=0.5"], r"\(did you mean --mem-fraction-static\?\)"),
        (["5", "--qqq"], r"^unrecognized arguments: 5 --qqq; --help lists all options$"),
        (["--tp-size", "abc"], r"^argument --tp-size: invalid int value: 'abc'; --help lists"),
        (["--tp-size"], r"^argument --tp-size: expected one argument; --help"),
        (["--backend", "tritn"], r"invalid choice: 'tritn' .*\(did you mean triton\?\); --help"),
        (["--backend", "x"], r"invalid choice: 'x' \(choose from [^()]*\); --help"),
    ],
)
def test_a_wrong_option_is_one_line_and_what_was_meant(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = OneLineParser()
    parser.add_argument("--mem-fraction-static", type=float)
    parser.add_argument("--tp-size", type=int)
    parser.add_argument("--backend", choices=["triton", "fa3"])
    with pytest.raises(UsageError, match=reason) as error:
        parser.parse_args(arguments)
    assert error.value.status == 2
    assert "\n" not in str(error.value)
    assert capsys.readouterr() == ("", "")


def test_an_errors_first_line_says_what_is_wrong() -> None:
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError("\nInvalid field 'x':\n    no list\nmore")) == "Invalid field 'x': no list"
    assert first_line(ValueError("only:")) == "only:"
    assert first_line(AssertionError()) == ""


def test_options_in_the_config_file_count_and_those_of_the_command_line_win(tmp_path: Path) -> None:
    """They are needed before SGLang, which merges the file, is imported."""
    file = tmp_path / "settings.yaml"
    file.write_text("encoder-window-ms: 7\nsm_partition: static:1\nenable-metrics: true\nmax-total-tokens: 9\n")
    merged = with_config_file(["--config", str(file), "--sm-partition", "off"])
    config = own_config(merged)
    assert (config.encoder_window_ms, config.sm_partition) == (7, "off")
    assert "--enable-metrics" in merged
    assert "--max-total-tokens" not in merged, "SGLang's own are merged by SGLang"
    file.write_text("port: 99999\n")
    with pytest.raises(StartError, match="--port 99999"):
        check_named_port(with_config_file(["--config", str(file)]))
    file.write_text("encoder-feature-cache-gb: -3\n")
    with pytest.raises(StartError, match="--encoder-feature-cache-gb"):
        own_config(with_config_file(["--config", str(file)]))
    for text in ("- a list", "{", "\x00"):
        file.write_text(text)
        with pytest.raises(StartError, match="--config"):
            with_config_file(["--config", str(file)])
    file.write_text("port: 1\nhost: [")
    with pytest.raises(StartError, match=r"is not YAML: .* in line 2"):
        with_config_file(["--config", str(file)])
    assert with_config_file(["--port", "1"]) == ["--port", "1"]


def test_the_config_file_may_follow_an_equals_sign() -> None:
    assert separated(["--config=a=b.yaml", "--port=1"]) == ["--config", "a=b.yaml", "--port=1"]
    for argv in (["--config"], ["--config="], ["--config", ""]):
        with pytest.raises(UsageError, match="--config needs the name of a file"):
            separated(argv)


def test_addresses_at_which_nothing_can_listen() -> None:
    for port in (-1, 0, 65536):
        with pytest.raises(StartError, match=f"--port {port}: ports are 1 to 65535"):
            check_port("127.0.0.1", port)
    with pytest.raises(StartError, match=r"--host 256.1.1.1: "):
        check_port("256.1.1.1", 30000)


@pytest.mark.parametrize("reuse", [None, socket.SO_REUSEADDR, socket.SO_REUSEPORT])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", ""])
def test_a_port_in_use_is_found_before_sglang_is_imported(reuse: int | None, host: str) -> None:
    with socket.socket() as taken:
        if reuse is not None:
            taken.setsockopt(socket.SOL_SOCKET, reuse, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments in (["--port", str(port)], [f"--port={port}"], ["--por", str(port)]):
            with pytest.raises(StartError, match=f"cannot listen on .*:{port} .*choose another --port"):
                check_named_port(["--model", "x", "--host", host, *arguments])


def test_a_connection_that_lingers_is_no_obstacle() -> None:
    """What closes first waits for stray packets of the connection, and keeps the port's number meanwhile."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            listener.accept()[0].close()
            assert client.recv(1) == b""
    with socket.socket() as strict, pytest.raises(OSError, match="in use"):
        strict.bind(("127.0.0.1", port))
    check_named_port(["--port", str(port)])


def test_a_port_that_is_no_number_is_named_early() -> None:
    with pytest.raises(UsageError, match="argument --port: invalid int value: 'http'"):
        check_named_port(["--port", "http"])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"encoder_feature_host_gb": 1e5}, "--encoder-feature-host-gb 100000: this machine has"),
        ({"encoder_feature_cache_gb": 1e5}, "--encoder-feature-cache-gb 100000: /dev/shm"),
    ],
)
def test_memory_that_the_machine_lacks_is_refused_at_once(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(StartError, match=reason):
        check_memory(SpaceServeConfig(**settings), has_accelerator=False)
    check_memory(SpaceServeConfig(), has_accelerator=False)


def test_the_store_on_a_gpu_is_not_held_against_the_hosts_memory() -> None:
    check_memory(SpaceServeConfig(encoder_feature_cache_gb=1e5), has_accelerator=True)
    with pytest.raises(StartError, match="--encoder-feature-host-gb"):
        check_memory(SpaceServeConfig(encoder_feature_host_gb=1e5), has_accelerator=True)


@pytest.mark.parametrize("name", ["cache", "host"])
def test_a_store_of_less_than_a_block_is_refused_before_the_model_is_loaded(name: str) -> None:
    block_gb = 16 * 256 * 4 / 1e9

    def of_size(size_gb: float) -> SpaceServeConfig:
        settings: dict[str, Any] = {f"encoder_feature_{name}_gb": size_gb}
        return SpaceServeConfig(**settings)

    with pytest.raises(StartError, match=rf"--encoder-feature-{name}-gb 1e-09 holds no block .* 16\.4 kB"):
        check_blocks(of_size(1e-9), 256, torch.float32)
    check_blocks(of_size(1.001 * block_gb), 256, torch.float32)


def test_model_folders_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with pytest.raises(StartError, match=f"no model folder {folder}"):
        check_model_folder(str(folder), "auto")
    folder.mkdir()
    with pytest.raises(StartError, match=r"holds no config\.json"):
        check_model_folder(str(folder), "auto")
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(StartError, match="is not a folder"):
        check_model_folder(str(folder / "config.json"), "auto")
    with pytest.raises(StartError, match="holds no weights"):
        check_model_folder(str(folder), "auto")
    check_model_folder(str(folder), "dummy")
    (folder / "model.safetensors").symlink_to(folder / "gone")
    with pytest.raises(StartError, match=r"cannot be read .*model\.safetensors: No such file"):
        check_model_folder(str(folder), "auto")
    (folder / "gone").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(StartError, match=r"the weights .*model\.safetensors cannot be read .*header"):
        check_model_folder(str(folder), "auto")
    whole = next(model_path().glob("*.safetensors")).read_bytes()
    (folder / "gone").write_bytes(whole[:-1])
    with pytest.raises(StartError, match=r"the weights .*model\.safetensors cannot be read"):
        check_model_folder(str(folder), "auto")
    (folder / "gone").write_bytes(whole)
    check_model_folder(str(folder), "auto")
    check_model_folder("Organisation/a-model-of-the-hub", "auto")
    check_model_folder("s3://bucket/a/model", "auto")


@pytest.mark.parametrize("text", ["[]", '["a"]', "null", "3", '"x"', "{", "", "\x00", "[" * 100_000])
def test_a_checkpoints_files_that_are_no_json_objects_are_named(text: str, tmp_path: Path) -> None:
    """In config.json, and in what every process reads beside it."""
    shutil.copytree(model_path(), tmp_path, dirs_exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
        whole = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text)
        with pytest.raises(StartError, match=f"{tmp_path / name} (holds|is not JSON)") as error:
            check_named_model(["--model", str(tmp_path)])
        assert "\n" not in str(error.value)
        (tmp_path / name).write_text(whole)
    check_named_model(["--model", str(tmp_path)])


def test_a_checkpoint_without_its_tokenizer_or_image_processor_is_refused(tmp_path: Path) -> None:
    shutil.copytree(model_path(), tmp_path / "model")
    shutil.copytree(model_path(), tmp_path / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    model = ["--model-path", str(tmp_path / "model")]
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(StartError, match=f"{tmp_path / 'model'} holds no tokenizer .*--tokenizer-path"):
        check_named_model(model)
    check_named_model([*model, "--tokenizer-path", str(tmp_path / "tokenizer")])
    check_named_model([*model, "--tokenizer-path", "Organisation/of-the-hub"])
    check_named_model([*model, "--skip-tokenizer-init"])
    for name in ("vocab.json", "tokenizer.model", "qwen.tiktoken", "tokenization_own.py"):
        (tmp_path / "model" / name).write_text("{}")
        check_tokenizer(str(tmp_path / "model"))
        (tmp_path / "model" / name).unlink()
    (tmp_path / "model" / "preprocessor_config.json").unlink()
    with pytest.raises(StartError, match=r"model holds no preprocessor_config\.json"):
        check_model_folder(str(tmp_path / "model"), "auto")
    config = tmp_path / "model" / "config.json"
    config.write_text('{"architectures": ["LlamaForCausalLM"]}')
    check_model_folder(str(tmp_path / "model"), "auto")
    for architectures in ('"x"', "[3, null, {}]", "[]", "{}", "null"):
        config.write_text(f'{{"architectures": {architectures}}}')
        with pytest.raises(StartError, match=f"{config} names no architectures"):
            check_model_folder(str(tmp_path / "model"), "auto")


@pytest.mark.parametrize("option", ["--model-path", "--model", "--model-pa"])
def test_the_named_model_is_looked_at_before_sglang_is_imported(option: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(StartError, match="holds no weights"):
        check_named_model(["--port", "1", option, str(tmp_path), "--device", "cpu"])
    with pytest.raises(StartError, match="holds no weights"):
        check_named_model([f"{option}={tmp_path}"])
    check_named_model([option, str(tmp_path), "--load-format", "dummy"])
    check_named_model(["--model-impl", "auto", "--device", "cpu"])


def test_a_workers_error_is_one_line_and_an_option_in_it_is_the_users() -> None:
    assert reason_of(ValueError("--sm-partition static:9: the device has 2 cores")).startswith("--sm-partition")
    assert reason_of(RuntimeError("\nCUDA error: x\nCompile with ...")) == "RuntimeError: CUDA error: x"
    assert reason_of(KeyError()) == "KeyError"
    assert SpaceServeConfig.is_at_fault("--sm-partition static:9: the device has 2 cores")
    assert SpaceServeConfig.is_at_fault("no room: give a smaller --encoder-feature-cache-gb")
    assert not SpaceServeConfig.is_at_fault("ValueError: see --help, --sm-partitions")


@pytest.mark.timeout(20)
@pytest.mark.usefixtures("signal_handlers")
def test_a_worker_that_does_not_start_ends_what_the_main_thread_does(tmp_path: Path) -> None:
    """Its reason is raised in the main thread, and once more where something swallows it there."""
    channels = Channels(run_dir=str(tmp_path), shm_prefix="spaceserve-unit-test-", dp_size=1)
    (tmp_path / "encoder-error-0").write_text("--sm-partition static:9: the device has 2 cores")
    server_args: Any = None
    starting = Starting()
    family = FAMILIES["Qwen2VLForConditionalGeneration"]
    supervisor = EncoderSupervisor(server_args, SpaceServeConfig(), family, channels, starting.fail, forked=False)
    ended = SimpleNamespace(pid=None, exitcode=1, is_alive=lambda: False, start=lambda: None)
    supervisor._context = SimpleNamespace(Process=lambda **arguments: ended)  # type: ignore[assignment]
    supervisor.start()
    for _ in range(2):
        with pytest.raises(ProcessFailed) as failed:
            time.sleep(15)
        assert str(failed.value) == "the encoder worker did not start: --sm-partition static:9: the device has 2 cores"
    starting.over()
    supervisor.stop()


@pytest.mark.usefixtures("signal_handlers")
def test_a_scheduler_that_does_not_start_ends_what_the_main_thread_does() -> None:
    """SGLang's schedulers say so with SIGQUIT."""
    Starting().hook().function(None, SimpleNamespace(custom_sigquit_handler=None))
    with pytest.raises(ProcessFailed, match="the scheduler did not start"):
        signal.raise_signal(signal.SIGQUIT)
