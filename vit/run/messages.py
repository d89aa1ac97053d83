"""A parser's error in one sentence: what was expected, what came, what may have been meant."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass


def is_bad_input(error: BaseException) -> bool:
    """Whether other options or data would help: our `ValueError`, and Lightning's own, which is not imported here."""
    return isinstance(error, ValueError) or type(error).__name__ == "MisconfigurationException"


def plain_message(message: str, options: Sequence[str], sources: Mapping[str, type]) -> str:
    """Shorten what jsonargparse says.

    Args:
        message: its error.
        options: names of all options, without dashes.
        sources: data sources by name.
    """
    message = message.strip()
    if found := re.search(r"unrecognized arguments: (.*)", message, re.IGNORECASE):
        words = found.group(1).split()
        wrong = next((word for word in words if word.startswith("-")), words[0]).split("=")[0]
        if not wrong.startswith("-"):
            return f"expected options that start with --, but got {wrong!r}."
        return f"there is no option {wrong}.{did_you_mean(wrong.lstrip('-'), options, '--')}"
    if found := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message):
        wrong = f"{found.group(1)}.{found.group(2)}"
        return f"there is no option {wrong}.{did_you_mean(wrong, options)}"
    if re.search(r"arguments are required: .*\bdata\b", message):
        return f"expected data: --data and one of {', '.join(sources)}, or a configuration that names it."
    if found := re.search(r'Parser key "([\w.]+)"', message):
        return _about(found.group(1), message, sources)
    return " ".join(line.strip(" -") for line in message.splitlines() if line.strip())


def _about(key: str, message: str, sources: Mapping[str, type]) -> str:
    """The message about the value of one option."""
    given = re.findall(r"Given value: (.*)", message)
    came = given[0].strip() if given else ""
    if key == "data" and (told := _about_data(message, came, sources)):
        return told
    if key == "model" and (found := re.search(r"Option '([\w.]+)' is not accepted", message)):
        return f"there is no option model.{found.group(1)}. To list those of a model: vit fit --model.help NAME"
    name = f"--{key}"
    if pair := re.search(r"NestedArg\(key='([^']*)', val='([^']*)'\)", came):
        came = pair.group(2)
    literals = re.findall(r"typing\.Literal\[([^\]]*)\]", message)
    if literals:
        came = came or (re.findall(r"Got value: (.*)", message) or [""])[0].strip()
        allowed = list(dict.fromkeys(item.strip(" '\"") for part in literals for item in part.split(",")))
        near = did_you_mean(came, allowed)
        return f"expected {name} to be one of {', '.join(allowed)}, but got {came!r}.{near}"
    kinds = [kind for kind in re.findall(r"Expected a <class '([\w.]+)'>", message) if kind != "NoneType"]
    if kinds and came:
        words = {"float": "a number", "int": "a whole number", "bool": "true or false", "str": "text"}
        wanted = " or ".join(dict.fromkeys(words.get(kind, kind) for kind in kinds[:3]))
        return f"expected {name} to be {wanted}, but got {came!r}."
    lines = [line.strip(" -") for line in message.splitlines() if line.strip()]
    kept = [x for x in lines if not re.match(r"(Subtypes|Given value|Errors|Does not validate|Parser key)", x)]
    return f"{name}: {'; '.join(dict.fromkeys(kept))}"


def _about_data(message: str, came: str, sources: Mapping[str, type]) -> str | None:
    named = re.search(r"class_path='?\"?(?:[\w.]*\.)?(\w+)|'class_path': '(?:[\w.]*\.)?(\w+)'", came)
    source = next((part for part in named.groups() if part), None) if named else None
    if found := re.search(r"Option '([\w.]+)' is not accepted", message):
        if source is None and (owners := _owners(found.group(1), sources)):
            who = f"{', '.join(owners)}: add --data {owners[0]}, say"
            return f"expected --data beside --data.{found.group(1)}, an option of {who}."
        known = sources.get(source or "", None)
        names = _fields(known) if known else list(dict.fromkeys(x for cls in sources.values() for x in _fields(cls)))
        return f"there is no option data.{found.group(1)}.{did_you_mean(found.group(1), names, 'data.')}"
    if found := re.search(r"arguments are required: ([\w., ]+?)\.?(?:\n|$)", message):
        options = ", ".join(f"--data.{name.strip()}" for name in found.group(1).split(","))
        return f"expected {options}, which the data source {source or 'given'} needs."
    if not came or came == "None":
        return f"expected data: --data and one of {', '.join(sources)}, or a configuration that names it."
    if inner := re.search(r'Parser key "(?!data")([\w.]+)":(.*?)(?:\n- |\Z)', message, re.DOTALL):
        return _about(f"data.{inner.group(1)}", message.replace(f'"{inner.group(1)}"', '""'), {})
    if re.fullmatch(r"\w+", came) and "dot import path" in message:
        listed = ", ".join(sources)
        near = did_you_mean(came, list(sources))
        return f"expected data from one of {listed}, or the import path of a class, but got {came}.{near}"
    return None


def _fields(source: type) -> list[str]:
    return [f.name for f in fields(source)] if is_dataclass(source) else []


def _owners(option: str, sources: Mapping[str, type]) -> list[str]:
    """Sources that have an option, the one for people's own pictures first."""
    names = [name for name, cls in sources.items() if option.partition(".")[0] in _fields(cls)]
    return sorted(names, key=lambda name: name != "Folder")


def did_you_mean(wrong: str, names: Sequence[str], prefix: str = "") -> str:
    """A question with the nearest names, or nothing where none is near.

    Args:
        wrong: what came.
        names: right names; a dotted one is found by its last part too.
        prefix: put before each name that is shown.
    """
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=0.8)
    if not close:
        ends = {name.rpartition(".")[2]: name for name in reversed(list(names))}
        close = [ends[end] for end in difflib.get_close_matches(wrong.rpartition(".")[2], list(ends), n=2)]
    close = close or difflib.get_close_matches(wrong, names, n=2)
    return f" Did you mean {' or '.join(prefix + name for name in close)}?" if close else ""
