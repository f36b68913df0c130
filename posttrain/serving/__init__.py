"""`posttrain serve`: serves a model behind an OpenAI-compatible HTTP API (docs/serve.md)."""
