"""Modules in place of torch, for compiling kernels that do not use it.

flash-attn-4 imports torch where it takes tensors of it, in files that its kernels import, too. The
kernels themselves need no more of it than names.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

_ROOT = "torch"


class _Name(type):
    """Stands for any class, function or value: may be called, joined by |, or asked for members."""

    def __getattr__(cls, name: str) -> _Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return _name(f"{cls.__name__}.{name}")

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else cls

    def __or__(cls, other: Any) -> Any:
        return Any

    def __ror__(cls, other: Any) -> Any:
        return Any


def _name(text: str) -> _Name:
    """A new one: no two are equal, as the types that are keys of tables must not be."""
    return _Name(text, (), {})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _name(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != _ROOT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> bool:
    """Puts the stand-in where torch would be imported from; False if there is a real torch."""
    if importlib.util.find_spec(_ROOT) is not None:
        return False
    sys.meta_path.append(_Finder())
    return True
