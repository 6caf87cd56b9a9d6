"""The folders that four commands pass through, from the import graph."""

from __future__ import annotations

import networkx

from website.imports import MODULES, ROOMS, imports, module_of, room
from website.svg import Picture

COMMANDS = {  # and the modules in which they begin
    "run": "fedbilevel.cli.run",
    "federation submit": "fedbilevel.cli.federation",
    "peer run": "fedbilevel.cli.peer",
    "reproduce": "fedbilevel.cli.reproduce",
}


def walk(start: str) -> set[tuple[str, str]]:
    """Pairs of folders: a module of the first imports from the second.

    Only modules that `start` imports, directly or indirectly, count.
    """
    seen, todo, found = {start}, [start], set()
    while todo:
        name = todo.pop()
        for other in filter(None, map(module_of, imports(MODULES[name]))):
            if other != "fedbilevel" and room(other) != room(name):
                found.add((room(name), room(other)))
            if other not in seen and other != "fedbilevel":
                seen.add(other)
                todo.append(other)
    return found


def picture() -> Picture:
    order = [name for name in reversed(ROOMS) if name != "root"]
    height = {name: 64 + 30 * place for place, name in enumerate(order)}
    p = Picture(760, 64 + 30 * len(order), "Folders that four commands pass through, from the top to the bottom")
    for name in order:
        p.text(12, height[name] + 4, name, "grey", size=13)
        p.line([(110, height[name]), (750, height[name])], "faint", width=0.6)
    for column, (command, start) in enumerate(COMMANDS.items()):
        middle = 170 + 160 * column
        p.text(middle, 28, command, "blue", size=13, anchor="middle", bold=True)
        steps = networkx.transitive_reduction(networkx.DiGraph(sorted(walk(start))))
        for one, other in sorted(steps.edges, key=lambda edge: (height[edge[0]], height[edge[1]])):
            far = order.index(other) - order.index(one)
            bend = middle + (0 if far == 1 else 12 * far)  # an arc passes the folders between
            p.line([(middle, height[one]), (bend, (height[one] + height[other]) / 2), (middle, height[other])], "blue")
        for name in sorted(steps.nodes, key=height.__getitem__):
            p.dot(middle, height[name], colour="blue")
    return p
