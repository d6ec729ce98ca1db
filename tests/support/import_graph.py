"""Which modules of a package import each other."""

import ast


def modules(root, *packages):
    """{dotted name: file} of packages."""
    paths = [path for package in packages for path in (root / package).rglob("*.py")]
    names = {path: path.relative_to(root).with_suffix("").parts for path in paths}
    return {
        ".".join(parts[:-1] if parts[-1] == "__init__" else parts): path
        for path, parts in names.items()
    }


def imports(tree, package):
    """(name, whether it is for annotations alone) of each import of a module, also of those in
    functions.

    Args:
      tree: the module's.
      package: the parts of the name of its package, or of itself if it is a package.
    """
    pending = [(tree, False)]
    while pending:
        node, is_type = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending += [(child, True) for child in node.body] + [
                (child, is_type) for child in node.orelse
            ]
            continue
        pending += [(child, is_type) for child in ast.iter_child_nodes(node)]
        if isinstance(node, ast.Import):
            yield from ((alias.name, is_type) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*above, *filter(None, [node.module])])
            yield from ((f"{source}.{alias.name}", is_type) for alias in node.names)


def graph(root, *packages, with_types):
    """{module: the modules that it imports}; an imported name that is no module counts as its
    module.
    """
    files = modules(root, *packages)
    found = {}
    for name, path in files.items():
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        wanted = [
            what
            for what, is_type in imports(ast.parse(path.read_text()), package)
            if with_types or not is_type
        ]
        known = [what if what in files else what.rpartition(".")[0] for what in wanted]
        found[name] = {what for what in known if what in files} - {name}
    return found


def circles(edges):
    """The sets of modules that import each other in a circle."""

    def reached(start):
        seen = set()
        pending = [start]
        while pending:
            new = edges[pending.pop()] - seen
            seen |= new
            pending += new
        return seen

    reach = {name: reached(name) for name in edges}
    return {
        frozenset(x for x in reach[name] if name in reach[x])
        for name in edges
        if name in reach[name]
    }


def arrows_up(floors, edges):
    """The imports between two rooms of which the second is not on a lower floor.

    Args:
      floors: the rooms of each floor, from the ground up; a module is in the room of the longest
        name.
      edges: as `graph` gives them.
    """
    floor_of = {room: i for i, rooms in enumerate(floors) for room in rooms}

    def room(module):
        return max((name for name in floor_of if f"{module}.".startswith(f"{name}.")), key=len)

    arrows = {
        (module, other)
        for module, others in edges.items()
        for other in others
        if room(module) != room(other)
    }
    return {
        (module, other)
        for module, other in arrows
        if floor_of[room(module)] <= floor_of[room(other)]
    }
