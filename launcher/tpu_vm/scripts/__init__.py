"""The shell scripts that hosts run, each rendered into a single command line.

A remote command is one string, carried by ssh: nothing is copied to a host before. `render` puts parameters as quoted
assignments in front of the script's text, never into the code. A line `. ./NAME.sh` includes another script of this
folder; comment lines are left out.

Rules for the scripts:
- POSIX sh, checked by shellcheck; a script names its parameters at the top (`: "${name:?}"`);
- short and idempotent: gcloud runs the whole command again when ssh, or the command, returns 255;
- never ends with 255;
- secrets and data come by standard input, never as parameters: arguments are visible to every process of a host.
"""

import functools
import re
import shlex
from importlib import resources


def render(name: str, *arguments: str, **parameters: str | int | float | bool) -> str:
    """Returns the text of a script with its parameters.

    Args:
        name: The file in this folder, without `.sh`.
        arguments: The script's positional arguments.
        parameters: Shell variables; a boolean becomes `yes` or `no`.
    """
    assignments = [f"{key}={shlex.quote(_to_text(value))}\n" for key, value in parameters.items()]
    if arguments:
        assignments.append(f"set -- {shlex.join(arguments)}\n")
    return "".join(assignments) + load(name)


@functools.cache
def load(name: str) -> str:
    """Returns the text of a script without parameters and comment lines, with included scripts in place."""
    text = (resources.files(__name__) / f"{name}.sh").read_text(encoding="utf-8")
    code = re.sub(r"^[ \t]*#.*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"^[ \t]*\. \./(\w+)\.sh\n", lambda include: load(include[1]), code, flags=re.MULTILINE)


def _to_text(value: str | int | float | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
