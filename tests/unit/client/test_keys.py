"""K1 to K5: which outputs are per-token rows, and what becomes of those that only looked like it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stagecache.errors import BudgetError, DaemonLostError, SchemaMismatchError, StageCacheError
from stagecache.keys import KeyBook, Split
from stagecache.mapping import StagedKey
from stagecache.policy import HIDDEN_KEY, ModelCachePolicy
from stagecache_wire.geometry import KeySchema
from tests.unit.client.key_kit import staged


class Daemon:
    """Opens keys, or refuses."""

    def __init__(self) -> None:
        self.opened: list[KeySchema] = []
        self.replaced: list[StagedKey] = []
        self.error: StageCacheError | None = None

    def open_key(self, schema: KeySchema, replacing: StagedKey | None) -> StagedKey:
        if self.error is not None:
            raise self.error
        if replacing is not None:
            self.replaced.append(replacing)
        self.opened.append(schema)
        return staged(len(self.opened) - 1, schema)


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


def book_of(daemon: Daemon, declared: tuple[str, ...] = (), **policy: Any) -> KeyBook:
    return KeyBook(daemon.open_key, ModelCachePolicy(**policy), frozenset(declared))


@pytest.fixture
def book(daemon: Daemon) -> KeyBook:
    return book_of(daemon)


def names(entries: list[Any]) -> list[str]:
    return [entry[0].schema.name if isinstance(entry[0], StagedKey) else entry[0] for entry in entries]


def split(book: KeyBook, n: int, batch: int, padded: int | None = None, hidden: Any = None, **outputs: Any) -> Split:
    return book.split(hidden, {name.replace("_", "."): value for name, value in outputs.items()}, n, padded or n, batch)


def test_a_key_is_found_by_its_first_dimension_and_cut_to_the_tokens(book: KeyBook, daemon: Daemon) -> None:
    """K1"""
    found = split(
        book, 5, 2, padded=8, hidden=torch.zeros(8, 3), a=torch.zeros(5, 2), b=torch.zeros(8), c=torch.zeros(6)
    )
    assert names(found.immediate) == [HIDDEN_KEY, "a", "b"]
    assert [rows.shape[0] for _, rows in found.immediate] == [5, 5, 5]
    assert list(found.leftover) == ["c"]
    assert [(key.name, key.dtype, key.row_shape, key.provisional) for key in daemon.opened] == [
        (HIDDEN_KEY, "float32", (3,), False),
        ("a", "float32", (2,), False),
        ("b", "float32", (), False),
    ]


def test_a_key_is_opened_once(book: KeyBook, daemon: Daemon) -> None:
    for _ in range(3):
        split(book, 5, 2, a=torch.zeros(5, 2))
    assert len(daemon.opened) == 1


@pytest.mark.parametrize(
    "value", [[1, 2], {"x": torch.zeros(5)}, "text", None, torch.tensor(3.0), torch.zeros(5, 0), torch.zeros(0, 5)]
)
def test_what_is_no_row_a_token_is_leftover(book: KeyBook, value: Any) -> None:
    """K4"""
    found = split(book, 5, 2, k=value)
    assert list(found.leftover) == ["k"]
    assert found.immediate == []


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_a_tensor_of_a_dtype_that_no_pool_holds_is_leftover(book: KeyBook) -> None:
    assert list(split(book, 5, 2, k=torch.zeros(5, dtype=torch.complex32)).leftover) == ["k"]


def test_a_key_first_seen_in_pure_decode_is_provisional_until_a_step_tells_them_apart(
    book: KeyBook, daemon: Daemon
) -> None:
    """K1"""
    split(book, 3, 3, k=torch.zeros(3, 2))
    assert daemon.opened[0].provisional
    split(book, 3, 3, k=torch.zeros(3, 2))
    split(book, 7, 3, k=torch.zeros(7, 2))
    refused = split(book, 7, 3, k=torch.zeros(3, 2))
    assert names(refused.failed) == ["k"], "it is confirmed: a mismatch refuses it for the step"


@pytest.mark.parametrize(
    "value", [torch.zeros(3, 2), torch.zeros(7, 9), torch.zeros(7, 2, dtype=torch.int64), [1], torch.tensor(1.0)]
)
def test_a_provisional_key_is_given_up_at_its_first_mismatch_for_ever(book: KeyBook, value: Any) -> None:
    """K1"""
    split(book, 3, 3, k=torch.zeros(3, 2))
    found = split(book, 7, 3, k=value)
    assert [key.schema.name for key in found.demoted] == ["k"]
    assert list(found.leftover) == ["k"]
    assert "k" not in book.open
    again = split(book, 7, 3, k=torch.zeros(7, 2))
    assert (list(again.leftover), again.demoted, again.immediate) == (["k"], [], [])


@pytest.mark.parametrize("how", ["declared", "role", "deferred"])
def test_a_declared_key_is_never_provisional(daemon: Daemon, how: str) -> None:
    book = {
        "declared": lambda: book_of(daemon, declared=("k",)),
        "role": lambda: book_of(daemon, key_roles={"k": "token"}),
        "deferred": lambda: book_of(daemon, deferred_keys=frozenset({"k"})),
    }[how]()
    found = split(book, 3, 3, k=torch.zeros(3, 2))
    assert not daemon.opened[0].provisional
    assert names(found.deferred if how == "deferred" else found.immediate) == ["k"]
    assert names(split(book, 7, 3, k=torch.zeros(3, 2)).failed) == ["k"]


def test_a_declared_role_beats_the_shape(daemon: Daemon) -> None:
    """K2"""
    book = book_of(daemon, key_roles={"table": "global"})
    found = split(book, 5, 2, table=torch.zeros(5, 2))
    assert (list(found.leftover), daemon.opened) == (["table"], [])


@pytest.mark.parametrize(
    "value", [torch.zeros(5, 3), torch.zeros(5, 2, dtype=torch.bfloat16), torch.zeros(5), torch.zeros(9, 2)]
)
def test_other_rows_are_refused_for_the_key_and_the_step_alone(book: KeyBook, value: torch.Tensor) -> None:
    """K3"""
    split(book, 5, 2, a=torch.zeros(5, 2), b=torch.zeros(5))
    found = split(book, 5, 2, hidden=torch.zeros(5, 1), a=value, b=torch.zeros(5))
    assert names(found.failed) == ["a"]
    assert names(found.immediate) == [HIDDEN_KEY, "b"]
    error = found.failed[0][1]
    assert isinstance(error, SchemaMismatchError)
    for part in ("float32 rows of shape (2,)", str(tuple(value.shape)), str(value.dtype).removeprefix("torch.")):
        assert part in str(error)
    assert names(split(book, 5, 2, a=torch.zeros(5, 2)).immediate) == ["a"]


def test_hidden_states_with_too_few_rows_are_refused(book: KeyBook) -> None:
    found = split(book, 5, 2, hidden=torch.zeros(4, 3))
    assert (len(found.failed), found.immediate) == (1, [])


def test_a_policy_without_hidden_states_does_not_look_at_them(daemon: Daemon) -> None:
    """K5"""
    book = book_of(daemon, needs_full_hidden_states=False)
    found = split(book, 5, 2, hidden=torch.zeros(5, 3), a=torch.zeros(5))
    assert names(found.immediate) == ["a"]
    assert [key.schema.name for key in book.hit_keys()] == ["a"]


def test_a_step_without_tokens_has_only_leftovers_and_demotes_nothing(book: KeyBook) -> None:
    split(book, 3, 3, k=torch.zeros(3, 2))
    found = split(book, 0, 3, hidden=torch.zeros(0, 3), k=torch.zeros(3, 2))
    assert (list(found.leftover), found.immediate, found.demoted) == (["k"], [], [])
    assert "k" in book.open


def test_hits_gather_hidden_first_then_the_others_by_name(book: KeyBook) -> None:
    split(book, 5, 2, z=torch.zeros(5), hidden=torch.zeros(5, 3), a=torch.zeros(5))
    assert [key.schema.name for key in book.hit_keys()] == [HIDDEN_KEY, "a", "z"]


def test_a_key_that_the_daemon_refuses_is_not_kept_and_not_asked_for_again(book: KeyBook, daemon: Daemon) -> None:
    daemon.error = BudgetError("no room")
    found = split(book, 5, 2, k=torch.zeros(5))
    assert (names(found.unkept), found.unopened) == (["k"], [])
    daemon.error = None
    assert names(split(book, 5, 2, k=torch.zeros(5)).unkept) == ["k"]
    assert isinstance(book.refused["k"], BudgetError)
    assert daemon.opened == []


def test_a_key_that_cannot_be_asked_for_now_is_asked_for_again(book: KeyBook, daemon: Daemon) -> None:
    daemon.error = DaemonLostError("away")
    assert names(split(book, 5, 2, k=torch.zeros(5)).unopened) == ["k"]
    daemon.error = None
    assert names(split(book, 5, 2, k=torch.zeros(5)).immediate) == ["k"]


def test_a_remembered_key_gives_way_to_the_rows_of_the_session(book: KeyBook, daemon: Daemon) -> None:
    old = staged(7, KeySchema("k", "float32", (2,)))
    book.add(old, remembered=True)
    found = split(book, 5, 2, k=torch.zeros(5, 4))
    assert names(found.immediate) == ["k"]
    assert (found.replaced, daemon.replaced) == ([old], [old])
    assert names(split(book, 5, 2, k=torch.zeros(5, 2)).failed) == ["k"], "from now on it is a key like any other"


def test_a_remembered_key_that_fits_is_kept(book: KeyBook, daemon: Daemon) -> None:
    book.add(staged(7, KeySchema("k", "float32", (2,))), remembered=True)
    found = split(book, 5, 2, k=torch.zeros(5, 2))
    assert (names(found.immediate), found.replaced, daemon.opened) == (["k"], [], [])


def test_the_hidden_key_among_the_outputs_is_ignored(book: KeyBook) -> None:
    found = book.split(None, {HIDDEN_KEY: torch.zeros(5, 3)}, 5, 5, 2)
    assert (found.immediate, found.leftover) == ([], {})
