"""Names and addresses that the processes of one server share."""

from __future__ import annotations

import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Channels:
    """Where the processes of one server find each other; unique to it, so that a lingering server disturbs nobody.

    Attributes:
        run_dir: folder of the sockets.
        shm_prefix: start of the name of every segment in /dev/shm.
        dp_size: schedulers that wait for features, one for each data-parallel rank.
    """

    run_dir: str
    shm_prefix: str
    dp_size: int

    @staticmethod
    def create(dp_size: int) -> Channels:
        """Make the folder and draw the names."""
        # Socket paths are limited to 107 bytes: keep the folder's own short.
        run_dir = tempfile.mkdtemp(prefix="spaceserve-", dir="/tmp" if Path("/tmp").is_dir() else None)
        return Channels(run_dir=run_dir, shm_prefix=f"spaceserve-{secrets.token_hex(6)}-", dp_size=dp_size)

    @property
    def requests(self) -> str:
        """Address at which the encoder worker takes its messages."""
        return f"ipc://{self.run_dir}/encoder"

    def features(self, dp_rank: int) -> str:
        """Address at which the scheduler of this data-parallel rank takes its messages."""
        return f"ipc://{self.run_dir}/features-{dp_rank}"

    def all_features(self) -> list[str]:
        """Addresses of all schedulers."""
        return [self.features(rank) for rank in range(self.dp_size)]

    @property
    def heartbeat(self) -> str:
        """File in which the encoder worker writes that it is alive."""
        return f"{self.run_dir}/heartbeat"

    @property
    def status_file(self) -> str:
        """File in which the encoder worker leaves its state, as JSON."""
        return f"{self.run_dir}/encoder-status.json"

    @property
    def sm_partition_file(self) -> str:
        """File that says how the encoder worker is to choose its SMs, once somebody has changed it."""
        return f"{self.run_dir}/sm-partition"

    @property
    def decoder_sms_file(self) -> str:
        """File in which the scheduler says for which groups of SMs it has decode graphs (sis/decoder_ladder.py)."""
        return f"{self.run_dir}/decoder-sms.json"

    @property
    def encoder_board(self) -> str:
        """Name of the segment in which the encoder worker says on how many SMs it runs."""
        return f"{self.shm_prefix}encoder"

    def slab_segment(self, epoch: int) -> str:
        """Name of the slab of one encoder worker, on the CPU."""
        return f"{self.shm_prefix}slab-{epoch}"

    def state_board(self, dp_rank: int) -> str:
        """Name of the segment in which the scheduler of this data-parallel rank says what it runs."""
        return f"{self.shm_prefix}decode-{dp_rank}"
