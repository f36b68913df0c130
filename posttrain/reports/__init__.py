"""What is drawn or written for people: progress, curves, the report page, comparisons, listings."""
