"""Planning before a run: its examples and steps, a memory estimate, the largest step, and a probe."""

from posttrain.base.files import table_beside

OLD_CARDS = ("t4", "v100", "v100-32gb")  # without bfloat16
CARDS = table_beside(__file__, "cards.yaml")  # GPUs with their memory in GiB
