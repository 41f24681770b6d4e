"""A contract of import-linter: no circle of files. Imports inside functions count as well."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output
from importlinter.domain import fields


class NoCircles(Contract):
    """Fails where modules of ``packages`` import each other in a circle; names one circle."""

    type_name = "no_circles"
    packages: Any = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Order the modules by their imports, which a circle makes impossible."""
        ours = {m for m in graph.modules if m.split(".")[0] in set(self.packages)}
        imports = {m: graph.find_modules_directly_imported_by(m) & ours for m in ours}
        try:
            TopologicalSorter(imports).prepare()
        except CycleError as error:
            return ContractCheck(kept=False, metadata={"circle": error.args[1]})
        return ContractCheck(kept=True)

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the circle, one import per line."""
        circle: list[str] = check.metadata["circle"][::-1]
        for importer, imported in pairwise(circle):
            output.print_error(f"{importer} imports {imported}")
