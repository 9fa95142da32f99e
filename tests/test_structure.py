"""The structure of the sources: no circles, small rooms, functions that can be seen whole, and words that stay retired."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_imports import ROOT, imports_of, sources

FUNCTION_LINES, CLASS_LINES, ROOM_FILES, PUBLIC = 60, 300, 16, 15
RETIRED = (
    # of the node's memory, transports, prefetch and deferred reductions
    "carriers", "Carriers", "Ring", "Turn", "room", "Ahead", "Later", "Mail", "Flights",
    "Debt", "Debts",
    # of layouts, layers and models
    "hosted", "is_host", "is_owner", "owned", "ways", "handed_on", "sums_once", "traits", "picture", "Joined", "Kind",
    # of products and benches
    "contest", "Contest", "Racer", "SharedBlocks", "volume_2d",
    # of locals, which have the noun of what they are
    "found", "one",
    # of what has a state, which was called by it
    "Alone", "Saving", "Inner", "Waiting", "Placed", "Tell",
)  # fmt: skip
"""Identifiers that had a name of the field's own: none may return as a name in the sources."""


def runtime_imports(module: str, file: Path, modules: dict[str, Path], type_checking: bool) -> set[str]:
    """The modules of summa3d that a module imports; without `type_checking`, not those that only a type checker reads."""
    text = file.read_text(encoding="utf-8")
    if not type_checking:
        text = re.sub(r"^if TYPE_CHECKING:\n((?: {4}.*)?\n)*", "", text, flags=re.MULTILINE)
    found = set()
    for name in imports_of(module, file, text):
        parent = name.rpartition(".")[0]
        found |= {one for one in (name, parent) if one in modules and one != module}
    # `from ..comm import grid` names the package too, which imports nothing of its own at run time
    return {one for one in found if modules[one].name != "__init__.py"}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Every set of modules that import each other, however indirectly (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            members = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(members) > 1:
                found.append(sorted(members))

    for module in graph:
        if module not in index:
            visit(module)
    return found


@pytest.mark.parametrize("type_checking", [False, True], ids=["at-run-time", "with-types"])
def test_no_file_imports_another_in_a_circle(type_checking: bool) -> None:
    modules = sources()
    graph = {module: runtime_imports(module, file, modules, type_checking) for module, file in modules.items()}
    assert circles(graph) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def too_long(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > (CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES):
                yield node.name, lines


def test_functions_and_classes_can_be_seen_whole() -> None:
    found = {module: [*too_long(ast.parse(file.read_text(encoding="utf-8")))] for module, file in sources().items()}
    assert {module: names for module, names in found.items() if names} == {}


def test_rooms_are_small() -> None:
    files = [file for folder in ("summa3d", "kernels") for file in (ROOT / folder).rglob("*") if file.is_file()]
    counts = Counter(str(file.parent.relative_to(ROOT)) for file in files if file.suffix in (".py", ".cu", ".cuh", ".toml"))
    assert {room: count for room, count in counts.items() if count > ROOM_FILES} == {}


def test_every_module_opens_by_saying_what_it_is() -> None:
    docstrings = {module: ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) for module, file in sources().items()}
    assert [module for module, text in docstrings.items() if not text] == []


def questions(tree: ast.Module) -> Iterator[str]:
    """Yield the functions whose docstring begins as a question does, not with what they do or return."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first, *_ = (ast.get_docstring(node) or ".").split()
            if first.strip(",.:;") in ("What", "Whether", "How", "Who", "Which", "Why"):
                yield node.name


def test_docstrings_of_functions_begin_with_a_verb_or_a_noun() -> None:
    found = {module: [*questions(ast.parse(file.read_text(encoding="utf-8")))] for module, file in sources().items()}
    assert {module: names for module, names in found.items() if names} == {}


def names_in(tree: ast.Module) -> Iterator[str]:
    """Every identifier that a module defines, assigns or reads: names, attributes, arguments, keywords, imports."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, (ast.arg, ast.keyword)) and node.arg:
            yield node.arg
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")


def test_retired_identifiers_do_not_return() -> None:
    found = {
        module: sorted(set(names_in(ast.parse(file.read_text(encoding="utf-8")))) & set(RETIRED))
        for module, file in sources().items()
    }
    assert {module: names for module, names in found.items() if names} == {}


def classes_in(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a module's classes, and of its aliases of types: assigned names in capitals and small letters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in tree.body:
        if not isinstance(node, ast.Assign) or (
            isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "TypeVar"
        ):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name) and re.match(r"[A-Z]\w*[a-z]", target.id):
                yield target.id


def test_a_class_name_has_one_meaning() -> None:
    counts = Counter(name for file in sources().values() for name in {*classes_in(ast.parse(file.read_text(encoding="utf-8")))})
    assert {name for name, count in counts.items() if count > 1} == set()


MODELS = "a torch module: what stages of a pipeline, generation and recomputation ask of a model"
TRANSPORT = "a transport: a method for each collective, and what begins it"
WIDE = {
    "Axis": "the collectives, each blocking and begun",
    **dict.fromkeys(("DistMatrix", "Conjugated"), "the front door of products"),
    "Fused": "no state: stands for the module of the reference's functions",
    **dict.fromkeys(("LanguageModel", "BERT", "GPT", "Llama", "Mixtral", "ViT", "AdoptedDecoder"), MODELS),
    **dict.fromkeys(("HostTransport", "CudaAwareTransport", "NcclTransport", "NcclLink", "PinnedTransport"), TRANSPORT),
    **dict.fromkeys(("DryTransport", "Route"), TRANSPORT),
    "DryStep": "a record: what one rank of a dry run would move and hold",
    "PlanTable": "columns of the planner's table",
}
"""Classes that may have more public methods or attributes, and why."""


def own_names(node: ast.ClassDef) -> tuple[set[str], set[str]]:
    """Names of methods, and of attributes: properties, names of the class's body, and those assigned to self in any method."""
    methods: set[str] = set()
    attributes: set[str] = set()
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            marks = [ast.unparse(decorator) for decorator in item.decorator_list]
            is_attribute = any("property" in mark or mark.endswith((".setter", ".deleter")) for mark in marks)
            (attributes if is_attribute else methods).add(item.name)
            attributes |= {
                inner.attr
                for inner in ast.walk(item)
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and ast.unparse(inner.value) == "self"
            }
        elif isinstance(item, (ast.Assign, ast.AnnAssign)):
            copies = isinstance(item.value, ast.Name) and item.value.id in methods
            names = {name.id for name in ast.walk(item) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
            (methods if copies else attributes).update(names)
    return methods, attributes


def public_names(name: str, classes: dict[str, ast.ClassDef]) -> tuple[set[str], set[str]]:
    """A class's public methods and attributes, inherited ones of our own bases included."""
    methods, attributes = own_names(classes[name])
    for base in (ast.unparse(base).split("[")[0] for base in classes[name].bases):
        if base in classes and base != name:
            inherited = public_names(base, classes)
            methods, attributes = methods | inherited[0], attributes | inherited[1]
    shown = {each for each in methods if not each.startswith("_")}
    return shown, {each for each in attributes if not each.startswith("_")} - shown


def is_record(node: ast.ClassDef) -> bool:
    """Return whether its fields are data alone: a frozen dataclass, which may be a file's keys, or a named tuple."""
    frozen = any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list)
    return frozen or any(ast.unparse(base) == "NamedTuple" for base in node.bases)


def crowded(classes: dict[str, ast.ClassDef]) -> dict[str, tuple[int, int]]:
    """Class → its numbers of public methods and attributes, of those that have too many and no reason; of records, methods."""
    counts = {name: tuple(map(len, public_names(name, classes))) for name in classes if name not in WIDE}
    return {
        name: (methods, attributes)
        for name, (methods, attributes) in counts.items()
        if methods > PUBLIC or (attributes > PUBLIC and not is_record(classes[name]))
    }


def classes_of(text: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)}


def test_classes_with_live_state_have_few_public_names() -> None:
    texts = (file.read_text(encoding="utf-8") for file in sources().values())
    assert crowded({name: node for text in texts for name, node in classes_of(text).items()}) == {}


def test_a_class_with_too_many_public_names_is_found_through_its_base_too() -> None:
    fields = "".join(f"        self.a{number} = {number}\n" for number in range(15))
    base = f"class Base:\n    def __init__(self):\n{fields}"
    derived = "class Derived(Base):\n    @property\n    def b(self): ...\n    def _c(self): self._d, self.a1 = 1, 2\n"
    assert crowded(classes_of(base + derived)) == {"Derived": (0, 16)}
    methods = "".join(f"    def m{number}(self): ...\n" for number in range(16))
    assert crowded(classes_of(f"@dataclass(frozen=True)\nclass Frozen:\n{methods}")) == {"Frozen": (16, 0)}
