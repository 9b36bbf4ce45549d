"""What a kubelet makes of `$` in a container's command and in values of its variables: a transcription of `Expand` in
k8s.io/kubernetes/third_party/forked/golang/expansion/expand.go."""

from collections.abc import Mapping


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` is the variable's value, or stays where there is none; `$$` is `$`; all else stays."""
    written, cursor, checkpoint = "", 0, 0
    while cursor < len(text):
        if text[cursor] == "$" and cursor + 1 < len(text):
            written += text[checkpoint:cursor]
            read, is_variable, advance = _read_name(text[cursor + 1 :])
            written += variables.get(read, f"$({read})") if is_variable else read
            cursor += advance
            checkpoint = cursor + 1
        cursor += 1
    return written + text[checkpoint:]


def _read_name(text: str) -> tuple[str, bool, int]:
    """What follows a `$`: the name or the text that stands for it, whether it is a name, and how far to go on."""
    if text[0] == "$":
        return "$", False, 1
    if text[0] == "(":
        end = text.find(")", 1)
        return (text[1:end], True, end + 1) if end > 0 else ("$(", False, 1)
    return f"${text[0]}", False, 1
