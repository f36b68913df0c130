"""Imports every module of posttrain, then trains a run of a configuration, saves, and resumes it for more steps.

python trains.py CONFIG.json
"""

import importlib
import json
import pkgutil
import sys

import posttrain
from posttrain.base.errors import ConfigError

OPTIONAL = ("vllm", "lm_eval")  # packages of which a module is nothing without


def main(file: str) -> None:
    imported, left = 0, []
    for module in pkgutil.walk_packages(posttrain.__path__, "posttrain."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
            imported += 1
        except (ModuleNotFoundError, ConfigError) as error:
            if not any(f"{name}" in str(error) for name in OPTIONAL):
                raise
            left.append(module.name)

    from posttrain.base.system import CAN_FORK, HANGUP
    from posttrain.cli import main
    from posttrain.runs import folder

    first = main(["train", file, "--max-steps", "2"])
    second = main(["train", file, "--resume", "--max-steps", "4"])
    has = [folder.fcntl is not None, CAN_FORK, HANGUP is not None]
    print(json.dumps({"imported": imported, "left": left, "status": [first, second], "has": has}))


if __name__ == "__main__":  # grading workers may be started by spawn
    main(sys.argv[1])
