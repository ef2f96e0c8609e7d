#!/usr/bin/env python3
"""Compiles the harness's cubins as the executor compiles its kernels, and the harness if there is a C++ compiler.

    python3 bench/cuda/hopper/build.py --nvrtc ENVIRONMENT --out FOLDER

Looks for NVRTC in the Python environment, and then in CUDA's toolkit. Needs no GPU. The folder also gets variants.txt,
from which the harness launches the compiled variants.
"""

import argparse
import ctypes
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[2] / "crates/corella-cuda/src/kernels"
CUDA = Path("/usr/local/cuda")

SHAPE = {"ELEMENT": "bf16", "WEIGHT": "FLOATS", "WHOLE_CHUNKS": 1, "GROUP_LEN": 128, "HAS_MINIMUM": 0}
COLUMNS = ("CHANNEL_TILE", "ROW_TILE", "NUM_STAGES", "BLOCKS", "IS_PERSISTENT", "SHARED_BY")
MORE_COLUMNS = ("CONSUMER_REGISTERS", "PRODUCER_REGISTERS", "BAND_ROWS")

# The first variant for many rows and the first for few equal those of hopper.rs.
VARIANTS = {
    "p128": (128, 128, 6, 1, 1, 1, 232, 40, 2048),
    "p128m": (128, 128, 6, 1, 1, 2, 232, 40, 2048),
    "p192": (128, 192, 5, 1, 1, 1, 232, 40, 2304),
    "p192m": (128, 192, 5, 1, 1, 2, 232, 40, 2304),
    "p128c3": (192, 128, 5, 1, 1, 1, 152, 56, 2048),
    "s64": (128, 64, 4, 2, 0, 1, 104, 32, 2048),
    "s64x8": (128, 64, 8, 1, 0, 1, 232, 40, 2048),
    "s64c1": (64, 64, 6, 2, 0, 1, 152, 96, 2048),
    "m128": (128, 128, 6, 1, 0, 1, 232, 40, 2048),
}


def modules():
    """Returns each cubin's name, source and macros."""
    yield "helper", HERE / "helper.cu", {}
    for gate in ("plain", "gated"):
        shape = {**SHAPE, "GATED": int(gate == "gated")}
        if gate == "gated":
            shape["ACTIVATION"] = "SILU"
        whole = {**shape, "WHOLE_UNITS": 1}
        for tiles in (1, 2, 4):
            narrow = {"COLUMN_TILES": tiles}
            for units in ("whole", "odd"):
                macros = {**shape, **narrow, "WHOLE_UNITS": int(units == "whole"), "LANES_EXCHANGE": 1}
                yield f"narrow_{tiles}_{gate}_{units}_exchange", KERNELS / "linear_narrow.cu", macros
            yield f"narrow_{tiles}_{gate}_whole_before", KERNELS / "linear_narrow.cu", {**whole, **narrow}
        for size, tile, stages in (("large", 128, 3), ("small", 64, 5)):
            macros = {**whole, "CHANNEL_TILE": tile, "ROW_TILE": tile, "NUM_STAGES": stages}
            yield f"wide_{size}_{gate}", KERNELS / "linear_wide.cu", macros
        yield f"finish_{gate}", KERNELS / "linear_finish.cu", whole
        for name, values in VARIANTS.items():
            macros = dict(zip(COLUMNS + MORE_COLUMNS, values, strict=True))
            yield f"hopper_{name}_{gate}", KERNELS / "linear_hopper.cu", {**whole, **macros}


def find_nvrtc(environment):
    places = [environment.glob("lib/python3*/site-packages/nvidia/*/lib")] if environment else []
    for folders in (*places, [CUDA / "lib64"]):
        for folder in folders:
            for library in sorted(folder.glob("libnvrtc.so.1[0-9]")):
                # NVRTC finds them by their name once they are loaded.
                for builtins in folder.glob("libnvrtc-builtins.so.1*"):
                    ctypes.CDLL(str(builtins))
                return library
    sys.exit(f"no libnvrtc is in {environment or 'an environment (--nvrtc names one)'}, nor in {CUDA}")


def compile_module(nvrtc, source, macros, out):
    """Writes a cubin, and returns the assembler's output."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = source.read_bytes()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, source.name.encode(), 0, None, None):
        sys.exit(f"NVRTC does not take {source}")
    # The options of nvrtc.rs.
    options = ["-std=c++17", "-fmad=false", "-default-device", "--gpu-architecture=sm_90a", "--ptxas-options=-v"]
    options += [f"-I{KERNELS}", *(f"-D{name}={value}" for name, value in macros.items())]
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), words)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    if failed:
        raise RuntimeError(f"{source.name} {macros}:\n{log.value.decode()}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    out.write_bytes(cubin.raw)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return log.value.decode()


def compile_cubin(library, folder, module):
    name, source, macros = module
    try:
        log = compile_module(ctypes.CDLL(str(library)), source, macros, folder / f"{name}.cubin")
    except RuntimeError as error:
        return f"{name} FAILED\n{error}"
    registers, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    warnings = "".join(f"\n{line}" for line in log.splitlines() if "arning" in line or "serializ" in line)
    return f"{name}: {registers.group(1)} registers, {spilled.group(1)} bytes spilled{warnings}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvrtc", type=Path, help="Python environment with NVRTC")
    parser.add_argument("--out", type=Path, required=True, help="folder for cubins and the harness")
    parser.add_argument("names", nargs="*", help="only modules whose names have one of these in them")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    library = find_nvrtc(arguments.nvrtc)
    lines = [" ".join(map(str, (name, *values[: len(COLUMNS)]))) for name, values in VARIANTS.items()]
    (arguments.out / "variants.txt").write_text("\n".join(lines) + "\n")
    wanted = [m for m in modules() if not arguments.names or any(name in m[0] for name in arguments.names)]
    failed = False
    # NVRTC compiles in one thread at a time of a process, but not while Python holds its lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for line in pool.map(lambda module: compile_cubin(library, arguments.out, module), wanted):
            print(line, flush=True)
            failed |= "FAILED" in line
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler:
        words = [compiler, "-O1", "-std=c++17", HERE / "hopper.cpp", "-o", arguments.out / "hopper", "-ldl"]
        failed |= subprocess.run(words).returncode != 0
    else:
        print("there is no g++, which builds the harness")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
