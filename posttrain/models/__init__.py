"""Models and tokenizers: loading, adapters, families, attention over packs."""
