"""Compiles every kernel for GPUs that need not be there, down to machine code, and says what the assembly has in it.

As a program: prints {kernel: {"error", "fused", "approximate", "widest"}} as JSON. Triton brings the assembler with it; no driver
and no device are asked for. What a launch would tell Triton (types, which numbers are multiples of 16) is written out here.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from swapper.device import triton_arithmetic, triton_codecs

Types = dict[str, Any]
"""Of a kernel's arguments, in order: Triton's names of types, and for constants ("constant", value)."""


def constants(**values: Any) -> Types:
    return {name: ("constant", value) for name, value in values.items()}


def adamw_types(gradient: str, parameter: str, is_stochastic: bool) -> Types:
    names = ["decay", "beta1", "rest1", "beta2", "rest2", "root_scale", "eps", "step_size"]
    return {
        **dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), "*fp32"),
        "gradient": gradient,
        "parameter": parameter,
        **dict.fromkeys(("factor", "skip"), "*fp32"),
        "count": "i32",
        **dict.fromkeys(names, "fp32"),
        "seed": "i64",
        "step": "i32",
        "first_counter": "i64",
        **constants(
            has_factor=True,
            has_skip=True,
            has_parameter=parameter != "*fp32",
            is_stochastic=is_stochastic,
            ELEMENTS=triton_arithmetic.ELEMENTS,
        ),
    }


def quantized_types(kernel: Any, values: str, bits: int, block: int) -> Types:
    more = {"overflown": "*i32"} if "overflown" in kernel.arg_names else {}
    floats = {"out" if "out" in kernel.arg_names else "values": values}
    sizes = dict.fromkeys(("columns", "row_bytes", "blocks"), "i32")
    together = triton_arithmetic.ELEMENTS // block
    return {
        "codes": "*i8",
        "scales": "*i16",
        **floats,
        **more,
        **sizes,
        **constants(bits=bits, BLOCK=block, TOGETHER=together),
    }


def codec_types(kernel: Any, fixed: dict[str, bool]) -> Types:
    code, scale = ("*u8", "*fp32") if fixed.get("is_variance") else ("*i8", "*i16")
    plain = "*i16" if fixed.get("is_bf16") else "*fp32"
    pointers = {"value": "*fp32", "rho": "*i8", "low": "*i16", "ties": "*u8", "parameter": "*i16"}
    pointers |= {"code": code, "scale": scale, "out": plain, "parts": plain, "unheld": "*i32"}
    given = {**pointers, "count": "i32", **constants(**fixed, GROUPS=triton_codecs.GROUPS)}
    return {name: given[name] for name in kernel.arg_names}


def kernels() -> dict[str, tuple[Any, Types]]:
    words = {"bf16": "*i16", "fp16": "*fp16", "fp32": "*fp32"}
    found: dict[str, tuple[Any, Types]] = {
        "adamw bf16": (triton_arithmetic._update, adamw_types("*i16", "*i16", False)),
        "adamw bf16 stochastic": (triton_arithmetic._update, adamw_types("*i16", "*i16", True)),
        "adamw fp16": (triton_arithmetic._update, adamw_types("*fp16", "*fp16", False)),
        "adamw fp32": (triton_arithmetic._update, adamw_types("*fp32", "*fp32", False)),
    }
    for name, (*both, fixed) in triton_codecs._KERNELS.items():
        found.update({f"{kernel.__name__} {name}": (kernel, codec_types(kernel, fixed)) for kernel in both})
    for name, pointer in words.items():
        for bits, block in ((8, 128), (4, 64)):
            for kernel in (triton_arithmetic._quantise, triton_arithmetic._dequantise):
                types = quantized_types(kernel, pointer, bits, block)
                found[f"{kernel.__name__} {bits} bits {name}"] = (kernel, types)
    return found


def compiled(kernel: Any, types: Types, capability: int) -> Any:
    signature = {name: "constexpr" if isinstance(kind, tuple) else kind for name, kind in types.items()}
    fixed = {name: kind[1] for name, kind in types.items() if isinstance(kind, tuple)}
    assert list(signature) == kernel.arg_names, (list(signature), kernel.arg_names)
    divisible = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind.startswith("*") or name in ("count", "columns", "row_bytes")
    }
    source = ASTSource(kernel, signature, fixed, divisible)
    return triton.compile(source, GPUTarget("cuda", capability, 32), {"enable_fp_fusion": False})


def findings(kernel: Any, types: Types, capability: int) -> dict[str, Any]:
    try:
        assembly = compiled(kernel, types, capability).asm["ptx"]
    except Exception:
        return {"error": traceback.format_exc()}
    return {
        "error": "",
        "fused": len(re.findall(r"\bfma\.\S*f32", assembly)),
        "approximate": len(re.findall(r"\b(?:div\.full|div\.approx|sqrt\.approx|\S+\.ftz)\S*", assembly)),
        "widest": max([int(n) for n in re.findall(r"\bld\.global\S*\.v([248])\.b", assembly)], default=1),
    }


def main() -> None:
    chosen = [int(argument) for argument in sys.argv[1:]] or [90]
    outcome = {
        f"{name} sm_{capability}": findings(kernel, types, capability)
        for capability in chosen
        for name, (kernel, types) in kernels().items()
    }
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
