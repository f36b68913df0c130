"""posttrain: post-training of language models on one packed batch."""

import logging

__version__ = "0.1.0"

# Where bitsandbytes is installed, PEFT imports it, and it advises on standard error about kernels for generation.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
