"""What `verify` found: one line a check, and the comparison with the source."""

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compare import Comparison


@dataclass
class Check:
    """One line of the table."""

    what: str
    found: str
    bound: str
    ok: bool


@dataclass
class Verification:
    """The checks of a folder, and the comparison with its source if there was one."""

    folder: str
    checks: list[Check] = field(default_factory=list)
    comparison: "Comparison | None" = None

    @property
    def ok(self) -> bool:
        """Whether no bound was passed."""
        return all(check.ok for check in self.checks)

    def add(self, what: str, found: str, bound: str, ok: bool) -> None:
        """Add a line."""
        self.checks.append(Check(what, found, bound, ok))

    def as_dict(self) -> dict[str, Any]:
        """The verification as JSON takes it."""
        result = {"folder": self.folder, "ok": self.ok, "checks": [asdict(c) for c in self.checks]}
        if self.comparison:
            facts = asdict(self.comparison)
            del facts["digests"]
            for name, family in self.comparison.families.items():
                facts["families"][name]["error"] = family.error
            result["comparison"] = facts
        return result
