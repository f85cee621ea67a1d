"""Each image and video of a request: fetched, measured, addressed by its content, and put into shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from spaceserve.config import SpaceServeConfig
from spaceserve.families import image_grid, video_layout
from spaceserve.feature_store.content import content_digest, new_key
from spaceserve.frontend.fetch import BadImageInput, fetch_bytes, is_remote, read_header
from spaceserve.messages import ImageSource
from spaceserve.shared_memory import OutOfSharedMemory, SegmentWriter, path_of, unlink
from spaceserve.video_file import BadVideo, read_video_header

DOWNLOAD_THREADS = 32


class MediaAdmission:
    """Makes an `ImageSource` of whatever form of image or video SGLang takes. Runs in threads; decodes no image."""

    def __init__(self, config: SpaceServeConfig, shm_prefix: str) -> None:
        self._config = config
        self._segments = SegmentWriter(shm_prefix)
        self._content_key = new_key()
        self._download_pool = ThreadPoolExecutor(DOWNLOAD_THREADS, thread_name_prefix="download")

    @property
    def _max_bytes(self) -> int:
        return int(self._config.encoder_max_image_mb * 1e6)

    def _write(self, data: bytes) -> str:
        try:
            return self._segments.write(data)
        except OutOfSharedMemory as error:
            from fastapi import HTTPException

            raise HTTPException(503, str(error)) from error

    def _admit_image(self, processor: Any, image: Any) -> ImageSource:
        fetched = read_header(fetch_bytes(image, self._max_bytes), self._config.encoder_max_image_pixels)
        settings = processor.image_config
        try:
            grid = image_grid(processor._processor.image_processor, settings, fetched.height, fetched.width)
        except ValueError as error:
            raise BadImageInput(f"the image cannot be resized: {error}") from error
        digest = content_digest(fetched.data, "image", settings, key=self._content_key)
        segment = self._write(fetched.data)
        merge = settings.get("merge_size", processor.spatial_merge_size)
        num_tokens = grid[0] * grid[1] * grid[2] // merge**2
        return ImageSource(digest, segment, len(fetched.data), fetched.height, fetched.width, grid, num_tokens)

    def _admit_video(self, processor: Any, video: Any) -> ImageSource:
        data = fetch_bytes(video, self._max_bytes, "video")
        settings = processor.video_config
        video_processor = processor._processor.video_processor
        digest = content_digest(data, "video", settings, key=self._content_key)
        segment = self._write(data)
        try:
            header = read_video_header(path_of(segment))
            # The encoder takes frames by two, so two are decoded at once at least.
            if 2 * header.height * header.width > self._config.encoder_max_image_pixels:
                raise BadImageInput(
                    f"the video has frames of {header.width}x{header.height} pixels, two of them more than the "
                    f"{self._config.encoder_max_image_pixels} accepted"
                )
            try:
                frames, grid = video_layout(video_processor, settings, header)
            except ValueError as error:
                raise BadImageInput(f"the video cannot be sampled and resized: {error}") from error
        except BaseException as error:
            unlink(segment)
            if isinstance(error, BadVideo):
                raise BadImageInput(str(error)) from error
            raise
        num_tokens = grid[0] * grid[1] * grid[2] // (settings.get("merge_size") or video_processor.merge_size) ** 2
        return ImageSource(digest, segment, len(data), header.height, header.width, grid, num_tokens, frames)

    async def admit(
        self, processor: Any, images: Sequence[Any], videos: Sequence[Any]
    ) -> tuple[list[ImageSource], list[ImageSource]]:
        """Admit all media of a request: their sources, images and videos apart. After an error none is left.

        Raises:
            BadImageInput: the client's fault; the message says which image or video.
        """
        media = [("image", image) for image in images] + [("video", video) for video in videos]
        admit = {"image": self._admit_image, "video": self._admit_video}
        # Downloads have threads of their own: slow servers must not hold up images that are here already.
        futures = [
            (self._download_pool if is_remote(medium) else processor.io_executor).submit(admit[what], processor, medium)
            for what, medium in media
        ]
        try:
            results = await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
        except asyncio.CancelledError:  # the client is gone; what threads still write must not stay
            for future in futures:
                future.add_done_callback(_discard)
            raise
        errors = [(i, result) for i, result in enumerate(results) if isinstance(result, BaseException)]
        sources = [result for result in results if isinstance(result, ImageSource)]
        if errors:
            for source in sources:
                unlink(source.segment)
            position, error = errors[0]
            if isinstance(error, BadImageInput) and len(media) > 1:
                what = media[position][0]
                number, count = (
                    (position + 1, len(images)) if what == "image" else (position + 1 - len(images), len(videos))
                )
                raise BadImageInput(f"{what} {number} of {count}: {error}") from error
            raise error
        return sources[: len(images)], sources[len(images) :]


def _discard(future: Future[ImageSource]) -> None:
    if not future.cancelled() and future.exception() is None:
        unlink(future.result().segment)
