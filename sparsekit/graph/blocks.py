"""without_blocks(): the unit graph of a model without some of its blocks."""

from collections.abc import Collection
from dataclasses import replace

from sparsekit.errors import UnknownNameError, nearest
from sparsekit.graph.graph import UnitGraph


def is_inside(name: str, roots: Collection[str]) -> bool:
    """Return whether a module is one of `roots` or within one of them."""
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def without_blocks(graph: UnitGraph, names: Collection[str]) -> UnitGraph:
    """Return the graph of the model without some blocks, and so without the units and entries inside of them."""
    for name in names:
        if name not in graph.blocks:
            raise UnknownNameError(f"no block {name!r} in this graph; {nearest(name, graph.blocks)}")
    gone = {key for name in names for key in graph.blocks[name].keys}
    left, names = set(graph.blocks).difference(names), [each for name in names for each in graph.blocks[name].modules]
    constants = {key: each for key, each in graph.constants.items() if not is_inside(each.module, names)}
    groups = {}
    for name, group in graph.groups.items():
        slices = tuple(piece for piece in group.slices if piece.name not in gone)
        if any(piece.side == "out" for piece in slices):
            held = tuple(piece for piece in group.constants if piece.name in constants)
            groups[name] = replace(group, slices=slices, constants=held)
    ties = (tuple(name for name in tied if name in groups) for tied in graph.ties)
    aliases = (tuple(key for key in keys if key not in gone) for keys in graph.aliases)
    norms = (site for site in graph.norms if not is_inside(site.module, names))
    return replace(
        graph,
        groups=groups,
        shapes={key: shape for key, shape in graph.shapes.items() if key not in gone},
        ties=tuple(tied for tied in ties if len(tied) > 1),
        unprunable=tuple(each for each in graph.unprunable if not is_inside(each.module, names)),
        sizes=tuple(each for each in graph.sizes if each.group in groups and not is_inside(each.module, names)),
        norms=tuple(replace(site, units={name: at for name, at in site.units.items() if name in groups}) for site in norms),
        aliases=tuple(keys for keys in aliases if len(keys) > 1),
        constants=constants,
        free=tuple(each for each in graph.free if each.group in groups and not is_inside(each.module, names)),
        leftovers=tuple(each for each in graph.leftovers if not is_inside(each.module, names)),
        unfollowed=tuple(each for each in graph.unfollowed if not is_inside(each.rpartition(".")[0], names)),
        blocks={name: block for name, block in graph.blocks.items() if name in left},
    )
