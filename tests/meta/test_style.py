"""House rules that no linter checks: docstrings, useful examples, and names.

Every check is a function that returns its findings. Each is tested on a bad snippet first, which it must report, and
then on the package.
"""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import sys
import types
from pathlib import Path

import pytest

import detent

SOURCE = Path(__file__).resolve().parents[2] / "src" / "detent"
FILES = sorted(SOURCE.rglob("*.py"))
NOTES_TO_SELF = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
RE_EXPORTS = ast.Import | ast.ImportFrom
EMPTY_EXAMPLE = re.compile(
    r"\.__name__$|\bin \(True, False(, None)?\)$|^(isinstance|hasattr)\((\w+(\(\))?), \"?\w+\"?\)$"
)
ACTIVITY = re.compile(r"\w+ing")
PUBLIC_NOUNS = {"packing", "rounding", "testing"}
VAGUE = {"base", "common", "helpers", "misc", "utils"}
TWINS = {"batchnorm", "calibration", "layers", "quantizer"}  # the same task in two frontends


def public_modules():
    """Every module of the package without an underscore in its dotted path, imported."""
    names = [info.name for info in pkgutil.walk_packages(detent.__path__, "detent.")]
    return [detent, *(importlib.import_module(name) for name in names if "._" not in name)]


def module_from(source, name="snippet"):
    """Create a module from source code, to test the checks."""
    module = types.ModuleType(name)
    exec(source, module.__dict__)
    return module


# Checks on text


def check_docstring(path, text):
    return [] if ast.get_docstring(ast.parse(text)) else [f"{path}: no module docstring"]


def check_notes_to_self(path, text):
    return [
        f"{path}:{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if NOTES_TO_SELF.search(line)
    ]


def check_examples_run(path, text):
    return [f"{path}: an example is skipped"] if "+SKIP" in text else []


def check_examples_show_something(path, text):
    """Report examples that only repeat a name, or that cannot fail."""
    sources = [
        example.source.strip()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        for example in doctest.DocTestParser().get_examples(ast.get_docstring(node) or "")
    ]
    return [f"{path}: the example {source!r} shows nothing" for source in sources if EMPTY_EXAMPLE.search(source)]


def check_module_name(path, _text):
    """Report modules whose name is an activity or vague instead of a noun."""
    stem = Path(path).stem
    if ACTIVITY.fullmatch(stem) and stem not in PUBLIC_NOUNS:
        return [f"{path}: named after an activity"]
    return [f"{path}: the name says nothing"] if stem in VAGUE else []


def check_only_re_exports(path, text):
    """Report an __init__ with more than a docstring, imports, and dunder constants such as __all__."""
    complaints = []
    for node in ast.parse(text).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        dunder = isinstance(node, ast.Assign) and all(
            isinstance(target, ast.Name) and re.fullmatch(r"__\w+__", target.id) for target in node.targets
        )
        if not (docstring or dunder or isinstance(node, RE_EXPORTS)):
            complaints.append(f"{path}:{node.lineno}: an __init__ only re-exports")
    return complaints


TEXT_CHECKS = [
    check_docstring,
    check_notes_to_self,
    check_examples_run,
    check_examples_show_something,
    check_module_name,
]


@pytest.mark.parametrize(
    ("check", "bad", "good"),
    [
        (check_docstring, "x = 1\n", '"""What it is."""\n'),
        (check_notes_to_self, "# TODO: later\n", "# to do is to be\n"),
        (check_examples_run, '""">>> f()  # doctest: +SKIP"""\n', '""">>> f()"""\n'),
        (check_examples_show_something, 'def f():\n    """>>> f.__name__"""\n', 'def f():\n    """>>> f()"""\n'),
        (check_examples_show_something, '""">>> g() in (True, False)"""\n', '""">>> g()\nTrue\n"""\n'),
        (
            check_only_re_exports,
            '"""D."""\nfrom a import b\n__all__ = ["b"]\nc = 1\n',
            '"""D."""\nfrom a import b\n__all__ = ["b"]\n',
        ),
        (check_only_re_exports, "def f(): ...\n", "import a\n"),
    ],
)
def test_text_check_can_complain(check, bad, good):
    assert check("m.py", bad)
    assert not check("m.py", good)


def repeated_stems(paths):
    """Base names of modules that occur twice, except those of both frontends and of every package."""
    stems = [path.stem for path in paths if path.stem not in {"__init__", *TWINS}]
    return sorted({stem for stem in stems if stems.count(stem) > 1})


def test_name_checks_can_complain():
    assert check_module_name("detent/placing.py", "")
    assert check_module_name("detent/utils.py", "")
    assert not check_module_name("detent/packing.py", "")
    assert repeated_stems([Path("a/report.py"), Path("b/report.py")]) == ["report"]
    assert not repeated_stems([Path("onnx/layers.py"), Path("torch/layers.py")])


def test_no_base_name_occurs_twice():
    assert not repeated_stems(FILES)


@pytest.mark.parametrize("check", TEXT_CHECKS)
def test_every_file(check):
    assert FILES
    complaints = [line for file in FILES for line in check(file.relative_to(SOURCE), file.read_text(encoding="utf-8"))]
    assert not complaints, "\n".join(complaints)


def test_every_init_only_re_exports():
    inits = [file for file in FILES if file.name == "__init__.py"]
    complaints = [
        line
        for file in inits
        for line in check_only_re_exports(file.relative_to(SOURCE), file.read_text(encoding="utf-8"))
    ]
    assert not complaints, "\n".join(complaints)


# Checks on imported modules


def unwrapped(member):
    """The function behind a method, class method, static method, property or cached property, or None."""
    for attribute in ("__func__", "fget", "func"):
        member = getattr(member, attribute, member)
    return member if inspect.isfunction(member) else None


def own_members(cls):
    """(name, function, is a method) of every public member that a class itself defines."""
    for name, member in vars(cls).items():
        function = unwrapped(member)
        if function is not None and not name.startswith("_"):
            yield name, function, inspect.isfunction(getattr(member, "__func__", member))


def definitions(module):
    """Functions and classes in a module's __all__ that are defined there, not re-exported."""
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name, None)
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__:
            yield name, value


def check_all(module):
    """Report a missing __all__, duplicates in it, and names that are not public."""
    if not hasattr(module, "__all__"):
        return [f"{module.__name__}: no __all__"]
    names = module.__all__
    complaints = [f"{module.__name__}.{name} does not exist" for name in names if not hasattr(module, name)]
    complaints += [f"{module.__name__}.{name} is listed twice" for name in set(names) if names.count(name) > 1]
    private = [name for name in names if name.startswith("_") and name != "__version__"]
    return complaints + [f"{module.__name__}.{name} is private" for name in private]


def check_documented(module):
    """Report public functions, classes, methods and properties without a docstring."""
    complaints = []
    for name, value in definitions(module):
        where = f"{module.__name__}.{name}"
        if not (value.__doc__ or "").strip() or value.__doc__.startswith(f"{name}("):  # generated by dataclass
            complaints.append(where)
        if inspect.isclass(value):
            members = own_members(value)
            complaints += [
                f"{where}.{member}" for member, _, _ in members if not inspect.getdoc(getattr(value, member))
            ]
    return complaints


def check_names(module):
    """Report submodules with the name of a public function of their package, which would hide it."""
    submodules = {info.name for info in pkgutil.iter_modules(getattr(module, "__path__", ()))}
    functions = {name for name in getattr(module, "__all__", ()) if inspect.isroutine(getattr(module, name, None))}
    return [f"{module.__name__}.{name} is a function and a module" for name in sorted(submodules & functions)]


MODULE_CHECKS = [check_all, check_documented, check_names]
UNDOCUMENTED = "__all__ = ['f']\ndef f(): pass\n"
BARE_METHOD = "__all__ = ['A']\nclass A:\n    '''A.\n\n    >>> A()\n    '''\n    def m(self): pass\n"
BARE_PROPERTY = BARE_METHOD.replace("def m", "@property\n    def m")
BARE_CLASSMETHOD = BARE_METHOD.replace("def m", "@classmethod\n    def m")
BARE_DATACLASS = "from dataclasses import dataclass\n__all__ = ['A']\n@dataclass\nclass A:\n    a: int\n"
GOOD = "__all__ = ['A']\nclass A:\n    '''A.\n\n    >>> A().m()\n    '''\n    def m(self):\n        '''M.'''\n"


@pytest.mark.parametrize(
    ("check", "bad"),
    [
        (check_all, "x = 1\n"),
        (check_all, "__all__ = ['missing']\n"),
        (check_all, "__all__ = ['x', 'x']\nx = 1\n"),
        (check_all, "__all__ = ['_x']\n_x = 1\n"),
        (check_documented, UNDOCUMENTED),
        (check_documented, BARE_METHOD),
        (check_documented, BARE_PROPERTY),
        (check_documented, BARE_CLASSMETHOD),
        (check_documented, BARE_DATACLASS),
    ],
)
def test_module_check_can_complain(check, bad):
    assert check(module_from(bad))
    assert not check(module_from(GOOD))


def test_name_check_can_complain(tmp_path):
    (tmp_path / "plan.py").write_text("")
    package = module_from("__all__ = ['plan']\ndef plan(): pass\n")
    package.__path__ = [str(tmp_path)]
    assert check_names(package) == ["snippet.plan is a function and a module"]


@pytest.mark.parametrize("check", MODULE_CHECKS)
def test_every_public_module(check):
    complaints = [line for module in public_modules() for line in check(module)]
    assert not complaints, "\n".join(complaints)


def test_walk_covers_the_package():
    names = {module.__name__ for module in public_modules()}
    assert {"detent", "detent.kernels.registry", "detent.observers", "detent.ops"} <= names
    assert names <= set(sys.modules)
