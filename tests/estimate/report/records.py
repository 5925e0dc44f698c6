"""Records made of the fixtures."""

import functools

from smalti.estimate.report import attention_record, entry, fn_record
from tests.estimate.report.programs import estimated

LABEL = "estimate; of a test"
CASE = {"B": 1, "Hq": 1, "Hkv": 1, "Sq": 256, "Sk": 256, "D": 128, "Dv": None}
CASE |= {"dtype": "bfloat16", "mask": "causal", "layout": "BHSD"}


@functools.cache
def _entry(name, variant=None):
    return entry(estimated(name), label=LABEL, variant=variant)


def fn(name="double"):
    return fn_record(f"programs.py:{name}", ["f32[512,128]"], _entry(name))


def attention():
    return attention_record(
        CASE,
        "forward",
        "v6e",
        LABEL,
        ours=None,
        peers={
            "splash": None,
            "jax_flash": _entry("jax_flash", "jax_flash block_q=128"),
            "xla": _entry("xla", "xla"),
        },
        reasons={"ours": "no kernels yet", "splash": "VMEM is exhausted\nat length"},
        tried={
            "jax_flash": [
                {"variant": "jax_flash block_q=128", "cycles": 1.0},
                {"variant": "jax_flash block_q=256", "cycles": None, "reason": "too large"},
            ],
        },
    )
