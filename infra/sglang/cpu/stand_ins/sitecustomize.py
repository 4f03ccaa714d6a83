"""Import stand-ins for packages that only a GPU or a vision model uses. Python runs this file at start, because the
folder is on PYTHONPATH of a server that was launched for the CPU.

- triton: kernel *definitions* must import (`@triton.jit`, `tl.constexpr`); none is launched on the CPU path.
- torchvision: the registry's wheel is linked against CUDA and does not import beside a CPU build of torch.

Each is put in only where the real package is absent. Asking such a package for a name gives another stand-in: a class
where the name starts with a capital letter, a module that can be called as a decorator otherwise.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any


class _Named(type):
    """Attributes of a stand-in class (`InterpolationMode.BICUBIC`) are their own dotted name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Class(metaclass=_Named):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Module(types.ModuleType):
    """A package whose every name exists."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__file__ = __file__
        self.__version__ = "3.0.0+eagle3.cpu"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        if full_name in sys.modules:
            return sys.modules[full_name]
        is_class = name[:1].isupper()
        made: Any = _Named(name, (_Class,), {"__module__": self.__name__}) if is_class else _Module(full_name)
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a decorator: `@jit` and `@jit(option=...)` leave the function as it is."""
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function

    def __getitem__(self, key: Any) -> "_Module":
        return self

    def __or__(self, other: Any) -> "_Module":  # in annotations: `tl.dtype | None`
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (_Class,)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: frozenset[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


_absent = frozenset(name for name in ("triton", "torchvision") if importlib.util.find_spec(name) is None)
if _absent:
    sys.meta_path.append(_Finder(_absent))
