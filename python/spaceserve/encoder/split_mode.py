"""What a mode of `--sm-partition` means on this device: units for every batch, or the SIS that chooses them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from spaceserve.config import SmPartition
from spaceserve.partition import Partitioner
from spaceserve.sis.decoder_ladder import DecoderLadder
from spaceserve.sis.delay import DECODE_WEIGHT
from spaceserve.sis.policy import MaskMode, Objective, SpaceInferenceScheduler

if TYPE_CHECKING:
    from spaceserve.config import SpaceServeConfig
    from spaceserve.sis.curves import DeviceCurves

logger = logging.getLogger(__name__)

OBJECTIVES: dict[str, Objective] = {"delay": "least_delay", "time": "least_time"}
NO_LADDER = DecoderLadder(reason="the scheduler has not said yet for which SMs it has CUDA graphs of decode")

SisFactory = Callable[[Sequence[int], MaskMode], SpaceInferenceScheduler]


@dataclass(frozen=True, kw_only=True)
class SplitMode:
    """A mode as the device carries it out.

    Attributes:
        name: the mode as it was asked for; `EncoderSplit` says which there are.
        partitioner: makes the groups of units; None where the encoder has the whole device.
        static_units: units of every batch.
        sis: chooses the units of each batch; with a partitioner, it or `static_units` is given.
        decode_weight: that `sis` is to have.
        reconsider_layers: `sis` chooses again before every so many-th block; 0 for once a batch.
        mask_mode: whether decode keeps to the other units.
        mask_error: why only the encoder is masked, though both sides were to be.
        may_improve: the scheduler has not said yet which groups decode has; both sides may be masked later.
    """

    name: str
    partitioner: Partitioner | None = None
    static_units: int | None = None
    sis: SpaceInferenceScheduler | None = None
    decode_weight: float = DECODE_WEIGHT
    reconsider_layers: int = 0
    mask_mode: MaskMode = "encoder"
    mask_error: str | None = None
    may_improve: bool = False


class SplitModes:
    """Finds what modes mean here. What a mode needs is made at its first use and kept. Not safe for two threads.

    Args:
        device: of the encoder.
        partitioner_factory, sis_factory: the latter makes an SIS from rungs and mask mode.
        ladder_path: where the scheduler says which groups decode has; it may appear later.
        reconsider_layers: of modes that name none.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        partitioner_factory: Callable[[], Partitioner] | None,
        sis_factory: SisFactory | None,
        ladder_path: Path | None,
        reconsider_layers: int,
    ) -> None:
        self._device = device
        self._partitioner_factory = partitioner_factory
        self._sis_factory = sis_factory
        self._ladder_path = ladder_path
        self._reconsider_layers = reconsider_layers
        self._partitioner: Partitioner | None = None
        self._sis_of: dict[MaskMode, SpaceInferenceScheduler] = {}

    def find(self, name: str) -> SplitMode:
        """The mode of this name.

        Raises:
            ValueError: an unknown mode, units that the device cannot grant, or both sides to be masked where decode has
                no group beside these units.
        """
        return self._find(name, self._ladder() or NO_LADDER, SmPartition.parse(name))

    def find_at_start(self, name: str) -> SplitMode:
        """As `find`, but where decode has no group beside these units, or none yet, the encoder alone is masked."""
        return self._find_or_mask_encoder(name, self._ladder())

    def improved(self, mode: SplitMode) -> SplitMode | None:
        """A mode of the start that `may_improve`, once the scheduler has said which groups decode has."""
        ladder = self._ladder()
        return None if ladder is None else self._find_or_mask_encoder(mode.name, ladder)

    def _ladder(self) -> DecoderLadder | None:
        return None if self._ladder_path is None else DecoderLadder.read(self._ladder_path)

    def _find_or_mask_encoder(self, name: str, ladder: DecoderLadder | None) -> SplitMode:
        """`ladder` None: not known yet."""
        asked = SmPartition.parse(name)
        try:
            return replace(
                self._find(name, ladder or NO_LADDER, asked), may_improve=asked.is_default and ladder is None
            )
        except ValueError as error:
            if asked.mask_mode == "encoder":
                raise
            alone = self._find(name, NO_LADDER, replace(asked, mask_mode="encoder"))
            return replace(alone, mask_error=str(error), may_improve=ladder is None)

    def _find(self, name: str, ladder: DecoderLadder, asked: SmPartition) -> SplitMode:
        kind = asked.kind
        if asked.is_default and not ladder.rungs:
            asked = replace(asked, mask_mode="encoder")
        if kind == "auto":
            kind = "sis" if self._device.type == "cuda" else "off"
        layers = self._reconsider_layers if asked.reconsider_layers is None else asked.reconsider_layers
        if kind == "off":
            if asked.mask_mode == "both":  # `both+auto` on the CPU
                ladder.check(0)
            return SplitMode(name=name, reconsider_layers=layers)
        partitioner = self._made_partitioner()
        num_sms = asked.num_sms
        if num_sms is not None and num_sms > partitioner.total_units:
            unit_name = partitioner.unit_name
            raise ValueError(f"--sm-partition {name}: the device has {partitioner.total_units} {unit_name}")
        if asked.mask_mode == "both":
            ladder.check(0 if num_sms is None else partitioner.group(num_sms).granted)
        mode = SplitMode(name=name, partitioner=partitioner, reconsider_layers=layers, mask_mode=asked.mask_mode)
        if num_sms is not None:
            return replace(mode, static_units=num_sms)
        if len(partitioner.rungs) < 2:
            logger.warning("No SM partition: %s; SIS has nothing to choose from", partitioner.describe())
            return replace(mode, static_units=partitioner.total_units)
        weight = DECODE_WEIGHT if asked.decode_weight is None else asked.decode_weight
        return replace(mode, sis=self._made_sis(partitioner, asked.mask_mode, ladder), decode_weight=weight)

    def _made_partitioner(self) -> Partitioner:
        if self._partitioner is None:
            if self._partitioner_factory is None:
                raise ValueError("this encoder was made without SM partitions")
            self._partitioner = self._partitioner_factory()
        return self._partitioner

    def _made_sis(
        self, partitioner: Partitioner, mask_mode: MaskMode, ladder: DecoderLadder
    ) -> SpaceInferenceScheduler:
        if mask_mode not in self._sis_of:
            assert self._sis_factory is not None, "the mode sis needs a sis_factory"
            rungs = partitioner.rungs if mask_mode == "encoder" else ladder.encoder_rungs(partitioner.rungs)
            self._sis_of[mask_mode] = self._sis_factory(rungs, mask_mode)
        return self._sis_of[mask_mode]


def sis_factory(config: SpaceServeConfig, device: torch.device, model_path: str) -> SisFactory:
    """Makes the SIS that the command line asks for, with curves of this device and model."""

    def new_sis(rungs: Sequence[int], mask_mode: MaskMode) -> SpaceInferenceScheduler:
        return SpaceInferenceScheduler(
            _curves(device, rungs[-1], model_path),
            rungs,
            objective="tpot" if config.tpot_target_ms is not None else OBJECTIVES[config.sis_objective],
            tpot_target_ms=config.tpot_target_ms,
            mask_mode=mask_mode,
        )

    return new_sis


def _curves(device: torch.device, total_units: int, model_path: str) -> DeviceCurves:
    from spaceserve.sis import curves_for
    from spaceserve.sis.shapes import shape_from_model_path

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    curves = curves_for(name, total_units, shape_from_model_path(model_path))
    # What they are worth says their provenance: measured on this device, with stand-ins, or an estimate.
    logger.info("SIS uses curves of %s (%s): %s", name, curves.source, curves.provenance)
    # The estimate keeps 20 SMs for a decoder, since cuBLAS fails on fewer; cores know no such limit.
    return curves if device.type == "cuda" else replace(curves, min_decoder_units=1)
