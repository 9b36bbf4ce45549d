"""Makes libraries that take the place of CUDA's, so that PyTorch's build for CUDA loads where there are none.

    cuda_absent.py LIBRARIES OUT    LIBRARIES: torch/lib; OUT: a folder for the dynamic loader's path

The loader wants every library to which torch's are linked, and every function of them. All functions are in one library
here, libcuda-absent.so.1, and each returns 100: CUDA's cudaErrorNoDevice, and an error to the others too. So
torch.cuda.is_available() is False and torch.cuda.device_count() is 0, as on a machine without a GPU. Libraries with
CUDA's names are empty, and linked to that one: a library that has a function must have CUDA's version of it, too.

From a torch that is not linked to CUDA it makes nothing. It needs gcc and nm.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

FUNCTIONS = "libcuda-absent.so.1"
LIBRARY = re.compile(r"lib(cu(?!da\.so)|nccl|nv)\w*\.so(\.\d+)*")  # not libcuda.so.1: that is the GPU driver's
FUNCTION = re.compile(r"_*(cu|nccl|nv|CUPTI)\w*")
NO_DEVICE = 100


def main(libraries: Path, out: Path) -> None:
    """Makes the folder `out` with a library for each of CUDA's that the libraries in the folder `libraries` need, and
    prints how many; leaves it empty if they need none."""
    out.mkdir(parents=True)
    files = sorted(libraries.glob("*.so"))
    own = {name for file in files for name in list_symbols(file, "--defined-only")}
    functions = {name for file in files for name in list_symbols(file, "--undefined-only")} - own
    functions = {name for name in functions if FUNCTION.fullmatch(name)}
    names = {name for file in files for name in list_needed(file) if LIBRARY.fullmatch(name)}
    if not names:
        return
    with tempfile.TemporaryDirectory() as folder:
        link(out / FUNCTIONS, assemble(Path(folder) / "functions.s", functions))
        empty = assemble(Path(folder) / "empty.s", set())
        for name in sorted(names):
            link(out / name, empty, "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", str(out / FUNCTIONS))
    print(f"{len(functions)} functions for {len(names)} libraries")


def list_symbols(file: Path, which: str) -> set[str]:
    """The names of a library's dynamic symbols, without versions."""
    lines = run("nm", "--dynamic", "--format=posix", which, str(file)).splitlines()
    return {line.split()[0].partition("@")[0] for line in lines}


def list_needed(file: Path) -> list[str]:
    """The libraries to which a library is linked."""
    return re.findall(r"NEEDED\s+(\S+)", run("objdump", "--private-headers", str(file)))


def assemble(source: Path, functions: set[str]) -> str:
    """Writes x86-64 assembly in which all these functions return NO_DEVICE. Returns its path."""
    labels = "".join(f".globl {name}\n.type {name},@function\n{name}:\n" for name in sorted(functions))
    source.write_text(f'.text\n{labels}mov ${NO_DEVICE}, %eax\nret\n.section .note.GNU-stack,"",@progbits\n')
    return str(source)


def link(library: Path, *arguments: str) -> None:
    """Makes a shared library of its own name."""
    run("gcc", "-shared", "-nostdlib", f"-Wl,-soname,{library.name}", "-o", str(library), *arguments)


def run(*command: str) -> str:
    """What a command prints that must succeed."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
