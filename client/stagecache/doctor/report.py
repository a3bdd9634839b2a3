"""What checks found, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Status(str, Enum):
    """How a finding stands.

    OK: as it should be. NOTE: to be known, nothing to mend. WARNING: it works, and something will cost or fail later.
    PROBLEM: it does not work. SKIPPED: cannot be seen from here, or has no meaning here.
    """

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """One thing that a check found. check: its stable name; found: a sentence; remedy: what to do, where there is."""

    check: str
    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """All findings, in the order of the checks."""

    findings: tuple[Finding, ...]

    def count(self, status: Status) -> int:
        return sum(finding.status is status for finding in self.findings)

    def exit_status(self, *, strict: bool = False) -> int:
        """1 where there is a problem, or with ``strict`` a warning; else 0."""
        bad = self.count(Status.PROBLEM) + (self.count(Status.WARNING) if strict else 0)
        return int(bad > 0)

    def of(self, check: str) -> Sequence[Finding]:
        """Findings of one check."""
        return [finding for finding in self.findings if finding.check == check]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "problems": self.count(Status.PROBLEM),
            "warnings": self.count(Status.WARNING),
            "findings": [
                {
                    "check": finding.check,
                    "status": finding.status.value,
                    "found": finding.found,
                    "remedy": finding.remedy,
                }
                for finding in self.findings
            ],
        }
