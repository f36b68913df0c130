"""`posttrain export`: a trained model as a folder that other programs load (docs/export.md)."""
