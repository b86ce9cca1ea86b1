"""A contract for import-linter: a package imports only what the contract lists."""

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output
from importlinter.domain.helpers import import_expressions_to_imports


class AllowedImports(Contract):
    """A list of all that a package may import, besides its own modules.

    Options:
        package: the package.
        allowed_imports: import expressions. One that matches no import is an error, so that the
            list cannot be longer than it must.
    """

    package = fields.StringField()
    allowed_imports = fields.SetField(subfield=fields.ImportExpressionField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Find the imports that are not on the list."""
        allowed = {
            (str(found.importer), str(found.imported))
            for found in import_expressions_to_imports(graph, self.allowed_imports)
        }
        own_modules = {self.package, *graph.find_descendants(self.package)}
        forbidden = [
            f"{importer} -> {imported}"
            for importer in sorted(own_modules)
            for imported in sorted(graph.find_modules_directly_imported_by(importer))
            if imported not in own_modules and (importer, imported) not in allowed
        ]
        return ContractCheck(kept=not forbidden, metadata={"forbidden": forbidden})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the imports that are not on the list."""
        for line in check.metadata["forbidden"]:
            output.print_error(f"- {line} is not listed")
