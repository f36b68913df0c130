"""Checks whether the Hugging Face hub is reachable, because without a network its library retries for half a minute."""

import contextlib
import socket
import time
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants

from posttrain.base.log import log

TRIES, PAUSE_S = 2, 0.5  # name lookups, and seconds between them: one lookup may fail by chance
_ours = False  # whether this module, not the user, has switched the library offline


def stay_offline_without_network() -> None:
    """If the hub's host name does not resolve, restrict its library to the local cache, as HF_HUB_OFFLINE=1 does.

    Called before every use, so that a long session notices when the network is back. Does nothing if the user has set
    HF_HUB_OFFLINE, or behind a proxy, which resolves names itself.
    """
    global _ours
    endpoint = urlsplit(constants.ENDPOINT)
    host = endpoint.hostname or ""
    if (constants.HF_HUB_OFFLINE and not _ours) or getproxies().keys() & {endpoint.scheme, "all"}:
        return
    offline = not _resolves(host)
    if offline and not _ours:
        log.info("%s does not resolve: using only the local cache of the hub", host)
    constants.HF_HUB_OFFLINE = _ours = offline


def _resolves(host: str) -> bool:
    for attempt in range(TRIES):
        time.sleep(PAUSE_S * bool(attempt))
        with contextlib.suppress(OSError):
            socket.getaddrinfo(host, 443)
            return True
    return False
