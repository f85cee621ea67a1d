"""Leaves signals to the whole process group to the launcher. Import it in any other process of the server.

Ctrl-C in a terminal, and a service manager's SIGTERM, reach every process of the server. The launcher ends the others
in order, once the requests in flight are answered; what ended by itself meanwhile would be taken for a crash. They
still end by SIGKILL, and when the launcher is gone.
"""

from __future__ import annotations

import signal

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
