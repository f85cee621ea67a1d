"""One SpaceServe server on the CPU with the bundled model: what users do with it, and what goes wrong."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from typing import Any

import psutil
import pytest
import requests

from servers import Server, data_url, encoded, free_port, picture, picture_url, running, user, user_with_videos
from videos import clip, damaged

pytestmark = pytest.mark.cpu

HEARTBEAT_TIMEOUT_S = 4


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ["--enable-metrics", "--encoder-heartbeat-timeout-s", str(HEARTBEAT_TIMEOUT_S)]
    with running("spaceserve.launch_server", *flags, env={"SPACESERVE_DEBUG": "1"}) as running_server:
        yield running_server


def num_encoded(server: Server) -> int:
    count: int = server.status()["num_encoded"]
    return count


# ---- what users do


def test_answers_about_the_bundled_picture(server: Server) -> None:
    from spaceserve.demo import ask

    url = data_url(ask.PICTURE.read_bytes())
    assert server.answer([user(ask.QUESTION, url)], max_tokens=64).strip() == ask.right_answer()


def test_streaming_gives_the_same_text(server: Server) -> None:
    messages = [user("Describe the picture.", picture_url(1))]
    assert server.stream(messages) == server.answer(messages)


def test_several_images_and_many_turns(server: Server) -> None:
    first = user("What colour is the background of the second picture?", picture_url(2), picture_url(3))
    answer = server.answer([first])
    again = [first, {"role": "assistant", "content": answer}, user("And of this one?", picture_url(4))]
    assert server.answer(again) is not None


def test_text_only(server: Server) -> None:
    before = num_encoded(server)
    assert server.answer([user("Hello")]) is not None
    assert num_encoded(server) == before


def test_generate_takes_images_too(server: Server) -> None:
    text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the picture.<|im_end|>\n"
    body: dict[str, Any] = {
        "text": text + "<|im_start|>assistant\n",
        "image_data": picture_url(5),
        "sampling_params": {"max_new_tokens": 16, "temperature": 0},
    }
    response = requests.post(f"{server.url}/generate", json=body, timeout=60)
    assert response.status_code == 200, response.text
    assert response.json()["text"].strip() == server.answer([user("Describe the picture.", picture_url(5))]).strip()


def test_structured_output(server: Server) -> None:
    message = user("What colour is the background?", picture_url(9))
    assert server.answer([message], regex="(yes|no)") in ("yes", "no")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert json.loads(server.answer([message], response_format=wanted, max_tokens=64))["n"] in (1, 2)


def test_openai_client(server: Server) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    messages: list[Any] = [user("Describe the picture.", picture_url(6))]
    whole = client.chat.completions.create(model="m", messages=messages, max_tokens=16, temperature=0)
    stream = client.chat.completions.create(model="m", messages=messages, max_tokens=16, temperature=0, stream=True)
    parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(parts) == whole.choices[0].message.content


def test_frontend_language_program(server: Server, tmp_path: Any) -> None:
    import sglang as sgl
    from sglang.lang.chat_template import get_chat_template

    path = tmp_path / "picture.png"
    path.write_bytes(encoded(picture(7)))

    @sgl.function
    def image_qa(s: Any, image: str, question: str) -> None:
        s += sgl.user(sgl.image(image) + question)
        s += sgl.assistant(sgl.gen("answer", max_tokens=16, temperature=0))

    backend = sgl.RuntimeEndpoint(server.url)
    backend.chat_template = get_chat_template("qwen2-vl")
    state = image_qa.run(image=str(path), question="Describe the picture.", backend=backend)
    assert state["answer"].strip()


@contextlib.contextmanager
def over_http(data: bytes, name: str) -> Iterator[str]:
    """URL of a file with these bytes."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/{name}"
    finally:
        http.shutdown()


def test_images_by_url_and_by_path(server: Server, tmp_path: Any) -> None:
    data = encoded(picture(8))
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    with over_http(data, path.name) as url_of_it:
        urls = [data_url(data), f"file://{path}", url_of_it]
        answers = {server.answer([user("Describe the picture.", url)]) for url in urls}
    assert len(answers) == 1


def video_url(seed: int, num_frames: int = 8) -> str:
    return data_url(clip(seed, num_frames), "x-msvideo", kind="video")


def test_videos_by_url_and_by_path_are_encoded_once(server: Server, tmp_path: Any) -> None:
    data = clip(30, num_frames=12)
    path = tmp_path / "video.avi"
    path.write_bytes(data)
    before = num_encoded(server)
    with over_http(data, path.name) as url_of_it:
        urls = [data_url(data, "mp4", kind="video"), f"file://{path}", str(path), url_of_it]
        answers = {server.answer([user_with_videos("What happens?", [url])]) for url in urls}
    assert len(answers) == 1
    assert num_encoded(server) == before + 1


def test_generate_takes_videos_and_images_in_one_prompt(server: Server) -> None:
    text = "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|><|vision_start|><|image_pad|><|vision_end|>"
    text += "What happens?<|im_end|>\n<|im_start|>assistant\n"
    body: dict[str, Any] = {
        "text": text,
        "image_data": [picture_url(31)],
        "video_data": [video_url(31)],
        "sampling_params": {"max_new_tokens": 16, "temperature": 0},
    }
    response = requests.post(f"{server.url}/generate", json=body, timeout=60)
    assert response.status_code == 200, response.text
    chat = server.answer([user_with_videos("What happens?", [video_url(31)], [picture_url(31)])])
    assert response.json()["text"].strip() == chat.strip()


def test_text_behind_a_hundred_images_starts_at_once(server: Server) -> None:
    def ask(number: int) -> int:
        urls = [picture_url(1000 + 4 * number + n, 392, 392) for n in range(4)]
        return server.chat([user("Describe the pictures.", *urls)], max_tokens=2).status_code

    with concurrent.futures.ThreadPoolExecutor(25) as pool:
        images = [pool.submit(ask, number) for number in range(25)]
        concurrent.futures.wait(images, return_when=concurrent.futures.FIRST_COMPLETED)  # all have been sent by now
        assert server.answer([user("Hello")], max_tokens=2) is not None
        assert sum(image.done() for image in images) < 25, "the text waited for the images"
        assert [image.result() for image in images] == [200] * 25


# ---- the feature store and the RadixCache


def test_a_repeated_request_is_not_encoded_again(server: Server) -> None:
    messages = [user("Describe the picture.", picture_url(20))]
    first = server.answer(messages)
    before = server.status()
    assert server.answer(messages) == first
    after = server.status()
    assert after["num_encoded"] == before["num_encoded"]
    assert after["store"]["hits"] == before["store"]["hits"], "the worker was asked although the prefix was cached"


def test_the_same_image_in_flight_is_encoded_once(server: Server) -> None:
    before = num_encoded(server)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        asked = [user(f"What is this? {n}", picture_url(21, 448, 448)) for n in range(6)]
        answers = list(pool.map(lambda message: server.chat([message]).status_code, asked))
    assert answers == [200] * 6
    assert num_encoded(server) == before + 1


def test_ten_turns_about_three_images_encode_three_times(server: Server) -> None:
    before = num_encoded(server)
    history = [user("Describe the pictures.", *(picture_url(seed) for seed in (22, 23, 24)))]
    for turn in range(10):
        history.append({"role": "assistant", "content": server.answer(history)})
        history.append(user(f"Question {turn}: is there a circle?"))
    assert num_encoded(server) == before + 3


def test_same_size_pictures_and_rotations_do_not_share_features(server: Server) -> None:
    upright = picture(25, 224, 224)
    urls = [
        data_url(encoded(image)) for image in (upright, upright.rotate(90), upright.rotate(180), picture(26, 224, 224))
    ]
    before = num_encoded(server)
    for url in urls:
        server.answer([user("Describe the picture.", url)])
    assert num_encoded(server) == before + len(urls)


def test_caller_supplied_hashes_do_not_reach_the_cache(server: Server) -> None:
    text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the picture.<|im_end|>\n"
    sampling = {"max_new_tokens": 16, "temperature": 0}
    answers = []
    for seed in (27, 28):
        body: dict[str, Any] = {
            "text": text + "<|im_start|>assistant\n",
            "image_data": picture_url(seed),
            "mm_hashes": ["abc"],
            "sampling_params": sampling,
        }
        answers.append(requests.post(f"{server.url}/generate", json=body, timeout=60).json()["text"])
    fresh = [server.answer([user("Describe the picture.", picture_url(seed))]) for seed in (27, 28)]
    assert [answer.strip() for answer in answers] == [answer.strip() for answer in fresh]


def test_token_ids_beyond_the_vocabulary_are_refused(server: Server) -> None:
    body: dict[str, Any] = {"input_ids": [3, 1_000_005], "sampling_params": {"max_new_tokens": 1}}
    response = requests.post(f"{server.url}/generate", json=body, timeout=60)
    assert response.status_code == 400
    assert "1000005" in response.text


def test_metrics(server: Server) -> None:
    server.answer([user("Describe the picture.", picture_url(29))])
    server.answer([user("Describe the picture.", picture_url(29))])
    server.status()
    metrics = requests.get(f"{server.url}/metrics", timeout=30).text
    for name in (
        "feature_store_used_blocks",
        "feature_store_misses_total",
        "elided_encodes_total",
        "feature_wait_seconds_count",
        "encoder_batches_total",
        "encoder_sms",
        "encode_seconds_count",
    ):
        lines = [line for line in metrics.splitlines() if line.startswith(f"spaceserve:{name}")]
        assert lines, f"spaceserve:{name} is not in /metrics"
        assert float(lines[0].split()[-1]) > 0
    assert "#elided-encode:" in server.log
    assert "feature usage: " in server.log


def test_flush_cache_empties_both_caches(server: Server) -> None:
    messages = [user("Describe the picture.", picture_url(30))]
    first = server.answer(messages)
    before = num_encoded(server)
    server.flush()
    assert server.status()["store"]["cached_blocks"] == 0
    assert server.answer(messages) == first
    assert num_encoded(server) == before + 1


# ---- bad input


def bad_inputs() -> dict[str, str]:
    good_png = encoded(picture(40, 448, 448).rotate(3))
    noisy_jpeg = encoded(picture(41, 448, 448).rotate(3), "JPEG")
    wide = encoded(picture(42, 3000, 6))
    return {
        "truncated PNG": data_url(good_png[: len(good_png) // 2]),
        "truncated JPEG": data_url(noisy_jpeg[: len(noisy_jpeg) // 2], "jpeg"),
        "no image": data_url(b"this is no image"),
        "zero bytes": "data:image/png;base64,",
        "bad base64": "data:image/png;base64,@@@@",
        "too many pixels": data_url(encoded(picture(43, 28, 28, mode="1").resize((60000, 60000)))),
        "aspect ratio": data_url(wide),
        "unreachable": f"http://127.0.0.1:{free_port()}/picture.png",
        "no such file": "/nonexistent/picture.png",
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_bad_images_get_400_with_the_reason_and_disturb_nobody(server: Server, stream: bool) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        good = pool.submit(server.answer, [user("Describe the picture.", picture_url(44 + stream, 448, 448))])
        for name, url in bad_inputs().items():
            response = server.chat([user("What is this?", url)], stream=stream)
            assert response.status_code == 400, f"{name}: {response.status_code} {response.text}"
            assert "image" in response.json()["message"], name
        assert good.result() is not None


def test_a_bad_image_among_good_ones_is_named(server: Server) -> None:
    response = server.chat([user("What are these?", picture_url(46), data_url(b"no image"))])
    assert response.status_code == 400
    assert "image 2 of 2" in response.json()["message"]


def test_preprocessed_images_are_refused(server: Server) -> None:
    for given in ({"format": "precomputed_embedding"}, {"format": "precomputed_embedding", "feature": [1.0]}, True):
        body: Any = {"text": "<|vision_start|><|image_pad|><|vision_end|>", "image_data": [given]}
        response = requests.post(f"{server.url}/generate", json=body, timeout=60)
        assert response.status_code in (400, 422), response.text


def test_a_request_id_may_be_used_again(server: Server) -> None:
    for seed in (70, 71, 72):
        body: Any = {
            "rid": "the-same",
            "text": "<|vision_start|><|image_pad|><|vision_end|>Describe the picture.",
            "image_data": picture_url(seed),
            "sampling_params": {"max_new_tokens": 4},
        }
        response = requests.post(f"{server.url}/generate", json=body, timeout=60)
        assert response.status_code == 200, response.text


def test_slow_servers_hold_up_nobody_and_leave_nothing(server: Server) -> None:
    class Slow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(40):
                    self.wfile.write(b"x")
                    time.sleep(1)

        def log_message(self, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{http.server_port}/picture.png"

    def ask_slow(_: int) -> None:
        with contextlib.suppress(requests.RequestException):
            body: Any = {"model": "m", "messages": [user("Hi", url)], "max_tokens": 2, "stream": True}
            requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=4)

    try:
        with concurrent.futures.ThreadPoolExecutor(40) as pool:
            slow = [pool.submit(ask_slow, n) for n in range(40)]
            assert server.answer([user("Describe the picture.", picture_url(73))]) is not None
            for future in slow:
                future.result()
        response = server.chat([user("Hi", url)])
        assert response.status_code == 400
        assert "took longer than" in response.json()["message"]
    finally:
        http.shutdown()


NO_VIDEOS = [b"\0\0\0", b"<html>no video</html>" * 50, clip(80)[:200], clip(81, num_frames=1), damaged()]


@pytest.mark.parametrize("data", NO_VIDEOS)
def test_files_that_are_no_video_are_refused_with_the_reason(server: Server, data: bytes) -> None:
    good = user_with_videos("What happens?", [video_url(82)])
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        served = pool.submit(server.chat, [good])
        response = server.chat([user_with_videos("What happens?", [data_url(data, "mp4", kind="video")])])
        assert response.status_code == 400, response.text
        assert "video" in response.json()["message"]
        assert "/dev/shm" not in response.text
        assert served.result().status_code == 200, served.result().text


def test_audio_and_preprocessed_video_are_refused_with_the_reason(server: Server) -> None:
    part = {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}}
    response = server.chat([{"role": "user", "content": [part, {"type": "text", "text": "What is said?"}]}])
    assert response.status_code == 400, response.text
    body: dict[str, Any] = {
        "text": "<|vision_start|><|video_pad|><|vision_end|>What happens?",
        "video_data": [{"format": "processor_output", "pixel_values_videos": [[0.0]], "video_grid_thw": [[1, 2, 2]]}],
        "sampling_params": {"max_new_tokens": 1},
    }
    response = requests.post(f"{server.url}/generate", json=body, timeout=60)
    assert response.status_code == 400, response.text
    assert "preprocessed" in response.text


# ---- clients that go away, workers that die


def test_a_client_that_disconnects_leaves_nothing(server: Server) -> None:
    for seed in range(50, 56):
        with contextlib.suppress(requests.RequestException):
            requests.post(
                f"{server.url}/v1/chat/completions",
                json={"model": "m", "messages": [user("Hi", picture_url(seed, 448, 448))], "max_tokens": 400},
                timeout=0.05,
            )
    wait_until_idle(server)


def wait_until_idle(server: Server) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        status = server.status()
        if status["num_requests"] == 0:
            assert status["store"]["pinned_blocks"] == 0
            assert status["store"]["reserved_blocks"] == 0
            return
    raise AssertionError(f"the worker still holds something: {status}")


def test_a_killed_worker_is_started_again_and_its_requests_are_served(server: Server) -> None:
    worker = server.process_titled("spaceserve::encoder")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(server.chat, [user("Hi", picture_url(60 + n, 448, 448))]) for n in range(3)]
        worker.send_signal(signal.SIGKILL)
        assert server.answer([user("Hello, text only")]) is not None
        assert [future.result().status_code for future in waiting] == [200, 200, 200]
    assert server.process_titled("spaceserve::encoder").pid != worker.pid
    assert server.answer([user("Describe the picture.", picture_url(63))]) is not None


def test_a_stopped_worker_is_noticed_and_replaced(server: Server) -> None:
    worker = server.process_titled("spaceserve::encoder")
    worker.send_signal(signal.SIGSTOP)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.chat, [user("Hi", picture_url(64))])
        assert server.answer([user("Hello, text only")]) is not None
        assert waiting.result().status_code == 200
    assert not psutil.pid_exists(worker.pid)


def test_a_worker_that_hangs_while_it_starts_is_replaced_too(server: Server) -> None:
    first = server.process_titled("spaceserve::encoder")
    first.send_signal(signal.SIGKILL)
    second = next_worker(server, {first.pid})
    second.send_signal(signal.SIGSTOP)
    assert server.answer([user("Describe the picture.", picture_url(66))]) is not None
    assert not psutil.pid_exists(second.pid)


def next_worker(server: Server, known: set[int]) -> psutil.Process:
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        with contextlib.suppress(AssertionError, psutil.Error):
            worker = server.process_titled("spaceserve::encoder")
            if worker.pid not in known:
                return worker
        time.sleep(0.05)
    raise AssertionError("no new worker was started")


def test_nothing_is_held_at_the_end(server: Server) -> None:
    wait_until_idle(server)
    store = server.status()["store"]
    assert store["free_blocks"] + store["cached_blocks"] == store["num_blocks"]
    assert "Traceback" not in server.log.partition("The encoder worker")[0]
    assert os.path.isdir(server.run_dir())
