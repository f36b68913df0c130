"""Language models that judge completions, behind an OpenAI-compatible address (docs/judge.md).

`judge` scores completions and compares pairs; `prompts` has the questions and reads a reply; `client` sends requests,
stores, paces, retries and counts; `post` is one HTTP request and the limits per minute. A judge that does not answer
gives no verdict, never a score of 0.
"""
