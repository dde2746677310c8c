"""Gives scratch paths to native code that opens files itself, for a redirection in Python.

`NATIVE_FILES` lists the functions and classes. Each is replaced at once if its module is imported,
or else after its import.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any
from urllib.parse import parse_qs, quote, unquote

PhysicalPath = Callable[[Any, int], Any]  # of a path that is opened with these flags of open(2)
Wrap = Callable[[Any, PhysicalPath], Any]  # makes the replacement of a function
Flags = Callable[..., int]  # of open(2), from a call's arguments

_REPLACE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_UPDATE = os.O_RDWR | os.O_CREAT
_HDF5_READ_WRITE, _HDF5_TRUNCATE = 1, 2  # H5F_ACC_RDWR, H5F_ACC_TRUNC
_IN_MEMORY = (":memory:", b":memory:", "", b"")


def _reads(*arguments: Any, **keywords: Any) -> int:
    return os.O_RDONLY


def _replaces(*arguments: Any, **keywords: Any) -> int:
    return _REPLACE


def _hdf5_flags(name: Any, flags: int = 0, *arguments: Any, **keywords: Any) -> int:
    return os.O_RDWR if flags & _HDF5_READ_WRITE else os.O_RDONLY


def _hdf5_flags_of_new(name: Any, flags: int = 0, *arguments: Any, **keywords: Any) -> int:
    return _REPLACE if flags & _HDF5_TRUNCATE else os.O_RDWR | os.O_CREAT | os.O_EXCL


def _storage_flags(filename: Any, shared: bool = False, *arguments: Any, **keywords: Any) -> int:
    return _UPDATE if shared else os.O_RDONLY


def _arrow_flags(path: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> int:
    if mode.startswith("w"):
        return _REPLACE
    return os.O_RDONLY if mode in ("r", "rb") else os.O_RDWR


def _path_argument(name: str, position: int, flags: Flags, *, is_static: bool = False) -> Wrap:
    """Return what wraps a function with a path among its arguments."""

    def wrap(function: Any, physical: PhysicalPath) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            values = list(arguments)
            if position < len(values):
                values[position] = physical(values[position], flags(*arguments, **keywords))
            elif name in keywords:
                path = physical(keywords[name], flags(*arguments, **keywords))
                keywords = {**keywords, name: path}
            return function(*values, **keywords)

        return staticmethod(call) if is_static else call

    return wrap


def _file_class(flags: Flags) -> Wrap:
    """Return what wraps a class whose constructor takes a path or a file."""

    def wrap(plain_class: Any, physical: PhysicalPath) -> Any:
        def __init__(self: Any, file: Any, *arguments: Any, **keywords: Any) -> None:
            is_path = isinstance(file, str | os.PathLike)
            path = physical(file, flags(file)) if is_path else file
            plain_class.__init__(self, path, *arguments, **keywords)

        return type(plain_class.__name__, (plain_class,), {"__init__": __init__})

    return wrap


def _sqlite_connect(connect: Any, physical: PhysicalPath) -> Any:
    """Return a `sqlite3.connect` whose database and journals are in the scratch folder."""

    def redirected_connect(database: Any, *arguments: Any, **keywords: Any) -> Any:
        if database in _IN_MEMORY:
            return connect(database, *arguments, **keywords)
        if not keywords.get("uri") or not str(database).startswith("file:"):
            return connect(_sqlite_path(database, physical), *arguments, **keywords)
        path, _, query = database.removeprefix("file:").partition("?")
        if path in _IN_MEMORY or parse_qs(query).get("mode") == ["memory"]:
            return connect(database, *arguments, **keywords)
        path = _sqlite_path(unquote(path), physical)
        return connect(f"file:{quote(path)}?{query}", *arguments, **keywords)

    return redirected_connect


def _sqlite_path(database: Any, physical: PhysicalPath) -> str:
    path = os.fsdecode(database)
    for suffix in ("-wal", "-journal"):
        if os.path.exists(path + suffix):
            physical(path + suffix, os.O_RDWR)
    return os.fsdecode(physical(path, os.O_RDWR | os.O_CREAT))


NATIVE_FILES: tuple[tuple[str, str, Wrap], ...] = (
    ("safetensors", "serialize_file", _path_argument("filename", 1, _replaces)),
    ("safetensors", "safe_open", _path_argument("filename", 0, _reads)),
    ("sqlite3", "connect", _sqlite_connect),
    ("h5py.h5f", "open", _path_argument("name", 0, _hdf5_flags)),
    ("h5py.h5f", "create", _path_argument("name", 0, _hdf5_flags_of_new)),
    ("torch", "_C.PyTorchFileWriter", _file_class(_replaces)),
    ("torch", "_C.PyTorchFileReader", _file_class(_reads)),
    ("torch", "_C.ScriptModule.save", _path_argument("filename", 1, _replaces)),
    ("torch", "_C.ScriptFunction.save", _path_argument("filename", 1, _replaces)),
    ("torch", "_C.import_ir_module", _path_argument("filename", 1, _reads)),
    ("torch", "from_file", _path_argument("filename", 0, _storage_flags)),
    ("torch", "UntypedStorage.from_file",
     _path_argument("filename", 0, _storage_flags, is_static=True)),
    ("pyarrow", "memory_map", _path_argument("path", 0, _arrow_flags)),
    ("pyarrow", "OSFile", _path_argument("path", 0, _arrow_flags)),
)  # fmt: skip


Pairs = list[tuple[Any, Any]]


class NativeFiles:
    """Replaces the functions of `NATIVE_FILES`."""

    def __init__(self, physical: PhysicalPath) -> None:
        self.pairs: Pairs = []  # functions and their replacements, which modules have bound
        self._physical = physical
        self._undo = ExitStack()

    def begin(self) -> None:
        """Replace methods, list functions for the caller to rebind, and watch imports."""
        names = {name for name, _, _ in NATIVE_FILES}
        for name in names & sys.modules.keys():
            self._replace_in(sys.modules[name])
        finder = _AfterImport(names, self._replace_after_import)
        sys.meta_path.insert(0, finder)
        self._undo.callback(finder.remove)

    def end(self) -> None:
        """Put the methods back."""
        self._undo.close()

    def _replace_after_import(self, module: ModuleType) -> None:
        pairs = self._replace_in(module)
        rebind(pairs, within=module.__name__)

    def _replace_in(self, module: ModuleType) -> Pairs:
        pairs = []
        for module_name, name, wrap in NATIVE_FILES:
            if module_name != module.__name__:
                continue
            *holders, attribute = name.split(".")
            holder: Any = module
            for part in holders:
                holder = getattr(holder, part, None)
            function = getattr(holder, attribute, None)
            if function is None:  # this version has none
                continue
            replacement = wrap(function, self._physical)
            if isinstance(holder, type):
                self._replace_method(holder, attribute, replacement)
            else:
                pairs.append((function, replacement))
        self.pairs += pairs
        return pairs

    def _replace_method(self, holder: type, name: str, replacement: Any) -> None:
        if name in vars(holder):
            self._undo.callback(setattr, holder, name, vars(holder)[name])
        else:  # it is inherited
            self._undo.callback(delattr, holder, name)
        setattr(holder, name, replacement)


def rebind(pairs: Pairs, classes: Sequence[type] = (), *, within: str = "") -> None:
    """Replace each first object by the second in all modules, or a package's, and in classes."""
    replacements = {id(old): new for old, new in pairs}
    for module_name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)
        is_meant = f"{module_name}.".startswith(f"{within}.") if within else True
        if not is_meant or not isinstance(namespace, dict):
            continue
        bound = [name for name, value in namespace.copy().items() if id(value) in replacements]
        for name in bound:
            namespace[name] = replacements[id(namespace[name])]
    for holder in classes:
        _rebind_class(holder, replacements)


def _rebind_class(holder: type, replacements: dict[int, Any]) -> None:
    """Replace static methods, and defaults of the other ones."""
    for name, value in list(vars(holder).items()):
        if isinstance(value, staticmethod) and id(value.__func__) in replacements:
            setattr(holder, name, staticmethod(replacements[id(value.__func__)]))
        if isinstance(value, FunctionType) and value.__defaults__:
            defaults = [replacements.get(id(default), default) for default in value.__defaults__]
            value.__defaults__ = tuple(defaults)


class _AfterImport(MetaPathFinder):
    """Calls a function with each of some modules after its import."""

    def __init__(self, names: set[str], act: Callable[[ModuleType], None]) -> None:
        self._names = names
        self._act = act

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if name not in self._names:
            return None
        spec = self._plain_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._act(module)

        spec.loader.exec_module = exec_module
        return spec

    def remove(self) -> None:
        sys.meta_path.remove(self)

    def _plain_spec(self, name: str) -> ModuleSpec | None:
        sys.meta_path.remove(self)
        try:
            return find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
