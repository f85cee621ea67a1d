"""One log line for a request whose client has gone, not one for each token that was on its way."""

from __future__ import annotations

import logging
from collections import OrderedDict

LOGGER = "sglang.srt.managers.tokenizer_manager"
# SGLang forgets a request when its stream is cancelled, and aborts it two seconds later: what is decoded until then
# is for nobody, and each token of it is an error in the log.
PREFIX = "Received output for rid="
SUFFIX = " but the state was deleted in TokenizerManager."
MAX_REMEMBERED = 4096


class OncePerRequest(logging.Filter):
    """Lets SGLang's line about output for a forgotten request pass once for each of the last requests."""

    def __init__(self) -> None:
        super().__init__()
        self._said: OrderedDict[str, None] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be logged. Called in the event loop's thread only, for the lines that matter."""
        message = record.getMessage()
        if not (message.startswith(PREFIX) and message.endswith(SUFFIX)):
            return True
        is_new = message not in self._said
        self._said[message] = None
        self._said.move_to_end(message)
        if len(self._said) > MAX_REMEMBERED:
            self._said.popitem(last=False)
        return is_new


def install() -> None:
    """Filter the lines of this process."""
    logging.getLogger(LOGGER).addFilter(OncePerRequest())
