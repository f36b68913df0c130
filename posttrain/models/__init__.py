"""Loading models and tokenizers, adapters, families, attention over packs."""
