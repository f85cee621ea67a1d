"""Beside stock SGLang on the same weights: equal answers, token for token; and proof of where the work is done."""

from __future__ import annotations

import concurrent.futures
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from servers import Server, data_url, encoded, picture, running, user, user_with_videos
from videos import clip

pytestmark = pytest.mark.upstream

NUM_PROMPTS = 100
MAX_TOKENS = 12

# Patches are 14 pixels, merged two by two: sides are rounded to multiples of 28, between 112x112 and 448x448 pixels
# in all. These are rounded up and down, kept, and clamped at both ends.
SIZES = [
    (224, 224),
    (223, 225),
    (239, 211),
    (210, 250),
    (28, 28),
    (40, 20),
    (1000, 300),
    (640, 640),
    (113, 447),
    (97, 301),
]

# Writes the pid of every process that decodes an image.
SITECUSTOMIZE = """
import os
import PIL.ImageFile
_load = PIL.ImageFile.ImageFile.load
def load(self):
    with open(os.environ["DECODE_LOG"], "a") as log:
        log.write(f"{os.getpid()}\\n")
    return _load(self)
PIL.ImageFile.ImageFile.load = load
"""

# Stock pins the memory of a video's frames, which PyTorch refuses where there is no accelerator. Nothing is decoded or
# resized by it, so that here it does nothing. Patched where torch has been imported, as importing it early is slow.
SITECUSTOMIZE_STOCK = """
import importlib.abc, importlib.machinery, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "sglang.srt.utils.video_decoder":
            return None
        import torch
        torch.Tensor.pin_memory = lambda tensor, *args, **kwargs: tensor
        return None
sys.meta_path.insert(0, Finder())
"""


def exif_rotated(image: Image.Image, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, "JPEG", exif=exif)


def prompts() -> list[list[dict[str, Any]]]:
    """Prompts with no image to three, of all sizes and several formats; the same at each call."""
    rng = random.Random(0)
    questions = ["Describe the picture.", "What colour is the background?", "How many objects are there?", "Is it red?"]
    made = []
    for number in range(NUM_PROMPTS):
        urls = []
        for _ in range((0, 1, 1, 2, 3)[number % 5]):
            width, height = rng.choice(SIZES)
            image = picture(rng.randrange(40), width, height, mode=rng.choice(["RGB", "RGB", "L", "P", "RGBA"]))
            kind = rng.randrange(3)
            if kind == 0:
                urls.append(data_url(exif_rotated(image.convert("RGB"), rng.randint(1, 8)), "jpeg"))
            elif kind == 1:
                urls.append(data_url(encoded(image.convert("RGB"), "JPEG"), "jpeg"))
            else:
                urls.append(data_url(encoded(image)))
        made.append([user(f"{rng.choice(questions)} ({number})", *urls)])
    return made + video_prompts()


def video_prompts() -> list[list[dict[str, Any]]]:
    """Prompts with a video or two, short and longer than the encoder's batch, and with an image."""
    videos = [
        data_url(clip(seed, num_frames, width, height, frames_per_s=4), "x-msvideo", kind="video")
        for seed, num_frames, width, height in ((1, 4, 168, 112), (2, 12, 140, 140), (3, 24, 400, 300), (4, 7, 64, 220))
    ]
    image = data_url(encoded(picture(3)))
    return [
        *([user_with_videos(f"What happens? ({number})", [video])] for number, video in enumerate(videos)),
        [user_with_videos("Which is longer?", videos[:2])],
        [user_with_videos("Is this in the video?", [videos[3]], [image])],
        [user_with_videos("And again?", [videos[2], videos[2]], [image])],
    ]


def ask(server: Server, messages: list[dict[str, Any]]) -> tuple[list[str], int]:
    """Tokens of the answer and number of prompt tokens."""
    response = server.chat(messages, max_tokens=MAX_TOKENS, logprobs=True, ignore_eos=True)
    assert response.status_code == 200, response.text
    body = response.json()
    return [token["token"] for token in body["choices"][0]["logprobs"]["content"]], body["usage"]["prompt_tokens"]


@pytest.fixture(scope="module")
def stock_answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[str], int]]:
    from spaceserve.demo import model_path

    folder = tmp_path_factory.mktemp("stock-site")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE_STOCK)
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}
    with running("sglang.launch_server", "--model-path", str(model_path()), env=env) as stock:
        return [ask(stock, messages) for messages in prompts()]


@pytest.fixture(scope="module")
def decode_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return folder / "decodes"


@pytest.fixture(scope="module")
def ours(stock_answers: list[tuple[list[str], int]], decode_log: Path) -> Iterator[Server]:
    env = {"PYTHONPATH": str(decode_log.parent), "DECODE_LOG": str(decode_log)}
    with running("spaceserve.launch_server", env=env) as server:
        yield server


def test_answers_vary(stock_answers: list[tuple[list[str], int]]) -> None:
    """Equality of answers that are all the same would prove nothing."""
    assert len({tuple(tokens) for tokens, _ in stock_answers}) > NUM_PROMPTS // 4


def test_equal_alone(ours: Server, stock_answers: list[tuple[list[str], int]]) -> None:
    assert [ask(ours, messages) for messages in prompts()] == stock_answers


def test_equal_eight_at_once_and_cached(ours: Server, stock_answers: list[tuple[list[str], int]]) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda messages: ask(ours, messages), prompts())) == stock_answers


def test_equal_eight_at_once_from_cold(ours: Server, stock_answers: list[tuple[list[str], int]]) -> None:
    ours.flush()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda messages: ask(ours, messages), prompts())) == stock_answers


def test_equal_streamed(ours: Server, stock_answers: list[tuple[list[str], int]]) -> None:
    def streamed(messages: list[dict[str, Any]]) -> str:
        return ours.stream(messages, max_tokens=MAX_TOKENS, ignore_eos=True)

    def whole(messages: list[dict[str, Any]]) -> str:
        return ours.answer(messages, max_tokens=MAX_TOKENS, ignore_eos=True)

    asked = prompts()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(streamed, asked)) == list(pool.map(whole, asked))


def test_images_are_decoded_by_the_encoder_worker_alone(ours: Server, decode_log: Path) -> None:
    ours.answer([user("Describe the picture.", data_url(encoded(picture(1000))))])
    pids = {int(line) for line in decode_log.read_text().splitlines()}
    assert pids == {ours.process_titled("spaceserve::encoder").pid}


# Loads the part of the model that a process of the server loads, with its hooks, and prints the parameters' names.
LOAD = """
import sys
from sglang.srt.server_args import ServerArgs
from spaceserve.encoder.model import encoder_only_hooks, load_part
from spaceserve.families import FAMILIES
from spaceserve.hooks import install
from spaceserve.scheduler.process import decoder_only_hooks

hooks = {"encoder": encoder_only_hooks, "decoder": decoder_only_hooks}[sys.argv[1]]
install(hooks(FAMILIES["Qwen2VLForConditionalGeneration"]))
model, _ = load_part(ServerArgs(model_path=sys.argv[2]), sys.argv[3])
for name, _ in model.named_parameters():
    print("PARAMETER", name)
"""


def parameter_names(part: str, tmp_path: Path) -> set[str]:
    from spaceserve.demo import model_path

    command = [sys.executable, "-c", LOAD, part, str(model_path()), str(tmp_path / part)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return {line.split()[1] for line in result.stdout.splitlines() if line.startswith("PARAMETER ")}


def test_each_process_holds_its_own_weights_only(tmp_path: Path) -> None:
    """The scheduler none of the encoder's, the encoder worker none of the decoder's."""
    encoder, decoder = (parameter_names(part, tmp_path) for part in ("encoder", "decoder"))
    assert encoder
    assert decoder
    assert all(name.startswith("visual.") for name in encoder)
    assert not any("visual" in name for name in decoder)
    assert any("layers.0.self_attn" in name for name in decoder)


def test_no_pixels_are_sent_to_the_scheduler() -> None:
    """What the main process hands over for an image is its size and where its file lies, whatever the file's size."""
    import pickle

    import torch
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    from spaceserve.messages import ImageSource
    from spaceserve.scheduler.tracking import SOURCE_KEY

    source = ImageSource(b"k" * 16, "segment", 5_000_000, 2048, 2048, (1, 146, 146), 5329)
    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        offsets=[(0, 5328)],
        model_specific_data={"image_grid_thw": torch.tensor([[1, 146, 146]]), SOURCE_KEY: source},
    )
    assert item.feature is None
    assert len(pickle.dumps(item)) < 2000
