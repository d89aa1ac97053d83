"""The `vit` command: a table from verbs to functions, each imported only when it is called."""

import importlib
import os
import sys
from collections.abc import Sequence

VERBS = {
    "check": ("vit.api:check_command", "look for damage, duplicates and leaks: vit check ROOT"),
    "fit": ("vit.api:fit_command", "train: vit fit --config quickstart"),
    "sweep": ("vit.api:sweep_command", "try values: vit sweep --config NAME --grid model.optim.lr=[1e-4,3e-4]"),
    "validate": ("vit.api:validate_command", "score a run on its val split: vit validate RUN"),
    "test": ("vit.api:test_command", "score a run on its test split: vit test RUN"),
    "weights": ("vit.models.known:command", "list good starting points, or show what a file holds: vit weights FILE"),
    "predict": ("vit.api:predict_command", "name pictures: vit predict RUN PICTURE ... --out labels.csv"),
}

BAD_INPUT = 2


def main(args: Sequence[str] | None = None) -> int:
    """Run a verb.

    Args:
        args: words behind `vit`; default those of the process.

    Returns:
        The exit code: 0, or 2 for bad input, whose message is printed without a traceback
        (VIT_TRACEBACK=1 shows it), 1 where `check` or `predict` met bad pictures or no run
        of a `sweep` went well, 130 after Ctrl-C, 143 after SIGTERM.
    """
    words = list(sys.argv[1:] if args is None else args)
    if words and words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if words and words[0] == "--version":
        from vit import __version__

        print(f"vit {__version__}")
        return 0
    verb = next((word for word in words if word in VERBS), None)
    if verb is None or (words[0] != verb and not words[0].startswith("-")):
        return _complain(_unknown(words))
    # Options before the verb are meant for it: vit --config quickstart fit.
    words.remove(verb)
    return _call(verb, words)


def _call(verb: str, words: list[str]) -> int:
    module, _, function = VERBS[verb][0].partition(":")
    try:
        try:
            result = getattr(importlib.import_module(module), function)(words)
        except RuntimeError as error:
            if "torchvision::nms" not in str(error):
                raise
            raise ValueError(
                "expected torch and torchvision of one build, but they do not fit together. Install both again: "
                "pip install --force-reinstall torch torchvision"
            ) from error
    except KeyboardInterrupt as stop:
        # 128 and the number of the signal, as shells count: Ctrl-C is 2.
        return 128 + getattr(stop, "number", 2)
    except Exception as error:
        from vit.run.messages import is_bad_input

        if not is_bad_input(error) or os.environ.get("VIT_TRACEBACK"):
            raise
        return _complain(f"vit {verb}: {error}")
    return int(result or 0)


def _complain(message: str) -> int:
    print(message, file=sys.stderr)
    return BAD_INPUT


def _unknown(words: Sequence[str]) -> str:
    if not words:
        return f"expected a verb.\n\n{_help()}"
    import difflib

    near = difflib.get_close_matches(words[0], VERBS, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"expected one of the verbs {', '.join(VERBS)}, but got {words[0]!r}.{hint}\n\n{_help()}"


def _help() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {text}" for verb, (_, text) in VERBS.items()]
    return "\n".join(
        [
            "usage: vit VERB [OPTIONS]",
            "",
            "Fine-tune, pre-train and study Vision Transformers, with numbers you can trust.",
            "",
            *lines,
            "",
            "vit VERB --help lists the options of a verb.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
