"""The optimizer on float32 masters, and schedules."""
