"""Language models that judge completions, behind an OpenAI-compatible API (docs/judge.md).

`judge` writes the questions and reads the replies that score completions and compare pairs; `client` sends, paces and
retries requests, stores replies and counts costs; `post` makes one HTTP request and keeps the limits per minute. A
judge that does not answer gives no verdict, never a score of 0.
"""
