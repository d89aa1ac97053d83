"""How long one waits for `vit --help`, `import vit` and `vit fit --help`, as ratios in one run.

Run: python benchmarks/startup.py        Writes docs/records/startup.json.
"""

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from records import keep

COMMANDS = {
    "python": [sys.executable, "-c", "pass"],
    "import vit": [sys.executable, "-c", "import vit"],
    "vit --help": [str(Path(sys.executable).parent / "vit"), "--help"],
    "import lightning.pytorch.cli": [sys.executable, "-c", "import lightning.pytorch.cli"],
    "vit fit --help": [str(Path(sys.executable).parent / "vit"), "fit", "--help"],
}


def main() -> None:
    """Alternate the commands, so that all meet the same machine; print and keep medians."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(5):
        for name, command in COMMANDS.items():
            started = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            times[name].append(time.perf_counter() - started)
    seconds = {name: round(median(values), 3) for name, values in times.items()}
    pairs = zip(times["vit fit --help"], times["import lightning.pytorch.cli"], strict=True)
    ratio = round(median(a / b for a, b in pairs), 3)
    for name, value in seconds.items():
        print(f"{name:<30} {value:7.3f} s")
    print(f"vit fit --help / import lightning.pytorch.cli: {ratio:.3f}")
    keep("startup", {"seconds": seconds, "help_over_import": ratio, "runs": 5})


if __name__ == "__main__":
    main()
