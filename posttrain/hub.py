"""Whether the Hugging Face hub can be reached at all, asked before its library tries for half a minute to."""

from __future__ import annotations

import logging
import socket
import time
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants

log = logging.getLogger("posttrain")

TRIES, PAUSE_S = 2, 0.5  # a look-up may fail once
_ours = False  # whether it is offline by our finding, not by the user's wish


def stay_offline_without_network() -> None:
    """Where the hub's name cannot be looked up, have its library use the local cache alone, as HF_HUB_OFFLINE=1 does.

    Asked before every use, so that a long session finds the network when it is back. A proxy looks up names itself.
    """
    global _ours
    place = urlsplit(constants.ENDPOINT)
    host = place.hostname or ""
    if (constants.HF_HUB_OFFLINE and not _ours) or getproxies().keys() & {place.scheme, "all"}:
        return
    offline = not _is_known(host)
    if offline and not _ours:
        log.info("%s cannot be looked up: only the local cache of the hub is used", host)
    constants.HF_HUB_OFFLINE = _ours = offline


def _is_known(host: str) -> bool:
    for attempt in range(TRIES):
        time.sleep(PAUSE_S * bool(attempt))
        try:
            socket.getaddrinfo(host, 443)
        except OSError:
            continue
        return True
    return False
