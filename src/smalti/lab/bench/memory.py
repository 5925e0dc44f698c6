"""How far one forward and backward pass makes a fresh process grow.

``python -m smalti.lab.bench.memory PEER CASE-AS-JSON`` is that process, and prints one line.
"""

import dataclasses
import json
import subprocess
import sys

from smalti.lab.bench.cases import Case, make_inputs
from smalti.lab.bench.cpu import resident_mib, use_cpu
from smalti.lab.bench.run import build
from smalti.lab.bench.torch_peers import Unavailable


def growth_in_fresh_process(peer: str, case: Case, timeout_s: float = 1800) -> float:
    """MiB between before the first call, inputs included, and the peak after it.

    What compiling takes counts, as it does for a user. Raises Unavailable where it cannot be
    measured.
    """
    if resident_mib() is None:
        raise Unavailable("measured on Linux only, from /proc/self/status")
    arguments = json.dumps({"mask": case.mask, "S": case.S, "backward": case.backward})
    done = subprocess.run(
        [sys.executable, "-m", "smalti.lab.bench.memory", peer, arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise Unavailable(f"the measuring process ended with {done.returncode}: {last}")
    return json.loads(done.stdout.splitlines()[-1])["growth_mib"]


def _measure(peer: str, case: Case) -> float:
    # One tiny call first: starting the backend and its threads is not the kernel's doing.
    tiny = dataclasses.replace(case, S=16)
    build(peer, tiny, make_inputs(tiny))()
    call = build(peer, case, make_inputs(case))
    before = resident_mib()
    call()
    after = resident_mib()
    assert before is not None
    assert after is not None
    return after[1] - before[0]


if __name__ == "__main__":
    use_cpu()
    print(json.dumps({"growth_mib": _measure(sys.argv[1], Case(**json.loads(sys.argv[2])))}))
