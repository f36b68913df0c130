"""posttrain: post-training of language models on one packed batch.

The Python API: `explore`, `train`, `train_all`, `load_run`, `evaluate` (posttrain/api.py, docs/api.md).
"""

import logging
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.api import Evaluated, TrainedRun, evaluate, explore, load_run, train, train_all

__version__ = "0.1.0"
__all__ = ["Evaluated", "TrainedRun", "evaluate", "explore", "load_run", "train", "train_all"]

# Turn off the telemetry of libraries, which read these variables when imported. Variables set by the user are kept.
TELEMETRY = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "VLLM_NO_USAGE_STATS": "1",
    "WANDB_ERROR_REPORTING": "false",
}
for _name, _value in TELEMETRY.items():
    os.environ.setdefault(_name, _value)

# If bitsandbytes is installed, PEFT imports it, and it prints advice about generation kernels on standard error.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    """Return a name of the Python API, which is imported on first use because it imports torch."""
    if name in __all__:
        return getattr(import_module("posttrain.api"), name)
    raise AttributeError(f"module 'posttrain' has no attribute {name!r}")
