"""Language models that judge completions, behind an OpenAI-compatible address (docs/judge.md).

`client` asks: cached, paced, retried, counted; `post` is one HTTP request and the limits per minute, `cache` the stored
replies. `single` scores one completion, `pairs` compares two in both orders, `asking` is common to both, `prompts` has
the questions and reads a reply. A judge that does not answer gives no verdict, never a score of 0.
"""
