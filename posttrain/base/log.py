"""The logger of the whole package. Its handlers are in runs/logs.py."""

import logging

log = logging.getLogger("posttrain")
