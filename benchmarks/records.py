"""Records of measurements in docs/records: the benchmarks write them, results.py reads them."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "docs" / "records"


def keep(name: str, record: dict[str, Any]) -> str:
    """Write a record, with the environment where it does not hold one yet; the text that was written."""
    if "environment" not in record:
        from vit.run.record import environment

        record = {**record, "environment": environment()}
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    (RECORDS / f"{name}.json").write_text(text, encoding="utf-8")
    return text


def read(name: str) -> dict[str, Any] | None:
    """A record; None where it was not measured yet."""
    path = RECORDS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def published(record: dict[str, Any]) -> dict[str, Any]:
    """A run's record without paths of this machine, which say nothing to anyone else."""
    config = json.loads(json.dumps(record["config"]))
    for place in (config["trainer"], config["data"]["init_args"]):
        for name in ("default_root_dir", "root"):
            place.pop(name, None)
    return {**record, "config": config, "data": {k: v for k, v in record["data"].items() if k not in ("root", "table")}}
