"""Planning before a run: its examples and steps, a memory estimate, the largest step, and a probe."""

# GPUs that a run can be planned for without owning one, with the memory that PyTorch reports, in GiB.
CARDS = {
    "rtx-3090": 23.6,
    "rtx-4090": 23.6,
    "l4": 22.0,
    "a10": 22.0,
    "rtx-5090": 31.4,
    "a100-40gb": 39.4,
    "l40s": 44.4,
    "a6000": 47.4,
    "a100": 79.2,
    "h100": 79.2,
    "h200": 139.8,
    "b200": 178.0,
}
