"""`posttrain serve`: a model behind OpenAI's HTTP interface (docs/serve.md)."""
