"""posttrain: post-training of language models on one packed batch."""

import logging

__version__ = "0.1.0"

# PEFT imports bitsandbytes if it is installed, which then prints advice about generation kernels on standard error.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
