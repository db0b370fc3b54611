"""Triton's interpreter, faster: types and shapes of tensors are the same few ones at every operation and are built once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import pytest


def keep_types(patch: pytest.MonkeyPatch, module: Any) -> None:
    """Cache what Triton 3.6 builds anew for each operation: numpy's element type, a block's type, a tensor's shape, the type of a
    result. Leave out what has no effect: the broadcast of operands of one shape, and sums in 64 bits that are compared with the
    limits of 32 bits and, without `debug`, asserted nowhere; they are a quarter of the interpreter's time.

    The caches live as long as `patch`. Nothing invalidates them: their keys are names of element types and shapes, their
    values are immutable. Compilers use the same classes, so nothing is patched where kernels are compiled.
    """
    if not os.environ.get("TRITON_INTERPRET"):
        return
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    options = module.interpreter_builder.options
    patch.setattr(module.interpreter_builder, "options", replace(options, sanitize_overflow=options.debug))
    patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast(TritonSemantic.broadcast_impl_value))
    patch.setattr(TritonSemantic, "computation_type_impl", computation_type(TritonSemantic.computation_type_impl))
    patch.setattr(module, "_get_np_dtype", numpy_type(core, module._get_np_dtype))
    patch.setattr(core.block_type, "__init__", block_type(core, core.block_type.__init__))
    patch.setattr(core.tensor, "__init__", tensor(core))
    patch.setattr(core.dtype, "__eq__", same_type(core.dtype.__eq__))


def numpy_type(core: Any, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    types: dict[str, Any] = {}

    def get(dtype: Any) -> Any:
        name = dtype.element_ty.name if dtype.__class__ is core.block_type else dtype.name
        if name not in types:
            types[name] = original(dtype)
        return types[name]

    return get


def block_type(core: Any, original: Callable[..., None]) -> Callable[..., None]:
    types: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[size.value if size.__class__ is core.constexpr else size for size in shape])
        if key not in types:
            original(self, element_ty, shape)
            types[key] = {"shape": self.shape, "numel": self.numel, "name": self.name}
        self.__dict__.update(types[key], element_ty=element_ty)

    return init


def tensor(core: Any) -> Callable[..., None]:
    @cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(prod(sizes))

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(tuple(type.shape.values) if type.is_block() else ())

    return init


def same_type(original: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: self is other or original(self, other)


def broadcast(original: Callable[..., Any]) -> Callable[..., Any]:
    def impl(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape.values == right.shape.values:
            return lhs, rhs
        return original(self, lhs, rhs)

    return impl


def computation_type(original: Callable[..., Any]) -> Callable[..., Any]:
    types: dict[tuple[Any, ...], Any] = {}

    def impl(self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = (a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod)
        if key not in types:
            types[key] = original(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return types[key]

    return impl
