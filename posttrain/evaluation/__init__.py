"""How good a model is, and how sure that is: suites, records of every answer, statistics."""
