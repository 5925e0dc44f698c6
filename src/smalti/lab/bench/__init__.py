"""CPU wall time of `smalti.attention` beside its peers: ``python -m smalti.lab.bench``."""
