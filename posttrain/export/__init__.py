"""`posttrain export`: writes a trained model as a folder that other programs can load (docs/export.md)."""
