"""posttrain: post-training of language models on one packed batch."""

__version__ = "0.1.0"
