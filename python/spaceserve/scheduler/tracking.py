"""What the gate knows of each request with images, and what the main process attaches to an image for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from spaceserve.feature_store.store import Ticket
from spaceserve.messages import FeaturesFailed, ImageSource

# What the main process attaches to an image item of a request.
SOURCE_KEY = "spaceserve_source"
OWNER_KEY = "spaceserve_owner"  # `worker_id` that the main process gave the request when it admitted it
ASKED_KEY = "spaceserve_asked"  # the main process has asked the worker already, under that id


def worker_id(rid: str, number: str) -> str:
    """Name of one admission of a request for the worker: clients may use their request ids again."""
    return f"{rid}@{number}"


def rid_of(identity: str) -> str:
    """The request id in a `worker_id`."""
    return identity.rpartition("@")[0]


@dataclass(frozen=True)
class AnswersExpired:
    """From the entry rank's clock to all ranks: these answers wait no longer for their requests.

    Ranks that dropped them by clocks of their own would disagree on a request that comes at that very moment.
    """

    worker_ids: list[str]


class Phase(Enum):
    """Where a request with images stands."""

    WAITING = auto()  # in a queue of the scheduler
    ADMITTED = auto()  # its prefill is under way and reads the features
    PREFILLED = auto()  # decodes; its features are released


@dataclass(frozen=True)
class TrackedImage:
    """One image of a request: its source, SGLang's hash of it, and its first and last placeholder (inclusive)."""

    source: ImageSource
    mm_hash: int
    first: int
    last: int


@dataclass
class TrackedRequest:
    """What the gate knows of a request with images."""

    rid: str
    worker_id: str  # its name in messages to and from the worker
    images: list[TrackedImage]
    since_s: float
    phase: Phase = Phase.WAITING
    seq: int = 0
    asked: frozenset[bytes] = frozenset()  # keys of the current EncodeRequest; empty with none
    tickets: dict[bytes, Ticket] = field(default_factory=dict)
    tries: int = 1
    failure: FeaturesFailed | None = None
    # A retracted request has output already; its next prefill ends with one more token.
    num_outputs_before: int = 0

    @property
    def is_waiting_for_features(self) -> bool:
        """An EncodeRequest is out and not answered."""
        return bool(self.asked) and not self.tickets

    def holds_all(self) -> bool:
        """Every image's features are held, so the RadixCache need not be asked."""
        return all(image.source.key in self.tickets for image in self.images)
