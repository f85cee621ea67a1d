"""Admission of requests with images and videos in the main process.

From the header of each image alone: its size gives the number of placeholders and their positions, a keyed hash of
its bytes gives the identity under which the RadixCache and the feature store know it. The bytes go to shared memory
once; pixels are made in the encoder worker only, but for a video's first frame, whose size counts.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import zmq

from spaceserve.channels import Channels
from spaceserve.config import SpaceServeConfig
from spaceserve.families import Family, seconds_per_grid
from spaceserve.feature_store.pad_values import PadValueRegistry
from spaceserve.frontend.media import MediaAdmission
from spaceserve.hooks import Hook
from spaceserve.messages import EncodeRequest, FinishRequest, ImageSource, ToWorker, encode
from spaceserve.scheduler.tracking import ASKED_KEY, OWNER_KEY, SOURCE_KEY, rid_of, worker_id
from spaceserve.shared_memory import unlink

logger = logging.getLogger(__name__)


class Admission:
    """Turns a request's images into placeholders and sources, and hands new ones to the encoder worker at once."""

    def __init__(self, config: SpaceServeConfig, channels: Channels) -> None:
        self._media = MediaAdmission(config, channels.shm_prefix)
        self._pad_values = PadValueRegistry()
        self._reply_to = channels.features(0)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._outbox = context.socket(zmq.PUSH)
        self._outbox.set_hwm(0)
        self._outbox.setsockopt(zmq.LINGER, 0)
        self._outbox.connect(channels.requests)
        self._outbox_lock = threading.Lock()
        # With several schedulers only their dispatcher knows which of them gets a request.
        self._may_ask_early = channels.dp_size == 1
        self._not_dispatched: dict[str, tuple[str, list[ImageSource]]] = {}  # by rid: worker_id and sources
        self._admissions = itertools.count()

    def send(self, message: ToWorker) -> None:
        """Hand a message to the encoder worker; never blocks."""
        with self._outbox_lock:
            self._outbox.send(encode(message))

    # ---- one request

    async def process(
        self,
        family: Family,
        processor: Any,
        images: Sequence[Any],
        videos: Sequence[Any],
        prompt: str | list[int],
        request: Any,
    ) -> Any:
        """What SGLang's processor of the family would return, without pixels.

        Raises:
            ValueError: the client's fault, HTTP 400.
        """
        from sglang.srt.managers.schedule_batch import Modality, MultimodalProcessorOutput

        input_ids = _tokenize(processor, prompt)
        tokens = processor.mm_tokens
        for what, token_id, media in (
            ("image", tokens.image_token_id, images),
            ("video", tokens.video_token_id, videos),
        ):
            num_placeholders = input_ids.count(token_id)
            if num_placeholders != len(media):
                raise ValueError(f"the prompt has {num_placeholders} {what} placeholders, {len(media)} were given")
        image_sources, video_sources = await self._media.admit(processor, images, videos)
        sources = image_sources + video_sources
        identity = worker_id(request.rid, f"m{next(self._admissions)}")
        self._not_dispatched[request.rid] = identity, sources
        # A caller's own hash would decide whose features and whose cached prefix this request reads.
        request.mm_hashes = None
        is_new = [not self._pad_values.knows(source.key) for source in sources]
        pads = self._pad_values.assign([source.key for source in sources])
        if pads.radix_extra_key is not None:
            request.extra_key = f"{request.extra_key or ''}{pads.radix_extra_key}"
        # What was seen before may be in the RadixCache, and need no encode: the scheduler looks. New images go now.
        ask_now = self._may_ask_early and all(is_new)
        expanded = processor._expand_input_ids(
            input_ids, [source.num_tokens for source in image_sources], tokens.image_token_id
        )
        expanded = processor._expand_input_ids(
            expanded, [source.num_tokens for source in video_sources], tokens.video_token_id
        )
        items = []
        hashes = iter(pads.item_hashes)
        for modality, name, token_id, group in (
            (Modality.IMAGE, "image_grid_thw", tokens.image_token_id, image_sources),
            (Modality.VIDEO, "video_grid_thw", tokens.video_token_id, video_sources),
        ):
            position = 0
            for source, mm_hash in zip(group, hashes, strict=False):
                first = expanded.index(token_id, position)
                position = first + source.num_tokens
                item = _placeholder_item(modality, first, source, identity, ask_now)
                item.model_specific_data[name] = torch.tensor([source.grid_thw], dtype=torch.long)
                item.set_hash(mm_hash)
                items.append(item)
        if ask_now:
            distinct = {source.key: source for source in sources}
            self.send(EncodeRequest(identity, 0, list(distinct.values()), self._reply_to))
        mrope_positions, mrope_position_delta = _positions(family, processor, expanded, items, video_sources)
        return MultimodalProcessorOutput(
            input_ids=expanded,
            padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(expanded, items),
            mm_items=items,
            im_start_id=processor.vision_start_token_id,
            im_end_id=processor.vision_end_token_id,
            im_token_id=tokens.image_token_id,
            video_token_id=tokens.video_token_id,
            audio_token_id=tokens.audio_token_id,
            mrope_positions=mrope_positions,
            mrope_position_delta=mrope_position_delta,
        )

    def dispatched(self, tokenized: Any) -> None:
        """The request is on its way to the scheduler, which from now on owns its sources."""
        if getattr(tokenized, "mm_inputs", None) is None:
            return
        for item in tokenized.mm_inputs.mm_items:
            # Parallel sampling dispatches one request several times, under new ids.
            owner = item.model_specific_data.get(OWNER_KEY)
            if owner is None:
                continue
            if self._not_dispatched.pop(rid_of(owner), None) is not None and rid_of(owner) != tokenized.rid:
                self.send(FinishRequest(owner))

    def abandon(self, rid: str) -> None:
        """The request ends before the scheduler hears of it."""
        admitted = self._not_dispatched.pop(rid, None)
        if admitted is not None:
            identity, sources = admitted
            for source in sources:
                unlink(source.segment)
            self.send(FinishRequest(identity))


def _positions(
    family: Family, processor: Any, input_ids: list[int], items: list[Any], videos: Sequence[ImageSource]
) -> tuple[torch.Tensor, torch.Tensor]:
    """M-RoPE positions `[3, len(input_ids)]` and their offset from the token's index `[1, 1]`."""
    if not videos or not family.has_seconds_per_grid:
        positions, delta = processor.compute_mrope_positions(input_ids, items)
        return positions, delta
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding

    video_processor = processor._processor.video_processor
    counts = [len(source.video.indices) for source in videos if source.video is not None]
    grids = {
        name: [item.model_specific_data[name] for item in items if name in item.model_specific_data]
        for name in ("image_grid_thw", "video_grid_thw")
    }
    # `compute_mrope_positions` leaves out the seconds.
    positions, delta = MRotaryEmbedding.get_rope_index(
        spatial_merge_size=processor.spatial_merge_size,
        image_token_id=processor.mm_tokens.image_token_id,
        video_token_id=processor.mm_tokens.video_token_id,
        vision_start_token_id=processor.vision_start_token_id,
        model_type=processor.model_type,
        tokens_per_second=processor._tokens_per_second,
        input_ids=torch.tensor([input_ids], dtype=torch.long),
        second_per_grid_ts=[seconds_per_grid(video_processor, count) for count in counts],
        **{name: torch.cat(found) if found else None for name, found in grids.items()},
    )
    return positions.squeeze(1), delta


def _placeholder_item(modality: Any, first: int, source: ImageSource, identity: str, asked: bool) -> Any:
    from sglang.srt.managers.schedule_batch import MultimodalDataItem

    return MultimodalDataItem(
        modality=modality,
        offsets=[(first, first + source.num_tokens - 1)],
        model_specific_data={SOURCE_KEY: source, OWNER_KEY: identity, ASKED_KEY: asked},
    )


def _tokenize(processor: Any, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    # Avoid a second beginning-of-sequence token where the chat template wrote one, as SGLang does.
    bos = getattr(processor._tokenizer, "bos_token", None)
    repeats_bos = processor._tokenizer_auto_adds_specials and bos and prompt.startswith(bos)
    ids = processor._tokenizer(prompt, add_special_tokens=not repeats_bos).input_ids
    return list(ids)


def check_in_vocabulary(input_ids: Sequence[int] | None, vocab_size: int) -> None:
    """Refuse token ids that are none: the RadixCache files images under ids beyond the vocabulary.

    A client who could send those might match, and so read from, what another client's image left there.

    Raises:
        ValueError: an id lies outside [0, vocab_size).
    """
    for token_id in input_ids or ():
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"input_ids holds {token_id}, which is outside of the vocabulary [0, {vocab_size})")


def admission_hooks(admission: Admission, family: Family) -> list[Hook]:
    """The hooks of the main process."""

    async def process_mm_data(
        original: Callable[..., Any],
        processor: Any,
        image_data: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        request = kwargs.get("request_obj", args[2] if len(args) > 2 else None)
        prompt = kwargs.get("input_text", args[1] if len(args) > 1 else None)
        assert request is not None
        assert prompt is not None
        if request.audio_data:
            raise ValueError("audio is not supported with an encoder worker; see --encoder-worker off")
        images, videos = list(image_data or []), list(request.video_data or [])
        formats = {_preprocessed_format(processor, medium) for medium in images + videos}
        if formats == {"PRECOMPUTED_EMBEDDING"} and all(
            torch.is_tensor(medium.get("feature")) for medium in images + videos
        ):
            return await original(processor, image_data, *args, **kwargs)
        if formats - {None}:
            raise ValueError(
                "preprocessed images and videos are not supported with an encoder worker: send the file itself"
            )
        return await admission.process(family, processor, images, videos, prompt, request)

    async def tokenize(original: Callable[..., Any], manager: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        check_in_vocabulary(obj.input_ids, manager.model_config.vocab_size)
        try:
            return await original(manager, obj, *args, **kwargs)
        except BaseException:
            admission.abandon(obj.rid)
            raise

    async def answer_abort(original: Callable[..., Any], manager: Any, out: Any, state: Any, is_stream: bool) -> Any:
        # A file that turns out to be damaged after its header was accepted: nothing has been streamed yet, so the
        # client still gets the status that a request without streaming gets.
        nothing_sent = not out["meta_info"].get("completion_tokens")
        return await original(manager, out, state, is_stream and not (nothing_sent and state.obj.contains_mm_input()))

    def send_one(manager: Any, tokenized_obj: Any) -> None:
        admission.dispatched(tokenized_obj)

    def send_batch(manager: Any, tokenized_objs: Any) -> None:
        for tokenized_obj in tokenized_objs:
            admission.dispatched(tokenized_obj)

    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    return [
        Hook(
            target=f"{family.processor}.process_mm_data_async",
            function=process_mm_data,
            kind="around",
            why="expand placeholders from image headers",
            parameters=("image_data", "input_text", "request_obj"),
        ),
        Hook(
            target=f"{manager}._tokenize_one_request",
            function=tokenize,
            kind="around",
            why="a request that is refused leaves nothing behind",
            parameters=("obj",),
        ),
        Hook(
            target=f"{manager}._handle_abort_finish_reason",
            function=answer_abort,
            kind="around",
            why="a damaged image ends in an HTTP status, also where the answer would be streamed",
            parameters=("out", "state", "is_stream"),
        ),
        Hook(
            target=f"{manager}._send_one_request",
            function=send_one,
            kind="before",
            why="the scheduler takes over a request's images",
            parameters=("tokenized_obj",),
        ),
        Hook(
            target=f"{manager}._send_batch_request",
            function=send_batch,
            kind="before",
            why="the same, for batched requests",
            parameters=("tokenized_objs",),
        ),
    ]


def _preprocessed_format(processor: Any, image: Any) -> str | None:
    found = processor._get_preprocessed_input_format(image)
    return None if found is None else str(found.name)
