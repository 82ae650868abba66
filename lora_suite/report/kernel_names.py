# SPDX-License-Identifier: Apache-2.0
"""Names of kernels that a person recognises and a terminal has room for.

A kernel's name is that of a C++ template with all its arguments, hundreds of characters that say again and
again which library it is from. What it is called by here is its library or outer function, the operation, the
tile of a product and the type of its numbers, as far as the name says them. Kernels that differ in the rest
have the same name then; their full names are in the data.
"""

from __future__ import annotations

import re

_PARAMETERS = re.compile(r"\(.*\)$")
_ANGLE = re.compile(r"[<>]")
_NOISE = re.compile(
    r"^void |at::native::|at::cuda::detail::|at_cuda_detail::|autograd::engine::evaluate_function: "
    r"|\(anonymous namespace\)::"
)
# Template arguments beside a longer name than this are left off.
_LONGEST = 48

_CUTLASS_OPERATION = re.compile(r"\bcutlass::Kernel2?<(\w+)>")
# A tile follows the schedule of its kernel, as cute::tuple<C<M>, C<N>, …>; in a mangled name an N that is M
# is an abbreviation (Itanium C++ ABI, 5.1.10).
_MANGLED_TILE = re.compile(r"Kernel(?:PtrArray)?Tma\w*?E+NS\w*?_IJNS\w*?_ILi(\d+)EEE(?:NS\w*?_ILi(\d+)EEE|S)")
_TILE = re.compile(r"Kernel(?:PtrArray)?Tma[^<]*<[^<]*C<(\d+)>, *[^<]*C<(\d+)>")
# How both operands lie, by cute::SM90::GMMA::Major: 0 where the summed index is innermost.
_MANGLED_MAJOR = re.compile(r"5MajorE([01])ELS\w*?_([01])E")

_CUTLASS_TYPE = re.compile(r"bfloat16_t|half_t")

_CUB = re.compile(r"(?:\bcub::|3cub).*?Device([A-Z]\w*?)Kernel")
_GENERIC = re.compile(
    r"(?:vectorized_|unrolled_|legacy_)?(elementwise|reduce|multi_tensor_apply)_kernel(?:_\w+)?<"
)
_OPERATION = re.compile(
    r"(?:CUDAFunctor(?:OnSelf)?_(\w+)|(\w+?)(?:Functor|_functor|Ops|_kernel_cuda|_kernel_impl|_cuda_impl))\b"
)
# Functors that say no more than how many operands there are, with the operation among their arguments.
_WRAPPERS = frozenset({"gpu", "AUnary", "BUnary", "Binary"})
_TYPE = re.compile(r"\b(BFloat16|bfloat16_t|Half|half_t|double|float|long|int|bool)\b")
_BRIEF = {
    "BFloat16": "bf16",
    "bfloat16_t": "bf16",
    "Half": "fp16",
    "half_t": "fp16",
    "float": "fp32",
    "double": "fp64",
}


def short(name: str) -> str:
    """A kernel's (or operator's) name in short: `elementwise Fill bf16`, `cutlass grouped gemm 64x128`."""
    plain = _NOISE.sub("", _demangled(name))
    return _cutlass(name) or _cub(name) or _generic(plain) or _plain(plain) or name


def _cutlass(name: str) -> str | None:
    operation = _CUTLASS_OPERATION.search(name)
    if operation is not None:
        return operation[1]
    if not name.startswith(("_ZN7cutlass", "void cutlass::", "cutlass::")):
        return None
    if "Gemm" not in name:
        return f"cutlass {_plain(_NOISE.sub('', _demangled(name))).removeprefix('cutlass::')}"
    grouped = "GroupProblemShape" in name or "GemmGrouped" in name
    words = ["cutlass", "grouped gemm" if grouped else "gemm"]
    tile = _MANGLED_TILE.search(name) or _TILE.search(name)
    if tile is not None:
        words.append(f"{tile[1]}x{tile[2] or tile[1]}")
    major = _MANGLED_MAJOR.search(name)
    if major is not None:
        words.append(("t", "n")[int(major[1])] + ("n", "t")[int(major[2])])
    number = _CUTLASS_TYPE.search(name)
    if number is not None:
        words.append(_BRIEF[number[0]])
    return " ".join(words)


def _cub(name: str) -> str | None:
    found = _CUB.search(name)
    return f"cub {found[1]}" if found is not None else None


def _generic(plain: str) -> str | None:
    """A kernel of torch's that takes its operation as an argument."""
    outer = _GENERIC.match(plain)
    if outer is None:
        return None
    arguments = plain[outer.end() :]
    words = [outer[1].removesuffix("_apply")]
    for found in _OPERATION.finditer(arguments):
        operation = found[1] or found[2]
        if operation not in _WRAPPERS:
            words.append(operation)
            break
    number = _TYPE.search(arguments)
    if number is not None:
        words.append(_BRIEF.get(number[1], number[1]))
    return " ".join(words)


def _plain(plain: str) -> str:
    """A name without its parameters, and without its arguments where they are long."""
    outer, angle, _ = plain.partition("<")
    if not angle or not outer or "(" in outer:
        return _PARAMETERS.sub("", plain)
    depth = 0
    for bracket in _ANGLE.finditer(plain):
        depth += 1 if bracket[0] == "<" else -1
        if depth == 0:
            return plain[: bracket.end()] if bracket.end() <= _LONGEST else outer
    return outer


def _demangled(name: str) -> str:
    """The nested name at the start of a mangled one, without arguments; another name as it is."""
    rest = re.sub(r"^_ZN?K?", "", name)
    if rest == name:
        return name
    parts = []
    while (length := re.match(r"\d+", rest)) is not None:
        end = length.end() + int(length[0])
        parts.append(rest[length.end() : end])
        rest = rest[end:]
    return "::".join(part for part in parts if not part.startswith("_GLOBAL__N")) or name
