"""What is installed, what of it works by one real call each, and how to mend the rest. Imports nothing slow."""

from posttrain.doctor.checks import all_checks, chosen
from posttrain.doctor.finding import Finding
from posttrain.doctor.process import examine
from posttrain.doctor.show import as_json, summary, table

__all__ = ["Finding", "all_checks", "as_json", "chosen", "examine", "summary", "table"]
