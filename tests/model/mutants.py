"""The reference model with one rule broken each: what the driver must find, or it finds nothing."""

from __future__ import annotations

from tests.model.delivery import Live, Part
from tests.model.reference import ReferenceCache, Saved
from tests.model.steps import Merged, Scheduled, Step


class LeaksOlderTenant(ReferenceCache):
    """H5: a key that the tenant did not write shows what an older tenant wrote."""

    def read(self, key: str, slot: int, zeros: bytes) -> bytes | None:
        row = super().read(key, slot, zeros)
        older = self.claims.get((key, slot), (0, None))[1]
        return older if row == zeros and older is not None else row


class GathersLate(ReferenceCache):
    """H8: rows are read when they are asked for."""

    def materialize(self, step_id: int, req_ids: list[str]) -> Merged:
        if step_id in self.saved:
            self.gather(self.saved[step_id])
        return super().materialize(step_id, req_ids)


class GathersBeforeTheWrite(ReferenceCache):
    """H6: same-step hits get the older tenant's rows."""

    def write(self, step: Step, saved: Saved) -> None:
        self.gather(saved)
        super().write(step, saved)

    def gather(self, saved: Saved) -> None:
        if not any(part.hit for part in saved.parts.values()):
            super().gather(saved)


class ForgetsLostSteps(ReferenceCache):
    """W8: a step without a save leaves its slots as they were."""

    def lose_unsaved(self) -> None:
        self.begun = None


class IgnoresReset(ReferenceCache):
    """R5."""

    def reset(self) -> None:
        self.clock += 1


class RefusedKeyKeepsItsSlots(ReferenceCache):
    """K3: a refused key is treated as one that the step does not have."""

    def write(self, step: Step, saved: Saved) -> None:
        refused, saved.refused = saved.refused, []
        super().write(step, saved)
        saved.refused = refused


class FirstRowStays(ReferenceCache):
    """R4: a slot of the same request keeps the row that was there."""

    def write(self, step: Step, saved: Saved) -> None:
        before = {claim: row for claim, row in self.claims.items() if self.tenants[claim[1]][0] == row[0]}
        super().write(step, saved)
        for (key, slot), (_, row) in before.items():
            if self.claims[key, slot][0] == self.clock and row is not None and len(saved.parts) == 1:
                self.claims[key, slot] = self.clock, row


class ReplaysEverything(ReferenceCache):
    """R3: a request that comes again gets everything from position 0."""

    def span(self, part: Part) -> tuple[int, int]:
        return part.start, part.request.first + part.request.tokens


class DropsContinuations(ReferenceCache):
    """R3: a request that comes again gets the rows of the step alone, as the in-process cache does."""

    def span(self, part: Part) -> tuple[int, int]:
        low, high = super().span(part)
        return (max(low, part.request.first), high) if part.period else (low, high)


class DiscardDelivers(ReferenceCache):
    """R3: discard moves delivered_upto."""

    def discard_step(self, step_id: int) -> None:
        saved = self.saved.get(step_id)
        super().discard_step(step_id)
        if saved is not None:
            for part in saved.parts.values():
                self.delivered(part, *self.span(part))


class MissesReplacedPrompts(ReferenceCache):
    """R3: exchanged blocks are not noticed."""

    def come_back(self, live: Live, request: Scheduled) -> None:
        live.blocks = request.blocks
        super().come_back(live, request)


class ForgetsPreemption(ReferenceCache):
    """R3: every comeback counts as a continuation."""

    def come_back(self, live: Live, request: Scheduled) -> None:
        live.preempted = False
        super().come_back(live, Scheduled(request.req_id, request.blocks, request.first, request.count, "new"))


class ClipsAtThePlan(ReferenceCache):
    """R3: what an open step hands out after the plan of the comeback is handed out twice."""

    def enter(self, request: Scheduled, row: int) -> Part:
        part = super().enter(request, row)
        if part.period and part.start == 0:
            part.plan = self.span(part)  # type: ignore[attr-defined]
        return part

    def span(self, part: Part) -> tuple[int, int]:
        return getattr(part, "plan", None) or super().span(part)


class DeliversWithoutAck(ReferenceCache):
    """R3: where the caller uses acks, handing out is taken for receiving."""

    def delivered(self, part: Part, begin: int, end: int) -> None:
        super().delivered(part, begin, end)
        part.periods[part.period].acked = part.periods[part.period].end


class FinishesLast(ReferenceCache):
    """R2: an id that finishes and starts anew is taken for one that comes again."""

    def finish(self, step: Step) -> None:
        again = {request.req_id for request in step.batch}
        super().finish(Step((), tuple(req_id for req_id in step.finished if req_id not in again)))


class NeverDemotes(ReferenceCache):
    """K1: a provisional key is refused at its first mismatch, as a confirmed one would be."""

    def sort_value(self, key: str, value: object, outputs: object, step: Step, saved: Saved) -> None:
        self.provisional.clear()
        super().sort_value(key, value, outputs, step, saved)  # type: ignore[arg-type]


class HiddenMayBeAbsent(ReferenceCache):
    """H4: hidden rows that the tenant did not write read zeros."""

    def read(self, key: str, slot: int, zeros: bytes) -> bytes | None:
        writer, lost = self.tenants.get(slot, (0, True))
        if not lost and writer > self.epoch and self.claims.get((key, slot), (0, None))[0] != writer:
            return zeros
        return super().read(key, slot, zeros)


MUTANTS = (
    LeaksOlderTenant,
    GathersLate,
    GathersBeforeTheWrite,
    ForgetsLostSteps,
    IgnoresReset,
    RefusedKeyKeepsItsSlots,
    FirstRowStays,
    ReplaysEverything,
    DropsContinuations,
    DiscardDelivers,
    MissesReplacedPrompts,
    ForgetsPreemption,
    ClipsAtThePlan,
    DeliversWithoutAck,
    FinishesLast,
    NeverDemotes,
    HiddenMayBeAbsent,
)
