"""The rules of the slot cache as a model: plain Python, no shared memory, no clock, no thread.

Every rule of docs/semantics.md that decides which rows come out is stated here once, in the method that its number
names. Immediate and deferred keys, pages and flushes do not occur: how rows travel must not show in any result.

Where a rule leaves a choice, this is how the model reads it:

- Keys of a merge (H2): hidden, and those per-token keys that the step's own outputs carry. A key that the step does
  not emit is not handed out by it. A step without tokens still yields the hidden rows of its hits (H7).
- A merge is as of its SAVE: slots that the step writes are read after that write, all others have not changed (H6).
- Delivery (R3) is in tests/model/delivery.py.
- Only rows that are to be handed out can make a hit unreadable (H4).
- A materialize that raises has consumed its step and hands out nothing, for any request of the call.
- A key that is declared or confirmed and comes with another first dimension, dtype or row shape is refused (K3). A
  provisional one becomes leftover from that step on; steps saved before it keep the result they had.
- A key is provisional while each step that showed it had as many tokens as requests (K1). A step without tokens says
  nothing about any key.
- The slots of a step that new_step_starts refused are lost too (W8); its finishes and preemptions have happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.model.delivery import Delivery, Part
from tests.model.steps import HIDDEN, Merged, Outputs, Refused, Rules, Scheduled, Schema, Step, Tensor

UNREADABLE = None
"""Stands for a row of a hit span that may not be read."""


@dataclass
class Saved:
    """A step that waits to be consumed."""

    parts: dict[str, Part]
    tensors: dict[str, Tensor]
    leftovers: dict[str, Any]
    refused: list[str]


class ReferenceCache(Delivery):
    """See the module."""

    def __init__(self, rules: Rules):
        super().__init__(rules.block_size, rules.explicit_acks)
        self.rules = rules
        self.clock = 0
        self.epoch = 0
        self.tenants: dict[int, tuple[int, bool]] = {}
        """slot -> (clock of the last step that wrote it, whether that step was lost)"""
        self.claims: dict[tuple[str, int], tuple[int, bytes | None]] = {}
        """(key, slot) -> (clock of the claiming step, its row, or None where the write failed)"""
        self.schemas = dict(rules.schemas)
        self.leftover_keys = {key for key, role in rules.roles.items() if role == "global"}
        self.provisional: set[str] = set()
        self.begun: tuple[Step, dict[str, Part]] | None = None
        self.saved: dict[int, Saved] = {}
        self.last_step_id = 0

    # ---- the calls

    def new_step_starts(self, step: Step) -> None:
        """H9: finishes, preemptions, then the hits. R2: so an id may finish and start anew in one step."""
        self.lose_unsaved()
        if step.new_epoch:
            self.reset()
        self.finish(step)
        self.preempt(step)
        bad = [request for request in step.batch if not self.covered(request)]
        row, parts = 0, {}
        for request in step.batch:
            if request not in bad:
                parts[request.req_id] = self.enter(request, row)
            row += request.tokens
        self.begun = step, parts
        if bad:
            raise Refused({"HitNotCoveredError"}, f"{bad[0]}")

    def save_outputs(self, outputs: Outputs) -> int:
        """W2, W6: refused before anything is copied; then the writes, then the gathers."""
        assert self.begun is not None
        step, parts = self.begun
        refusals = set()
        if outputs.unpadded > self.rules.capacity:
            refusals.add("StepTooLargeError")
        if not len(self.written_slots(step)) == step.tokens == outputs.unpadded:
            refusals.add("SlotMismatchError")
        if not refusals and len(self.saved) >= self.rules.depth:
            refusals.add("StagingTimeoutError")
        if refusals:
            self.lose_unsaved()
            raise Refused(refusals)
        self.begun = None
        self.clock += 1
        saved = Saved(parts, {}, {}, [])
        given = {HIDDEN: outputs.hidden, **outputs.mm} if self.rules.needs_hidden else outputs.mm
        for key, value in given.items():
            if value is not None:
                self.sort_value(key, value, outputs, step, saved)
        self.write(step, saved)
        self.gather(saved)
        self.last_step_id += 1
        self.saved[self.last_step_id] = saved
        return self.last_step_id

    def materialize(self, step_id: int, req_ids: list[str]) -> Merged:
        """S1, S2, R3, H4, K3."""
        if step_id not in self.saved:
            raise Refused({"StepConsumedError"})
        saved = self.saved.pop(step_id)
        if not set(req_ids) <= set(saved.parts):
            raise Refused({"UnknownRequestError"})
        errors = {"SchemaMismatchError"} if saved.refused else set()
        order = list(saved.parts)
        out: Merged = {
            key: {req_id: belonging(value, order.index(req_id), len(order)) for req_id in req_ids}
            for key, value in saved.leftovers.items()
        }
        spans = {req_id: self.span(saved.parts[req_id]) for req_id in dict.fromkeys(req_ids)}
        for key, tensor in saved.tensors.items():
            out[key] = {}
            for req_id, (begin, end) in spans.items():
                rows = self.rows(saved.parts[req_id], key, tensor, begin, end)
                if UNREADABLE in rows:
                    errors.add("UnreadableHitError")
                elif rows:
                    out[key][req_id] = tensor.with_rows(rows)
        if errors:
            raise Refused(errors)
        for req_id, (begin, end) in spans.items():
            self.delivered(saved.parts[req_id], begin, end)
        return {key: values for key, values in out.items() if values}

    def discard_step(self, step_id: int) -> None:
        """S1; R3: moves no delivered_upto."""
        if self.saved.pop(step_id, None) is None:
            raise Refused({"StepConsumedError"})

    def reset(self) -> None:
        """R5: the epoch rises; what was saved before cannot be read any more, what was gathered before can."""
        self.clock += 1
        self.epoch = self.clock

    # ---- hits

    def covered(self, request: Scheduled) -> bool:
        """H3, S4. A continuation may carry any number; a V2 runner's resume is a resume."""
        if request.how not in ("new", "resumed") or request.first == 0:
            return True
        size = self.rules.block_size
        live = self.live.get(request.req_id)
        continuation = request.how == "new" and live is not None and not live.preempted
        aligned = continuation or request.first % size == 0
        return request.count >= 0 and aligned and request.first <= len(request.blocks) * size

    # ---- keys

    def sort_value(self, key: str, value: Any, outputs: Outputs, step: Step, saved: Saved) -> None:
        """K1 to K4: per-token rows, a refusal, or a leftover."""
        n = outputs.unpadded
        if key in self.leftover_keys or not isinstance(value, Tensor) or not n:
            if key != HIDDEN:
                saved.leftovers[key] = value
            return
        fits = len(value.rows) in (n, outputs.padded)
        known = self.schemas.get(key)
        ambiguous = n == len(step.batch)
        if known is None and key != HIDDEN and not fits:
            saved.leftovers[key] = value
            return
        if known is None:
            known = self.schemas[key] = Schema(value.dtype, value.row_shape)
            if ambiguous and key != HIDDEN and key not in self.rules.roles:
                self.provisional.add(key)
        if fits and (known.dtype, known.row_shape) == (value.dtype, value.row_shape):
            saved.tensors[key] = value.with_rows(value.rows[:n])
            if not ambiguous:
                self.provisional.discard(key)
        elif key in self.provisional:
            self.demote(key)
            saved.leftovers[key] = value
        else:
            saved.refused.append(key)

    def demote(self, key: str) -> None:
        """K1."""
        self.provisional.discard(key)
        del self.schemas[key]
        self.leftover_keys.add(key)

    # ---- slots

    def slot(self, request: Scheduled, position: int) -> int:
        size = self.rules.block_size
        return request.blocks[position // size] * size + position % size

    def written_slots(self, step: Step) -> list[int]:
        """Slots of the step's tokens, in row order; positions that the block table does not cover have none."""
        size = self.rules.block_size
        return [
            self.slot(request, position)
            for request in step.batch
            for position in range(request.first, min(request.first + request.tokens, len(request.blocks) * size))
        ]

    def lose_unsaved(self) -> None:
        """W8: the slots of a step whose save did not happen become unreadable for every key."""
        if self.begun is not None:
            self.clock += 1
            for slot in self.written_slots(self.begun[0]):
                self.tenants[slot] = self.clock, True
            self.begun = None

    def write(self, step: Step, saved: Saved) -> None:
        """R4, K3: the later row stays; a refused key's claim stands without a row."""
        for row, slot in enumerate(self.written_slots(step)):
            self.tenants[slot] = self.clock, False
            for key, tensor in saved.tensors.items():
                self.claims[key, slot] = self.clock, tensor.rows[row]
            for key in saved.refused:
                self.claims[key, slot] = self.clock, None

    def read(self, key: str, slot: int, zeros: bytes) -> bytes | None:
        """W9, H4, H5: lost, failed, never written or of an older epoch may not be read; a tenant that did not write
        the key left zeros, or, for hidden, nothing that may be read."""
        writer, lost = self.tenants.get(slot, (0, True))
        if lost or writer <= self.epoch:
            return UNREADABLE
        claimer, row = self.claims.get((key, slot), (0, None))
        if claimer == writer:
            return row
        return UNREADABLE if key == HIDDEN else zeros

    def gather(self, saved: Saved) -> None:
        """H2, H6, H8: the hit's rows are taken now, whenever they will be asked for."""
        hidden = self.schemas.get(HIDDEN) if self.rules.needs_hidden else None
        if hidden and not any(part.request.tokens for part in saved.parts.values()):
            saved.tensors[HIDDEN] = Tensor(hidden.dtype, hidden.row_shape, ())
        for part in saved.parts.values():
            if part.start == 0:
                for key in saved.tensors:
                    part.hit[key] = self.gather_hit(part.request, key, saved.tensors[key])

    def gather_hit(self, request: Scheduled, key: str, tensor: Tensor) -> list[bytes | None]:
        zeros = bytes(tensor.row_bytes)
        return [self.read(key, self.slot(request, position), zeros) for position in range(request.first)]

    def rows(self, part: Part, key: str, tensor: Tensor, begin: int, end: int) -> list[bytes | None]:
        """H2: positions [begin, end) in order: the hit's rows, then this step's."""
        first = part.request.first
        hit = part.hit.get(key, [])[begin:end] if begin < first else []
        own = tensor.rows[part.row + max(begin, first) - first : part.row + max(end, first) - first]
        return [*hit, *own] if begin < end else []


def belonging(value: Any, index: int, requests: int) -> Any:
    """K4: what of a leftover reaches the request at ``index`` of the batch: its entry of a list that has one a
    request, else all of it."""
    if isinstance(value, dict):
        return {name: belonging(inner, index, requests) for name, inner in value.items()}
    return value[index] if isinstance(value, list) and len(value) == requests else value
