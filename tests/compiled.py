"""
Compile the kernels ahead of time, without a GPU, and print what came out, a JSON object a line. Run by test_kernels.py in a
process of its own, where kernels are not interpreted:  python tests/compiled.py 90:1280:8:1 ...    (arch:C:H:streams)
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[1]))
from route_kernels import RUNGS, TritonHistory, _backward, _forward  # noqa: E402

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TENSORS = {"bank": "bf16", "out": "bf16", "dout": "bf16", "dnew": "bf16", "qg": "fp32", "partial": "fp32", "lse": "fp32",
           "delta": "fp32", "dbank": "fp32", "dqg": "fp32"}


def compiled(kernel, arch, constants, **flags):
    """-> registers, bytes of stack and local memory, and bytes a thread of global accesses by their width."""
    constants = constants | flags
    warps = constants.pop("num_warps")
    types = {name: "constexpr" if name in constants else f"*{TENSORS[name]}" if name in TENSORS else
             "fp32" if name == "eps" else "i32" for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types.values()) if t[0] == "*"}
    source = ASTSource(kernel, types, {(kernel.arg_names.index(name),): value for name, value in constants.items()}, aligned)
    cubin = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps}).asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (subprocess.run([CUOBJDUMP, flag, file.name], capture_output=True, text=True, check=True).stdout
                       for flag in ("--dump-resource-usage", "-sass"))
    numbers = {key.lower(): int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    widths = {}
    for suffix in re.findall(r"\b(?:LDG|STG)\.E\.?(\d+|U16|U8)?", code):
        bits = {"": 32, "U16": 16, "U8": 8}.get(suffix) or int(suffix)
        widths[bits] = widths.get(bits, 0) + bits // 8
    return numbers | {"spills": len(re.findall(r"\b(?:LDL|STL)\b", code)), "bytes_by_width": widths}


for case in sys.argv[1:]:
    arch, C, H, streams = map(int, case.split(":"))
    roles = ((1, 0), (0, 1)) if streams == 2 else ((0,), (0,))
    meta = torch.empty(3, streams, C, device="meta"), torch.empty(3, C, device="meta")
    history = TritonHistory(RUNGS["triton"], *meta, H, 1e-6, *roles)
    for kernel in (_forward, _backward):
        for count in [n for n in (1, 2, 4, 8) if n <= history.group and (kernel is _backward or n in (1, history.group))]:
            flags = {"MERGE": count == 1} if kernel is _forward else {"ADD": True}
            found = compiled(kernel, arch, history.constants(kernel, count), OPEN=int(streams == 2), **flags)
            print(json.dumps({"case": case, "kernel": kernel.__name__, "count": count, **found}), flush=True)
