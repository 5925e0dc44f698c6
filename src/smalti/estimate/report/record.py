"""The JSON files of `smalti estimate`: one run, with all that is needed to doubt or repeat it."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA = 1


def attention_record(
    case: Mapping[str, Any],
    which: str,
    chip: str,
    label: str,
    *,
    ours: dict[str, Any] | None,
    peers: Mapping[str, dict[str, Any] | None],
    reasons: Mapping[str, str],
    tried: Mapping[str, list[dict[str, Any]]],
) -> dict[str, Any]:
    """A comparison. Entries get `ratio_to_best_peer`: their cycles over the least of any peer.

    reasons: why an entry is None, by name, "ours" included.
    tried: every variant of each, with its cycles or with why it failed.
    """
    best = min((found["cycles"] for found in peers.values() if found), default=None)

    def with_ratio(found: dict[str, Any] | None) -> dict[str, Any] | None:
        if found is None:
            return None
        return {**found, "ratio_to_best_peer": found["cycles"] / best if best else None}

    return {
        **_head("attention"),
        "case": dict(case),
        "pass": which,
        "chip": chip,
        "label": label,
        "ours": with_ratio(ours),
        "peers": {name: with_ratio(found) for name, found in peers.items()},
        "reasons": dict(reasons),
        "tried": dict(tried),
    }


def fn_record(function: str, args: list[str], found: dict[str, Any]) -> dict[str, Any]:
    """One function: its entry's keys stand at the top."""
    return {**_head("fn"), "function": function, "args": args, **found}


def _head(kind: str) -> dict[str, Any]:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"schema": SCHEMA, "kind": kind, "date_utc": now}


def entries_of(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A record's entries by name: "ours" and the peers, or the function."""
    if record["kind"] == "fn":
        return {record["function"]: dict(record)}
    named = {"ours": record["ours"], **record["peers"]}
    return {name: found for name, found in named.items() if found}


def record_text(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=1, allow_nan=False) + "\n"


def read_record(path: Path) -> dict[str, Any]:
    """A record from its file. Raises ValueError where it cannot be read or is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # RecursionError: of brackets in brackets
        raise ValueError(f"{path} is no JSON ({error}); give a file that --json wrote") from error
    if not isinstance(record, dict) or record.get("kind") not in ("attention", "fn"):
        raise ValueError(f"{path} is no record of `smalti estimate`; give a file that --json wrote")
    if record.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} has the format {record.get('schema')}, and this version reads {SCHEMA}: "
            "estimate it again"
        )
    return record
