"""Every number of a record is checked: each refusal of the validator has a record here that meets it.

Lines that raise are counted from the source, so a refusal that somebody adds without a case fails the last test.
"""

from __future__ import annotations

import inspect
import traceback
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from stagecache_wire import layout, records
from stagecache_wire.records import BadRecordError, KeyMode, Kind, Record, decode, encode, key_words
from stagecached import validate
from stagecached.segments import SessionSegments
from stagecached.validate import check_record, read_entry
from tests.unit.server.session_kit import Log, flush, gathers, hit, new_session, runs, save, slots, spans

ROWS, CLAIM, FAILED = KeyMode.ROWS, KeyMode.CLAIM, KeyMode.FAILED
BIG = (1 << 32) - 1
HUGE = (1 << 64) - 1

met: set[tuple[str, int]] = set()
"""(module, line) of each refusal that a case has met."""


@pytest.fixture(scope="module")
def segments() -> Iterator[SessionSegments]:
    with new_session() as made:
        yield made


def good_save() -> Record:
    record = save(1, runs((4, 3), (20, 2)), (0, ROWS), (1, CLAIM), (2, FAILED))
    found = hit(runs((4, 4), (0, 2)), (0, 1, 64), (1, 15, 4096))
    return replace(record, spans=found.spans, span_runs=found.span_runs, gathers=found.gathers)


def lost() -> Record:
    return Record(0, Kind.LOST, rows=3, runs=runs((0, 3)))


def blocks(kind: Kind, *numbers: int) -> Record:
    return Record.of_blocks(kind, [(number, bytes([number % 256]) * 32) for number in numbers])


GOOD: dict[str, Callable[[], Record]] = {
    "save": good_save,
    "save of units": lambda: save(0, slots(3, 31, 0), (0, ROWS)),
    "save without keys": lambda: save(0, runs((0, 16))),
    "save that only claims": lambda: save(records.NO_PAGE, runs((0, 2)), (2, CLAIM)),
    "begin": lambda: hit(runs((0, 32)), (0, 15, 0)),
    "begin without gathers": lambda: Record(0, Kind.BEGIN),
    "lost": lost,
    "lost units": lambda: Record(0, Kind.LOST, rows=2, runs=slots(31, 0), unit_runs=True),
    "flush": lambda: flush(1, slots(3, 9), [1, 4]),
    "fail": lambda: flush(9, slots(3, 9), [1, 4], kind=Kind.FAIL),
    "reset": lambda: Record(0, Kind.RESET, rows=4),
    "reset of a model that is the same": lambda: Record(0, Kind.RESET, page=records.SAME_MODEL, rows=4),
    "close key": lambda: Record(0, Kind.CLOSE_KEY, keys=key_words((1, ROWS))),
    "publish": lambda: blocks(Kind.PUBLISH, 0, 7, 3),
    "fill": lambda: blocks(Kind.FILL, 7),
    "close key that is closed": lambda: Record(0, Kind.CLOSE_KEY, keys=key_words((9, ROWS))),
}

SEQUENCE = 5
"""Of the record that is checked."""

BAD: dict[str, tuple[Callable[[], Record], str]] = {
    "save without slots": (lambda: Record(0, Kind.SAVE), "no runs"),
    "lost without slots": (lambda: Record(0, Kind.LOST), "no runs"),
    "run of nothing": (lambda: save(0, runs((0, 2), (4, 0)), (0, ROWS)), "a run of no slots"),
    "slot beyond the cache": (lambda: save(0, runs((30, 3)), (0, ROWS)), "slot 32 of 32"),
    "unit slot beyond the cache": (lambda: save(0, slots(3, 32), (0, ROWS)), "slot 32 of 32"),
    "run that overflows": (lambda: save(0, runs((BIG, 2)), (0, ROWS)), "slot 4294967296 of 32"),
    "more slots than rows": (lambda: replace(lost(), rows=2), "runs of 3 slots for 2 rows"),
    "more rows than slots": (lambda: replace(lost(), rows=HUGE), "runs of 3 slots"),
    "save beyond the page": (lambda: save(0, runs((0, 17)), (0, ROWS)), "17 rows, at most 16"),
    "flush beyond the page": (lambda: flush(0, slots(*range(17)), [1] * 17), "17 rows, at most 16"),
    "lost of more slots than there are": (
        lambda: Record(0, Kind.LOST, rows=64, runs=runs((0, 32), (0, 32))), "64 rows, at most 32"
    ),
    "begin with runs": (lambda: replace(hit(runs((0, 2)), (0, 1, 0)), runs=runs((0, 2))), "BEGIN carries runs"),
    "reset to an epoch beyond a word": (lambda: Record(0, Kind.RESET, rows=1 << 63), "epoch 9223372036854775808 after"),
    "reset with a page": (lambda: Record(0, Kind.RESET, page=1, rows=4), "RESET with page 1"),
    "reset with runs": (lambda: Record(0, Kind.RESET, runs=runs((0, 2))), "RESET carries runs"),
    "close key with runs": (
        lambda: Record(0, Kind.CLOSE_KEY, keys=key_words((1, ROWS)), runs=runs((0, 1))), "CLOSE_KEY carries runs"
    ),
    "unknown mode": (lambda: replace(save(0, runs((0, 1))), keys=np.array([9 << 24], np.uint32)), "9 is not a valid"),
    "flush of no key": (lambda: replace(flush(0, slots(1), [1]), keys=key_words()), "FLUSH names 0 keys"),
    "flush of two keys": (
        lambda: replace(flush(0, slots(1), [1]), keys=key_words((0, ROWS), (1, ROWS))), "FLUSH names 2 keys"
    ),
    "lost that names a key": (lambda: replace(lost(), keys=key_words((0, ROWS))), "LOST names 1 keys"),
    "reset that names a key": (lambda: Record(0, Kind.RESET, keys=key_words((0, ROWS))), "RESET names 1 keys"),
    "begin that names a key": (lambda: Record(0, Kind.BEGIN, keys=key_words((0, ROWS))), "BEGIN names 1 keys"),
    "key named twice": (lambda: save(0, runs((0, 2)), (0, ROWS), (0, CLAIM)), "named twice"),
    "key that is not open": (lambda: save(0, runs((0, 2)), (7, CLAIM)), "key 7 is not open"),
    "flush of a key that is not open": (lambda: flush(0, slots(1), [1], key_id=7), "key 7 is not open"),
    "page beyond the last": (lambda: save(2, runs((0, 2)), (0, ROWS)), "page 2 of 2"),
    "no page for rows": (lambda: save(records.NO_PAGE, runs((0, 2)), (0, ROWS)), "page 18446744073709551615 of 2"),
    "flush page beyond the last": (lambda: flush(2, slots(1), [1]), "page 2 of 2"),
    "claim of the record itself": (lambda: flush(0, slots(1, 2), [1, SEQUENCE]), "claim 5 is not older"),
    "claim of the future": (lambda: flush(0, slots(1), [HUGE]), "is not older"),
    "claim of nobody": (lambda: flush(0, slots(1, 2), [0, 1]), "is not older"),
    "fail of nobody's claim": (lambda: flush(0, slots(1), [0], kind=Kind.FAIL), "is not older"),
    "span run of nothing": (lambda: hit(runs((0, 2), (4, 0)), (0, 1, 0)), "a span run of no slots"),
    "span slot beyond the cache": (lambda: hit(runs((31, 2)), (0, 1, 0)), "span slot 32 of 32"),
    "span slot that overflows": (lambda: hit(runs((BIG, BIG)), (0, 1, 0)), "span slot"),
    "span of no runs": (lambda: replace(hit(runs((0, 2)), (0, 1, 0)), spans=spans((0, 0, 0))), "span of runs 0 to 0"),
    "span beyond the runs": (lambda: replace(hit(runs((0, 2)), (0, 1, 0)), spans=spans((1, 1, 2))), "span of runs 1"),
    "span that overflows": (lambda: replace(hit(runs((0, 2)), (0, 1, 0)), spans=spans((BIG, BIG, 2))), "span of runs"),
    "span of other rows": (lambda: replace(hit(runs((0, 2)), (0, 1, 0)), spans=spans((0, 1, 3))), "2 slots for 3 rows"),
    "span of more slots than there are": (
        lambda: hit(runs((0, 20), (0, 20)), (0, 1, 0)), "span runs of 40 slots"
    ),
    "gather of no span": (
        lambda: replace(hit(runs((0, 2)), (0, 1, 0)), gathers=gathers((1, 0, 1, 0))), "span 1 of 1"
    ),
    "gather of a key that is not open": (lambda: hit(runs((0, 2)), (7, 1, 0)), "key 7 is not open"),
    "result beyond the table": (lambda: hit(runs((0, 2)), (0, 16, 0)), "result 16 of 16"),
    "extent beyond the arena": (lambda: hit(runs((0, 2)), (0, 1, (1 << 16) - 8)), "the arena at 65536"),
    "extent that overflows": (lambda: hit(runs((0, 2)), (0, 1, HUGE)), "the arena at 65536"),
    "more gathers than the arena holds": (
        lambda: hit(runs((0, 32)), *((1, 1, 0) for _ in range(200))), "gathers of 76800 bytes"
    ),
    "span that nobody gathers": (
        lambda: replace(hit(runs((0, 2)), (0, 1, 0)), spans=spans((0, 1, 2), (0, 1, 2))), "1 spans that no gather"
    ),
    "reset with gathers": (lambda: replace(hit(runs((0, 2)), (0, 1, 0)), kind=Kind.RESET), "RESET carries gathers"),
    "lost with spans": (
        lambda: replace(lost(), spans=spans((0, 1, 2)), span_runs=runs((0, 2))), "LOST carries gathers"
    ),
    "publish of no block": (lambda: blocks(Kind.PUBLISH), "no blocks"),
    "block beyond the cache": (lambda: blocks(Kind.FILL, 0, 8), "block 8 of 8"),
    "block that overflows": (lambda: blocks(Kind.PUBLISH, BIG), "block 4294967295 of 8"),
    "other number of blocks": (lambda: replace(blocks(Kind.FILL, 0, 1), rows=3), "2 blocks, 3 were said"),
    "block named twice": (lambda: blocks(Kind.FILL, 4, 1, 4), "a block is named twice"),
    "blocks as runs": (
        lambda: replace(blocks(Kind.FILL, 0), unit_runs=False, runs=runs((0, 4))), "FILL with runs of slots"
    ),
    "publish that names a key": (lambda: replace(blocks(Kind.PUBLISH, 0), keys=key_words((0, ROWS))), "names 1 keys"),
    "fill with gathers": (
        lambda: replace(blocks(Kind.FILL, 0), spans=spans((0, 1, 2)), span_runs=runs((0, 2))), "FILL carries gathers"
    ),
    "flush with span runs": (lambda: replace(flush(0, slots(1), [1]), span_runs=runs((0, 2))), "FLUSH carries gathers"),
}  # fmt: skip


def check(segments: SessionSegments, record: Record) -> None:
    """As the daemon does: through the wire form."""
    record.sequence = SEQUENCE
    check_record(segments, decode(*encode(record)))


def refused(call: Callable[[], object], match: str) -> None:
    """``call`` must refuse with such a text; the line that did is noted."""
    with pytest.raises(BadRecordError, match=match) as caught:
        call()
    frame = traceback.extract_tb(caught.tb)[-1]
    met.add((frame.filename.rpartition("/")[2], int(frame.lineno or 0)))


@pytest.mark.parametrize("name", GOOD)
def test_a_good_record_passes(segments: SessionSegments, name: str) -> None:
    check(segments, GOOD[name]())


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_is_refused_by_the_number_that_is_bad(segments: SessionSegments, name: str) -> None:
    make, match = BAD[name]
    refused(lambda: check(segments, make()), match)


@pytest.mark.parametrize(
    ("word", "value", "match"),
    [
        (layout.E_KIND, 0, "kind 0 is unknown"),
        (layout.E_KIND, 10, "kind 10 is unknown"),
        (layout.E_KIND, 2 | 2 << 8, "flags 2 are unknown"),
        (layout.E_COUNTS_A, HUGE, "do not fill"),
        (layout.E_COUNTS_B, 1, "do not fill"),
        (layout.E_KIND, 2 | 7 << 16, "do not fill"),
        (layout.E_PAYLOAD_LENGTH, 0, "do not fill"),
        (layout.E_PAYLOAD_LENGTH, 8, "do not fill"),
    ],
)
def test_an_entry_that_contradicts_its_payload_is_refused(word: int, value: int, match: str) -> None:
    words, payload = encode(save(0, runs((0, 2)), (0, ROWS)))
    words[word] = value
    refused(lambda: decode(words, payload), match)


def write_entry(segments: SessionSegments, sequence: int, **words: int) -> None:
    at = segments.layout.entry_word(sequence)
    entry = [sequence, int(Kind.BEGIN), 0, 0, 0, 0, 0, 0]
    for name, value in words.items():
        entry[getattr(layout, name)] = value
    segments.words[at : at + layout.ENTRY_WORDS] = memoryview(array("Q", entry))


def test_an_entry_of_another_sequence_is_refused(segments: SessionSegments) -> None:
    write_entry(segments, 1, E_SEQUENCE=2)
    segments.words[layout.W_HEAD] = 1
    refused(lambda: read_entry(segments, 1), "entry carries sequence 2")


@pytest.mark.parametrize("length", [1 << 20, (1 << 20) + 8, HUGE])
def test_a_payload_that_leaves_the_ring_is_refused(segments: SessionSegments, length: int) -> None:
    size = segments.layout.payload_bytes
    write_entry(segments, 1, E_PAYLOAD_POSITION=size * 3 + 8, E_PAYLOAD_LENGTH=min(length * (size >> 20), HUGE))
    segments.words[layout.W_HEAD] = 1
    refused(lambda: read_entry(segments, 1), "leaves the ring")


def test_a_head_that_is_further_than_the_log_is_long_is_refused(segments: SessionSegments) -> None:
    write_entry(segments, 1)
    for head in (segments.layout.log_entries + 1, HUGE):
        segments.words[layout.W_HEAD] = head
        refused(lambda: read_entry(segments, 1), "records ahead")
    segments.words[layout.W_HEAD] = segments.layout.log_entries
    assert read_entry(segments, 1)[0][layout.E_SEQUENCE] == 1


def test_a_sequence_that_no_claim_word_can_hold_is_refused(segments: SessionSegments) -> None:
    """No log gets so far; a scribbled ``consumed`` says so."""
    sequence = layout.MAX_SEQUENCE + 1
    segments.words[layout.W_HEAD] = sequence
    refused(lambda: read_entry(segments, sequence), "more than a claim can hold")


def test_what_was_read_cannot_change_any_more() -> None:
    with new_session() as segments:
        Log(segments).append(save(0, runs((0, 2)), (0, ROWS)))
        words, payload = read_entry(segments, 1)
        start = segments.layout.payload_word * layout.WORD
        segments.control_bytes[start : start + 64] = b"\xff" * 64
        check_record(segments, decode(words, payload))


def test_every_refusal_of_the_validator_was_met() -> None:
    """Runs last. ``encode``'s own refusal, of counts that no memory holds, is not the daemon's."""
    if len(met) < 10:
        pytest.skip("the cases did not run")
    expected = set()
    for module in (validate, records):
        source = inspect.getsource(module).splitlines()
        name = str(module.__file__).rpartition("/")[2]
        expected |= {(name, number) for number, line in enumerate(source, 1) if "raise BadRecordError(" in line}
    expected = {at for at in expected if "count does not fit" not in _line(*at)}
    assert expected - met == set(), {at: _line(*at) for at in expected - met}


def _line(name: str, number: int) -> str:
    module = validate if name == "validate.py" else records
    return inspect.getsource(module).splitlines()[number - 1]
