"""The lab: what shows a kernel right and times it honestly."""
