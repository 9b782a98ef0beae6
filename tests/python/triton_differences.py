"""Where this server answers otherwise than Triton on purpose, and why."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """One deliberate difference: the cases it is about (a pattern of names), why, and what is answered instead."""

    cases: str
    why: str
    status: object = None
    fragment: str = ""

    def check(self, case, ours) -> str:
        """How an answer differs from what this entry promises, empty if it does not."""
        status = case.status if self.status is None else self.status
        fragment = self.fragment or case.fragment
        if ours.status == status and fragment in ours.text:
            return ""
        return f"status {ours.status}, promised {status} with {fragment!r}: {ours.text[:300]!r}"


DIFFERENCES = []
